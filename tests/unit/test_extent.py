"""The extent over real shared memory: slots in force have it, all others have given it back, in any order of calls."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle import _native, regions
from sparkle._native import EMPTY, PAGE_BYTES, READY, RETIRED, Mapping, Pool
from sparkle.errors import ConfigError
from sparkle.manifest import LayoutClass, layout_class
from sparkle.regions import Region, RegionSpec
from sparkled.prefetch import extent as module
from sparkled.prefetch.extent import Extent

pytestmark = pytest.mark.unit
needs_discard = pytest.mark.skipif(not _native.CAN_DISCARD, reason="this system gives shared memory back whole only")

WHOLE = layout_class("whole", [("up.weight", "U8", (PAGE_BYTES,)), ("up.scales", "U8", (PAGE_BYTES,))], {})
ODD = layout_class("odd", [("up.weight", "U8", (5000,)), ("up.scales", "U8", (300,))], {})  # slots share pages
PER_STEP = 3  # slots of WHOLE
SYSTEM_PAGE = os.sysconf("SC_PAGESIZE")
N_LAYERS, N_EXPERTS = 2, 64
CLIENT = 1  # the mask of the client that has bit 0

Shape = Sequence[tuple[LayoutClass, Sequence[int]]]  # of each layout class: the slots of each of its regions
ONE = [(WHOLE, [8])]
SHAPES: dict[str, Shape] = {
    "one region": ONE,
    "three regions": [(WHOLE, [4, 3, 5])],
    "slots that share pages": [(ODD, [7, 8])],
    "two classes, the first without slots": [(ODD, []), (WHOLE, [2, 6])],
    "three classes": [(WHOLE, [4, 4]), (ODD, [9]), (WHOLE, [1, 2, 3])],
}


class Memory:
    """A pool's control segment and regions, all slots retired, and removed at the end; `extent` has taken stock."""

    def __init__(self, shape: Shape) -> None:
        self.classes = [layout for layout, _ in shape]
        tag, first, self.specs = secrets.token_hex(3), 0, list[RegionSpec]()
        for layout, (form, counts) in enumerate(shape):
            for n in counts:
                name = f"/spk-test-{tag}-{len(self.specs)}"
                self.specs.append(RegionSpec(name, layout, first, n, regions.region_bytes(form, n), n))
                first += n
        self.name = f"/spk-test-{tag}-c"
        self.pool = Pool.create(self.name, N_LAYERS, N_EXPERTS, first, "test", "")
        self.regions = [Region.create(spec, self.classes[spec.layout]) for spec in self.specs]
        for slot in range(first):
            self.pool.retire(slot)
        self.extent = self.take_stock()

    def take_stock(self) -> Extent:
        """What a successor does."""
        self.extent = Extent(self.pool, self.regions, len(self.classes))
        return self.extent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in [self.name, *(spec.name for spec in self.specs)]:
            Mapping.unlink(name)

    def grow(self, layout: int, target: int) -> list[int]:
        """Grow all the way; returns the new slots."""
        slots = list[int]()
        while self.extent.in_force[layout] < target:
            slots += self.extent.grow(layout, target)
        return slots

    def shrink(self, layout: int, target: int) -> bool:
        return self.extent.shrink(layout, target, self.pool.retire)

    def states(self, layout: int = 0) -> list[int]:
        mine = [spec for spec in self.specs if spec.layout == layout]
        return [self.pool.state(spec.first_slot + i) for spec in mine for i in range(spec.n_slots)]

    def hold(self, slot: int) -> None:
        """An expert in a slot, and a client that holds it."""
        self.pool.begin_load(slot, slot // N_EXPERTS, slot % N_EXPERTS)
        self.pool.publish(slot, CLIENT)

    def in_force_of(self, spec: RegionSpec) -> int:
        """Slots in force of a region: the first of a class are those of its first region."""
        before = sum(s.n_slots for s in self.specs if s.layout == spec.layout and s.first_slot < spec.first_slot)
        return min(spec.n_slots, max(0, self.extent.in_force[spec.layout] - before))

    def check(self) -> None:
        """Slots in force have memory, and nothing else has but the header page and what shares a page with either."""
        for region in self.regions:
            n, found = self.in_force_of(region.spec), backed_pages(region)
            spans = [(region.backed(0)[0][0] - PAGE_BYTES, PAGE_BYTES), *(region.backed(n) if n else [])]
            needed = {page for span in spans for page in pages(span)}
            ends = [address + n_bytes for address, n_bytes in region.backed(region.spec.n_slots)]
            torn = {
                end // SYSTEM_PAGE for end in ends if end % SYSTEM_PAGE
            }  # an array's last page is whole in no range
            assert len(needed) <= found <= len(needed | torn)
            if n:
                region.reserve(0, n)
                assert backed_pages(region) == found, "a slot in force had no memory"


def pages(span: tuple[int, int]) -> range:
    address, n_bytes = span
    return range(address // SYSTEM_PAGE, -(-(address + n_bytes) // SYSTEM_PAGE))


def backed_pages(region: Region) -> int:
    """How many pages of a region have memory, as the file system tells."""
    return Path("/dev/shm", region.spec.name.lstrip("/")).stat().st_blocks * 512 // SYSTEM_PAGE


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", PER_STEP * WHOLE.record_bytes)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory(ONE) as memory:
        yield memory


# --- growing and shrinking -------------------------------------------------------------------------------------------


def test_growth_goes_in_steps_and_each_brings_its_memory(memory: Memory) -> None:
    extent = memory.extent
    assert (extent.capacity(0), extent.in_force, extent.n_bytes) == (8, [0], 0)
    for slots in ([0, 1, 2], [3, 4, 5], [6]):
        assert extent.grow(0, 7) == slots
        assert extent.in_force == [slots[-1] + 1]
        assert extent.n_bytes == extent.in_force[0] * WHOLE.record_bytes
        assert memory.states() == [EMPTY] * extent.in_force[0] + [RETIRED] * (8 - extent.in_force[0])
        memory.check()
    assert extent.grow(0, 99) == [7], "no more than there are"
    assert extent.grow(0, 99) == []
    memory.check()


@needs_discard
def test_a_shrink_gives_the_last_slots_back_and_leaves_the_others_alone(memory: Memory) -> None:
    memory.grow(0, 8)
    [region] = memory.regions
    for piece in region.pieces:
        piece[:] = [[i + 1] for i in range(8)]
    for n in (5, 2, 1):
        assert memory.shrink(0, 1)
        assert memory.extent.in_force == [n]
        assert memory.states() == [EMPTY] * n + [RETIRED] * (8 - n)
        assert memory.extent.n_bytes == n * WHOLE.record_bytes
        memory.check()
        for piece in region.pieces:
            assert [int(row[-1]) for row in piece[:n]] == list(range(1, n + 1))
    assert memory.grow(0, 3) == [1, 2]
    assert not any(piece[1:3].any() for piece in region.pieces), "memory that comes again is new"
    memory.check()


@needs_discard
def test_what_is_resident_is_left_in_place(memory: Memory) -> None:
    memory.grow(0, 8)
    for slot in range(8):
        memory.pool.begin_load(slot, 0, slot)
        memory.pool.publish(slot, 0)
    assert memory.shrink(0, 5)
    assert [memory.pool.lookup(0, expert) for expert in range(8)] == [0, 1, 2, 3, 4, -1, -1, -1]
    assert memory.states() == [READY] * 5 + [RETIRED] * 3


@needs_discard
@pytest.mark.parametrize("busy", ["held", "loading"])
def test_a_slot_that_cannot_be_retired_leaves_the_rest_retired_and_is_tried_again(memory: Memory, busy: str) -> None:
    memory.grow(0, 8)
    memory.pool.begin_load(6, 0, 6)
    if busy == "held":
        memory.pool.publish(6, CLIENT)
    state, asked = memory.pool.state(6), list[int]()

    def retire(slot: int) -> bool:
        asked.append(slot)
        return memory.pool.retire(slot)

    for _ in range(2):
        assert not memory.extent.shrink(0, 2, retire)
        assert memory.extent.in_force == [8]
        assert memory.states() == [EMPTY] * 5 + [RETIRED, state, RETIRED]
        memory.check()
    if busy == "loading":
        memory.pool.publish(6, 0)
    memory.pool.clear_client(0)
    assert memory.extent.shrink(0, 2, retire)
    assert (memory.extent.in_force, memory.states()) == ([5], [EMPTY] * 5 + [RETIRED] * 3)
    assert asked == [5, 6, 7] * 3
    memory.check()
    assert memory.extent.shrink(0, 2, retire)
    assert memory.extent.in_force == [2]
    memory.check()


def test_nothing_is_retired_where_memory_cannot_be_given_back(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.grow(0, 8)
    monkeypatch.setattr(_native, "CAN_DISCARD", False)
    with pytest.raises(ConfigError, match="cannot take back parts of shared memory; restart with another SPARKLE_POOL"):
        memory.shrink(0, 2)
    assert (memory.extent.in_force, memory.states()) == ([8], [EMPTY] * 8)
    assert memory.take_stock().in_force == [8]


@needs_discard
def test_growth_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step needs memory in two regions, and there is none for the second: the first gives its part back."""
    shm = os.statvfs("/dev/shm")
    too_many = shm.f_blocks * shm.f_frsize // PAGE_BYTES + 1
    with Memory([(WHOLE, [4, too_many])]) as memory:
        memory.grow(0, 2)
        monkeypatch.setattr(module, "STEP_BYTES", 2 * too_many * WHOLE.record_bytes)
        with pytest.raises(ConfigError, match="shared memory is full"):
            memory.extent.grow(0, 4 + too_many)
        assert memory.extent.in_force == [2]
        assert memory.states()[:5] == [EMPTY, EMPTY, RETIRED, RETIRED, RETIRED]
        memory.check()
        assert memory.extent.grow(0, 3) == [2]
        memory.check()


# --- a shrink that is called off --------------------------------------------------------------------------------------


@needs_discard
@pytest.mark.parametrize(("target", "back"), [(8, [5, 7]), (99, [5, 7]), (7, [5]), (6, [5]), (5, []), (2, [])])
def test_slots_below_the_target_come_back_with_their_memory(memory: Memory, target: int, back: list[int]) -> None:
    memory.grow(0, 8)
    memory.hold(6)
    assert not memory.shrink(0, 2)
    assert memory.extent.restore(0, target) == back
    assert memory.extent.in_force == [8]
    assert [slot for slot, state in enumerate(memory.states()) if state == RETIRED] == [
        x for x in (5, 7) if x not in back
    ]
    memory.check()


@needs_discard
def test_what_was_given_back_is_not_restored_but_grown(memory: Memory) -> None:
    memory.grow(0, 8)
    assert memory.shrink(0, 5)
    assert memory.extent.restore(0, 8) == []
    assert memory.states() == [EMPTY] * 5 + [RETIRED] * 3
    assert memory.grow(0, 8) == [5, 6, 7]
    memory.check()


# --- taking stock -----------------------------------------------------------------------------------------------------


@needs_discard
def test_stock_ends_at_the_last_slot_that_is_not_retired(memory: Memory) -> None:
    memory.grow(0, 8)
    memory.hold(5)
    for slot in (1, 6, 7):
        memory.pool.retire(slot)
    extent = memory.take_stock()
    assert extent.in_force == [6]
    assert memory.states() == [EMPTY] * 5 + [READY] + [RETIRED] * 2, "below, nothing stays retired"
    memory.check()


@needs_discard
def test_memory_that_a_predecessor_had_no_time_to_give_back_is_given_back(memory: Memory) -> None:
    """It was killed when all slots of a step were retired, or when memory had come and no slot was restored yet."""
    memory.grow(0, 8)
    for slot in (5, 6, 7):
        memory.pool.retire(slot)
    assert memory.take_stock().in_force == [5]
    memory.check()
    memory.regions[0].reserve(5, 8)
    assert memory.take_stock().in_force == [5]
    memory.check()
    for slot in range(5):
        memory.pool.retire(slot)
    assert (memory.take_stock().in_force, memory.extent.n_bytes) == ([0], 0)
    memory.check()


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_spans_are_the_memory_behind_slots_in_force_in_parts_of_whole_slots(shape: Shape) -> None:
    with Memory(shape) as memory:
        assert memory.extent.spans() == []
        for share in (1, 2, 3):
            for layout in range(len(shape)):
                memory.grow(layout, memory.extent.capacity(layout) * share // 3)
            spans = memory.extent.spans()
            assert spans == sorted(spans)
            assert covered(spans) == covered(
                [span for r in memory.regions if (n := memory.in_force_of(r.spec)) for span in r.backed(n)]
            )
            assert sum(n_bytes for _, n_bytes in spans) == memory.extent.n_bytes, "nothing twice"
            for address, n_bytes in spans:
                region = next(r for r in memory.regions if in_region(r, address))
                sizes = [piece.nbytes for piece in region.layout.pieces]
                per_step = max(1, module.STEP_BYTES // region.layout.record_bytes)
                assert any(n_bytes % size == 0 and n_bytes // size <= per_step for size in sizes)


def in_region(region: Region, address: int) -> bool:
    return 0 <= address - region.backed(0)[0][0] < region.spec.n_bytes


def covered(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans as (begin, end), those that touch joined."""
    joined = list[tuple[int, int]]()
    for address, n_bytes in sorted(spans):
        if joined and joined[-1][1] == address:
            joined[-1] = (joined[-1][0], address + n_bytes)
        else:
            joined.append((address, address + n_bytes))
    return joined


# --- everything in any order ------------------------------------------------------------------------------------------

CALLS = st.tuples(
    st.sampled_from(["grow", "shrink", "restore", "hold", "release", "successor"]),
    st.integers(0, 2),
    st.integers(0, 15),
)


@needs_discard
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@given(calls=st.lists(CALLS, max_size=30))
def test_any_order_of_calls_keeps_memory_and_states_together(shape: Shape, calls: list[tuple[str, int, int]]) -> None:
    """Classes and sizes beyond those of the shape are taken modulo theirs."""
    with Memory(shape) as memory:
        for call, c, n in calls:
            extent, layout = memory.extent, c % len(shape)
            target = n % (extent.capacity(layout) + 1)
            before = list(extent.in_force)
            if call == "grow" and target > before[layout]:
                new = extent.grow(layout, target)
                assert len(new) >= extent.in_force[layout] - before[layout] > 0
            elif call == "shrink" and target < before[layout]:
                was_done = memory.shrink(layout, target)
                assert was_done == (target <= extent.in_force[layout] < before[layout])
            elif call == "restore":
                extent.restore(layout, target)
                assert RETIRED not in memory.states(layout)[: min(target, before[layout])]
            elif call == "hold":
                free = [slot for slot in range(memory.pool.n_slots) if memory.pool.state(slot) == EMPTY]
                if free:
                    memory.hold(free[n % len(free)])
            elif call == "release":
                memory.pool.clear_client(0)
            elif call == "successor":
                memory.take_stock()
                assert all(now <= then for now, then in zip(memory.extent.in_force, before, strict=True))
            for other in range(len(shape)):
                n_in_force = memory.extent.in_force[other]
                assert set(memory.states(other)[n_in_force:]) <= {RETIRED}
                if other != layout and call != "successor":
                    assert n_in_force == before[other], "classes do not touch each other"
            memory.check()
            assert memory.extent.n_bytes == sum(
                n * form.record_bytes for n, form in zip(memory.extent.in_force, memory.classes, strict=True)
            )
