"""How much of the pool is in force: the first slots of each layout class; the rest is retired and has no memory.

Owns the memory behind slots and their state RETIRED. Growing and shrinking go in steps, so that the daemon's loop can
serve in between. Never takes the memory of a slot that a client holds or a read goes to: such a slot is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkle import _native
from sparkle.errors import ConfigError
from sparkle.regions import Region

STEP_BYTES = 64 << 20  # taken or given back at a time: a few tens of milliseconds of zeroing pages


class Extent:
    """`in_force[c]` slots of class c may hold experts: those numbered from the class's first on."""

    def __init__(self, pool: _native.Pool, regions: Sequence[Region], n_classes: int) -> None:
        """Take stock of a pool: what is in force ends at the last slot of a class that is not retired.

        Behind the slots after it there may be memory yet: of a predecessor that was killed between two steps.
        """
        self._pool = pool
        self._regions = [[r for r in regions if r.spec.layout == c] for c in range(n_classes)]
        self.in_force = [0] * n_classes
        for layout in range(n_classes):
            slots = self._numbers(layout, 0, self.capacity(layout))
            for slot in slots:
                if pool.state(slot) != _native.RETIRED:
                    self.in_force[layout] = slot - slots[0] + 1
            self._restore(self._numbers(layout, 0, self.in_force[layout]))
            self._discard(layout, self.in_force[layout])

    @property
    def asked_bytes(self) -> int:
        """The size that a user has asked for, which a successor goes on with; 0 if nobody has.

        It lies in the header page of the pool's first region: it lasts as long as the pool, and dies with it.
        """
        return self._first_region.asked_bytes

    @asked_bytes.setter
    def asked_bytes(self, n_bytes: int) -> None:
        self._first_region.asked_bytes = n_bytes

    @property
    def _first_region(self) -> Region:
        return next(region for mine in self._regions for region in mine)

    def capacity(self, layout: int) -> int:
        return sum(r.spec.n_slots for r in self._regions[layout])

    @property
    def n_bytes(self) -> int:
        """Bytes of experts that the slots in force can hold."""
        return sum(
            n * mine[0].layout.record_bytes for n, mine in zip(self.in_force, self._regions, strict=True) if mine
        )

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of all memory behind slots in force, in parts of whole slots.

        The kernel pins one part at a time; one as large as a region would block the process's other threads meanwhile.
        """
        spans: list[tuple[int, int]] = []
        for layout, mine in enumerate(self._regions):
            left = self.in_force[layout]
            for region in mine:
                n = min(left, region.spec.n_slots)
                for address, n_bytes in region.backed(n) if n else ():
                    part = n_bytes // n * self._n_per_step(layout)
                    spans += [(address + at, min(part, n_bytes - at)) for at in range(0, n_bytes, part)]
                left -= n
        return sorted(spans)

    def grow(self, layout: int, target: int) -> list[int]:
        """Put the next slots of a class to use, up to `target` in all; returns their numbers, all EMPTY now.

        Raises ConfigError, with nothing changed, if there is no memory.
        """
        begin = self.in_force[layout]
        end = min(target, self.capacity(layout), begin + self._n_per_step(layout))
        try:
            for region, first, last in self._parts(layout, begin, end):
                region.reserve(first, last)
        except ConfigError:
            self._discard(layout, begin)
            raise
        self.in_force[layout] = end
        return self._restore(self._numbers(layout, begin, end))

    def restore(self, layout: int, target: int) -> list[int]:
        """Put slots below `target` to use again that a shrinking has retired and then was called off.

        They have their memory yet: it is given back for a whole step at once, after which they are not in force.
        """
        return self._restore(self._numbers(layout, 0, min(target, self.in_force[layout])))

    def _restore(self, slots: Sequence[int]) -> list[int]:
        retired = [slot for slot in slots if self._pool.state(slot) == _native.RETIRED]
        for slot in retired:
            self._pool.restore(slot)
        return retired

    def shrink(self, layout: int, target: int, retire: Callable[[int], bool]) -> bool:
        """Give up the last slots of a class, down to `target`; a part of them at a time.

        `retire(slot)` retires one and says whether it could. True if something was given back.
        """
        if not _native.CAN_DISCARD:
            raise ConfigError("this system cannot take back parts of shared memory; restart with another SPARKLE_POOL")
        now = self.in_force[layout]
        begin = max(target, now - self._n_per_step(layout))
        could = [retire(slot) for slot in self._numbers(layout, begin, now)]
        if not all(could):  # those that could are out of use already; their memory follows with that of the others
            return False
        self._discard(layout, begin)
        self.in_force[layout] = begin
        return True

    def _discard(self, layout: int, begin: int) -> None:
        """Give the memory of slots `begin` and later back, if the system can, whether there is any or not.

        Not of one step only: a page that two steps share lies whole in no step's range.
        """
        for region, first, end in self._parts(layout, begin, self.capacity(layout)) if _native.CAN_DISCARD else ():
            region.discard(first, end)

    def _n_per_step(self, layout: int) -> int:
        return max(1, STEP_BYTES // self._regions[layout][0].layout.record_bytes)

    def _numbers(self, layout: int, begin: int, end: int) -> range:
        first = self._regions[layout][0].spec.first_slot if self._regions[layout] else 0
        return range(first + begin, first + end)

    def _parts(self, layout: int, begin: int, end: int) -> list[tuple[Region, int, int]]:
        """(region, first, end) of slots begin … end - 1 of a class, each counted from its region's start."""
        parts, at = [], 0
        for region in self._regions[layout]:
            first, last = max(begin - at, 0), min(end - at, region.spec.n_slots)
            if first < last:
                parts.append((region, first, last))
            at += region.spec.n_slots
        return parts
