"""The pool changes its size while clients use it: memory goes back to the system, and every byte stays right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest

from sparkle import _native, regions
from sparkle._native import RETIRED, Pool
from sparkle.errors import Cancelled
from sparkle.messages import Error, Message, PinExperts, PinState, PoolState, ResizePool
from sparkle.store import Store
from tests.daemons import WAIT_S, DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser
from tests.ipc.pools import ask, pool_settings, resident, write_store

pytestmark = [
    pytest.mark.ipc,
    pytest.mark.skipif(not _native.CAN_DISCARD, reason="this system gives shared memory back whole only"),
]

N_LAYERS, N_EXPERTS, TOP_K = 4, 16, 2
N_ALL = N_LAYERS * N_EXPERTS
FLOOR = N_EXPERTS + 2  # a prefill step's experts of a layer, and two reads in the background: sparkle.budget
SHORT_S = 0.1
OVERHEAD_BYTES = 256 << 10  # of a region beside its slots: a header, the ends of arrays


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("resize") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture
def prefetch(store: Store, short_dir: Path) -> Iterator[DaemonProcess]:
    """A pool of all experts, and a short patience with clients that hold slots."""
    with spawn("prefetch", short_dir, pool_settings(store, N_ALL), {"RESIZE_DEADLINE_S": SHORT_S}) as daemon:
        daemon.wait_for_state("ready", n_slots=N_ALL)
        yield daemon


def size_of(store: Store, n_slots: int) -> str:
    return str(n_slots * store.classes[0].record_bytes)


def ask_size(daemon: DaemonProcess, size: str) -> Message:
    return ask(daemon, ResizePool("r", size))


def resize(daemon: DaemonProcess, store: Store, n_slots: int) -> None:
    """Ask for so many slots and get them at once."""
    state = ask_size(daemon, size_of(store, n_slots))
    assert state == PoolState("r", int(size_of(store, n_slots)), n_slots, ""), state


def pool_of(daemon: DaemonProcess) -> Pool:
    return Pool.attach(regions.control_name(daemon.run_dir.shm_prefix))


def memory_of(daemon: DaemonProcess) -> int:
    """Bytes that the pool's regions really take of the machine's memory."""
    specs = regions.from_json(pool_of(daemon).layout)
    return sum(Path("/dev/shm", spec.name.lstrip("/")).stat().st_blocks * 512 for spec in specs)


def assert_memory(daemon: DaemonProcess, store: Store, n_slots: int) -> None:
    least = n_slots * store.classes[0].record_bytes
    assert least <= memory_of(daemon) <= least + OVERHEAD_BYTES


def use_everything(user: PoolUser) -> None:
    for layer in range(N_LAYERS):
        user.use(layer, range(N_EXPERTS))


class Traffic:
    """A client in a thread of its own that uses random sets without pause, each byte compared with the store."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        self.n_sets = 0
        self._user = PoolUser(run_dir, store)
        self._is_over = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        rng = random.Random(0)
        try:
            with self._user as user:
                while not self._is_over.is_set():
                    experts = rng.sample(range(N_EXPERTS), rng.choice((1, TOP_K, 5, N_EXPERTS)))
                    user.hold(rng.randrange(N_LAYERS), experts, self._is_over.is_set)
                    user.release()
                    self.n_sets += 1
        except Cancelled:
            return
        except BaseException as e:
            self._failures.append(e)
            raise

    def wait_for(self, n_sets: int) -> None:
        """Wait until so many more sets have been used."""
        until, deadline = self.n_sets + n_sets, time.monotonic() + WAIT_S
        while self.n_sets < until:
            assert not self._failures
            assert time.monotonic() < deadline, f"{self.n_sets} sets, then none"
            self._thread.join(0.001)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert not self._failures
        assert self._user.client.unplaced_experts == 0


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_memory_goes_back_and_comes_again(prefetch: DaemonProcess, store: Store) -> None:
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        assert_memory(prefetch, store, N_ALL)
        for n in (40, FLOOR, 33, 34, N_ALL, FLOOR, N_ALL):
            resize(prefetch, store, n)
            assert_memory(prefetch, store, n)
            metrics = prefetch.status().metrics
            assert (metrics["n_slots"], metrics["pool_bytes"]) == (n, int(size_of(store, n)))
            assert metrics["pool_target_bytes"] == metrics["pool_bytes"]
            assert metrics["slots_used"] <= n
            use_everything(user)
            assert prefetch.wait_for_state("ready", slots_held=0).metrics["slots_used"] == n
        assert (metrics["unplaced_experts"], user.client.generation) == (0, 1)


