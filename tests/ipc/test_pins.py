"""Pinned experts stay, whatever clients ask for; and they never take what a step needs."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from sparkle import regions
from sparkle._native import Pool
from sparkle.messages import Error, PinExperts, PinState
from sparkle.policy import Key
from sparkle.store import Store
from tests.daemons import DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser
from tests.ipc.pools import ask, pool_settings, resident, write_store

pytestmark = pytest.mark.ipc

N_LAYERS, N_EXPERTS, TOP_K = 4, 16, 2
N_SLOTS = 32
FLOOR = N_EXPERTS + 2  # a prefill step's experts of a layer, and two reads in the background: sparkle.budget
PINS = {(0, 3), (0, 4), (2, 15), (3, 0)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("pins") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture
def prefetch(store: Store, short_dir: Path) -> Iterator[DaemonProcess]:
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS)) as daemon:
        daemon.wait_for_state("ready", n_slots=N_SLOTS)
        yield daemon


@pytest.fixture
def user(prefetch: DaemonProcess, store: Store) -> Iterator[PoolUser]:
    with PoolUser(prefetch.run_dir.path, store) as user:
        yield user


def pin(daemon: DaemonProcess, layer: int, experts: Sequence[int], is_pinned: bool = True) -> PinState:
    state = ask(daemon, PinExperts("p", layer, list(experts), is_pinned))
    assert isinstance(state, PinState), state
    return state


def pin_all(daemon: DaemonProcess, keys: set[Key]) -> None:
    for layer, expert in sorted(keys):
        pin(daemon, layer, [expert])


def use_everything(user: PoolUser, but: Collection[Key] = ()) -> None:
    for layer in range(N_LAYERS):
        user.use(layer, [expert for expert in range(N_EXPERTS) if (layer, expert) not in but])


def residences(daemon: DaemonProcess, keys: set[Key]) -> list[tuple[int, int]]:
    """Slot and generation of each: an expert that left and came back has others."""
    pool = Pool.attach(regions.control_name(daemon.run_dir.shm_prefix))
    slots = [pool.lookup(*key) for key in sorted(keys)]
    assert min(slots) >= 0
    return [(slot, pool.gen(slot)) for slot in slots]


def test_pins_are_read_and_never_evicted(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    pin_all(prefetch, PINS)
    metrics = prefetch.wait_for_state("ready", slots_used=len(PINS), slots_loading=0).metrics
    assert metrics["slots_pinned"] == len(PINS)
    assert resident(prefetch, store) == PINS
    before = residences(prefetch, PINS)
    for _ in range(3):
        use_everything(user, but=PINS)
    assert residences(prefetch, PINS) == before
    n_read = prefetch.status().metrics["bytes_read"]
    for layer, expert in sorted(PINS):
        user.use(layer, [expert])
    metrics = prefetch.status().metrics
    assert (metrics["bytes_read"], metrics["unplaced_experts"]) == (n_read, 0)
    assert metrics["evictions"] > N_SLOTS


def test_pins_that_are_there_already_stay(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    user.use(0, range(N_EXPERTS))
    before = residences(prefetch, {(0, 5)})
    n_pinnable = N_SLOTS - FLOOR
    assert pin(prefetch, 0, [5]) == PinState("p", 1, n_pinnable, n_asked_pinned=1, n_asked_absent=0)
    assert pin(prefetch, 0, [5]) == PinState("p", 1, n_pinnable, n_asked_pinned=1, n_asked_absent=0)
    for _ in range(2):
        use_everything(user, but={(0, 5)})
    assert residences(prefetch, {(0, 5)}) == before


def test_what_is_no_longer_pinned_may_go(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    pin_all(prefetch, PINS)
    prefetch.wait_for_state("ready", slots_used=len(PINS))
    for layer, expert in sorted(PINS - {(3, 0)}):
        state = pin(prefetch, layer, [expert], is_pinned=False)
    assert (state.n_pinned, state.n_asked_pinned) == (1, 0)
    assert pin(prefetch, 1, [1], is_pinned=False).n_pinned == 1  # was none
    use_everything(user, but=PINS)
    assert resident(prefetch, store) & PINS == {(3, 0)}
    assert prefetch.status().metrics["slots_pinned"] == 1


def test_pins_beyond_what_may_be_pinned_leave_room_for_any_set(
    prefetch: DaemonProcess, store: Store, user: PoolUser
) -> None:
    n_pinnable = N_SLOTS - FLOOR
    assert pin(prefetch, 0, range(10)) == PinState("p", 10, n_pinnable, 10, 10)
    assert pin(prefetch, 1, range(N_EXPERTS)) == PinState("p", n_pinnable, n_pinnable, n_pinnable - 10, n_pinnable - 10)
    assert pin(prefetch, 2, range(N_EXPERTS)) == PinState("p", n_pinnable, n_pinnable, 0, 0)
    prefetch.wait_for_state("ready", slots_used=n_pinnable, slots_loading=0)
    pins = {(0, e) for e in range(10)} | {(1, e) for e in range(n_pinnable - 10)}  # first come, first pinned
    assert resident(prefetch, store) == pins
    assert pin(prefetch, 0, range(10)) == PinState("p", n_pinnable, n_pinnable, 10, 0)
    before = residences(prefetch, pins)
    for _ in range(2):
        use_everything(user)
    assert residences(prefetch, pins) == before
    assert prefetch.status().metrics["unplaced_experts"] == 0


def test_the_smallest_pool_has_no_room_for_pins(store: Store, short_dir: Path) -> None:
    n_slots = TOP_K + 2
    with spawn("prefetch", short_dir, pool_settings(store, n_slots)) as daemon, PoolUser(short_dir, store) as user:
        daemon.wait_for_state("ready", n_slots=n_slots)
        assert pin(daemon, 0, [1, 2]) == PinState("p", 0, 0, 0, 0)
        for layer in range(N_LAYERS):
            user.use(layer, [0, 3, 5, 7])
        daemon.wait_for_state("ready", slots_pinned=0, unplaced_experts=0)


def test_a_pin_waits_for_a_slot_when_all_are_in_use(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    user.hold(0, range(N_EXPERTS))
    user.hold(1, range(N_EXPERTS))
    assert pin(prefetch, 2, [7]) == PinState("p", 1, N_SLOTS - FLOOR, 1, 1)
    assert prefetch.wait_for_state("ready", slots_held=N_SLOTS).metrics["bytes_read_background"] == 0
    assert pin(prefetch, 2, [7]).n_asked_absent == 1
    user.release()
    prefetch.wait_for_state("ready", bytes_read_background=store.classes[0].record_bytes)
    assert (2, 7) in resident(prefetch, store)
    assert pin(prefetch, 2, [7]).n_asked_absent == 0


@pytest.mark.parametrize(
    ("layer", "experts", "text"),
    [
        (N_LAYERS, [0], "PinExperts.layer 4: the store has 4 layers"),
        (-1, [0], "PinExperts.layer -1"),
        (0, [], "at least one"),
        (0, [0, N_EXPERTS], "from 0 to 15"),
        (0, [-1], "from 0 to 15"),
        (0, [3, 3], "named once"),
    ],
)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_pins_of_what_does_not_exist_are_errors(
    shared: DaemonProcess, layer: int, experts: list[int], text: str, is_pinned: bool
) -> None:
    error = ask(shared, PinExperts("x", layer, experts, is_pinned))
    assert isinstance(error, Error), error
    assert (error.code, error.request_id) == ("protocol", "x")
    assert text in error.message
    metrics = shared.status().metrics
    assert (metrics["slots_pinned"], metrics["bytes_read"]) == (0, 0)


@pytest.fixture(scope="module")
def shared(store: Store) -> Iterator[DaemonProcess]:
    """One daemon for messages that change nothing."""
    with (
        tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder,
        spawn("prefetch", Path(folder), pool_settings(store, N_SLOTS)) as daemon,
    ):
        daemon.wait_for_state("ready")
        yield daemon


@pytest.mark.parametrize(("fraction", "n_pinned"), [("0.25", N_SLOTS // 4), ("1", N_SLOTS - FLOOR)])
def test_a_share_of_the_pool_is_pinned_to_the_experts_used_most_so_far(
    store: Store, short_dir: Path, fraction: str, n_pinned: int
) -> None:
    hottest = [(layer, expert) for expert in (9, 2, 11, 5) for layer in (1, 3, 0, 2)]
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS, PROFILE="on")) as first:
        with PoolUser(short_dir, store) as user:
            for i in range(len(hottest)):
                for layer, expert in hottest[: len(hottest) - i]:
                    user.use(layer, [expert])
        first.terminate()
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS, PROFILE="on", PIN_FRACTION=fraction)) as second:
        second.wait_for_state("ready", slots_used=n_pinned, slots_pinned=n_pinned, slots_loading=0)
        assert resident(second, store) == set(hottest[:n_pinned])
        with PoolUser(short_dir, store) as user:
            before = residences(second, set(hottest[:n_pinned]))
            for _ in range(2):
                use_everything(user)
            assert residences(second, set(hottest[:n_pinned])) == before
