"""The pool's size: what a user may ask for, in which words it is refused, and the way from one size to another.

Shared memory, slots, residency and governor are real; only what the machine has left is made up.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from sparkle import _native, budget, config, regions
from sparkle._native import EMPTY, RETIRED, Mapping, Pool
from sparkle.errors import ConfigError
from sparkle.machine import MemoryReading, MemoryWatch
from sparkle.manifest import layout_class
from sparkle.policy import LayerShape, make_policy
from sparkle.regions import Region, RegionSpec
from sparkle.store import Store
from sparkled.prefetch import extent, sizing
from sparkled.prefetch.disk import Disk
from sparkled.prefetch.extent import Extent
from sparkled.prefetch.governor import CALM_S
from sparkled.prefetch.reads import ReadQueue
from sparkled.prefetch.residency import Residency
from sparkled.prefetch.segments import Segments, open_segments
from sparkled.prefetch.side import FILL
from sparkled.prefetch.sizing import Sizing
from tests.ipc.pools import write_store

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not _native.CAN_DISCARD, reason="this system gives shared memory back whole only"),
]

N_LAYERS, N_EXPERTS, TOP_K = 4, 8, 2
N_ALL = N_LAYERS * N_EXPERTS
ROWS = 2  # of a prefill step
FLOOR = ROWS * TOP_K + budget.BACKGROUND_READS
PER_STEP = 4
GB = 10**9
WAIT_S = 30.0
CLIENT = 1  # the mask of the client that has bit 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("sizing") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def mixed(store: Store) -> Store:
    """The same layers, in two layout classes in turn; nobody reads their records."""
    small = layout_class("small", [("up_proj.weight", "U8", (4096,))], {})
    layers = [dataclasses.replace(layer, layout=layer.index % 2) for layer in store.layers]
    return dataclasses.replace(store, classes=(*store.classes, small), layers=tuple(layers))


class Machine:
    """A machine of `limit` bytes, of which others take `others`, with one pool."""

    def __init__(self) -> None:
        self.limit, self.others, self.pressure = 64 * GB, 10 * GB, 0.0
        self.extent: Extent | None = None

    def read(self) -> MemoryReading:
        pool_bytes = self.extent.n_bytes if self.extent is not None else 0
        return MemoryReading(self.limit, self.limit - self.others - pool_bytes, self.pressure, "RAM")

    def leave(self, n_bytes: int) -> None:
        """Others take all but so many bytes."""
        self.others += self.read().available_bytes - n_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(MemoryWatch, "read", lambda watch: machine.read())
    return machine


class Sized:
    """A pool in `segments`, its residency and its sizing, without the messages around them."""

    def __init__(
        self, machine: Machine, store: Store, segments: Segments, planned: Sequence[int], is_governed: bool
    ) -> None:
        self.store, self.segments, self.pool = store, segments, segments.pool
        self.extent = machine.extent = segments.extent
        shapes = [
            [LayerShape(x.index, x.n_experts, x.top_k) for x in store.layers if x.layout == c] for c in classes(store)
        ]
        self.residency = Residency(store, self.pool, segments.regions, [make_policy("lru", x) for x in shapes], 0)
        self.disk = Disk.open(store, "off")
        record_bytes = max(layout.stride_bytes for layout in store.classes)
        reader = _native.Reader.with_threads(1, self.disk.block_bytes, record_bytes)
        self.reads = ReadQueue(store, self.disk, reader, 1, 1.0, self.residency.read_ended)
        self.residency.start(self.reads)
        plan = budget.Budget(0, 0, tuple(planned), ROWS, 0, (), ())
        self.n_shrinks = 0
        self.sizing = Sizing(store, plan, self.extent, self.residency, is_governed, self._on_shrink)
        self.answers = list[str]()

    def _on_shrink(self) -> None:
        self.n_shrinks += 1

    def ask(self, n_slots: int | str) -> None:
        """Ask for a size, or for so many slots of the first class."""
        text = n_slots if isinstance(n_slots, str) else str(n_slots * self.store.classes[0].record_bytes)
        self.sizing.ask(text, self.answers.append)

    def go(self) -> None:
        """All the way."""
        for _ in range(1000):
            self.sizing.step()
            if self.sizing.is_done:
                return
        raise AssertionError(f"not done: {self.extent.in_force}, answers {self.answers}")

    def hold(self, slot: int) -> None:
        """Read an expert into every free slot, and let a client hold that in `slot`."""
        for key in ((layer.index, expert) for layer in self.store.layers for expert in range(layer.n_experts)):
            self.residency.fill(key, FILL, False)
        while self.residency.n_loading:
            assert select.select([self.reads.event_fd], [], [], WAIT_S)[0]
            self.reads.reap()
        assert self.pool.grant(slot, CLIENT)

    def release(self) -> None:
        self.pool.clear_client(0)

    def check(self) -> None:
        """States, memory and free slots agree about what is in force."""
        for c in classes(self.store):
            mine = [r.spec for r in self.segments.regions if r.spec.layout == c]
            states = [self.pool.state(spec.first_slot + i) for spec in mine for i in range(spec.n_slots)]
            n = self.extent.in_force[c]
            assert RETIRED not in states[:n]
            assert set(states[n:]) <= {RETIRED}
            assert self.residency.n_usable(c) == n
        files = [Path("/dev/shm", r.spec.name.lstrip("/")) for r in self.segments.regions]
        n_bytes = sum(file.stat().st_blocks * 512 for file in files)
        headers = len(files) * _native.PAGE_BYTES
        assert n_bytes == self.extent.n_bytes + headers  # every slot has whole pages of its own

    def close(self) -> None:
        self.reads.close()
        self.disk.close()


def classes(store: Store) -> range:
    return range(len(store.classes))


Make = Callable[..., Sized]


@pytest.fixture
def make(machine: Machine, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A pool of `n_slots` planned slots of each class; with `after`, that of a predecessor which was killed."""
    step_bytes = PER_STEP * store.classes[0].record_bytes
    monkeypatch.setattr(extent, "STEP_BYTES", step_bytes)
    monkeypatch.setattr(sizing, "STEP_BYTES", step_bytes)
    prefix = f"/spk-sizing-{os.getpid()}"
    with ExitStack() as stack:

        def make(*n_slots: int, of: Store = store, is_governed: bool = False, after: Sized | None = None) -> Sized:
            if after is not None:
                assert Extent(after.pool, after.segments.regions, len(of.classes)).in_force == after.extent.in_force
            segments = open_segments(prefix, of, n_slots, lambda: False)
            assert segments.is_adopted == (after is not None)
            segments.pool.complete()
            stack.callback(segments.unlink)
            sized = Sized(machine, of, segments, n_slots, is_governed)
            stack.callback(sized.close)
            return sized

        yield make


