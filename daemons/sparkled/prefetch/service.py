"""The prefetch daemon's process: messages, timers and start-up around one pool.

Allocating the pool and measuring the disk take seconds, so a thread does them while the loop answers StatusRequest;
after that everything happens in the loop's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from sparkle import _native, budget, config
from sparkle.config import Settings
from sparkle.errors import PeerError, PoolError, ProtocolError, SparkleError, StorageError
from sparkle.lifecycle import Daemon, State
from sparkle.messages import (
    AttachPool,
    CancelFetch,
    DetachPool,
    Error,
    ExpertsReady,
    FetchExperts,
    HintExperts,
    PinExperts,
    PinState,
    PoolAttached,
    PoolState,
    ResizePool,
    StartTrace,
    StopTrace,
)
from sparkle.store import Store
from sparkle.trace import Event
from sparkled.prefetch.disk import Depth, Disk, make_reader, measure_depth
from sparkled.prefetch.residency import Request
from sparkled.prefetch.segments import Segments, open_segments
from sparkled.prefetch.serving import Serving, make_policies

log = logging.getLogger(__name__)

DEATH_CHECK_S = 0.5
QUEUE_RETRY_S = 0.002  # a release sends no message: look again while a set waits for slots
EXPIRY_S = 0.05
PUMP_S = 0.01
GOVERN_S = 0.25
RESIZE_S = 0.01
JUDGE_S = 5.0


@dataclass(slots=True)
class _Built:
    """What the start-up thread hands over."""

    disk: Disk
    reader: _native.Reader
    depth: Depth
    segments: Segments


class PrefetchDaemon(Daemon):
    """See the package's docstring."""

    role = "prefetch"

    def __init__(self, settings: Settings) -> None:
        # Before locks and sockets are taken: a start that cannot succeed leaves nothing behind.
        self._store = Store.open(settings.resolved_model())
        self._plan = budget.derive(settings, self._store)
        make_policies(settings, self._store)
        super().__init__(settings)
        for line in (*self._plan.reasons, *(f"warning: {w}" for w in self._plan.warnings)):
            log.info("budget %s", line)
        self._built: _Built | SparkleError | None = None
        self._builder = threading.Thread(target=self._build, name="builder", daemon=True)
        self._serving: Serving | None = None

    # --- start and stop --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.become(State.STARTING, f"allocating {budget.gb(self._plan.pool_bytes)} of shared memory")
        self._builder.start()

    def model_fingerprint(self) -> str:
        return self._store.fingerprint

    def _build(self) -> None:
        """In the builder thread: everything that takes long. The result is taken over by the loop."""
        disk = None
        try:
            disk = Disk.open(self._store, self.settings.direct_io)
            depth = measure_depth(self.settings, self._store, disk)
            reader = make_reader(self.settings, self._store, disk, depth.n_reads)
            segments = open_segments(
                self.rundir.shm_prefix, self._store, self._plan.slots, lambda: self.state is State.DRAINING
            )
            # a successor gets the lock when no read of ours can land any more
            reader.keep_open(self.role_lock.fileno())
            reader.register_memory(segments.extent.spans())
            self._built = _Built(disk, reader, depth, segments)
        except Exception as e:  # the process edge of this thread: the loop must learn of its end
            if disk is not None:
                disk.close()
            if not isinstance(e, SparkleError):
                log.exception("builder_broke")
            self._built = e if isinstance(e, SparkleError) else SparkleError(f"start-up broke: {type(e).__name__}: {e}")
        self.wake()

    def on_wake(self) -> None:
        """Take over what the builder made."""
        built, self._built = self._built, None
        if built is None:
            return
        if isinstance(built, SparkleError):
            self.fail(built)
            return
        serving = Serving(
            self.settings, self.rundir, self._store, self._plan, built.disk, built.reader, built.depth, built.segments
        )
        self._serving = serving
        serving.residency.on_ready, serving.residency.on_failed = self._on_ready, self._on_failed
        n_found = serving.start()
        pool = built.segments.pool
        pool.epoch = self.epoch
        pool.complete()
        self.watch(serving.reads.event_fd, serving.reap)
        self.every(DEATH_CHECK_S, serving.clients.bury_the_dead)
        self.every(EXPIRY_S, serving.residency.expire)
        self.every(PUMP_S, serving.look_around)
        self.every(GOVERN_S, self._govern)
        self.every(JUDGE_S, serving.judge)
        self.every(config.PROFILE_S, serving.recorder.save)
        depth = built.depth
        log.info(
            "io engine=%r direct_io=%r depth=%d (%s)",
            serving.reader_name,
            built.disk.direct_io,
            depth.n_reads,
            depth.reason,
        )
        how = f"adopted with {n_found} experts" if built.segments.is_adopted else "empty"
        self.become(State.READY, f"pool of {sum(built.segments.extent.in_force)} slots, {how}")

    def stop(self) -> None:
        if self._builder.is_alive():
            self._builder.join()  # allocation can't be interrupted; what it made must be removed below
        if isinstance(self._built, _Built):
            self._built.disk.close()
            self._built.segments.unlink()
        serving, self._serving = self._serving, None
        if serving is not None:
            self.unwatch(serving.reads.event_fd)
            serving.stop()

    # --- clients ---------------------------------------------------------------------------------------------------

    def on_attach_pool(self, peer: bytes, message: AttachPool) -> None:
        serving = self._in_service()
        bit = serving.attach(message.incarnation, message.layers)
        self.reply(peer, PoolAttached(message.incarnation, serving.segments.name, bit, self.epoch))

    def on_detach_pool(self, _peer: bytes, message: DetachPool) -> None:
        self._in_service().clients.forget(message.incarnation, "client_left")

    # --- experts ---------------------------------------------------------------------------------------------------

    def on_fetch_experts(self, peer: bytes, message: FetchExperts) -> None:
        serving = self._in_service()
        self._check(serving, message)
        for event in serving.clients.drain(message.bit, message.ring_position):
            serving.observe(event)
        if (running := serving.residency.requests.get(message.request_id)) is not None:
            running.peer = peer  # sent again; the answer goes where it was asked last
            return
        answer = serving.clients.last_answer.get(message.bit)
        if answer is not None and answer.request_id == message.request_id:
            self.reply(peer, answer)  # a repeat that crossed it: a new grant could outlive the client's hold
            return
        serving.fetch(_request(peer, message, serving.clients.last_event.get(message.bit)))
        if serving.residency.has_queued:
            self.after(QUEUE_RETRY_S, self._retry)

    def _check(self, serving: Serving, message: FetchExperts) -> None:
        if serving.clients.bit_of(message.incarnation) != message.bit:
            raise PeerError("FetchExperts from a client that is not attached; attach first")
        layout = self._check_experts("FetchExperts", message.layer, message.experts)
        if message.ring_position < 0:
            raise ProtocolError(f"FetchExperts.ring_position {message.ring_position} is negative")
        n_slots = serving.segments.extent.in_force[layout]
        if len(message.experts) > n_slots:
            raise PoolError(
                f"{len(message.experts)} experts of layer {message.layer} asked for at once, "
                f"but the pool has {n_slots} slots for them; raise SPARKLE_MEMORY"
            )

    def _check_experts(self, kind: str, layer: int, experts: list[int]) -> int:
        """Refuse what the store does not have; returns the layer's layout class."""
        if not 0 <= layer < len(self._store.layers):
            raise ProtocolError(f"{kind}.layer {layer}: the store has {len(self._store.layers)} layers")
        n_experts = self._store.layers[layer].n_experts
        if not experts or any(not 0 <= e < n_experts for e in experts):
            raise ProtocolError(f"{kind}.experts: need at least one, each from 0 to {n_experts - 1}")
        if len(set(experts)) != len(experts):
            raise ProtocolError(f"{kind}.experts: each expert may be named once")
        return self._store.layers[layer].layout

    def on_cancel_fetch(self, peer: bytes, message: CancelFetch) -> None:
        if self._in_service().residency.cancel(message.request_id):
            self.reply(peer, Error("cancelled", "fetch cancelled", request_id=message.request_id))

    def on_hint_experts(self, _peer: bytes, message: HintExperts) -> None:
        self._check_experts("HintExperts", message.layer, message.experts)
        self._in_service().hint(message.predictor, message.layer, message.experts)

    def _on_ready(self, request: Request, slots: list[int]) -> None:
        serving = self._in_service()
        answer = ExpertsReady(request.message.request_id, slots)
        serving.clients.last_answer[request.message.bit] = answer
        serving.meter.stalled(time.monotonic() - request.arrived)
        self.reply(request.peer, answer)

    def _on_failed(self, request: Request, error: SparkleError) -> None:
        log.warning("fetch_failed layer=%d code=%s %s", request.message.layer, error.code, error)
        retryable = error.retryable and not isinstance(error, StorageError)
        self.reply(request.peer, Error(error.code, str(error), retryable, request.message.request_id))

    def _retry(self) -> None:
        serving = self._in_service()
        serving.clients.bury_the_dead()
        serving.residency.retry_queued()
        if serving.residency.has_queued:
            self.after(QUEUE_RETRY_S, self._retry)

    # --- sparkle-ctl -----------------------------------------------------------------------------------------------

    def on_pin_experts(self, peer: bytes, message: PinExperts) -> None:
        serving = self._in_service()
        self._check_experts("PinExperts", message.layer, message.experts)
        keys = [(message.layer, expert) for expert in message.experts]
        n_pinnable = serving.pin(keys) if message.is_pinned else serving.unpin(keys)
        n_pinned = len(serving.residency.pinned)
        self.reply(peer, PinState(message.request_id, n_pinned, n_pinnable, *serving.n_pinned_of(keys)))

    def on_resize_pool(self, peer: bytes, message: ResizePool) -> None:
        serving = self._in_service()

        def done(detail: str) -> None:
            extent = serving.segments.extent
            self.reply(peer, PoolState(message.request_id, extent.n_bytes, sum(extent.in_force), detail))

        serving.sizing.ask(message.size, done)
        self._resize()

    def _govern(self) -> None:
        self._in_service().sizing.govern()
        self._resize()

    def _resize(self) -> None:
        serving = self._in_service()
        serving.resize()
        if not serving.sizing.is_done:
            self.after(RESIZE_S, self._resize)

    def on_start_trace(self, peer: bytes, message: StartTrace) -> None:
        self.reply(peer, self._in_service().start_trace(message.request_id, message.path))

    def on_stop_trace(self, peer: bytes, message: StopTrace) -> None:
        self.reply(peer, self._in_service().stop_trace(message.request_id))

    def _in_service(self) -> Serving:
        if self._serving is None:
            raise PeerError(f"the prefetch daemon is {self.state.value}: {self.detail}")
        return self._serving

    def metrics(self) -> dict[str, Any]:
        experts_bytes = sum(
            x.n_experts * self._store.layout_of(x.index).record_bytes for x in self._store.layers if x.kind == "main"
        )
        out: dict[str, Any] = {"model_name": self._store.name, "experts_bytes": experts_bytes, "n_clients": 0}
        return out | (self._serving.metrics() if self._serving is not None else {})


def _request(peer: bytes, message: FetchExperts, event: Event | None) -> Request:
    """`event`: what the client did last; a step's fetch follows its look-up of the same layer."""
    deadline = time.monotonic() + message.deadline_ms / 1e3
    if event is None or event.layer != message.layer:
        return Request(peer, message, deadline)
    was_hit = {e for e, is_hit in zip(event.experts, event.is_hit, strict=True) if is_hit}
    in_use = {(event.layer, e) for e in event.experts}
    return Request(peer, message, deadline, was_hit, in_use)