def test_shrinking_keeps_what_stays_in_place(prefetch: DaemonProcess, store: Store) -> None:
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        resize(prefetch, store, 40)
        left = resident(prefetch, store)
        assert len(left) == 40
        before = prefetch.status().metrics["bytes_read"]
        for layer, expert in sorted(left):
            user.use(layer, [expert])
        assert prefetch.status().metrics["bytes_read"] == before


def test_shares_and_units_are_sizes_too(prefetch: DaemonProcess, store: Store) -> None:
    n_bytes = int(size_of(store, N_ALL))
    for size, n_slots in (("50%", N_ALL // 2), (" 75% ", N_ALL * 3 // 4), (f"{n_bytes / 2e6}MB", N_ALL // 2)):
        state = ask_size(prefetch, size)
        assert isinstance(state, PoolState), state
        assert state.n_slots == n_slots
    more = ask_size(prefetch, "1GB")  # than there are experts
    assert isinstance(more, PoolState), more
    assert more.n_slots == N_ALL


def test_what_is_no_size_is_refused(prefetch: DaemonProcess, store: Store) -> None:
    for size in ("", " ", "many", "-1", "0%", "101%", "1e9", "NaN", "5%%", "9" * 30, "1\0"):
        error = ask_size(prefetch, size)
        assert isinstance(error, Error), error
        assert (error.code, error.request_id) == ("config", "r")
    assert prefetch.status().metrics["n_slots"] == N_ALL


def test_less_than_a_step_needs_is_refused_with_the_arithmetic(prefetch: DaemonProcess, store: Store) -> None:
    record_bytes = store.classes[0].record_bytes
    with PoolUser(prefetch.run_dir.path, store) as user:
        for size, text in (
            (
                str(int(size_of(store, FLOOR)) - 1),
                f"step of theirs needs {FLOOR * record_bytes / 1e3:.0f} kB",
            ),
            (str(record_bytes), f"cannot hold one step, which needs {(TOP_K + 2) * record_bytes / 1e3:.0f} kB ("),
        ):
            error = ask_size(prefetch, size)
            assert isinstance(error, Error), error
            assert error.code == "config"
            assert text in error.message
        use_everything(user)
        assert prefetch.status().metrics["n_slots"] == N_ALL


# --- clients meanwhile -----------------------------------------------------------------------------------------------


def test_a_busy_client_never_sees_wrong_bytes(prefetch: DaemonProcess, store: Store) -> None:
    rng = random.Random(1)
    with Traffic(prefetch.run_dir.path, store) as traffic:
        for _ in range(25):
            n = rng.randint(FLOOR, N_ALL)
            state = ask_size(prefetch, size_of(store, n))
            assert isinstance(state, PoolState), state
            prefetch.wait_for_state("ready", n_slots=n)
            assert_memory(prefetch, store, n)
            traffic.wait_for(10)
    metrics = prefetch.wait_for_state("ready", n_clients=0, slots_held=0).metrics
    assert (metrics["unplaced_experts"], metrics["fetches_failed"]) == (0, 0)


def test_a_slot_in_use_delays_the_shrink_until_it_is_released(store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, pool_settings(store, N_ALL)) as daemon, PoolUser(short_dir, store) as user:
        use_everything(user)
        slots = user.hold(N_LAYERS - 1, range(4))
        assert min(slots) >= FLOOR
        before = [user.bytes_in(slot) for slot in slots]
        peer = daemon.peer()
        peer.send(ResizePool("r", size_of(store, FLOOR)))
        assert daemon.wait_for_state("ready", pool_target_bytes=int(size_of(store, FLOOR))).metrics["n_slots"] == N_ALL
        assert [user.bytes_in(slot) for slot in slots] == before
        assert not peer.received
        user.release()
        assert peer.wait_for(PoolState) == PoolState("r", int(size_of(store, FLOOR)), FLOOR, "")
        assert_memory(daemon, store, FLOOR)
        use_everything(user)


def test_a_resize_is_answered_at_its_deadline_and_goes_on(prefetch: DaemonProcess, store: Store) -> None:
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        slots = user.hold(N_LAYERS - 1, range(4))
        before = [user.bytes_in(slot) for slot in slots]
        state = ask_size(prefetch, size_of(store, FLOOR))
        assert isinstance(state, PoolState), state
        assert state.n_slots == N_ALL
        assert "not there yet: the last slots are in use" in state.detail
        assert [user.bytes_in(slot) for slot in slots] == before
        assert prefetch.status().metrics["slots_held"] == 4
        user.release()
        prefetch.wait_for_state("ready", n_slots=FLOOR)
        use_everything(user)
        assert_memory(prefetch, store, FLOOR)


@pytest.mark.parametrize("n_again", [N_ALL, N_ALL - 8])
def test_a_shrink_that_is_called_off_gives_all_slots_back(prefetch: DaemonProcess, store: Store, n_again: int) -> None:
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        user.hold(N_LAYERS - 1, [N_EXPERTS - 1])
        assert isinstance(ask_size(prefetch, size_of(store, FLOOR)), PoolState)
        assert isinstance(ask_size(prefetch, size_of(store, n_again)), PoolState)
        user.release()
        metrics = prefetch.wait_for_state("ready", n_slots=n_again).metrics
        use_everything(user)
        pool = pool_of(prefetch)
        assert sum(pool.state(slot) != RETIRED for slot in range(pool.n_slots)) == n_again
        assert prefetch.status().metrics["slots_used"] == n_again, metrics


def test_a_smaller_pool_has_fewer_pins_and_serves_any_set(prefetch: DaemonProcess, store: Store) -> None:
    """Pins may take only what a step does not need, also after a shrink."""
    with PoolUser(prefetch.run_dir.path, store) as user:
        peer = prefetch.peer()
        for layer in range(3):
            peer.send(PinExperts("p", layer, list(range(N_EXPERTS))))
            state = peer.wait_for(PinState)
        assert (state.n_pinned, state.n_pinnable) == (N_ALL - FLOOR, N_ALL - FLOOR)
        use_everything(user)
        resize(prefetch, store, FLOOR + 5)
        assert prefetch.status().metrics["slots_pinned"] <= 5
        use_everything(user)


# --- who decides -----------------------------------------------------------------------------------------------------


def test_the_governor_keeps_to_the_size_that_the_user_chose(store: Store, short_dir: Path) -> None:
    settings = pool_settings(store, N_ALL, GOVERNOR="on")
    with spawn("prefetch", short_dir, settings) as daemon, PoolUser(short_dir, store) as user:
        first = daemon.wait_for_state("ready").metrics
        if "full size" not in first["governor_reason"] and first["pool_shrinks"]:
            pytest.skip(f"this machine is short of memory: {first['governor_reason']}")
        resize(daemon, store, 40)
        assert_kept(daemon, store, 40)
        use_everything(user)


def assert_kept(daemon: DaemonProcess, store: Store, n_slots: int) -> None:
    """The size is the target, and still is after the governor has looked a few times."""
    looks = set[int]()
    while len(looks) < 4:  # each finds another number of bytes left
        metrics = daemon.status().metrics
        looks.add(metrics["memory_available_bytes"])
    assert metrics["pool_target_bytes"] == int(size_of(store, n_slots))
    assert (metrics["n_slots"], metrics["pool_grows"]) == (n_slots, 0), metrics["governor_reason"]


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@contextmanager
def successor(daemon: DaemonProcess, store: Store, n_planned: int = N_ALL, **settings: str) -> Iterator[DaemonProcess]:
    daemon.kill()
    with spawn("prefetch", daemon.run_dir.path, pool_settings(store, n_planned, **settings)) as other:
        yield other


def test_a_successor_goes_on_with_the_size_that_the_pool_had(prefetch: DaemonProcess, store: Store) -> None:
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        resize(prefetch, store, 40)
        with successor(prefetch, store) as second:
            assert "adopted with 40 experts" in second.wait_for_state("ready", n_slots=40).detail
            use_everything(user)
            resize(second, store, N_ALL)
            use_everything(user)
            second.wait_for_state("ready", slots_used=N_ALL)
            assert user.client.generation == 1


@pytest.mark.parametrize(("n_planned", "n_slots"), [(N_ALL, 40), (40, FLOOR), (40, N_ALL)])
def test_with_a_governor_a_successor_keeps_to_the_size_that_the_user_chose(
    store: Store, short_dir: Path, n_planned: int, n_slots: int
) -> None:
    with spawn("prefetch", short_dir, pool_settings(store, n_planned, GOVERNOR="on")) as first:
        first.wait_for_state("ready", n_slots=n_planned)
        with PoolUser(short_dir, store) as user:
            resize(first, store, n_slots)
            with successor(first, store, n_planned, GOVERNOR="on") as second:
                second.wait_for_state("ready", n_slots=n_slots)
                assert_kept(second, store, n_slots)
                use_everything(user)
                with successor(second, store, n_planned, GOVERNOR="on") as third:
                    third.wait_for_state("ready", n_slots=n_slots)
                    assert_kept(third, store, n_slots)


def test_after_an_orderly_end_the_settings_count_again(store: Store, short_dir: Path) -> None:
    for _ in range(2):
        with spawn("prefetch", short_dir, pool_settings(store, N_ALL)) as daemon:
            assert daemon.wait_for_state("ready").metrics["pool_target_bytes"] == int(size_of(store, N_ALL))
            resize(daemon, store, 40)


def test_a_daemon_killed_while_it_waits_for_a_slot_loses_none(prefetch: DaemonProcess, store: Store) -> None:
    """Most of the slots to be given up are retired already, one is in use; the successor goes on from there."""
    with PoolUser(prefetch.run_dir.path, store) as user:
        use_everything(user)
        [slot] = user.hold(N_LAYERS - 1, [N_EXPERTS - 1])
        assert isinstance(ask_size(prefetch, size_of(store, FLOOR)), PoolState)
        assert prefetch.status().metrics["slots_used"] == FLOOR + 1
        with successor(prefetch, store) as second:
            n_slots = second.wait_for_state("ready", slots_held=1, slots_used=FLOOR + 1).metrics["n_slots"]
            assert n_slots > slot
            use_everything(user)
            user.release()
            second.wait_for_state("ready", n_slots=FLOOR)
            assert_memory(second, store, FLOOR)
            use_everything(user)
            resize(second, store, N_ALL)
            use_everything(user)
            second.wait_for_state("ready", slots_used=N_ALL)


def test_kills_at_any_moment_of_a_resize_never_give_wrong_bytes(store: Store, short_dir: Path) -> None:
    rng, settings = random.Random(2), pool_settings(store, N_ALL)
    with ExitStack() as stack:
        traffic: Traffic | None = None
        for n in (FLOOR, N_ALL, FLOOR):
            with spawn("prefetch", short_dir, settings) as daemon:
                daemon.wait_for_state("ready")
                traffic = traffic or stack.enter_context(Traffic(short_dir, store))
                traffic.wait_for(10)
                assert daemon.status().metrics["unplaced_experts"] == 0
                daemon.peer().send(ResizePool("r", size_of(store, n)))
                traffic.wait_for(rng.randrange(3))
                daemon.kill()
        last = stack.enter_context(spawn("prefetch", short_dir, settings))
        assert traffic is not None
        traffic.wait_for(10)
        resize(last, store, FLOOR)
        assert_memory(last, store, FLOOR)
        traffic.wait_for(10)