# --- what may be asked for --------------------------------------------------------------------------------------------


def test_a_size_is_gone_to_in_steps_and_answered_once(make: Make, store: Store) -> None:
    sized = make(N_ALL)
    sizes = list[int]()
    sized.ask(FLOOR)
    while not sized.sizing.is_done:
        assert sized.answers == []
        sized.sizing.step()
        sizes += sized.extent.in_force
        sized.check()
    assert sizes == [*range(N_ALL - PER_STEP, FLOOR, -PER_STEP), FLOOR]
    assert sized.n_shrinks == len(sizes), "nobody may have the memory pinned"
    assert sized.answers == [""]
    sized.ask(" 50% ")
    sized.go()
    assert sized.extent.in_force == [N_ALL // 2]
    sized.check()
    assert sized.answers == ["", ""]
    assert sized.sizing.governor.target_bytes == sized.extent.n_bytes == N_ALL // 2 * store.classes[0].record_bytes
    sized.sizing.step()
    assert sized.answers == ["", ""]


SIZE = "expected a size such as 24GB, 512MiB or 1000000"
SHARE = "expected a size or a share of the experts between 0% and 100%"
ONE_STEP = r"cannot hold one step, which needs 82 kB \(4 of 20 kB: top_k experts of a layer and 2 reads under way\)"
GUARD = r"a pool of {} is too small while the daemons run: a prefill step of theirs needs 123 kB; restart them with"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("many", f"a pool of 'many': {SIZE}"),
        ("-5GB", f"a pool of '-5GB': {SIZE}"),
        ("1e9", SIZE),
        ("9" * 30, "a size below 8 EiB"),
        ("0%", f"a pool of '0%': {SHARE}"),
        ("101%", SHARE),
        ("5%%", SIZE),
        ("", rf"a pool of 0 kB {ONE_STEP}"),
        ("0", rf"a pool of 0 kB {ONE_STEP}"),
        ("81kB", rf"a pool of 81 kB {ONE_STEP}"),
        ("5%", rf"a pool of 33 kB {ONE_STEP}"),
        ("100kB", GUARD.format("100 kB") + " SPARKLE_POOL=100kB"),
        (str(FLOOR * 20480 - 1), GUARD.format("123 kB") + " SPARKLE_POOL=122879"),
        ("15%", GUARD.format("98 kB") + " SPARKLE_POOL=15%"),
    ],
)
def test_what_is_refused_changes_nothing(make: Make, text: str, words: str) -> None:
    sized = make(20)
    before = sized.sizing.governor.target_bytes
    with pytest.raises(ConfigError, match=words):
        sized.ask(text)
    assert sized.sizing.is_done
    sized.sizing.step()
    assert (sized.extent.in_force, sized.sizing.governor.target_bytes, sized.answers) == ([20], before, [])
    assert sized.extent.asked_bytes == 0
    sized.check()


