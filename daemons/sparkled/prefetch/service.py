"""The prefetch daemon's process: messages, clients and start-up around one Residency.

Allocating the pool and measuring the disk take seconds, so a thread does them while the loop answers StatusRequest;
after that everything happens in the loop's thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkle import _native, budget
from sparkle.config import Settings
from sparkle.errors import PeerError, PoolError, ProtocolError, SparkleError, StorageError
from sparkle.lifecycle import Daemon, State
from sparkle.messages import AttachPool, CancelFetch, DetachPool, Error, ExpertsReady, FetchExperts, PoolAttached
from sparkle.policy import Key
from sparkle.rundir import lock_is_free
from sparkle.store import Store
from sparkled.prefetch.disk import Disk, make_reader, measure_depth
from sparkled.prefetch.reads import ReadQueue, percentile
from sparkled.prefetch.residency import Request, Residency
from sparkled.prefetch.segments import Segments, open_segments

log = logging.getLogger(__name__)

INCARNATION = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]+")  # becomes a file name: nothing else may come in
DEATH_CHECK_S = 0.5
QUEUE_RETRY_S = 0.002  # a release sends no message: look again while a set waits for slots
EXPIRY_S = 0.05
FILL_S = 0.01


@dataclass(slots=True)
class _Built:
    """What the start-up thread hands over."""

    disk: Disk
    reader: _native.Reader
    depth: int
    depth_reason: str
    segments: Segments


class PrefetchDaemon(Daemon):
    """See the package's docstring."""

    role = "prefetch"

    def __init__(self, settings: Settings) -> None:
        # Before locks and sockets are taken: a start that cannot succeed leaves nothing behind.
        self._store = Store.open(settings.resolved_model())
        self._budget = budget.derive(settings, self._store)
        super().__init__(settings)
        for line in (*self._budget.reasons, *(f"warning: {w}" for w in self._budget.warnings)):
            log.info("budget %s", line)
        self._built: _Built | SparkleError | None = None
        self._builder = threading.Thread(target=self._build, name="builder", daemon=True)
        self._disk: Disk | None = None
        self._segments: Segments | None = None
        self._residency: Residency | None = None
        self._reads: ReadQueue | None = None
        self._clients: dict[str, int] = {}
        self._last_event: dict[int, tuple[int, frozenset[int]]] = {}
        self._last_answer: dict[int, ExpertsReady] = {}
        self._layers_used: set[int] = set()
        self._fill: Iterator[Key] = iter(())

    # --- start and stop --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.become(State.STARTING, f"allocating {budget.gb(self._budget.pool_bytes)} of shared memory")
        for path in self.rundir.clients.glob("*.lock"):  # of clients that died while nobody looked
            if lock_is_free(path):
                path.unlink(missing_ok=True)
        self._builder.start()

    def model_fingerprint(self) -> str:
        return self._store.fingerprint

    def _build(self) -> None:
        """In the builder thread: everything that takes long. The result is taken over by the loop."""
        disk = None
        try:
            disk = Disk.open(self._store, self.settings.direct_io)
            depth, reason = measure_depth(self.settings, self._store, disk)
            reader = make_reader(self.settings, self._store, disk, depth)
            segments = open_segments(
                self.rundir.shm_prefix, self._store, self._budget.slots, lambda: self.state is State.DRAINING
            )
            reader.keep_open(
                self.role_lock.fileno()
            )  # a successor gets the lock when no read of ours can land any more
            reader.register_memory([(at, n * slots) for r in segments.regions for at, n, slots in r.arrays()])
            self._built = _Built(disk, reader, depth, reason, segments)
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
        self._disk, self._segments, reader, pool = built.disk, built.segments, built.reader, built.segments.pool
        residency = Residency(self._store, pool, built.segments.regions, self._on_ready, self._on_failed)
        self._reads = ReadQueue(
            self._store, built.disk, reader, built.depth, self.settings.checksum_frac, residency.read_ended
        )
        self._residency = residency
        self._reader_name, self._depth = reader.name, built.depth
        n_found = residency.start(self._reads)
        pool.epoch = self.epoch
        self._adopt_clients(pool)
        pool.complete()
        self.watch(self._reads.event_fd, self._reads.reap)
        self.every(DEATH_CHECK_S, self._bury_the_dead)
        self.every(EXPIRY_S, residency.expire)
        self.every(FILL_S, self._fill_background)
        log.info(
            "io engine=%r direct_io=%r depth=%d (%s)",
            reader.name,
            built.disk.direct_io,
            built.depth,
            built.depth_reason,
        )
        how = f"adopted with {n_found} experts" if built.segments.is_adopted else "empty"
        self.become(State.READY, f"pool of {pool.n_slots} slots, {how}")

    def _adopt_clients(self, pool: _native.Pool) -> None:
        """Clients of the predecessor keep their bits; those that died meanwhile are cleared by `_bury_the_dead`."""
        for bit in range(_native.MAX_CLIENTS):
            if name := pool.client_name(bit):
                self._clients[name] = bit

    def stop(self) -> None:
        if self._builder.is_alive():
            self._builder.join()  # allocation can't be interrupted; what it made must be removed below
        if isinstance(self._built, _Built):
            self._disk, self._segments = self._built.disk, self._built.segments
        if self._reads is not None:
            self.unwatch(self._reads.event_fd)
            self._reads.close()
        self._reads = self._residency = None
        if self._disk is not None:
            self._disk.close()
        if self._segments is not None:
            self._segments.unlink()

    # --- clients ---------------------------------------------------------------------------------------------------

    def on_attach_pool(self, peer: bytes, message: AttachPool) -> None:
        _, pool = self._serving()
        if not INCARNATION.fullmatch(message.incarnation) or len(message.incarnation) > 47:
            raise ProtocolError(f"AttachPool.incarnation {message.incarnation[:60]!r} is not <role>-<pid>-<hex time>")
        if any(not 0 <= i < len(self._store.layers) for i in message.layers):
            raise ProtocolError(f"AttachPool.layers: the store has layers 0 to {len(self._store.layers) - 1}")
        if message.incarnation not in self._clients:
            if lock_is_free(self._lock_path(message.incarnation)):
                raise ProtocolError(f"AttachPool: nobody holds the lock {self._lock_path(message.incarnation)}")
            self._clients[message.incarnation] = self._take_bit(pool, message.incarnation)
            log.info("client_attached client=%s bit=%d", message.incarnation, self._clients[message.incarnation])
        if not self._layers_used.issuperset(message.layers):
            self._layers_used.update(message.layers)
            self._fill = self._fill_order()
        segment = self._segments.name if self._segments else ""
        bit = self._clients[message.incarnation]
        self.reply(peer, PoolAttached(message.incarnation, segment, bit, self.epoch))

    def _take_bit(self, pool: _native.Pool, incarnation: str) -> int:
        self._bury_the_dead()
        free = set(range(_native.MAX_CLIENTS)) - set(self._clients.values())
        if not free:
            raise PoolError(f"the pool has {_native.MAX_CLIENTS} clients already; end one")
        bit = min(free)
        pool.reset_ring(bit)
        self._last_event.pop(bit, None)
        pool.set_client(bit, incarnation)
        return bit

    def on_detach_pool(self, _peer: bytes, message: DetachPool) -> None:
        if message.incarnation in self._clients:
            self._forget(message.incarnation, "client_left")

    def _bury_the_dead(self) -> None:
        """Clear the bits of clients whose lock is free: only that proves a client dead, silence does not."""
        for name in [n for n in self._clients if lock_is_free(self._lock_path(n))]:
            self._forget(name, "client_died")
            self._lock_path(name).unlink(missing_ok=True)

    def _forget(self, incarnation: str, event: str) -> None:
        residency, pool = self._serving()
        bit = self._clients.pop(incarnation)
        self._drain(bit)
        self._last_answer.pop(bit, None)
        n_held = residency.drop_client(incarnation, bit)
        pool.set_client(bit, "")
        log.info("%s client=%s slots_held=%d", event, incarnation, n_held)

    def _lock_path(self, incarnation: str) -> Any:
        return self.rundir.clients / f"{incarnation}.lock"

    # --- experts ---------------------------------------------------------------------------------------------------

    def on_fetch_experts(self, peer: bytes, message: FetchExperts) -> None:
        residency, _ = self._serving()
        self._check(message)
        self._drain(message.bit, message.ring_position)
        layer, hits = self._last_event.get(message.bit, (-1, frozenset()))
        if (running := residency.requests.get(message.request_id)) is not None:
            running.peer = peer  # sent again; the answer goes where it was asked last
            return
        answer = self._last_answer.get(message.bit)
        if answer is not None and answer.request_id == message.request_id:
            self.reply(peer, answer)  # a repeat that crossed it: a new grant could outlive the client's hold
            return
        was_hit = hits if layer == message.layer else frozenset()
        residency.fetch(Request(peer, message, time.monotonic() + message.deadline_ms / 1e3, was_hit))
        if residency.has_queued:
            self.after(QUEUE_RETRY_S, self._retry)

    def _check(self, message: FetchExperts) -> None:
        if self._clients.get(message.incarnation) != message.bit:
            raise PeerError("FetchExperts from a client that is not attached; attach first")
        if not 0 <= message.layer < len(self._store.layers):
            raise ProtocolError(f"FetchExperts.layer {message.layer}: the store has {len(self._store.layers)} layers")
        n_experts = self._store.layers[message.layer].n_experts
        if not message.experts or any(not 0 <= e < n_experts for e in message.experts):
            raise ProtocolError(f"FetchExperts.experts: need at least one, each from 0 to {n_experts - 1}")
        if len(set(message.experts)) != len(message.experts):
            raise ProtocolError("FetchExperts.experts: each expert may be named once")
        if message.ring_position < 0:
            raise ProtocolError(f"FetchExperts.ring_position {message.ring_position} is negative")
        layout = self._store.layers[message.layer].layout
        if len(message.experts) > self._budget.slots[layout]:
            raise PoolError(
                f"{len(message.experts)} experts of layer {message.layer} asked for at once, "
                f"but the pool has {self._budget.slots[layout]} slots for them; raise SPARKLE_MEMORY"
            )

    def on_cancel_fetch(self, peer: bytes, message: CancelFetch) -> None:
        residency, _ = self._serving()
        if residency.cancel(message.request_id):
            self.reply(peer, Error("cancelled", "fetch cancelled", request_id=message.request_id))

    def _on_ready(self, request: Request, slots: list[int]) -> None:
        answer = ExpertsReady(request.message.request_id, slots)
        self._last_answer[request.message.bit] = answer
        self.reply(request.peer, answer)

    def _on_failed(self, request: Request, error: SparkleError) -> None:
        log.warning("fetch_failed layer=%d code=%s %s", request.message.layer, error.code, error)
        retryable = error.retryable and not isinstance(error, StorageError)
        self.reply(request.peer, Error(error.code, str(error), retryable, request.message.request_id))

    # --- timers ----------------------------------------------------------------------------------------------------

    def _drain(self, bit: int, limit: int = 2**63) -> None:
        """Feed the policy what a client did, and remember its last event: (layer, experts that it found)."""
        residency, pool = self._serving()
        try:
            events = pool.drain(bit, limit)
        except RuntimeError as e:  # bytes of another process: they may mislead the policy, but end nothing
            log.warning("ring_damaged bit=%d %s", bit, e)
            pool.reset_ring(bit)
            return
        for _, event_layer, experts in events:
            if not event_layer < len(self._store.layers):
                log.warning("ring_damaged bit=%d event of layer %d, which does not exist", bit, event_layer)
                continue
            residency.used(event_layer, experts)
            self._last_event[bit] = (event_layer, frozenset(e for e, is_hit in experts if is_hit))

    def _retry(self) -> None:
        residency, _ = self._serving()
        self._bury_the_dead()
        residency.retry_queued()
        if residency.has_queued:
            self.after(QUEUE_RETRY_S, self._retry)

    def _fill_background(self) -> None:
        """Keep the disk busy with experts nobody asked for, as long as nobody asks and slots are empty."""
        for bit in self._clients.values():
            self._drain(bit)
        if self.settings.background_fill == "off" or self._reads is None or self._residency is None:
            return
        while self._reads.is_idle and self._reads.n_background < budget.BACKGROUND_READS:
            key = next(self._fill, None)
            if key is None:
                return
            self._residency.fill(key)

    def _fill_order(self) -> Iterator[Key]:
        layers = [layer for layer in self._store.layers if layer.index in self._layers_used]
        for expert in range(max((layer.n_experts for layer in layers), default=0)):
            for layer in layers:
                if expert < layer.n_experts:
                    yield layer.index, expert

    def _serving(self) -> tuple[Residency, _native.Pool]:
        if self._residency is None or self._segments is None:
            raise PeerError(f"the prefetch daemon is {self.state.value}: {self.detail}")
        return self._residency, self._segments.pool

    # --- telemetry -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "model_name": self._store.name,
            "experts_bytes": sum(
                x.n_experts * self._store.classes[x.layout].record_bytes for x in self._store.layers if x.kind == "main"
            ),
            "n_experts": sum(x.n_experts for x in self._store.layers if x.index in self._layers_used),
            "n_clients": len(self._clients),
        }
        if self._residency is None or self._segments is None or self._reads is None or self._disk is None:
            return out
        stats, counts = self._reads.stats, self._residency.counts
        return out | {
            "pool_bytes": sum(r.spec.n_bytes for r in self._segments.regions),
            "n_regions": len(self._segments.regions),
            "n_slots": self._segments.pool.n_slots,
            "slots_used": self._residency.n_used,
            "slots_loading": self._residency.n_loading,
            "slots_held": self._segments.pool.n_held(),
            "slots_pinned": 0,  # nothing is pinned: eviction may take any slot that is not held
            "slots_side": self._residency.n_side,
            **{name: counts[name] for name in _COUNTS},
            "bytes_read": stats.bytes_read,
            "bytes_read_demand": stats.bytes_read_demand,
            "bytes_read_background": stats.bytes_read_background,
            "read_busy_s": self._reads.busy_s,
            "read_p50_ms": percentile(stats.latencies_ms, 0.5),
            "read_p99_ms": percentile(stats.latencies_ms, 0.99),
            "reads_retried": stats.reads_retried,
            "records_quarantined": len(self._reads.quarantined),
            "checksums_verified": stats.checksums_verified,
            "io_engine": self._reader_name,
            "direct_io": self._disk.direct_io,
            "read_depth": self._depth,
        }


_COUNTS = (
    "hits_resident",
    "hits_in_flight",
    "hits_late",
    "misses",
    "fetches",
    "fetches_queued",
    "fetches_failed",
    "evictions",
    "unplaced_experts",
)
