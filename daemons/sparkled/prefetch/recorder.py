"""What is written down of clients' use of experts: the usage profile that outlives the run, and traces on demand.

Owns the profile, its file, and the trace under way. A disk that fails ends the recording, never a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparkle.config import Settings
from sparkle.errors import BadRequest, SparkleError, StorageError
from sparkle.messages import TraceState
from sparkle.policy import Key, policy_name
from sparkle.profile import UsageProfile, profile_path, set_aside
from sparkle.store import Store
from sparkle.trace import Event, TraceHeader, TraceLayer, TraceWriter

log = logging.getLogger(__name__)


class Recorder:
    """`usage` and `hottest` are empty where the setting `profile` is off, and what is used then is not recorded."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._profile = UsageProfile.for_store(store)
        self._path = profile_path(settings.state_dir, store.fingerprint)
        self._is_on = settings.profile == "on"
        self._trace: TraceWriter | None = None
        if self._is_on:
            self._restore()

    def _restore(self) -> None:
        try:
            if self._profile.restore(self._path):
                log.info("profile_restored path=%s tokens=%d", self._path, self._profile.n_tokens)
        except SparkleError as e:
            log.warning("profile_not_used %s moved_to=%s", e, self._set_aside())

    def _set_aside(self) -> Path | str | None:
        try:
            return set_aside(self._path)
        except StorageError as e:  # a folder that lets nothing go takes nothing either: `save` will say so
            return f"nowhere ({e})"

    # --- usage -----------------------------------------------------------------------------------------------------

    def usage(self) -> Mapping[Key, float]:
        return self._profile.usage() if self._is_on else {}

    def hottest(self) -> list[Key]:
        return self._profile.hottest() if self._is_on else []

    @property
    def n_tokens(self) -> int:
        """Tokens that the profile has seen, those of former runs included."""
        return self._profile.n_tokens

    def observe(self, event: Event) -> None:
        if self._is_on:
            self._profile.observe(event)
        if self._trace is not None:
            self._of_trace(lambda trace: trace.write(event))

    def save(self) -> None:
        """Write down what came in since the last time; a minute of it is the most that a kill may cost."""
        try:
            if self._is_on and not self._profile.is_saved:
                self._profile.save(self._path)
        except StorageError as e:
            log.warning("profile_not_saved %s", e)
        self._of_trace(TraceWriter.flush)

    def stop(self) -> None:
        self.save()
        self._of_trace(TraceWriter.close)

    def _of_trace(self, do: Callable[[TraceWriter], None]) -> None:
        """Do something to the trace under way, if any; where the disk refuses, the trace has ended."""
        if self._trace is not None:
            try:
                do(self._trace)
            except StorageError as e:
                log.warning("trace_ended %s", e)
                self._trace = None

    # --- traces ----------------------------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        return self._trace is not None

    def start_trace(
        self, request_id: str, path: str, n_slots: Sequence[int], resident: Callable[[], Sequence[Key]]
    ) -> TraceState:
        """Record from now on. Raises BadRequest if a trace is under way, ConfigError or StorageError for the file."""
        if self._trace is not None:
            raise BadRequest(f"a trace is being recorded to {self._trace.path}; stop it first (sparkle-ctl trace stop)")
        if not Path(path).is_absolute() or "\0" in path:
            raise BadRequest(f"StartTrace.path {path!r} is not an absolute path")
        header = TraceHeader(
            model=self._store.name,
            fingerprint=self._store.fingerprint,
            started_at=time.time(),
            layers=tuple(TraceLayer(x.index, x.n_experts, x.top_k, x.layout) for x in self._store.layers),
            record_bytes=tuple(layout.record_bytes for layout in self._store.classes),
            n_slots=tuple(n_slots),
            policy=policy_name(self._settings.policy),
            resident=tuple(resident()),
        )
        self._trace = TraceWriter(Path(path), header)
        log.info("trace_started path=%s", path)
        return self._state(self._trace, request_id, True)

    def stop_trace(self, request_id: str) -> TraceState:
        """End the trace. Raises BadRequest if there is none, StorageError if its last part could not be written."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise BadRequest("no trace is being recorded; begin one with sparkle-ctl trace start")
        trace.close()
        log.info("trace_stopped path=%s events=%d bytes=%d", trace.path, trace.n_events, trace.n_bytes)
        return self._state(trace, request_id, False)

    @staticmethod
    def _state(trace: TraceWriter, request_id: str, is_recording: bool) -> TraceState:
        return TraceState(request_id, str(trace.path), is_recording, trace.n_events, trace.n_bytes)
