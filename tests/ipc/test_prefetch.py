"""The prefetch daemon as a process: every byte in every slot, contention, deaths, and messages that make no sense."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparkle import config, telemetry
from sparkle._native import RING_WORDS, Mapping
from sparkle.errors import Cancelled, UnplacedExpert
from sparkle.messages import AttachPool, CancelFetch, Error, ExpertsReady, FetchExperts, PoolAttached
from sparkle.regions import control_name
from sparkle.rundir import FileLock
from sparkle.store import Store
from tests.daemons import WAIT_S, DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser, PoolUserProcess

pytestmark = pytest.mark.ipc

TOP_K, N_EXPERTS, N_LAYERS = 2, 8, 2
LEAST_SLOTS = TOP_K + 2  # see sparkle.budget
RING_BYTES = 128 + 4 * RING_WORDS
IDLE_CPU_FRAC = 0.2


@pytest.fixture(scope="module")
def store(random_stores: dict[str, Path]) -> Store:
    return Store.open(random_stores["aligned"])


def shm_of(daemon: DaemonProcess) -> list[str]:
    prefix = daemon.run_dir.shm_prefix.lstrip("/")
    return sorted(p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(prefix))


def pool_bytes(store: Store, n_slots: int) -> str:
    return str(n_slots * store.classes[0].record_bytes)


def n_counted(daemon: DaemonProcess) -> int:
    """Experts that the daemon says clients asked for, however they were met."""
    metrics = daemon.status().metrics
    return sum(metrics[name] for name in ("hits_resident", "hits_in_flight", "hits_late", "misses"))


def wait_for_count(daemon: DaemonProcess, n_asked: int) -> None:
    """Wait until all events have been read from the rings; each expert must be counted, and once."""
    deadline = time.monotonic() + WAIT_S
    while (n := n_counted(daemon)) < n_asked and time.monotonic() < deadline:
        pass
    assert n == n_asked, daemon.status()


@pytest.fixture(scope="module")
def least(store: Store) -> Iterator[DaemonProcess]:
    """A daemon with the smallest pool that is allowed."""
    settings = {"SPARKLE_MODEL": str(store.path), "SPARKLE_POOL": pool_bytes(store, LEAST_SLOTS)}
    with (
        tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder,
        spawn("prefetch", Path(folder), settings) as daemon,
    ):
        daemon.wait_for_state("ready", n_slots=LEAST_SLOTS)
        yield daemon


@pytest.fixture
def prefetch(least: DaemonProcess) -> Iterator[DaemonProcess]:
    """The same; a test must leave no client, no marked slot and no fetch behind."""
    yield least
    least.wait_for_state("ready", n_clients=0, slots_held=0, slots_loading=0)


@pytest.fixture
def user(prefetch: DaemonProcess, store: Store) -> Iterator[PoolUser]:
    with PoolUser(prefetch.run_dir.path, store) as user:
        yield user


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["aligned", "odd"])
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_whole_sets_arrive_byte_for_byte(
    random_stores: dict[str, Path], short_dir: Path, shape: str, engine: str
) -> None:
    """Every expert of every layer, with the background filling the pool at the same time."""
    store = Store.open(random_stores[shape])
    with spawn("prefetch", short_dir, {"SPARKLE_MODEL": str(store.path), "SPARKLE_IO": engine}) as daemon:
        try:
            status = daemon.wait_for_state("ready")
        except AssertionError:
            if engine == "uring" and "kernel refuses it" in daemon.stderr():
                pytest.skip("the kernel refuses io_uring")
            raise
        telemetry.check("prefetch", status.metrics)
        assert str(status.metrics["io_engine"]).startswith({"uring": "io_uring", "threads": "threads"}[engine])
        with PoolUser(short_dir, store) as user:
            for layer in range(N_LAYERS):
                user.use(layer, range(N_EXPERTS))
                user.use(layer, [5, 1])
            wait_for_count(daemon, N_LAYERS * (N_EXPERTS + 2))
            metrics = daemon.wait_for_state("ready", slots_held=0).metrics
            assert metrics["bytes_read"] == N_LAYERS * N_EXPERTS * store.classes[0].record_bytes  # each once
            assert metrics["bytes_read"] == metrics["bytes_read_demand"] + metrics["bytes_read_background"]
            assert metrics["checksums_verified"] >= N_LAYERS * N_EXPERTS
            assert (metrics["unplaced_experts"], metrics["evictions"], metrics["fetches_failed"]) == (0, 0, 0)
            assert metrics["hits_resident"] >= N_LAYERS * 2
        daemon.terminate()
        assert shm_of(daemon) == []


def test_the_smallest_pool_serves_any_set(prefetch: DaemonProcess, user: PoolUser) -> None:
    before, rng = n_counted(prefetch), random.Random(0)
    for _ in range(100):
        experts = rng.sample(range(N_EXPERTS), rng.randint(1, LEAST_SLOTS))
        user.use(rng.randrange(N_LAYERS), experts)
    wait_for_count(prefetch, before + user.n_asked)
    metrics = prefetch.status().metrics
    assert metrics["evictions"] > 100
    assert metrics["unplaced_experts"] == 0


def test_a_pool_one_byte_smaller_is_refused(store: Store, short_dir: Path) -> None:
    n_bytes = int(pool_bytes(store, LEAST_SLOTS)) - 1
    with spawn("prefetch", short_dir, {"SPARKLE_MODEL": str(store.path), "SPARKLE_POOL": str(n_bytes)}) as daemon:
        assert daemon.wait_for_exit() == 78
        assert "cannot hold one step" in daemon.stderr()


def test_clients_that_contend_for_the_smallest_pool_all_get_served(prefetch: DaemonProcess, store: Store) -> None:
    """Three clients whose sets do not fit at the same time: none is starved, none sees wrong bytes."""
    before, asked, failures = n_counted(prefetch), [0, 0, 0], list[BaseException]()

    def work(i: int) -> None:
        rng = random.Random(i)
        try:
            with PoolUser(prefetch.run_dir.path, store) as user:
                for _ in range(60):
                    user.use(rng.randrange(N_LAYERS), rng.sample(range(N_EXPERTS), rng.randint(2, LEAST_SLOTS)))
                asked[i] = user.n_asked
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert prefetch.status().metrics["unplaced_experts"] == 0
    # a set that is evicted again before its client took it is asked for, and counted, once more
    assert n_counted(prefetch) - before >= sum(asked)


# --- clients that die, stop or change their mind ---------------------------------------------------------------------


def test_slots_of_a_killed_client_are_free_again(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    with PoolUserProcess(prefetch.run_dir.path, store) as other:
        assert other.tell("hold 0 0,1,2,3").startswith("held ")
        assert prefetch.wait_for_state("ready", slots_held=LEAST_SLOTS).metrics["n_clients"] == 2
        other.kill()
        user.use(1, [4, 5, 6, 7])  # waits until the death is proved
    prefetch.wait_for_state("ready", n_clients=1, slots_held=0)
    assert len(list(prefetch.run_dir.clients.iterdir())) == 1


def test_slots_of_a_stopped_client_stay_its_own(
    prefetch: DaemonProcess, store: Store, user: PoolUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "FETCH_DEADLINE_S", 1.2)  # longer than a dead client would be found by
    with PoolUserProcess(prefetch.run_dir.path, store) as other:
        slots = [int(s) for s in other.tell("hold 0 0,1,2").removeprefix("held ").split(",")]
        before = [user.bytes_in(s) for s in slots]
        other.process.send_signal(signal.SIGSTOP)
        with pytest.raises(UnplacedExpert):
            user.use(1, [4, 5, 6, 7])
        user.use(1, [4])  # what is free is still to be had
        assert [user.bytes_in(s) for s in slots] == before
        assert prefetch.status().metrics["n_clients"] == 2
        other.process.send_signal(signal.SIGCONT)
        assert other.tell("release") == "released"
        user.use(1, [4, 5, 6, 7])
        other.kill()


def test_a_cancelled_fetch_leaves_no_slot_marked(prefetch: DaemonProcess, user: PoolUser) -> None:
    """Cancelled at any moment, and without another message of the client: grants are given back at once."""
    rng = random.Random(2)
    for n in range(40):
        looks = itertools.count()
        should_abort = functools.partial(_nth, looks, n % 8)
        try:
            user.hold(rng.randrange(N_LAYERS), rng.sample(range(N_EXPERTS), 3), should_abort)
            user.release()
        except Cancelled:
            pass
        prefetch.wait_for_state("ready", slots_held=0)


def _nth(looks: Iterator[int], n: int) -> bool:
    """True from the n-th look on."""
    return next(looks) >= n


def test_a_repeat_that_crosses_its_answer_marks_nothing(prefetch: DaemonProcess, user: PoolUser) -> None:
    peer, (incarnation, bit) = prefetch.peer(), (user.client.incarnation, user.client._bit)
    fetch = FetchExperts("r/1", incarnation, bit, 0, [1, 2], 0, 5000)
    peer.send(fetch)
    slots = peer.wait_for(ExpertsReady).slots
    assert prefetch.status().metrics["slots_held"] == 2  # granted: nobody has looked at them yet
    user.client.release(user.client.native.hold(0, [1, 2]))
    prefetch.wait_for_state("ready", slots_held=0)
    peer.send(fetch)
    assert peer.wait_for(ExpertsReady).slots == slots
    assert prefetch.status().metrics["slots_held"] == 0


def test_a_set_that_waits_ends_at_its_deadline(prefetch: DaemonProcess, user: PoolUser) -> None:
    """It names what it waited for; a cancel of a waiting set is answered too."""
    user.hold(0, [0, 1, 2])
    peer, (incarnation, bit) = prefetch.peer(), (user.client.incarnation, user.client._bit)
    before = prefetch.status().metrics
    peer.send(FetchExperts("w/1", incarnation, bit, 1, [4, 5], 0, 100))
    error = peer.wait_for(Error)
    assert (error.code, error.request_id) == ("pool", "w/1")
    assert "slots that other clients hold" in error.message
    peer.send(FetchExperts("w/2", incarnation, bit, 1, [4, 5], 0, 60_000))
    peer.send(CancelFetch("w/2"))
    assert peer.wait_for(Error).code == "cancelled"
    after = prefetch.status().metrics
    assert after["fetches_queued"] - before["fetches_queued"] == 2
    assert after["fetches_failed"] - before["fetches_failed"] == 1
    user.release()


# --- messages that make no sense -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"layer": N_LAYERS}, "protocol", "layer 2: the store has 2 layers"),
        ({"layer": -1}, "protocol", "layer -1"),
        ({"experts": []}, "protocol", "at least one"),
        ({"experts": [0, N_EXPERTS]}, "protocol", "from 0 to 7"),
        ({"experts": [-1]}, "protocol", "from 0 to 7"),
        ({"experts": [3, 3]}, "protocol", "named once"),
        ({"experts": list(range(LEAST_SLOTS + 1))}, "pool", "the pool has 4 slots"),
        ({"ring_position": -1}, "protocol", "ring_position -1"),
        ({"bit": 9}, "peer", "not attached"),
        ({"bit": -1}, "peer", "not attached"),
        ({"bit": 64}, "peer", "not attached"),
        ({"incarnation": "compute-1-a"}, "peer", "not attached"),
    ],
)
def test_malformed_fetches_are_errors_and_nothing_else(
    prefetch: DaemonProcess, user: PoolUser, changes: dict[str, object], code: str, text: str
) -> None:
    fields = {"layer": 0, "experts": [0], "bit": user.client._bit, "incarnation": user.client.incarnation}
    fields |= {"request_id": "m/1", "ring_position": 0, "deadline_ms": 1000, **changes}
    peer = prefetch.peer()
    peer.send(FetchExperts(**fields))  # type: ignore[arg-type]
    error = peer.wait_for(Error)
    assert (error.code, error.request_id) == (code, "m/1")
    assert text in error.message
    user.use(0, [0, 1])


@pytest.mark.parametrize(
    ("incarnation", "layers", "text"),
    [
        ("../../etc/passwd", [0], "is not <role>-<pid>-<hex time>"),
        ("compute-1-ab/x", [0], "is not"),
        ("compute-1-" + "a" * 60, [0], "is not"),
        ("compute-1-ab", [2], "has layers 0 to 1"),
        ("compute-1-ab", [-1], "has layers 0 to 1"),
        ("compute-1-ab", [0], "nobody holds the lock"),
    ],
)
def test_attaching_needs_a_name_and_a_lock(
    prefetch: DaemonProcess, incarnation: str, layers: list[int], text: str
) -> None:
    peer = prefetch.peer()
    peer.send(AttachPool(incarnation, 1, layers))
    error = peer.wait_for(Error)
    assert error.code == "protocol"
    assert text in error.message


def test_one_client_too_many_is_refused_until_one_leaves(prefetch: DaemonProcess) -> None:
    peer, locks = prefetch.peer(), list[FileLock]()
    for i in range(17):
        locks.append(FileLock(prefetch.run_dir.clients / f"compute-1-{i:x}.lock"))
        assert locks[-1].try_acquire()
        peer.send(AttachPool(f"compute-1-{i:x}", 1, []))
        answer = peer.receive()
        assert isinstance(answer, PoolAttached) == (i < 16), answer
    assert isinstance(answer, Error)
    assert (answer.code, answer.retryable) == ("pool", True)
    locks[3].close()  # as its process's death would
    peer.send(AttachPool("compute-1-10", 1, []))
    assert peer.wait_for(PoolAttached).bit == 3
    for lock in (*locks[:3], *locks[4:]):
        lock.close()
    prefetch.wait_for_state("ready", n_clients=0)


def test_a_damaged_ring_ends_nothing(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    memory = Mapping.attach(control_name(prefetch.run_dir.shm_prefix)).array()
    ring = memory[len(memory) - (16 - user.client._bit) * RING_BYTES :]
    ring[:8].view(np.uint64)[0] = 2**40
    user.use(0, [0, 1])
    prefetch.wait_for_state("ready")
    written = int(ring[:8].view(np.uint64)[0])
    ring[128:].view(np.uint32)[written % RING_WORDS : written % RING_WORDS + 6] = (0, 0, 1, 0, 0xFFFF << 16 | 1, 0)
    ring[:8].view(np.uint64)[0] = written + 6  # an event of a layer that does not exist
    user.use(0, [2, 3])
    assert prefetch.stderr().count("ring_damaged") >= 2


def test_raw_bytes_are_answered_with_an_error(prefetch: DaemonProcess) -> None:
    peer = prefetch.peer()
    for frames in ([b"x"], [b"SPK1", b"FetchExperts", b"\xc1"], [b"SPK1", b"Generate", b"\x80"]):
        peer.send(frames)
        assert peer.wait_for(Error).code == "protocol"


# --- one instance ----------------------------------------------------------------------------------------------------


def test_a_second_instance_does_not_disturb_the_first(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    user.hold(0, [0, 1])
    before = shm_of(prefetch)
    with spawn("prefetch", prefetch.run_dir.path, {"SPARKLE_MODEL": str(store.path)}) as second:
        assert second.wait_for_exit() == 78
        assert f"a prefetch daemon (pid {prefetch.process.pid}) already runs" in second.stderr()
    assert shm_of(prefetch) == before
    user.release()
    user.use(1, [0, 1, 2])


def test_an_idle_daemon_takes_little_of_the_cpu(prefetch: DaemonProcess, user: PoolUser) -> None:
    """A timer that is due within a millisecond must not make the loop spin until then."""
    began, cpu = time.monotonic(), _cpu_s(prefetch)
    with pytest.raises(subprocess.TimeoutExpired):
        prefetch.process.wait(1.0)
    assert _cpu_s(prefetch) - cpu < IDLE_CPU_FRAC * (time.monotonic() - began)


def _cpu_s(daemon: DaemonProcess) -> float:
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_client_that_only_hits_learns_of_a_new_pool(store: Store, short_dir: Path) -> None:
    """A daemon that ended in order took its pool along; the client's ring is read by nobody, until it attaches anew."""
    settings = {"SPARKLE_MODEL": str(store.path)}
    with spawn("prefetch", short_dir, settings) as first:
        first.wait_for_state("ready")
        user = PoolUser(short_dir, store)
        user.use(0, [1, 2])
    try:
        for n in (1000, 1):
            while user.client.native.push_event(0, 0, 1, 0, 0, [1] * n, [0] * n):
                pass
        with spawn("prefetch", short_dir, settings) as second:
            second.wait_for_state("ready")
            user.use(0, [1, 2])
            assert user.client.generation == 2
            assert second.status().metrics["n_clients"] == 1
    finally:
        user.client.close()
