"""How large the pool is: what the user asks for, what the machine has left, and the steps from one size to another.

Owns the target and the governor. Slots come and go through the Residency and the Extent, a part at a time, so that
requests are served in between. Never goes below the guard: what one step of the compute daemon needs at once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkle import budget, config
from sparkle._native import CAN_DISCARD
from sparkle.budget import gb
from sparkle.errors import ConfigError
from sparkle.machine import MemoryWatch
from sparkle.store import Store
from sparkled.prefetch.extent import STEP_BYTES, Extent
from sparkled.prefetch.governor import Governor
from sparkled.prefetch.residency import Residency

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """A user's resize that has not been answered. `done` gets the words to answer with."""

    done: Callable[[str], None]
    detail: str
    deadline: float


class Sizing:
    """`on_shrink` is called before memory is given back: nobody may have it pinned."""

    def __init__(
        self,
        store: Store,
        plan: budget.Budget,
        extent: Extent,
        residency: Residency,
        is_governed: bool,
        on_shrink: Callable[[], None],
    ) -> None:
        self._store = store
        self._extent = extent
        self._residency = residency
        self._is_governed = is_governed
        self._on_shrink = on_shrink
        self._sizes = [layout.record_bytes for layout in store.classes]
        self._floor = budget.floor_slots(store, plan.prefill_rows)
        self._target = list(extent.in_force)
        most = max(self._bytes(plan.slots), extent.n_bytes)
        if extent.asked_bytes:  # of a predecessor, which may have been killed on the way there, or kept it smaller
            slots = self._slots(extent.asked_bytes)
            most = self._bytes(slots)
            if not is_governed:
                self._target = slots
        self._asked: list[_Asked] = []
        self._watch = MemoryWatch()
        self.reading = self._watch.read()
        slots_bytes = sum(size for n, size in zip(plan.slots, self._sizes, strict=True) if n)
        self.governor = Governor(most, self._bytes(self._floor), slots_bytes)
        self.counts: Counter[str] = Counter()

    def ask(self, text: str, done: Callable[[str], None]) -> None:
        """Take a user's wish; `done(detail)` is called when it is fulfilled, or as far as it can be.

        Raises ConfigError for what is no size, or too small.
        """
        try:
            size = config.pool_text(text.strip())
            asked_bytes = config.parse_size(size) if size and not size.endswith("%") else 0
            n_bytes = budget.pool_bytes(size, self._store) if size else 0
        except ValueError as e:
            raise ConfigError(f"a pool of {text!r}: expected {e}") from None
        slots = list(budget.slots_for(self._store, n_bytes, f"a pool of {gb(n_bytes)}"))
        if any(n < least for n, least in zip(slots, self._floor, strict=True)):
            raise ConfigError(
                f"a pool of {gb(n_bytes)} is too small while the daemons run: a prefill step of theirs needs "
                f"{gb(self._bytes(self._floor))}; restart them with SPARKLE_POOL={text}"
            )
        if not CAN_DISCARD and slots != self._extent.in_force:
            raise ConfigError(f"this system cannot resize shared memory; restart the daemons with SPARKLE_POOL={text}")
        self.reading = self._watch.read()
        room, detail = self.governor.room(self.reading, self._extent.n_bytes), ""
        if n_bytes > max(room, self._extent.n_bytes):
            detail = f"{gb(n_bytes)} does not fit now: {gb(self.reading.available_bytes)} left ({self.reading.where})"
            n_bytes = max(room, self._extent.n_bytes)
            slots = self._slots(n_bytes)
        elif n_bytes < asked_bytes:
            detail = f"all experts are {gb(n_bytes)}: a larger pool would have no use"
        self.governor.set_target(self._bytes(slots))
        self._extent.asked_bytes = n_bytes  # not rounded: what is rounded to whole slots twice may lose one
        self._change_target(slots)
        self._asked.append(_Asked(done, detail, time.monotonic() + config.RESIZE_DEADLINE_S))
        log.info("pool_resize asked=%r target=%d", text, self._bytes(slots))

    def govern(self) -> None:
        """Look at the machine's memory and change the target if need be; call a few times a second."""
        self.reading = self._watch.read()
        if not self._is_governed or not CAN_DISCARD or self._asked:
            return
        size = self.governor.decide(time.monotonic(), self.reading, self._extent.n_bytes)
        if size is None:
            return
        slots = self._slots(size)
        if slots != self._target:
            kind = "pool_shrinks" if self._bytes(slots) < self._extent.n_bytes else "pool_grows"
            self.counts[kind] += 1
            log.info("%s to=%d reason=%r", kind, self._bytes(slots), self.governor.reason)
        self._change_target(slots)

    def step(self) -> None:
        """Go a part of the way to the target; call often."""
        try:
            for layout in range(len(self._target)):
                target = self._target[layout]  # which _may_grow may have taken back for all classes
                if target < self._extent.in_force[layout]:
                    self._on_shrink()
                    self._extent.shrink(layout, target, self._residency.retire)
                elif target > self._extent.in_force[layout] and self._may_grow():
                    self._residency.add_slots(self._extent.grow(layout, target))
        except ConfigError as e:  # /dev/shm is full: stay as large as it allows
            log.warning("pool_not_grown %s", e)
            self._target = list(self._extent.in_force)
            self._finish(str(e))
        if self._target == self._extent.in_force:
            self._finish("")
        now = time.monotonic()
        for asked in [a for a in self._asked if now > a.deadline]:
            self._asked.remove(asked)
            asked.done("not there yet: the last slots are in use, it goes on")

    def _change_target(self, slots: list[int]) -> None:
        self._target = slots
        for layout, target in enumerate(slots):
            self._residency.add_slots(self._extent.restore(layout, target))

    @property
    def is_done(self) -> bool:
        return self._target == self._extent.in_force and not self._asked

    def _finish(self, detail: str) -> None:
        asked, self._asked = self._asked, []
        for one in asked:
            one.done(detail or one.detail)

    def _may_grow(self) -> bool:
        """At a control group's limit the kernel kills, it does not refuse: look before each step."""
        reading, now = self._watch.read(), self._extent.n_bytes
        step = min(STEP_BYTES, self._bytes(self._target) - now)
        if now + step <= self.governor.room(reading, now):
            return True
        self._target = [min(a, b) for a, b in zip(self._target, self._extent.in_force, strict=True)]
        self._finish(f"memory became short on the way: {gb(reading.available_bytes)} left ({reading.where})")
        return False

    def _slots(self, n_bytes: int) -> list[int]:
        """What so many bytes buy, never below the guard."""
        slots = budget.slots_for(self._store, max(n_bytes, self._bytes(self._floor)), "the guard")
        return [max(n, least) for n, least in zip(slots, self._floor, strict=True)]

    def _bytes(self, slots: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(slots, self._sizes, strict=True))
