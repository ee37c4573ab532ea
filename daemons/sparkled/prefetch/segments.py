"""The pool's shared memory over a daemon's life: made, adopted from a predecessor that died, removed.

Owns the names of the control segment and the regions. A pool is adopted if it is the one that would be made: the same
store, the same plan; how many slots are in force by now is what it says itself. Never removes memory of another
instance: all names start with the run directory's prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkle import _native, regions
from sparkle.budget import gb
from sparkle.errors import ConfigError, PoolError
from sparkle.machine import memory_reading
from sparkle.regions import Region, RegionSpec
from sparkle.store import Store
from sparkled.prefetch.extent import STEP_BYTES, Extent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segments:
    """A pool's memory, mapped."""

    name: str
    pool: _native.Pool
    regions: tuple[Region, ...]
    extent: Extent
    is_adopted: bool

    def unlink(self) -> None:
        _unlink(self.name, [r.spec for r in self.regions])


def open_segments(prefix: str, store: Store, slots: Sequence[int], should_stop: Callable[[], bool]) -> Segments:
    """Adopt the predecessor's pool, or make a new one. Takes seconds for a large pool: page after page is reserved.

    slots: how many of each layout class are to be in force. Raises ConfigError if shared memory is too small, PoolError
    if `should_stop` said so; nothing is left behind then.
    """
    name = regions.control_name(prefix)
    wanted = regions.plan(prefix, store.classes, _capacity(store, slots), slots)
    old = _try_attach(name)
    if old is not None:
        if (adopted := _adopt(name, old, store, wanted)) is not None:
            return adopted
        _unlink(name, _specs_of(old))
    _native.Mapping.unlink(name)
    try:
        # The control segment first: it names the regions, so that a successor finds what a daemon killed here made.
        pool = _create_control(name, store, wanted)
        mapped = tuple(Region.create(spec, store.classes[spec.layout]) for spec in wanted)
        for slot in range(pool.n_slots):
            pool.retire(slot)
        extent = Extent(pool, mapped, len(store.classes))
        for layout, n in enumerate(slots):
            while extent.in_force[layout] < n:
                _refuse_if_short(extent, slots)
                if should_stop():  # a large pool takes longer to allocate than a shutdown may
                    raise PoolError("stopped while allocating")
                extent.grow(layout, n)
    except Exception:
        _unlink(name, wanted)
        raise
    return Segments(name, pool, mapped, extent, is_adopted=False)


def _refuse_if_short(extent: Extent, slots: Sequence[int]) -> None:
    """At a control group's limit the kernel kills instead of refusing: look before each step."""
    reading = memory_reading()
    if reading.available_bytes < STEP_BYTES:
        raise ConfigError(
            f"memory is short: {gb(extent.n_bytes)} of the pool ({sum(slots)} slots) are allocated, and "
            f"{gb(max(0, reading.available_bytes))} left of {gb(reading.limit_bytes)} ({reading.where}); end other "
            "programs, or lower SPARKLE_MEMORY or SPARKLE_POOL"
        )


def _capacity(store: Store, slots: Sequence[int]) -> list[int]:
    """The most slots that each class will ever have: where memory can be given back and taken again, all experts."""
    if not _native.CAN_DISCARD:
        return list(slots)
    n_experts = [0] * len(store.classes)
    for layer in store.layers:
        if slots[layer.layout]:
            n_experts[layer.layout] += layer.n_experts
    return [max(n, have) for n, have in zip(slots, n_experts, strict=True)]


def _try_attach(name: str) -> _native.Pool | None:
    try:
        return _native.Pool.attach(name)
    except (OSError, RuntimeError) as e:
        if not isinstance(e, FileNotFoundError):
            log.info("pool_not_adopted %s", e)
        return None


def _adopt(name: str, old: _native.Pool, store: Store, wanted: Sequence[RegionSpec]) -> Segments | None:
    specs = _specs_of(old)
    if not old.is_complete or old.fingerprint != store.fingerprint or _shape(specs) != _shape(wanted):
        return None
    try:
        mapped = tuple(Region.attach(s, store.classes[s.layout]) for s in specs)
        return Segments(name, old, mapped, Extent(old, mapped, len(store.classes)), is_adopted=True)
    except PoolError as e:
        log.warning("pool_not_adopted %s", e)
        return None


def _specs_of(pool: _native.Pool) -> tuple[RegionSpec, ...]:
    """The regions of a predecessor's pool; none if its table is damaged, or was not written yet."""
    try:
        return regions.from_json(pool.layout)
    except PoolError as e:
        log.warning("pool_not_adopted %s", e)
        return ()


def _shape(specs: Sequence[RegionSpec]) -> list[tuple[int, ...]]:
    return [(s.layout, s.first_slot, s.n_slots, s.n_bytes, s.n_planned) for s in specs]


def _create_control(name: str, store: Store, specs: Sequence[RegionSpec]) -> _native.Pool:
    n_experts = max(layer.n_experts for layer in store.layers)
    n_slots = sum(s.n_slots for s in specs)
    try:
        return _native.Pool.create(
            name, len(store.layers), n_experts, n_slots, store.fingerprint, regions.to_json(specs)
        )
    except OSError as e:
        raise ConfigError(f"cannot create shared memory {name}: {e}; make /dev/shm larger or free some") from e


def _unlink(name: str, specs: Sequence[RegionSpec]) -> None:
    for spec in specs:
        _native.Mapping.unlink(spec.name)
    _native.Mapping.unlink(name)
