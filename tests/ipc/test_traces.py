"""Recorded routing of the real daemon: what replay finds in a trace is what the daemon did, expert by expert."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle.messages import Error, StartTrace, StopTrace, TraceState
from sparkle.policy import POLICIES, LayerShape, Policy, make_policy
from sparkle.replay import Score, replay
from sparkle.store import Store
from sparkle.trace import Event, Origin, Trace, read_trace
from tests.daemons import DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser
from tests.ipc.pools import ask, pool_settings, skewed_set, wait_for_uses, write_store

pytestmark = pytest.mark.ipc

N_LAYERS, N_EXPERTS, TOP_K = 4, 16, 2
N_SLOTS = N_LAYERS * N_EXPERTS // 2
N_STEPS = 120
MANY_ROWS = 8
FILE_LIMIT_BYTES = 8192  # more than a daemon's log has, less than the trace of the test would


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("traces") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture
def prefetch(store: Store, short_dir: Path) -> Iterator[DaemonProcess]:
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS)) as daemon:
        daemon.wait_for_state("ready", n_slots=N_SLOTS)
        yield daemon


def start(daemon: DaemonProcess, path: Path) -> None:
    state = ask(daemon, StartTrace("1", str(path)))
    assert isinstance(state, TraceState), state
    assert (state.path, state.is_recording, state.n_events) == (str(path), True, 0)


def stop(daemon: DaemonProcess) -> TraceState:
    state = ask(daemon, StopTrace("2"))
    assert isinstance(state, TraceState), state
    assert not state.is_recording
    return state


class Workload:
    """Tokens of two conversations, seeded: hot experts that differ by layer, and now and then a step of many rows."""

    def __init__(self, user: PoolUser, seed: int) -> None:
        self._user = user
        self._rng = random.Random(seed)
        self._hot = [self._rng.sample(range(N_EXPERTS), N_EXPERTS) for _ in range(N_LAYERS)]
        self._step = 0
        self.events: list[tuple[Origin, int, list[int]]] = []

    def run(self, n_steps: int) -> int:
        """Do so many steps, check every byte, and return how many experts were used."""
        n_before = sum(len(experts) for _, _, experts in self.events)
        for _ in range(n_steps):
            self._step += 1
            rows = self._rng.randint(2, MANY_ROWS) if self._step % 10 == 0 else 1
            origin = Origin(self._step, self._rng.randrange(2), rows, self._rng.randrange(100))
            for layer, hot in enumerate(self._hot):
                experts = list(dict.fromkeys(e for _ in range(rows) for e in skewed_set(self._rng, hot, TOP_K)))
                self._use(layer, experts, origin)
        return sum(len(experts) for _, _, experts in self.events) - n_before

    def _use(self, layer: int, experts: list[int], origin: Origin) -> None:
        self.events.append((origin, layer, experts))
        slots = self._user.client.acquire(layer, experts, origin)
        for slot, expert in zip(slots, experts, strict=True):
            assert self._user.bytes_in(slot) == self._user._record(layer, expert)
        self._user.client.release(slots)


class Watched:
    """A policy that also keeps the events as replay shows them to it: `is_hit` is what replay has found."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen: list[Event] = []
        self.on_load, self.on_evict = policy.on_load, policy.on_evict
        self.seed, self.victims = policy.seed, policy.victims

    def on_step(self, event: Event) -> None:
        self.seen.append(event)
        self._policy.on_step(event)


def replayed(trace: Trace, policy: str) -> tuple[Score, list[Event]]:
    """Replay a trace under a policy from the pool that it began with."""
    layers = [LayerShape(x.index, x.n_experts, x.top_k) for x in trace.header.layers]
    watched = Watched(make_policy(policy, layers))
    [n_slots] = trace.header.n_slots
    return replay(trace.events, layers, n_slots, watched, trace.header.resident), watched.seen


