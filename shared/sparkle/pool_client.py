"""A client of the expert pool: finds experts in shared memory, asks the prefetch daemon for those that are not there.

Owns a DEALER to the prefetch daemon, one bit of the slot masks, one event ring, a lock file that proves the client
alive, and the mapped regions. Sends AttachPool, FetchExperts, CancelFetch, HintExperts, DetachPool. Never writes to a
region, and never returns a slot that does not hold what was asked for. Everything here is used by one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from sparkle import config, regions, wire
from sparkle._native import PoolClient as _NativeClient
from sparkle.errors import (
    Cancelled,
    ConfigError,
    PeerError,
    PoolError,
    SparkleError,
    StorageError,
    UnplacedExpert,
    from_code,
)
from sparkle.messages import (
    AttachPool,
    CancelFetch,
    DetachPool,
    Error,
    ExpertsReady,
    FetchExperts,
    Hello,
    HintExperts,
    Message,
    PoolAttached,
    Welcome,
)
from sparkle.rundir import FileLock, RunDir
from sparkle.store import Store
from sparkle.trace import Origin

POLL_MS = 20  # how often a wait looks for an abort; replies wake it at once
RING_POLL_S = 0.005
FIRST_RESEND_S = 0.05  # daemons start together; the pool of a small model is ready in a tenth of a second


@dataclass(slots=True)
class Fetch:
    """A FetchExperts under way; times are those of time.monotonic()."""

    layer: int
    experts: list[int]
    request_id: str
    end: float
    resend_at: float = 0.0


class PoolClient:
    """See the module. `generation` grows whenever the regions were mapped anew: views made before are stale."""

    def __init__(self, rundir: RunDir, store: Store, layers: Sequence[int], role: str) -> None:
        self._rundir = rundir
        self._store = store
        self._layers = list(layers)
        self._role = role
        self.incarnation = f"{role}-{os.getpid()}-{time.time_ns():x}"
        self._lock = FileLock(rundir.clients / f"{self.incarnation}.lock")
        if not self._lock.try_acquire():
            raise PeerError(f"cannot lock {self._lock.path}; another process uses this name")
        self._context = wire.Context()
        self._socket = wire.dealer(self._context, rundir.socket("prefetch"))
        self._ids = itertools.count(1)
        self._abandoned: set[str] = set()
        self._native: _NativeClient | None = None
        self._bit = -1
        self._epoch = 0
        self._segment = ""
        self.regions: list[regions.Region] = []
        self.generation = 0
        self.stall_s = 0.0
        self.unplaced_experts = 0

    # --- attaching -------------------------------------------------------------------------------------------------

    def attach(self, deadline_s: float, should_abort: Callable[[], bool] = lambda: False) -> None:
        """Join the pool, waiting until the prefetch daemon is ready. Raises PeerError at the deadline."""
        end = time.monotonic() + deadline_s
        interval_s, found = FIRST_RESEND_S, "is it running?"
        while not should_abort():
            self._greet()
            pause = min(end, time.monotonic() + interval_s)
            interval_s = min(2 * interval_s, config.RESEND_S)
            while (message := self._receive(pause, should_abort)) is not None:
                if isinstance(message, PoolAttached):
                    try:
                        self._map(message)
                        return
                    except PoolError as e:
                        found = str(e)
                elif isinstance(message, Error) and message.request_id is None and not message.retryable:
                    raise from_code(message.code, message.message)
            if time.monotonic() >= end:
                raise PeerError(
                    f"no pool from the prefetch daemon at {self._rundir.socket('prefetch')} within {deadline_s:.0f} s; "
                    f"{found} (sparkle-ctl status)"
                )
        raise Cancelled("cancelled while waiting for the pool")

    def _map(self, attached: PoolAttached) -> None:
        """Map the pool unless it is mapped. Raises PoolError, with nothing changed, if it has gone again."""
        if (attached.segment, attached.bit, attached.epoch) == (self._segment, self._bit, self._epoch):
            return
        try:
            native = _NativeClient.attach(attached.segment, attached.bit)
        except (OSError, RuntimeError) as e:
            raise PoolError(f"the pool {attached.segment} cannot be mapped: {e}") from e
        if native.fingerprint != self._store.fingerprint:
            raise ConfigError("the pool holds another model's experts; restart the daemons with the same SPARKLE_MODEL")
        is_mapped = self._native is not None and attached.bit == self._bit and native.layout == self._native.layout
        if not is_mapped:  # every pool's region names are new
            self.regions = [
                regions.Region.attach(spec, self._store.classes[spec.layout])
                for spec in regions.from_json(native.layout)
            ]
            self._native = native
            self.generation += 1
        self._segment, self._bit, self._epoch = attached.segment, attached.bit, attached.epoch
        self.native.reconcile()  # grants of a daemon that died before it could tell

    @property
    def native(self) -> _NativeClient:
        if self._native is None:
            raise PoolError("not attached to the pool")
        return self._native

    # --- experts ---------------------------------------------------------------------------------------------------

    def acquire(
        self, layer: int, experts: Sequence[int], origin: Origin, should_abort: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Return a held slot for each of the distinct `experts` of store layer `layer`, waiting for those not there.

        The caller releases the slots when every evaluation that reads them has completed. Raises UnplacedExpert or
        StorageError if an expert cannot be placed before FETCH_DEADLINE_S, Cancelled if `should_abort` says so; nothing
        is held then.
        """
        slots = self.look_up(layer, experts, origin, should_abort)
        if min(slots) >= 0:
            return slots
        # INVARIANT: a client that waits holds nothing of its set, so two clients cannot block each other. The set is
        # granted as a whole.
        self.release(slots)
        return self.wait(self.fetch(layer, experts), should_abort)

    def look_up(
        self, layer: int, experts: Sequence[int], origin: Origin, should_abort: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Hold what is there (-1 where nothing is), and write the event that policy learns from.

        Waits while the ring is full: nothing may be dropped. A ring that nobody empties may belong to a pool that its
        daemon took along when it ended, so the client attaches anew meanwhile, and looks again in what it gets.
        """
        full_since, resend_at = 0.0, 0.0
        while True:
            slots = self.native.hold(layer, experts)
            if self.native.push_event(*origin.words(), layer, experts, slots):
                return slots
            self.release(slots)
            now = time.monotonic()
            full_since = full_since or now
            if should_abort():
                raise Cancelled("cancelled while the event ring was full")
            if now > full_since + config.RING_DEADLINE_S:
                waited = f"{config.RING_DEADLINE_S:.0f} s"
                raise PeerError(f"the prefetch daemon has not read events for {waited}; is it alive?")
            if now >= resend_at:
                self._greet()
                resend_at = now + config.RESEND_S
            message = self._receive(now + RING_POLL_S, should_abort)
            if isinstance(message, PoolAttached):
                self._map(message)

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Ask for experts, and go on; `wait` or `abandon` must follow."""
        if self._abandoned:  # a daemon that died before it answered may have granted
            self.native.reconcile()
        fetch = Fetch(layer, list(experts), self._next_id(), time.monotonic() + config.FETCH_DEADLINE_S)
        self._request(fetch)
        return fetch

    def wait(self, fetch: Fetch, should_abort: Callable[[], bool] = lambda: False) -> list[int]:
        """Return the held slots of a fetch. The caller must hold nothing meanwhile; raises like `acquire`."""
        began = time.monotonic()
        try:
            return self._wait(fetch, should_abort)
        except SparkleError as e:
            if not isinstance(e, Cancelled):
                self.unplaced_experts += 1
            raise
        finally:
            self.stall_s += time.monotonic() - began

    def _wait(self, fetch: Fetch, should_abort: Callable[[], bool]) -> list[int]:
        while True:
            now = time.monotonic()
            if should_abort() or now >= fetch.end:
                self.abandon(fetch)
                if should_abort():
                    raise Cancelled("cancelled while waiting for experts")
                raise UnplacedExpert(
                    f"{len(fetch.experts)} experts of layer {fetch.layer} were not placed within "
                    f"{config.FETCH_DEADLINE_S:.0f} s: the disk is too slow, the pool too small, or the prefetch "
                    "daemon is down (sparkle-ctl status)"
                )
            if now >= fetch.resend_at:  # silence: the daemon may have been restarted, and a new one does not know us
                self._greet()
                self._request(fetch)
            message = self._receive(min(fetch.end, fetch.resend_at), should_abort)
            slots = self._take(message, fetch)
            if slots is not None:
                return slots
            if isinstance(message, ExpertsReady) and message.request_id == fetch.request_id:
                fetch.request_id = self._next_id()  # evicted meanwhile: ask anew
                self._request(fetch)

    def release(self, slots: Sequence[int]) -> None:
        self.native.release(slots)

    def hint(self, layer: int, experts: Sequence[int], predictor: str) -> None:
        """Tell the daemon what will be needed soon, the likeliest first. Nothing is waited for, nothing promised."""
        self._send(HintExperts(self.incarnation, layer, list(experts), predictor))

    def _next_id(self) -> str:
        return f"{self.incarnation}/{next(self._ids)}"

    def _greet(self) -> None:
        """Say who we are and ask to be attached; to a daemon that knows us already, this changes nothing."""
        self._send(Hello(self._role, os.getpid(), model=self._store.fingerprint))
        self._send(AttachPool(self.incarnation, os.getpid(), self._layers))

    def _request(self, fetch: Fetch) -> None:
        now = time.monotonic()
        fetch.resend_at = now + config.RESEND_S
        self._send(
            FetchExperts(
                request_id=fetch.request_id,
                incarnation=self.incarnation,
                bit=self._bit,
                layer=fetch.layer,
                experts=fetch.experts,
                ring_position=self.native.ring_position,
                deadline_ms=max(1, int((fetch.end - now) * 1000)),
            )
        )

    def _take(self, message: Message | None, fetch: Fetch) -> list[int] | None:
        """Handle a message that arrived while `fetch` was waited for; the held slots if it completes the set."""
        if isinstance(message, PoolAttached):
            with contextlib.suppress(PoolError):  # gone again already: the request is repeated, and answered by another
                self._map(message)
        elif isinstance(message, ExpertsReady):
            if message.request_id != fetch.request_id:  # the answer to a repeat that we no longer needed
                self.native.reconcile()
                return None
            # The grants keep the slots; taking them is an ordinary hold, so a wrong slot can't slip through.
            slots = self.native.hold(fetch.layer, fetch.experts)
            if min(slots) >= 0:
                return slots
            self.release(slots)
            self.native.reconcile()
        elif isinstance(message, Error) and message.request_id == fetch.request_id:
            self.native.reconcile()
            error = from_code(message.code, message.message)
            if isinstance(error, StorageError):
                raise error
            if not isinstance(error, PeerError):  # a PeerError says: not yet; it is asked again
                raise UnplacedExpert(str(error))
        return None

    def abandon(self, fetch: Fetch) -> None:
        """Take a request back, and give back what it was granted; an answer that comes late is seen by `_receive`."""
        self._abandoned.add(fetch.request_id)
        self._send(CancelFetch(fetch.request_id))
        end = time.monotonic() + config.CANCEL_DEADLINE_S
        while fetch.request_id in self._abandoned and self._receive(end, lambda: False) is not None:
            pass
        self.native.reconcile()

    # --- messages --------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        try:
            self._socket.send_multipart(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return  # thousands of messages wait for a daemon that is gone; the resend after its return counts

    def _receive(self, until: float, should_abort: Callable[[], bool]) -> Message | None:
        """Return the next message, or None at `until` or on abort."""
        while not should_abort():
            left_ms = int((until - time.monotonic()) * 1000)
            if left_ms <= 0:
                return None
            if not self._socket.poll(min(POLL_MS, left_ms)):
                continue
            message = wire.decode(self._socket.recv_multipart())
            request_id = getattr(message, "request_id", None)
            if request_id in self._abandoned:
                self._abandoned.discard(request_id)
                self.native.reconcile()  # its grants crossed our cancel
            if not isinstance(message, Welcome):
                return message
        return None

    def close(self) -> None:
        """Leave the pool: views made from the regions must not be used any more."""
        self._send(DetachPool(self.incarnation))
        self.regions = []
        self._native = None
        self._socket.close()
        self._context.term()
        self._lock.remove_and_close()
