"""Recorded usage: what a run has learned of the workload is there for the next, and never in the way of a request."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkle import profile, regions
from sparkle._native import READY, Pool
from sparkle.policy import Key
from sparkle.profile import UsageProfile, profile_path
from sparkle.store import Store
from sparkle.trace import Event
from tests.daemons import WAIT_S, DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser
from tests.ipc.pools import pool_settings, resident, write_store

pytestmark = pytest.mark.ipc

N_LAYERS, N_EXPERTS, TOP_K = 4, 16, 2
N_SLOTS = 32
HOTTEST = [(layer, expert) for expert in (9, 2, 11, 5, 0, 7, 14, 1, 8) for layer in (1, 3, 0, 2)]  # 4 more than slots


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("profile") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """So many experts that filling a pool takes a while."""
    return write_store(tmp_path_factory.mktemp("long") / "bytes.store", N_LAYERS, 256, TOP_K)


def settings(store: Store, **others: str) -> dict[str, str]:
    return pool_settings(store, N_SLOTS, **{"PROFILE": "on", **others})


def file_of(run_dir: Path, store: Store) -> Path:
    return profile_path(run_dir / "state", store.fingerprint)


def recorded(path: Path, store: Store, hottest: list[Key]) -> None:
    """Write the file that `work` would leave behind."""
    usage = UsageProfile.for_store(store)
    for i in range(len(hottest)):
        for layer, expert in hottest[: len(hottest) - i]:
            usage.observe(Event(i, 0, 0, 1, 0, layer, [expert], [True]))
    usage.save(path)


def work(user: PoolUser) -> None:
    """Use each of the hottest once more than the next."""
    for i in range(len(HOTTEST)):
        for layer, expert in HOTTEST[: len(HOTTEST) - i]:
            user.use(layer, [expert])


def tokens_of_work() -> int:
    """Each use is a token of its layer; the layer with the most tokens says how many there were."""
    n = [0] * N_LAYERS
    for i, (layer, _) in enumerate(HOTTEST):
        n[layer] += len(HOTTEST) - i
    return max(n)


# --- recorded and kept -----------------------------------------------------------------------------------------------


def test_usage_outlives_a_kill(store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, settings(store), deadlines={"PROFILE_S": 0.05}) as first:
        path = file_of(short_dir, store)
        with PoolUser(short_dir, store) as user:
            work(user)
            first.wait_for_state("ready", profile_tokens=tokens_of_work())
            while not path.exists() or profile.load(path).n_tokens < tokens_of_work():
                first.status()
            first.kill()
    saved = profile.load(path)
    assert saved.hottest() == HOTTEST
    assert path.stat().st_mode & 0o777 == 0o600
    with spawn("prefetch", short_dir, settings(store)) as second:
        second.wait_for_state("ready", profile_tokens=tokens_of_work())
        with PoolUser(short_dir, store) as user:
            user.use(0, [3])
            second.wait_for_state("ready", profile_tokens=tokens_of_work() + 1)
        second.terminate()
    assert profile.load(path).n_tokens == tokens_of_work() + 1


def test_an_orderly_end_loses_nothing(store: Store, short_dir: Path) -> None:
    """Not even what clients did in the last milliseconds."""
    with spawn("prefetch", short_dir, settings(store)) as daemon, PoolUser(short_dir, store) as user:
        work(user)
        daemon.terminate()
    assert profile.load(file_of(short_dir, store)).n_tokens == tokens_of_work()


def test_nothing_is_recorded_where_the_user_does_not_want_it(store: Store, short_dir: Path) -> None:
    """Nor is what was recorded before made use of."""
    off = settings(store, PROFILE="off", PIN_FRACTION="0.2")
    path = file_of(short_dir, store)
    recorded(path, store, HOTTEST)
    before = path.read_bytes()
    with (
        spawn("prefetch", short_dir, off, deadlines={"PROFILE_S": 0.05}) as daemon,
        PoolUser(short_dir, store) as user,
    ):
        assert daemon.wait_for_state("ready", slots_pinned=0).metrics["profile_tokens"] == 0
        work(user)
        daemon.wait_for_state("ready", slots_held=0, profile_tokens=0)
        daemon.terminate()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# --- a warm start ----------------------------------------------------------------------------------------------------


def test_the_next_start_fills_the_pool_with_the_hottest(store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, settings(store)) as first, PoolUser(short_dir, store) as user:
        work(user)
        for layer in range(N_LAYERS):
            user.use(layer, [expert for expert in range(N_EXPERTS) if (layer, expert) not in HOTTEST])
        assert not set(HOTTEST[:N_SLOTS]) <= resident(first, store), "the last used are others"
        first.terminate()
    with (
        spawn("prefetch", short_dir, settings(store, BACKGROUND_FILL="on")) as second,
        PoolUser(short_dir, store) as user,
    ):
        second.wait_for_state("ready", slots_used=N_SLOTS, slots_loading=0)
        assert resident(second, store) == set(HOTTEST[:N_SLOTS])
        for layer, expert in HOTTEST[:N_SLOTS]:
            user.use(layer, [expert])
        metrics = second.wait_for_state("ready", slots_side=0).metrics
        size = store.classes[0].record_bytes
        assert (metrics["misses"], metrics["bytes_read_background"]) == (0, N_SLOTS * size)
        assert metrics["predicted_bytes"]["fill"] == {
            "issued": N_SLOTS * size,
            "used": N_SLOTS * size,
            "late": 0,
            "wasted": 0,
        }


def test_slots_that_the_profile_leaves_empty_are_filled_too(store: Store, short_dir: Path) -> None:
    few = HOTTEST[:5]
    recorded(file_of(short_dir, store), store, few)
    with (
        spawn("prefetch", short_dir, settings(store, BACKGROUND_FILL="on")) as second,
        PoolUser(short_dir, store),
    ):
        second.wait_for_state("ready", slots_used=N_SLOTS, slots_loading=0)
        assert set(few) < resident(second, store)


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfuda", "pinned"])
def test_policies_know_what_was_hot_before(store: Store, short_dir: Path, policy: str) -> None:
    """A scan of all other experts, once each, does not push out what is hot; but for a policy that learns nothing."""
    hot = HOTTEST[: N_SLOTS // 4]
    recorded(file_of(short_dir, store), store, hot)
    warm = settings(store, BACKGROUND_FILL="on", POLICY=policy)
    with spawn("prefetch", short_dir, warm) as second, PoolUser(short_dir, store) as user:
        second.wait_for_state("ready", slots_used=N_SLOTS, slots_loading=0)
        for layer in range(N_LAYERS):
            for expert in range(N_EXPERTS):
                if (layer, expert) not in hot:
                    user.use(layer, [expert])
        n_left = len(resident(second, store) & set(hot))
    assert n_left == 0 if policy == "lru" else n_left > len(hot) / 2


# --- files that are not what they were -------------------------------------------------------------------------------


def _garbage(path: Path, store: Store) -> None:
    path.write_bytes(b"\xff{" * 100)


def _half(path: Path, store: Store) -> None:
    recorded(path, store, HOTTEST)
    path.write_bytes(path.read_bytes()[:-40])


def _newer(path: Path, store: Store) -> None:
    recorded(path, store, HOTTEST)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


def _of_another_model(path: Path, store: Store) -> None:
    recorded(path, store, HOTTEST)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "f" * 64}))


def _a_folder(path: Path, store: Store) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_garbage, "is damaged or no usage profile"),
        (_half, "is damaged or no usage profile"),
        (_newer, "Update Sparkle"),
        (_of_another_model, "is of another model"),
        (_a_folder, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_set_aside(
    store: Store, short_dir: Path, damage: Callable[[Path, Store], None], text: str
) -> None:
    path = file_of(short_dir, store)
    path.parent.mkdir()
    damage(path, store)
    with spawn("prefetch", short_dir, settings(store)) as daemon, PoolUser(short_dir, store) as user:
        user.use(0, [0, 1])
        daemon.wait_for_state("ready", profile_tokens=1)
        log = daemon.stderr()
        assert "profile_not_used" in log
        assert text in log
        aside = path.with_name(f"{path.name}.damaged")
        assert str(aside) in log
        assert aside.exists()
        daemon.terminate()
    assert profile.load(path).hottest() == [(0, 0), (0, 1)]


def test_a_state_folder_that_cannot_be_used_costs_the_profile_and_nothing_else(store: Store, short_dir: Path) -> None:
    not_a_folder = short_dir / "file"
    not_a_folder.write_text("precious")
    broken = settings(store, STATE_DIR=str(not_a_folder))
    with (
        spawn("prefetch", short_dir, broken, deadlines={"PROFILE_S": 0.05}) as daemon,
        PoolUser(short_dir, store) as user,
    ):
        user.use(0, [0, 1])
        while "profile_not_saved" not in daemon.stderr():
            daemon.status()
        user.use(1, range(N_EXPERTS))
        daemon.terminate()
    assert not_a_folder.read_text() == "precious"


# --- demand first ----------------------------------------------------------------------------------------------------


def n_ready(daemon: DaemonProcess) -> int:
    pool = Pool.attach(regions.control_name(daemon.run_dir.shm_prefix))
    return sum(pool.state(slot) == READY for slot in range(pool.n_slots))


def test_a_request_does_not_wait_for_the_filling_of_the_pool(long_store: Store, short_dir: Path) -> None:
    """It comes while the pool is being filled, and asks for what the filling would read last."""
    n_slots = N_LAYERS * 256
    filling = pool_settings(long_store, n_slots, BACKGROUND_FILL="on", READ_DEPTH="1")
    with spawn("prefetch", short_dir, filling) as daemon, PoolUser(short_dir, long_store) as user:
        while n_ready(daemon) == 0:
            daemon.status()
        daemon.process.send_signal(signal.SIGSTOP)
        n_before = n_ready(daemon)
        assert n_before < n_slots / 2
        worker = threading.Thread(target=user.use, args=(3, [253, 254, 255]))
        position = user.client.native.ring_position
        worker.start()
        while user.client.native.ring_position == position:  # its event is written before it asks
            assert worker.is_alive()
        daemon.process.send_signal(signal.SIGCONT)
        worker.join(WAIT_S)
        n_after = n_ready(daemon)
        assert not worker.is_alive()
        assert n_after < n_slots, "it was served before the rest was read"
        metrics = daemon.wait_for_state("ready", slots_used=n_slots, slots_loading=0).metrics
        assert metrics["misses"] == 3
        size = long_store.classes[0].record_bytes
        assert (metrics["bytes_read_demand"], metrics["bytes_read"]) == (3 * size, n_slots * size)
        for layer in range(N_LAYERS):
            user.use(layer, range(0, 256, 7))
        assert daemon.status().metrics["misses"] == 3