# --- live = replay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(POLICIES))
def test_replay_finds_what_the_daemon_did(store: Store, short_dir: Path, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "routing.trace"
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS, POLICY=policy)) as daemon:
        daemon.wait_for_state("ready", n_slots=N_SLOTS, policy=policy)
        start(daemon, path)
        with PoolUser(short_dir, store) as user:
            workload = Workload(user, seed=1)
            n_uses = workload.run(N_STEPS)
            metrics = wait_for_uses(daemon, n_uses)
        assert stop(daemon).n_events == N_STEPS * N_LAYERS
    trace = read_trace(path)
    assert not trace.is_truncated
    assert (trace.header.policy, trace.header.resident, trace.header.n_slots) == (policy, (), (N_SLOTS,))
    assert trace.header.fingerprint == store.fingerprint
    assert [(Origin(e.step, e.stream, e.rows, e.token), e.layer, e.experts) for e in trace.events] == workload.events

    score, seen = replayed(trace, policy)
    assert [event.is_hit for event in seen] == [event.is_hit for event in trace.events]
    assert (score.n_uses, score.n_misses) == (n_uses, metrics["misses"])
    assert score.n_uses - score.n_misses == metrics["hits_resident"]
    assert metrics["evictions"] == score.n_misses - N_SLOTS > 100, "the pool was under pressure"
    assert metrics["bytes_read"] == score.n_misses * store.classes[0].record_bytes


def test_a_trace_that_begins_in_a_full_pool_says_what_was_there(
    prefetch: DaemonProcess, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "later.trace"
    with PoolUser(prefetch.run_dir.path, store) as user:
        workload = Workload(user, seed=2)
        n_before = workload.run(30)
        before = wait_for_uses(prefetch, n_before)
        start(prefetch, path)
        assert prefetch.status().metrics["is_recording"] == 1
        n_uses = workload.run(30)
        after = wait_for_uses(prefetch, n_before + n_uses)
        stop(prefetch)
        assert prefetch.status().metrics["is_recording"] == 0
    trace = read_trace(path)
    assert len(trace.header.resident) == N_SLOTS
    score, seen = replayed(trace, "lru")  # whose whole state is the order of what is there
    assert [event.is_hit for event in seen] == [event.is_hit for event in trace.events]
    assert (score.n_uses, score.n_misses) == (n_uses, after["misses"] - before["misses"])


def test_a_trace_has_all_that_happened_between_start_and_stop(
    prefetch: DaemonProcess, store: Store, tmp_path: Path
) -> None:
    """Hits travel without a message: whoever stops right after the last must still find it, whoever starts late not."""
    with PoolUser(prefetch.run_dir.path, store) as user:
        user.use(0, [0, 1])
        for n in range(20):
            user.use(0, [0])
            start(prefetch, tmp_path / f"{n}.trace")
            user.use(0, [1])
            assert stop(prefetch).n_events == 1
            [event] = read_trace(tmp_path / f"{n}.trace").events
            assert (event.experts, event.is_hit) == ([1], [True])


# --- what is refused -------------------------------------------------------------------------------------------------


def test_one_trace_at_a_time(prefetch: DaemonProcess, tmp_path: Path) -> None:
    first, second = tmp_path / "first.trace", tmp_path / "second.trace"
    refused = ask(prefetch, StopTrace("0"))
    assert isinstance(refused, Error)
    assert (refused.code, refused.request_id) == ("bad_request", "0")
    assert "no trace is being recorded" in refused.message
    start(prefetch, first)
    refused = ask(prefetch, StartTrace("3", str(second)))
    assert isinstance(refused, Error)
    assert (refused.code, refused.request_id) == ("bad_request", "3")
    assert str(first) in refused.message
    assert not second.exists()
    stop(prefetch)
    start(prefetch, second)
    stop(prefetch)
    assert [len(read_trace(path).events) for path in (first, second)] == [0, 0]


def test_files_that_cannot_be_made_are_refused(prefetch: DaemonProcess, store: Store, tmp_path: Path) -> None:
    taken, no_folder = tmp_path / "taken", tmp_path / "none" / "x.trace"
    taken.write_text("precious")
    for path, code, text in (
        ("relative.trace", "bad_request", "is not an absolute path"),
        ("", "bad_request", "is not an absolute path"),
        (str(taken), "config", "exists; name a file that does not"),
        ("/dev/full", "config", "exists"),
        (str(no_folder), "storage", "Choose another folder"),
        (str(tmp_path), "config", "exists"),
        ("/x\0y", "bad_request", "is not an absolute path"),
    ):
        refused = ask(prefetch, StartTrace("4", path))
        assert isinstance(refused, Error), path
        assert (refused.code, refused.request_id) == (code, "4")
        assert text in refused.message
    assert taken.read_text() == "precious"
    assert prefetch.status().metrics["is_recording"] == 0
    with PoolUser(prefetch.run_dir.path, store) as user:
        user.use(0, [0, 1])


# --- ends that nobody asked for --------------------------------------------------------------------------------------


def test_a_killed_daemon_leaves_a_trace_that_can_be_read(store: Store, short_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed.trace"
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS), deadlines={"PROFILE_S": 0.05}) as daemon:
        start_when_ready(daemon, path)
        empty = path.stat().st_size
        with PoolUser(short_dir, store) as user:
            workload = Workload(user, seed=3)
            wait_for_uses(daemon, workload.run(10))
            while path.stat().st_size == empty:
                daemon.status()
            daemon.kill()
            trace = read_trace(path)
            assert trace.is_truncated
            n = len(trace.events)
            assert n > 0
            assert [(e.layer, e.experts) for e in trace.events] == [(x, y) for _, x, y in workload.events[:n]]
            with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS)) as successor:
                successor.wait_for_state("ready", is_recording=0)
                user.use(0, [0, 1])


