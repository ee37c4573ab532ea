"""A pool in service: everything that exists once memory and disk are there, and how the parts work together.

Owns the parts and the order in which an event passes through them: residency and policy first, so that a fetch that
follows finds them up to date, then those that only watch. Decides what the idle disk reads: forecasts, then pins, then
empty slots. Never speaks to a peer; the daemon around it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from sparkle import _native, budget
from sparkle.config import Settings
from sparkle.messages import TraceState
from sparkle.policy import Key, LayerShape, Policy, make_policy, policy_name
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkle.trace import Event
from sparkled.prefetch.clients import Clients
from sparkled.prefetch.controller import Controller
from sparkled.prefetch.disk import Depth, Disk
from sparkled.prefetch.forecasts import PREDICTORS, Forecasts
from sparkled.prefetch.meter import Meter
from sparkled.prefetch.reads import ReadQueue, percentile
from sparkled.prefetch.recorder import Recorder
from sparkled.prefetch.residency import Request, Residency
from sparkled.prefetch.segments import Segments
from sparkled.prefetch.side import FILL
from sparkled.prefetch.sizing import Sizing

SIDE_FRAC = 1 / 8  # of the slots, at most, for forecasts that are not used yet


def layer_shapes(store: Store, layout: int) -> list[LayerShape]:
    return [LayerShape(x.index, x.n_experts, x.top_k) for x in store.layers if x.layout == layout]


def make_policies(settings: Settings, store: Store) -> list[Policy]:
    """One policy per layout class: only experts of a class compete for its slots. Raises ConfigError for its name."""
    return [make_policy(settings.policy, layer_shapes(store, i)) for i in range(len(store.classes))]


class Serving:
    """See the module. `residency.on_ready` and `on_failed` are the daemon's to set."""

    def __init__(
        self,
        settings: Settings,
        rundir: RunDir,
        store: Store,
        plan: budget.Budget,
        disk: Disk,
        reader: _native.Reader,
        depth: Depth,
        segments: Segments,
    ) -> None:
        self._settings = settings
        self._store = store
        self._plan = plan
        self._disk = disk
        self._depth = depth
        self.segments = segments
        self.reader_name = reader.name
        self.recorder = Recorder(settings, store)
        policies = make_policies(settings, store)
        for policy in policies:
            policy.seed(self.recorder.usage())
        side_limit = min(int(SIDE_FRAC * sum(plan.slots)), 2 * max(x.top_k for x in store.layers))
        self.residency = Residency(store, segments.pool, segments.regions, policies, side_limit)
        self.reads = ReadQueue(store, disk, reader, depth.n_reads, settings.checksum_frac, self.residency.read_ended)
        self.clients = Clients(rundir, store, segments.pool, self._client_gone)
        self.forecasts = Forecasts(self.clients.layers_after)
        self.controller = Controller(settings.prefetch, PREDICTORS)
        self.meter = Meter(self._chapter, [layout.record_bytes for layout in store.classes])
        self.meter.on_token = self._on_token
        self.residency.on_missed, self.residency.on_evicted = self.meter.missed, self.meter.evicted
        self.sizing = Sizing(
            store, plan, segments.extent, self.residency, settings.governor == "on", self._before_shrink
        )
        self._reader = reader
        self._pins: deque[Key] = deque()
        self._fill: Iterator[Key] = iter(())
        self._is_pinned_memory = True

    def start(self) -> int:
        """Take stock of the pool; returns how many experts were found in it."""
        n_found = self.residency.start(self.reads)
        self._follow(self.controller.active)
        if self._settings.pin_fraction:
            for layout in range(len(self._store.classes)):
                n = int(self._settings.pin_fraction * self.segments.extent.in_force[layout])
                mine = [k for k in self.recorder.hottest() if self._store.layers[k[0]].layout == layout]
                self.pin(mine[:n])
        return n_found

    def stop(self) -> None:
        self._catch_up()
        self.recorder.stop()
        self.reads.close()
        del self._reader
        self._disk.close()
        self.segments.unlink()

    # --- clients and events ----------------------------------------------------------------------------------------

    def attach(self, incarnation: str, layers: list[int]) -> int:
        before = self.clients.layers
        bit = self.clients.attach(incarnation, layers)
        if self.clients.layers != before:
            self._fill = self._fill_order()
        return bit

    def _client_gone(self, incarnation: str, bit: int) -> int:
        for event in self.clients.drain(bit):
            self.observe(event)
        return self.residency.drop_client(incarnation, bit)

    def observe(self, event: Event) -> None:
        layout = self._store.layers[event.layer].layout
        self.recorder.observe(event)
        self.meter.observe(event, layout)
        self.residency.used(event)
        self.forecasts.observe(event)

    def fetch(self, request: Request) -> None:
        self.residency.fetch(request)
        self._pump()

    def hint(self, predictor: str, layer: int, experts: Sequence[int]) -> None:
        self.forecasts.hint(predictor, layer, experts)
        self._pump()

    def reap(self) -> None:
        self.reads.reap()
        self._pump()

    def look_around(self) -> None:
        """Clients that find everything send no message: see what they did, and give the disk something to do."""
        self._catch_up()
        self._pump()

    def _catch_up(self) -> None:
        for event in self.clients.drain_all():
            self.observe(event)

    def _on_token(self, seconds: float, stall_s: float) -> None:
        self.controller.on_token(seconds, stall_s)
        if self.controller.active != self.forecasts.active:
            self._follow(self.controller.active)

    def _follow(self, predictor: str | None) -> None:
        self.forecasts.active = predictor
        self.segments.pool.wants_hints = predictor == "router"

    # --- ahead of demand -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Keep a few background reads under way, as long as no client waits for the disk."""
        while self.reads.is_idle and self.reads.n_background < budget.BACKGROUND_READS:
            if not self._read_ahead():
                return

    def _read_ahead(self) -> bool:
        """Begin one background read; False if there is nothing to read."""
        active = self.forecasts.active
        if active is not None:
            for key in self.forecasts.take():
                if self.residency.fill(key, active, may_evict=True):
                    return True
        while self._pins:
            key = self._pins[0]
            is_wanted = key in self.residency.pinned and self.residency.is_absent(key)
            if is_wanted and not self.residency.fill(key, FILL, may_evict=True):
                break  # every slot is in use: it is tried again
            self._pins.popleft()
            if is_wanted:
                return True
        if self._settings.background_fill == "off" or not self.residency.n_free:
            return False
        return any(self.residency.fill(key, FILL, may_evict=False) for key in self._fill)

    def _fill_order(self) -> Iterator[Key]:
        """Every expert that clients may ask for: by recorded use, then those never used, a bit of each layer."""
        layers = [layer for layer in self._store.layers if layer.index in self.clients.layers]
        known = self.recorder.hottest()
        yield from (key for key in known if key[0] in self.clients.layers)
        seen = set(known)
        for expert in range(max((layer.n_experts for layer in layers), default=0)):
            for layer in layers:
                if expert < layer.n_experts and (layer.index, expert) not in seen:
                    yield layer.index, expert

    def pin(self, keys: Sequence[Key]) -> int:
        """Keep experts in the pool, the first of them if not all may be; returns how many may be pinned in all."""
        wanted = self.residency.pinned | set(keys)
        n_pinnable = self._n_pinnable()
        for layout, limit in enumerate(n_pinnable):
            n = sum(self._store.layers[layer].layout == layout for layer, _ in wanted)
            if n > limit:
                keys = self._within(layout, limit, keys)
        self.residency.pinned |= set(keys)
        self._pins.extend(keys)
        self._pump()
        return sum(n_pinnable)

    def _within(self, layout: int, limit: int, keys: Sequence[Key]) -> list[Key]:
        """The first of `keys` that still may be pinned in a class."""
        free = limit - sum(self._store.layers[layer].layout == layout for layer, _ in self.residency.pinned)
        out = []
        for key in keys:
            is_mine = self._store.layers[key[0]].layout == layout and key not in self.residency.pinned
            free -= is_mine
            if not is_mine or free >= 0:
                out.append(key)
        return out

    def unpin(self, keys: Sequence[Key]) -> int:
        self.residency.pinned -= set(keys)
        return sum(self._n_pinnable())

    def n_pinned_of(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many of `keys` are pinned, and how many of these have no slot that could be read yet."""
        pinned = self.residency.pinned.intersection(keys)
        return len(pinned), sum(self.segments.pool.lookup(*key) < 0 for key in pinned)

    def _n_pinnable(self) -> list[int]:
        """Slots of each class beyond what a step needs at once: pins may take those."""
        floor = budget.floor_slots(self._store, self._plan.prefill_rows)
        return [max(0, self.residency.n_usable(layout) - least) for layout, least in enumerate(floor)]

    def _trim_pins(self) -> None:
        """A smaller pool has fewer pins: those go that would be evicted first. What a lost slot had is read again."""
        pinned = self.residency.pinned
        for layout, limit in enumerate(self._n_pinnable()):
            mine = {key for key in pinned if self._store.layers[key[0]].layout == layout}
            here = [key for key in self.residency.resident(layout) if key in mine]
            gone = sorted(mine.difference(here))
            pinned.difference_update([*gone, *here][: max(0, len(mine) - limit)])
            self._pins.extend(key for key in gone if key in pinned and key not in self._pins)

    # --- size ------------------------------------------------------------------------------------------------------

    def resize(self) -> None:
        before = list(self.segments.extent.in_force)
        self.sizing.step()
        if self.segments.extent.in_force != before or not self.sizing.is_done:
            self._trim_pins()
        if self.segments.extent.in_force != before:
            self.meter.resized()
            self._fill = self._fill_order()

    def _before_shrink(self) -> None:
        """Memory that the kernel has pinned for reads is not given back: read without that from now on."""
        if self._is_pinned_memory:
            self._is_pinned_memory = False
            self._reader.register_memory([])
            self.reader_name = self._reader.name

    # --- telemetry -------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        self.meter.turn_pages()

    def _chapter(self, layout: int) -> tuple[int, Sequence[Key]]:
        return self.segments.extent.in_force[layout], self.residency.resident(layout)

    def start_trace(self, request_id: str, path: str) -> TraceState:
        classes = range(len(self._store.classes))
        resident = lambda: [key for layout in classes for key in self.residency.resident(layout)]  # noqa: E731
        self._catch_up()  # what was used before is not part of it
        return self.recorder.start_trace(request_id, path, self.segments.extent.in_force, resident)

    def stop_trace(self, request_id: str) -> TraceState:
        self._catch_up()  # what was used until now is
        return self.recorder.stop_trace(request_id)

    def metrics(self) -> dict[str, Any]:
        stats, counts, extent = self.reads.stats, self.residency.counts, self.segments.extent
        judged = self.meter.judged()
        return {
            "n_experts": sum(x.n_experts for x in self._store.layers if x.index in self.clients.layers),
            "n_clients": len(self.clients),
            "pool_bytes": extent.n_bytes,
            "pool_target_bytes": self.sizing.governor.target_bytes,
            "n_regions": len(self.segments.regions),
            "n_slots": sum(extent.in_force),
            "slots_used": self.residency.n_used,
            "slots_loading": self.residency.n_loading,
            "slots_held": self.segments.pool.n_held(),
            "slots_pinned": len(self.residency.pinned),
            "slots_side": len(self.residency.side),
            **{name: counts[name] for name in _COUNTS},
            "regrets": self.meter.counts["regrets"],
            "tokens": self.meter.counts["tokens"],
            "bytes_read": stats.bytes_read,
            "bytes_read_demand": stats.bytes_read_demand,
            "bytes_read_background": stats.bytes_read_background,
            "predicted_bytes": {name: dict(n) for name, n in self.residency.side.n_bytes.items()},
            "read_busy_s": self.reads.busy_s,
            "read_p50_ms": percentile(stats.latencies_ms, 0.5),
            "read_p99_ms": percentile(stats.latencies_ms, 0.99),
            "reads_retried": stats.reads_retried,
            "records_quarantined": len(self.reads.quarantined),
            "checksums_verified": stats.checksums_verified,
            "judged_tokens": judged.tokens,
            "judged_bytes_read": judged.bytes_read,
            "judged_bytes_belady": judged.bytes_belady,
            "judged_decode_s": judged.decode_s,
            "judged_stall_s": judged.stall_s,
            "policy": policy_name(self._settings.policy),
            "prefetch_active": self.forecasts.active or "off",
            "prefetch_reason": self.controller.reason,
            "prefetch_trials": self.controller.trials,
            "governor_reason": self.sizing.governor.reason if self._settings.governor == "on" else "off",
            "memory_available_bytes": self.sizing.reading.available_bytes,
            "memory_pressure_frac": self.sizing.reading.pressure_frac,
            "pool_shrinks": self.sizing.counts["pool_shrinks"],
            "pool_grows": self.sizing.counts["pool_grows"],
            "is_recording": int(self.recorder.is_recording),
            "profile_tokens": self.recorder.n_tokens,
            "io_engine": self.reader_name,
            "direct_io": self._disk.direct_io,
            "read_depth": self._depth.n_reads,
            "disk_bytes_per_s": self._depth.bytes_per_s or stats.bytes_read / max(self.reads.busy_s, 1e-9),
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