def test_the_guard_is_as_low_as_it_goes(make: Make) -> None:
    sized = make(20)
    sized.ask(FLOOR)
    sized.go()
    assert (sized.extent.in_force, sized.answers) == ([FLOOR], [""])


def test_each_class_has_a_guard_of_its_own(make: Make, mixed: Store) -> None:
    sized = make(12, 12, of=mixed)
    record_bytes = [layout.record_bytes for layout in mixed.classes]
    with pytest.raises(ConfigError, match="too small while the daemons run"):
        sized.ask(str(FLOOR * sum(record_bytes) - 1))
    sized.ask(str(FLOOR * sum(record_bytes)))
    sized.go()
    assert sized.extent.in_force == [FLOOR, FLOOR]
    sized.ask("100%")
    sized.go()
    assert sized.extent.in_force == [N_ALL // 2, N_ALL // 2]
    sized.check()


def test_a_system_that_cannot_resize_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sized = make(20)
    monkeypatch.setattr(sizing, "CAN_DISCARD", False)
    with pytest.raises(ConfigError, match="cannot resize shared memory; restart the daemons with SPARKLE_POOL=50%"):
        sized.ask("50%")
    sized.ask(20)
    sized.go()
    assert (sized.extent.in_force, sized.answers) == ([20], [""])


def test_more_than_all_experts_is_all_of_them(make: Make) -> None:
    sized = make(20)
    sized.ask("1GB")
    sized.go()
    assert sized.extent.in_force == [N_ALL]
    assert sized.answers == ["all experts are 655 kB: a larger pool would have no use"]


# --- more than there is room for --------------------------------------------------------------------------------------


def test_more_than_fits_is_as_much_as_fits(make: Make, machine: Machine, store: Store) -> None:
    """The growth mark stays available: for this limit, 4.8 GB."""
    sized, record_bytes = make(10), store.classes[0].record_bytes
    machine.leave(4_800_000_000 + 5 * record_bytes)
    sized.ask(N_ALL)
    sized.go()
    assert sized.extent.in_force == [15]
    assert sized.answers == ["655 kB does not fit now: 4.8 GB left (RAM)"]
    assert sized.sizing.governor.target_bytes == 15 * record_bytes
    sized.check()


def test_where_nothing_more_fits_the_pool_keeps_its_size(make: Make, machine: Machine) -> None:
    sized = make(10)
    machine.leave(GB)
    sized.ask(N_ALL)
    sized.go()
    assert sized.extent.in_force == [10]
    assert sized.answers == ["655 kB does not fit now: 1.0 GB left (RAM)"]
    sized.ask(8)
    sized.go()
    assert (sized.extent.in_force, sized.answers[1]) == ([8], "")


def test_memory_that_gets_short_on_the_way_ends_the_growth(make: Make, machine: Machine, store: Store) -> None:
    sized, record_bytes = make(10), store.classes[0].record_bytes
    sized.ask(N_ALL)
    sized.sizing.step()
    assert sized.extent.in_force == [10 + PER_STEP]
    machine.leave(4_800_000_000 + PER_STEP * record_bytes - 1)
    sized.go()
    assert sized.extent.in_force == [10 + PER_STEP]
    assert sized.answers == ["memory became short on the way: 4.8 GB left (RAM)"]
    assert sized.sizing.governor.target_bytes == N_ALL * record_bytes, "the wish stands: the governor may grow later"
    sized.check()


def test_memory_that_gets_short_ends_the_growth_of_all_classes(make: Make, machine: Machine, mixed: Store) -> None:
    """What is left would do for the small class's step, but growth as a whole is over."""
    sized = make(10, 10, of=mixed)
    machine.leave(4_800_000_000 + GB)
    sized.ask("100%")
    machine.leave(4_800_000_000 + mixed.classes[0].record_bytes)
    sized.sizing.step()
    assert sized.extent.in_force == [10, 10]
    sized.go()
    assert sized.extent.in_force == [10, 10]
    assert sized.answers == ["memory became short on the way: 4.8 GB left (RAM)"]
    sized.check()


def test_full_shared_memory_ends_the_growth(machine: Machine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step asks for more than /dev/shm has in all, which the kernel refuses at once."""
    shm = os.statvfs("/dev/shm")
    whole, planned = shm.f_blocks * shm.f_frsize, 10
    record_bytes = -(-whole // (16384 * _native.PAGE_BYTES)) * _native.PAGE_BYTES
    n_slots, form = (
        planned + whole // record_bytes + 1,
        layout_class("large", [("up_proj.weight", "U8", (record_bytes,))], {}),
    )
    many = tuple(dataclasses.replace(layer, n_experts=-(-n_slots // N_LAYERS)) for layer in store.layers)
    large = dataclasses.replace(store, classes=(form,), layers=many)
    monkeypatch.setattr(extent, "STEP_BYTES", 1 << 62)
    name = f"/spk-sizing-full-{os.getpid()}"
    spec = RegionSpec(name, 0, 0, n_slots, regions.region_bytes(form, n_slots), planned)
    with ExitStack() as stack:
        pool = Pool.create(f"{name}-c", N_LAYERS, many[0].n_experts, n_slots, "test", "")
        stack.callback(Mapping.unlink, f"{name}-c")
        region = Region.create(spec, form)
        stack.callback(Mapping.unlink, name)
        for slot in range(n_slots):
            pool.retire(slot)
        force = Extent(pool, [region], 1)
        force.grow(0, planned)
        machine.limit = 4 * budget.pool_bytes("100%", large)
        machine.others = 0
        sized = Sized(machine, large, Segments(name, pool, (region,), force, False), [planned], False)
        stack.callback(sized.close)
        sized.ask("100%")
        sized.go()
        [answer] = sized.answers
        assert answer.startswith("shared memory is full: no room for ")
        assert "make /dev/shm larger" in answer
        assert sized.extent.in_force == [planned]
        assert Path(f"/dev/shm{name}").stat().st_blocks * 512 == force.n_bytes + _native.PAGE_BYTES
        sized.ask(planned - 1)
        sized.go()
        assert (sized.extent.in_force, sized.answers[1]) == ([planned - 1], "")


# --- a resize that takes long -----------------------------------------------------------------------------------------


def test_an_unfinished_resize_is_answered_at_its_deadline_and_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "RESIZE_DEADLINE_S", 0.05)
    sized = make(20)
    sized.hold(19)
    began = time.monotonic()
    sized.ask(FLOOR)
    while not sized.answers:
        sized.sizing.step()
    assert time.monotonic() - began > config.RESIZE_DEADLINE_S
    assert sized.answers == ["not there yet: the last slots are in use, it goes on"]
    assert (sized.extent.in_force, sized.sizing.is_done) == ([20], False)
    assert sized.residency.n_usable(0) == 20 - PER_STEP + 1, "the others of the step are out of use"
    sized.release()
    sized.go()
    assert sized.extent.in_force == [FLOOR]
    assert len(sized.answers) == 1
    sized.check()


def test_a_wish_replaces_one_that_is_under_way_and_both_are_answered(make: Make) -> None:
    sized = make(20)
    sized.hold(19)
    sized.ask(FLOOR)
    sized.sizing.step()
    assert [sized.pool.state(slot) for slot in range(16, 19)] == [RETIRED] * 3
    sized.ask(18)
    assert [sized.pool.state(slot) for slot in range(16, 19)] == [EMPTY, EMPTY, RETIRED], "called off, below the target"
    assert sized.answers == []
    sized.release()
    sized.go()
    assert (sized.extent.in_force, sized.answers) == ([18], ["", ""])
    sized.check()


# --- the governor -----------------------------------------------------------------------------------------------------


def test_the_governor_shrinks_and_grows(make: Make, machine: Machine, store: Store) -> None:
    record_bytes, reserve = store.classes[0].record_bytes, int(0.05 * machine.limit)
    sized = make(N_ALL, is_governed=True)
    sized.sizing.govern()
    assert sized.sizing.is_done, "a machine with room is left alone"
    machine.leave(reserve - 1)
    sized.sizing.govern()
    assert not sized.sizing.is_done
    sized.go()
    assert sized.extent.in_force == [FLOOR], "a quarter of the reserve more is wanted, far more than this pool has"
    assert sized.sizing.counts == {"pool_shrinks": 1}
    assert "short of memory: 3.2 GB of 64.0 GB available (RAM)" in sized.sizing.governor.reason
    assert sized.sizing.governor.target_bytes == N_ALL * record_bytes
    machine.others = 10 * GB
    sized.sizing.govern()
    assert sized.sizing.is_done, f"growth waits for {CALM_S} s of calm"
    assert "grows in" in sized.sizing.governor.reason
    sized.check()


def test_the_governor_grows_a_pool_that_it_finds_small(make: Make, machine: Machine, store: Store) -> None:
    """As a successor of a daemon that had to shrink; a step is one slot, the next comes three seconds later."""
    first = make(N_ALL, is_governed=True)
    machine.leave(0)
    first.sizing.govern()
    first.go()
    machine.others = 10 * GB
    sized = make(N_ALL, is_governed=True, after=first)
    assert sized.extent.in_force == [FLOOR]
    sized.sizing.govern()
    sized.go()
    assert (sized.extent.in_force, sized.sizing.counts) == ([FLOOR + 1], {"pool_grows": 1})
    sized.sizing.govern()
    assert sized.sizing.is_done
    assert "smaller than asked for, grows in 3 s" in sized.sizing.governor.reason
    sized.check()


def test_the_governor_keeps_still_while_a_user_waits_and_where_it_is_off(make: Make, machine: Machine) -> None:
    for is_governed in (True, False):
        sized = make(N_ALL, is_governed=is_governed)
        sized.hold(N_ALL - 1)
        if is_governed:
            sized.ask(N_ALL - 1)
        machine.leave(0)
        sized.sizing.govern()
        assert sized.sizing.reading.available_bytes == 0, "it looks all the same"
        sized.sizing.step()
        assert (sized.extent.in_force, sized.sizing.counts) == ([N_ALL], {})
        sized.release()
        machine.others = 10 * GB
        sized.segments.unlink()


def test_pressure_shrinks_too(make: Make, machine: Machine) -> None:
    sized = make(N_ALL, is_governed=True)
    machine.leave(15 * GB)
    machine.pressure = 0.2
    sized.sizing.govern()
    sized.go()
    assert sized.extent.in_force == [N_ALL * 3 // 4]
    assert "tasks wait for memory 20% of the time" in sized.sizing.governor.reason


# --- what outlives a daemon -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_governed", [True, False])
@pytest.mark.parametrize("n_slots", [FLOOR, 15, N_ALL])
def test_a_successor_keeps_to_what_the_user_asked_for(make: Make, is_governed: bool, n_slots: int) -> None:
    first = make(20, is_governed=is_governed)
    first.ask(n_slots)
    first.go()
    second = make(20, is_governed=is_governed, after=first)
    assert second.extent.in_force == [n_slots]
    assert second.sizing.governor.target_bytes == second.extent.n_bytes
    for _ in range(3):
        second.sizing.govern()
        second.go()
    assert (second.extent.in_force, second.sizing.counts) == ([n_slots], {})
    second.check()


@pytest.mark.parametrize("n_slots", [FLOOR, N_ALL])
def test_a_successor_goes_on_with_a_resize_that_was_under_way(make: Make, n_slots: int) -> None:
    first = make(20)
    first.ask(n_slots)
    first.sizing.step()
    second = make(20, after=first)
    assert second.extent.in_force == first.extent.in_force not in ([20], [n_slots])
    second.go()
    assert second.extent.in_force == [n_slots]
    second.check()


def test_a_governed_successor_does_not_take_a_shrunk_pool_for_the_wish(make: Make, machine: Machine) -> None:
    first = make(20, is_governed=True)
    first.ask(25)
    first.go()
    machine.leave(0)
    first.sizing.govern()
    first.go()
    assert first.extent.in_force == [FLOOR]
    second = make(20, is_governed=True, after=first)
    assert (second.extent.in_force, second.sizing.is_done) == ([FLOOR], True)
    assert second.sizing.governor.target_bytes == 25 * second.store.classes[0].record_bytes


def test_rounding_a_wish_again_loses_no_slot(make: Make, mixed: Store) -> None:
    first = make(10, 10, of=mixed)
    for percent in range(60, 100):
        first.ask(f"{percent}%")
        first.go()
        second = make(10, 10, of=mixed, after=first)
        assert second.sizing.is_done, f"{percent}%: {second.extent.in_force}"
        first = second


def test_without_a_wish_a_successor_takes_the_plan(make: Make) -> None:
    first = make(20, is_governed=True)
    second = make(20, is_governed=True, after=first)
    assert second.extent.asked_bytes == 0
    assert second.sizing.governor.target_bytes == second.extent.n_bytes == first.extent.n_bytes
