"""The governor over simulated time: a machine with a limit, neighbours that come and go, and a pool that obeys."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle.errors import ConfigError
from sparkle.machine import MemoryReading
from sparkled.prefetch.governor import Governor

pytestmark = pytest.mark.unit

MB, GB = 10**6, 10**9
TICK_S = 0.25
SLOT = 3_342_336  # one expert of the first target model


@dataclass
class Machine:
    """`limit` bytes, of which `others` are taken; the pool takes whole slots, as the service does."""

    limit: int
    target: int
    floor: int = 14 * SLOT
    slot: int = SLOT
    others: int = 0
    pressure: float = 0.0
    pool: int = 0
    now_s: float = 1000.0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.governor = Governor(self.target, self.floor, self.slot)
        self.pool = self.pool or self.whole(self.target)

    def whole(self, n_bytes: int) -> int:
        return n_bytes // self.slot * self.slot

    @property
    def reading(self) -> MemoryReading:
        return MemoryReading(self.limit, self.limit - self.others - self.pool, self.pressure, "RAM")

    def tick(self) -> int | None:
        """One decision, carried out."""
        size = self.governor.decide(self.now_s, self.reading, self.pool)
        self.now_s += TICK_S
        if size is not None:
            self.pool = self.whole(size)
            self.sizes.append(self.pool)
        return size

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.tick()


@pytest.fixture
def mac() -> Machine:
    """64 GB, a pool of 40, 10 GB for everything else."""
    return Machine(limit=64 * GB, target=40 * GB, others=10 * GB)


def test_a_machine_with_room_is_left_alone(mac: Machine) -> None:
    mac.run(60)
    assert mac.sizes == []
    assert mac.governor.reason == "full size: 14.0 GB of 64.0 GB available (RAM)"


def test_one_decision_answers_a_sudden_need(mac: Machine) -> None:
    mac.others = 30 * GB
    assert mac.tick() is not None
    assert mac.reading.available_bytes >= 0.05 * mac.limit, "the reserve is there again"
    assert mac.reading.available_bytes < 0.07 * mac.limit, "and not much more"
    assert "short of memory: -6.0 GB of 64.0 GB available (RAM), 3.2 GB to be kept free" in mac.governor.reason
    mac.run(60)
    assert len(mac.sizes) == 1, "the need is met: nothing more is given, nothing taken back"


def test_the_pool_comes_back_slowly_after_a_quiet_time(mac: Machine) -> None:
    mac.others = 30 * GB
    mac.tick()
    small = mac.pool
    mac.others = 10 * GB
    mac.run(9)
    assert mac.pool == small
    assert "grows in 1 s" in mac.governor.reason
    mac.run(2)
    assert small < mac.pool <= small + 0.04 * mac.target
    mac.run(12)
    assert mac.pool == pytest.approx(small + 5 * mac.target / 32, abs=5 * SLOT), "a step every three seconds"
    mac.run(100)
    assert mac.pool == mac.whole(mac.target)
    n_steps = len(mac.sizes)
    mac.run(60)
    assert len(mac.sizes) == n_steps, "what rounding leaves below the target is not asked for again"


def test_growth_stops_where_a_shrink_would_follow(mac: Machine) -> None:
    mac.others = 30 * GB
    mac.tick()
    mac.others = 22 * GB
    mac.run(600)
    n_steps, available = len(mac.sizes), mac.reading.available_bytes
    assert mac.sizes[1:] == sorted(mac.sizes[1:]), "one shrink, then only growth"
    assert 1.5 * 0.05 * mac.limit <= available < 1.5 * 0.05 * mac.limit + mac.target / 32 + SLOT
    mac.run(600)
    assert len(mac.sizes) == n_steps
    assert "no room to grow" in mac.governor.reason


def test_a_neighbour_that_grows_step_by_step_is_followed_step_by_step(mac: Machine) -> None:
    for _ in range(200):
        mac.others += 100 * MB
        mac.tick()
        assert mac.reading.available_bytes >= 0.05 * mac.limit
    assert 2 < len(mac.sizes) < 30, "each shrink restores some room: not every step needs one"


def test_a_need_in_the_middle_of_growth_ends_it(mac: Machine) -> None:
    mac.others = 30 * GB
    mac.tick()
    mac.others = 10 * GB
    mac.run(20)
    grown = mac.pool
    mac.others = 34 * GB
    mac.tick()
    assert mac.pool < grown
    mac.others = 10 * GB
    small = mac.pool
    mac.run(9)
    assert mac.pool == small


def test_at_the_floor_it_says_that_there_is_no_more_to_give(mac: Machine) -> None:
    mac.others = 63 * GB
    mac.run(10)
    assert mac.sizes == [mac.floor]
    assert mac.governor.reason.endswith("the pool is as small as it can be")
    mac.others = 10 * GB
    mac.run(9)
    assert mac.pool == mac.floor, "the quiet time begins when the need ends"
    mac.run(2)
    assert mac.pool > mac.floor


def test_a_decision_that_takes_time_to_carry_out_is_repeated_not_added_up(mac: Machine) -> None:
    mac.others = 30 * GB
    first = mac.governor.decide(1000.0, mac.reading, mac.pool)
    assert first is not None
    assert [mac.governor.decide(1000.25 + i / 4, mac.reading, mac.pool) for i in range(8)] == [first] * 8


# --- small limits -----------------------------------------------------------------------------------------------------


def test_a_small_container_keeps_a_pool(mac: Machine) -> None:
    """Of 600 MB, 75 stay free: an absolute reserve of 256 MB would leave none."""
    box = Machine(limit=600 * MB, target=200 * MB, floor=10 * MB, slot=MB, others=300 * MB)
    box.run(30)
    assert box.sizes == []
    box.others += 60 * MB
    box.tick()
    assert 75 * MB <= box.reading.available_bytes <= 95 * MB
    assert box.pool >= 140 * MB


def test_a_pool_of_few_slots_grows_by_whole_ones() -> None:
    box = Machine(limit=10 * GB, target=10 * SLOT, floor=4 * SLOT, others=1 * GB, pool=4 * SLOT)
    box.run(60)
    assert box.sizes == [n * SLOT for n in range(5, 11)]


# --- pressure ---------------------------------------------------------------------------------------------------------


def test_tasks_that_wait_for_memory_make_the_pool_smaller(mac: Machine) -> None:
    mac.pressure = 0.3
    before = mac.pool
    mac.tick()
    assert mac.pool == mac.whole(before - before // 4)
    assert mac.governor.reason == "tasks wait for memory 30% of the time: 14.0 GB of 64.0 GB available (RAM)"


def test_one_step_is_given_time_to_show_in_the_average() -> None:
    box = Machine(limit=64 * GB, target=20 * GB, others=39 * GB, pressure=0.3)
    box.run(9)
    assert len(box.sizes) == 1
    box.run(2)
    assert len(box.sizes) == 2
    box.run(60)
    assert len(box.sizes) == 3, "a quarter of the memory is available now: it is not ours that they wait for"


def test_waiting_at_somebody_elses_limit_is_none_of_our_business(mac: Machine) -> None:
    mac.pressure, mac.others = 0.9, 5 * GB
    mac.run(60)
    assert mac.sizes == []


def test_a_need_is_answered_at_once_also_after_pressure(mac: Machine) -> None:
    mac.pressure = 0.3
    mac.tick()
    mac.others = 50 * GB
    mac.tick()
    assert len(mac.sizes) == 2
    assert mac.reading.available_bytes >= 0.05 * mac.limit


def test_the_pool_does_not_grow_while_tasks_wait(mac: Machine) -> None:
    mac.pool = 30 * SLOT
    mac.others, mac.pressure = 40 * GB, 0.05
    mac.run(900)
    left = mac.reading.available_bytes
    assert left >= mac.limit / 4, "only as far as memory is plenty"
    mac.pressure = 0.0
    mac.run(120)
    assert mac.reading.available_bytes < left


def test_growth_that_brings_pressure_back_is_tried_ever_more_seldom() -> None:
    """A sawtooth, should there be one, gets long teeth."""
    box = Machine(limit=64 * GB, target=40 * GB, others=14 * GB)
    shrinks: list[float] = []
    for _ in range(int(3600 / TICK_S)):
        box.pressure = 0.2 if box.pool > 35 * GB else 0.0
        before = box.pool
        box.tick()
        if box.pool < before:
            shrinks.append(box.now_s)
    gaps = [b - a for a, b in pairwise(shrinks)]
    assert 4 <= len(shrinks) <= 12
    assert gaps == sorted(gaps)
    assert gaps[-1] > 5 * gaps[0]


def test_old_failures_are_forgotten(mac: Machine) -> None:
    assert time_to_grow(mac) < 11
    waits = [time_to_grow(mac) for _ in range(3)]
    assert waits == pytest.approx([20, 40, 80], abs=1)
    mac.run(3601)
    assert time_to_grow(mac) < 11


def test_neighbours_that_come_now_and_then_are_no_failure(mac: Machine) -> None:
    for _ in range(5):
        assert time_to_grow(mac) < 11
        mac.run(180)


def time_to_grow(mac: Machine) -> float:
    """Seconds from the end of a need, which is there for one moment, to the first step of growth."""
    mac.others += mac.reading.available_bytes
    assert mac.tick()
    mac.others, began_s, small = 10 * GB, mac.now_s, mac.pool
    while mac.pool <= small and mac.now_s < began_s + 1000:
        mac.tick()
    return mac.now_s - began_s


# --- the user's word --------------------------------------------------------------------------------------------------


def test_a_smaller_target_is_taken_at_once_and_kept(mac: Machine) -> None:
    mac.governor.set_target(12 * GB)
    assert mac.governor.target_bytes == 12 * GB
    assert mac.tick() == 12 * GB
    mac.run(60)
    assert mac.pool == mac.whole(12 * GB)


def test_a_larger_target_is_grown_to(mac: Machine) -> None:
    mac.governor.set_target(44 * GB)
    mac.run(60)
    assert mac.pool == mac.whole(44 * GB)


def test_a_target_below_one_step_is_refused(mac: Machine) -> None:
    with pytest.raises(ConfigError, match=r"a pool of 10\.0 MB cannot hold one step, which needs 46\.8 MB"):
        mac.governor.set_target(10 * MB)
    assert mac.governor.target_bytes == mac.target
    with pytest.raises(ConfigError, match="cannot hold one step"):
        Governor(5, 6, 1)


def test_room_is_what_may_be_asked_for_now(mac: Machine) -> None:
    room = mac.governor.room(mac.reading, mac.pool)
    assert room == mac.pool + mac.reading.available_bytes - int(0.05 * 64 * GB) * 1.5
    mac.governor.set_target(room)
    mac.pool = mac.whole(room)
    mac.run(60)
    assert mac.sizes == [], "a pool of that size may stay"
    mac.others = 64 * GB
    assert mac.governor.room(mac.reading, 0) == 0


# --- what holds always ------------------------------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    limit = draw(st.integers(100 * MB, 1000 * GB))
    slot = draw(st.integers(10_000, 20 * MB))
    floor = slot * draw(st.integers(1, 40))
    target = floor + draw(st.integers(0, 2 * limit))
    return Machine(limit, target, floor, slot, pool=slot * draw(st.integers(floor // slot, target // slot)))


moments = st.tuples(st.floats(0, 1.2), st.sampled_from([0.0, 0.0, 0.005, 0.05, 0.2, 1.0]), st.integers(1, 60))


@given(machines(), st.lists(moments, min_size=1, max_size=8))
def test_any_history_stays_between_floor_and_target_and_answers_a_drop_at_once(
    box: Machine, history: list[tuple[float, float, int]]
) -> None:
    reserve = min(max(256 << 20, 0.05 * box.limit), box.limit / 8)
    for others, pressure, n_ticks in history:
        box.others, box.pressure = int(others * box.limit), pressure
        for _ in range(n_ticks):
            was_short = box.reading.available_bytes < int(reserve)
            size = box.tick()
            assert size is None or box.floor <= size <= box.target
            if was_short:
                assert box.pool == box.floor or box.limit - box.others - box.pool >= int(reserve) or size is not None
                true_deficit = (
                    box.others + box.pool > box.limit
                )  # more than the reading can tell: it shows no less than 0
                assert true_deficit or box.pool == box.floor or box.reading.available_bytes >= int(reserve)


@given(machines(), st.floats(0, 1.2), st.sampled_from([0.0, 0.005, 0.05, 0.2, 1.0]))
def test_a_constant_machine_sees_no_flapping(box: Machine, others: float, pressure: float) -> None:
    """First the pool shrinks, if it must; then it grows, if it can; then nothing ever changes again."""
    box.others, box.pressure = int(others * box.limit), pressure
    was = box.pool
    box.run(240)
    turns = [b > a for a, b in pairwise([was, *box.sizes])]
    assert turns == sorted(turns), "no shrink after a growth"