def test_an_orderly_end_closes_the_trace(store: Store, short_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "ended.trace"
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS)) as daemon:
        start_when_ready(daemon, path)
        with PoolUser(short_dir, store) as user:
            workload = Workload(user, seed=4)
            workload.run(10)
            daemon.terminate()
    trace = read_trace(path)
    assert not trace.is_truncated
    assert len(trace.events) == len(workload.events)


def test_a_full_disk_ends_the_trace_and_nothing_else(prefetch: DaemonProcess, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "full.trace"
    start(prefetch, path)
    resource.prlimit(prefetch.process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, resource.RLIM_INFINITY))
    with PoolUser(prefetch.run_dir.path, store) as user:
        user.use(0, range(N_EXPERTS))
        rng, step = random.Random(5), 1
        while prefetch.status().metrics["is_recording"]:
            for _ in range(200):
                step += 1
                origin = Origin(step, rng.randrange(2**16), 1, rng.randrange(2**32))
                user.client.release(user.client.acquire(0, rng.sample(range(N_EXPERTS), 4), origin))
        assert "trace_ended" in prefetch.stderr()
        user.use(1, range(N_EXPERTS))
        user.use(2, range(N_EXPERTS))
    refused = ask(prefetch, StopTrace("5"))
    assert isinstance(refused, Error)
    assert refused.code == "bad_request"
    resource.prlimit(prefetch.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    start(prefetch, tmp_path / "after.trace")
    stop(prefetch)


def test_a_trace_whose_end_cannot_be_written_is_an_error_to_who_stops_it(
    prefetch: DaemonProcess, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "end.trace"
    start(prefetch, path)
    limit = path.stat().st_size
    with PoolUser(prefetch.run_dir.path, store) as user:
        user.use(0, [0, 1])
        resource.prlimit(prefetch.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        error = ask(prefetch, StopTrace("6"))
        assert isinstance(error, Error)
        assert (error.code, error.request_id) == ("storage", "6")
        assert str(path) in error.message
        user.use(1, [0, 1])
    assert prefetch.status().metrics["is_recording"] == 0


def start_when_ready(daemon: DaemonProcess, path: Path) -> None:
    daemon.wait_for_state("ready")
    start(daemon, path)
