"""When the pool gives memory back, and when it takes it again: a decision, made from readings of the machine.

Owns what it remembers between decisions: the target and the times to wait. Reads no clock and no file, resizes nothing:
the service asks it a few times a second and does what it says.

Two marks of available memory decide. Below the reserve the pool shrinks at once; it grows only if half as much again
stays available afterwards, slowly, and after a quiet time. Between the marks nothing happens, so that a constant
machine sees no flapping. A pool too big for its machine is worse than a small one: when in doubt, smaller.
"""

from __future__ import annotations

import math

from sparkle.budget import gb
from sparkle.errors import ConfigError
from sparkle.machine import MemoryReading

# The reserve: what a neighbour, or a daemon of ours, can take between two decisions without anybody being killed.
RESERVE_SHARE = 0.05  # of the limit that binds: 3.2 of 64 GB
RESERVE_BYTES = 256 << 20  # but a process can take this much in a quarter of a second, however small the machine
RESERVE_MOST = 1 / 8  # of the limit: in a container of 600 MB, RESERVE_BYTES would leave no pool
GROWTH_MARK = 1.5  # times the reserve must stay available after the pool has grown
AIM = 1.25  # times the reserve is restored by a shrink: to the byte, and the next page would start another

# Tasks waiting for memory, while the machine looks as if it had some: what is in the page cache is in use.
HIGH_PRESSURE = 0.10  # of the time; a healthy machine shows less than 0.01
CALM_PRESSURE = 0.01
TIGHT_SHARE = 0.25  # with more than this available, others wait for memory at a limit of their own
PRESSURE_STEP = 0.25  # of the pool goes at once: the cost of a few more reads is small beside that of swapping
PRESSURE_WAIT_S = 10.0  # the kernel's average covers so much time: only then does it show what the last step did

CALM_S = 10.0  # without need before the pool grows
GROWTH_SHARE = 1 / 32  # of the target per step: the whole pool comes back in a minute and a half
GROWTH_EVERY_S = 3.0
REGRET_S = 60.0  # a shrink so soon after growth doubles the quiet time that the next growth needs
MAX_CALM_S = 600.0  # but no more than this
FORGET_S = 3600.0  # without a shrink, and it is CALM_S again


class Governor:
    """See the module. `reason` says for people what the last decision was and why."""

    def __init__(self, target_bytes: int, floor_bytes: int, slots_bytes: int) -> None:
        """floor_bytes: the smallest pool that can serve a step. slots_bytes: one slot of each layout class together.

        The service rounds sizes down to whole slots: a pool less than slots_bytes below a size has that size.
        """
        self._floor = floor_bytes
        self._slots_bytes = slots_bytes
        self._target = floor_bytes
        self._calm_s = CALM_S
        self._next_growth_s = -math.inf
        self._last_growth_s = -math.inf
        self._last_shrink_s = -math.inf
        self.reason = "no reading yet"
        self.set_target(target_bytes)

    @property
    def target_bytes(self) -> int:
        return self._target

    def set_target(self, target_bytes: int) -> None:
        """Take the size that the pool may have at most, a user's choice. Raises ConfigError below the floor."""
        if target_bytes < self._floor:
            raise ConfigError(
                f"a pool of {gb(target_bytes)} cannot hold one step, which needs {gb(self._floor, math.ceil)}; "
                "ask for more"
            )
        self._target = target_bytes
        self._calm_s = CALM_S  # earlier failures say nothing about the new size

    def room(self, reading: MemoryReading, pool_bytes: int) -> int:
        """Return the largest pool that leaves the growth mark available: what a user's resize may ask for now."""
        return max(0, pool_bytes + reading.available_bytes - _growth_mark(reading.limit_bytes))

    def decide(self, now_s: float, reading: MemoryReading, pool_bytes: int) -> int | None:
        """Return the size that the pool should take now, or None to leave it; never below floor, never above target.

        pool_bytes: all slots in force. Asking again before a decision was carried out repeats it.
        """
        wanted = self._wanted(now_s, reading, pool_bytes)
        size = max(self._floor, min(self._target, wanted))
        if size < pool_bytes:
            self._note_shrink(now_s)
        elif size > pool_bytes:
            self._last_growth_s = now_s
            self._next_growth_s = now_s + GROWTH_EVERY_S
        return size if size != pool_bytes else None

    def _wanted(self, now_s: float, reading: MemoryReading, pool_bytes: int) -> int:
        """The size that memory asks for, regardless of floor and target, and say why in `reason`."""
        limit, available = reading.limit_bytes, reading.available_bytes
        reserve = _reserve(limit)
        machine = f"{gb(available)} of {gb(limit)} available ({reading.where})"
        if available < reserve:
            at_floor = ", the pool is as small as it can be" if pool_bytes <= self._floor else ""
            self.reason = f"short of memory: {machine}, {gb(reserve)} to be kept free{at_floor}"
            self._next_growth_s = now_s + self._calm_s
            return pool_bytes - int(AIM * reserve - available)
        pressure = reading.pressure_frac
        if pressure >= HIGH_PRESSURE and available < TIGHT_SHARE * limit:
            self.reason = f"tasks wait for memory {pressure:.0%} of the time: {machine}"
            self._next_growth_s = now_s + self._calm_s
            is_answered = now_s - self._last_shrink_s < PRESSURE_WAIT_S
            return pool_bytes - (0 if is_answered else int(PRESSURE_STEP * pool_bytes))
        if pool_bytes > self._target - self._slots_bytes:
            self.reason = f"full size: {machine}"
            return pool_bytes
        step = max(self._slots_bytes, int(GROWTH_SHARE * self._target))
        left = available - step
        if left < _growth_mark(limit) or (pressure > CALM_PRESSURE and left < TIGHT_SHARE * limit):
            self.reason = f"smaller than asked for, no room to grow: {machine}"
            self._next_growth_s = now_s + self._calm_s
            return pool_bytes
        if now_s < self._next_growth_s:
            self.reason = f"smaller than asked for, grows in {self._next_growth_s - now_s:.0f} s: {machine}"
            return pool_bytes
        self.reason = f"growing: {machine}"
        return pool_bytes + step

    def _note_shrink(self, now_s: float) -> None:
        """Wait longer before the next growth if it looks as if the last one was a mistake."""
        if now_s - self._last_shrink_s > FORGET_S:
            self._calm_s = CALM_S
        elif self._last_growth_s > max(self._last_shrink_s, now_s - REGRET_S):
            self._calm_s = min(MAX_CALM_S, 2 * self._calm_s)
        self._last_shrink_s = now_s
        self._next_growth_s = now_s + self._calm_s


def _reserve(limit_bytes: int) -> int:
    return int(min(max(RESERVE_BYTES, RESERVE_SHARE * limit_bytes), RESERVE_MOST * limit_bytes))


def _growth_mark(limit_bytes: int) -> int:
    return int(GROWTH_MARK * _reserve(limit_bytes))
