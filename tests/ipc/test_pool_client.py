"""The pool client against a prefetch daemon that is scripted: late, wrong and missing answers, and every deadline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path

import pytest

from sparkle import config, regions
from sparkle._native import Mapping, Pool
from sparkle.errors import Cancelled, ConfigError, PeerError, StorageError, UnplacedExpert
from sparkle.manifest import ExpertLayer, layout_class
from sparkle.messages import AttachPool, CancelFetch, Error, ExpertsReady, FetchExperts, Hello, PoolAttached
from sparkle.pool_client import PoolClient
from sparkle.regions import Region
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkle.trace import Event, Origin
from tests.fakes import FakeDaemon, Say

pytestmark = pytest.mark.ipc

LAYOUT = layout_class("tiny", [("up_proj.weight", "U8", (64,))], {})
LAYER = ExpertLayer(0, "m", "main", 0, 8, 2, "layer_000", 16384, (0,) * 8)
STORE = Store(Path("tiny.store"), "f" * 64, (LAYOUT,), (LAYER,), {}, {}, {}, {})
N_SLOTS = 4


class FakePrefetch(FakeDaemon):
    """Owns a real pool; what it answers to FetchExperts is up to the test."""

    def __init__(self, run_dir: Path) -> None:
        self.prefix = RunDir(run_dir).shm_prefix
        self.pool = self.new_pool()
        super().__init__(run_dir, "prefetch")
        self.on[AttachPool] = self.attach

    def new_pool(self, fingerprint: str = STORE.fingerprint) -> Pool:
        self.unlink()
        self.specs = regions.plan(self.prefix, [LAYOUT], [N_SLOTS])
        for spec in self.specs:
            Region.create(spec, LAYOUT)
        table = regions.to_json(self.specs)
        pool = Pool.create(regions.control_name(self.prefix), 1, 8, N_SLOTS, fingerprint, table)
        pool.complete()
        self.pool = pool
        return pool

    def unlink(self) -> None:
        for spec in getattr(self, "specs", ()):
            Mapping.unlink(spec.name)
        Mapping.unlink(regions.control_name(self.prefix))

    def attach(self, message: AttachPool, say: Say) -> None:
        say(PoolAttached(message.incarnation, regions.control_name(self.prefix), 0, self.epoch))

    def load(self, *experts: int, grants: int = 1) -> list[int]:
        """Put experts into slots 0, 1, …"""
        for slot, expert in enumerate(experts):
            assert self.pool.begin_load(slot, 0, expert)
            self.pool.publish(slot, grants)
        return list(range(len(experts)))

    def serve(self, message: FetchExperts, say: Say) -> None:
        say(ExpertsReady(message.request_id, self.load(*message.experts)))


@pytest.fixture
def prefetch(short_dir: Path) -> Iterator[FakePrefetch]:
    with FakePrefetch(short_dir) as fake:
        yield fake
        fake.unlink()


@pytest.fixture
def client(prefetch: FakePrefetch, short_dir: Path) -> Iterator[PoolClient]:
    client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    client.attach(5.0)
    yield client
    client.close()


def marked(prefetch: FakePrefetch) -> list[int]:
    return [slot for slot in range(N_SLOTS) if prefetch.pool.mask(slot)]


# --- attaching ------------------------------------------------------------------------------------------------------


def test_attaching_stops_at_once_when_it_is_no_longer_wanted(short_dir: Path) -> None:
    with FakeDaemon(short_dir, "prefetch") as mute:
        client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
        looks = itertools.count()
        with pytest.raises(Cancelled):
            client.attach(60.0, lambda: next(looks) > 3)
        client.close()
        mute.wait_for(Hello)
        assert len(mute.received) < 10  # it must not send as fast as it can


def test_attaching_ends_at_its_deadline(short_dir: Path) -> None:
    client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    with pytest.raises(PeerError, match=rf"{short_dir}/prefetch.sock within 0 s; is it running\? \(sparkle-ctl status"):
        client.attach(0.1)
    client.close()


def test_a_pool_that_has_gone_again_is_waited_for(prefetch: FakePrefetch, short_dir: Path) -> None:
    prefetch.unlink()
    client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    with pytest.raises(PeerError, match=r"cannot be mapped.*No such file"):
        client.attach(0.2)
    prefetch.new_pool()
    client.attach(5.0)
    assert len(client.regions) == 1
    client.close()


def test_another_models_pool_is_refused(prefetch: FakePrefetch, short_dir: Path) -> None:
    prefetch.new_pool(fingerprint="0" * 64)
    client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    with pytest.raises(ConfigError, match="another model"):
        client.attach(5.0)
    client.close()


def test_a_refusal_that_will_not_change_is_raised(prefetch: FakePrefetch, short_dir: Path) -> None:
    prefetch.on[AttachPool] = lambda message, say: say(Error("protocol", "no such layer"))
    client = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    with pytest.raises(Exception, match="no such layer"):
        client.attach(5.0)
    client.close()


def test_the_lock_proves_the_client_alive_until_it_leaves(client: PoolClient, short_dir: Path) -> None:
    [lock] = (short_dir / "clients").iterdir()
    assert lock.name == f"{client.incarnation}.lock"


# --- fetching -------------------------------------------------------------------------------------------------------


def test_hits_cost_no_message(prefetch: FakePrefetch, client: PoolClient) -> None:
    prefetch.load(3, 5, grants=0)
    assert client.acquire(0, [5, 3], Origin(2**32 + 7, stream=3, rows=1, token=9)) == [1, 0]
    [event] = starmap(Event, prefetch.pool.drain(0, 2**63))
    assert event == Event(7, event.time_us, 3, 1, 9, 0, [5, 3], [True, True])
    assert FetchExperts not in map(type, prefetch.received)
    client.release([1, 0])
    assert marked(prefetch) == []


def test_a_client_that_waits_holds_nothing_of_its_set(prefetch: FakePrefetch, client: PoolClient) -> None:
    prefetch.load(3, grants=0)
    seen: list[list[int]] = []

    def look_and_serve(message: FetchExperts, say: Say) -> None:
        seen.append(marked(prefetch))
        assert prefetch.pool.begin_load(1, 0, 4)
        prefetch.pool.publish(1, 1)
        say(ExpertsReady(message.request_id, [0, 1]))

    prefetch.on[FetchExperts] = look_and_serve
    assert client.acquire(0, [3, 4], Origin(1)) == [0, 1]
    assert seen == [[]]
    fetch = prefetch.wait_for(FetchExperts)
    assert (fetch.layer, fetch.experts, fetch.bit, fetch.ring_position) == (0, [3, 4], 0, 7)
    client.release([0, 1])


def test_a_set_evicted_before_it_is_taken_is_asked_for_anew(prefetch: FakePrefetch, client: PoolClient) -> None:
    def too_late(message: FetchExperts, say: Say) -> None:
        say(ExpertsReady(message.request_id, [0, 1]))  # nothing is there
        prefetch.on[FetchExperts] = prefetch.serve

    prefetch.on[FetchExperts] = too_late
    assert client.acquire(0, [1, 2], Origin(1)) == [0, 1]
    first, second = prefetch.wait_for(FetchExperts), prefetch.wait_for(FetchExperts, 2)
    assert first.request_id != second.request_id
    client.release([0, 1])


def test_silence_is_met_with_the_same_request_again(
    prefetch: FakePrefetch, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "RESEND_S", 0.1)
    replies = iter([None, Error("peer", "starting", retryable=True), ExpertsReady("", [])])

    def reluctant(message: FetchExperts, say: Say) -> None:
        match next(replies):
            case Error(code, text):
                say(Error(code, text, True, message.request_id))
            case ExpertsReady():
                prefetch.serve(message, say)

    prefetch.on[FetchExperts] = reluctant
    assert client.acquire(0, [1], Origin(1)) == [0]
    ids = {m.request_id for m in prefetch.received if isinstance(m, FetchExperts)}
    kinds = [type(m) for m in prefetch.received]
    assert (len(ids), kinds.count(FetchExperts)) == (1, 3)
    assert kinds[-3:] == [Hello, AttachPool, FetchExperts]  # a new daemon would not know us
    client.release([0])


@pytest.mark.parametrize(
    ("code", "error"), [("storage", StorageError), ("pool", UnplacedExpert), ("protocol", UnplacedExpert)]
)
def test_an_error_gives_back_what_was_granted(
    prefetch: FakePrefetch, client: PoolClient, code: str, error: type[Exception]
) -> None:
    def fail(message: FetchExperts, say: Say) -> None:
        prefetch.load(1)
        say(Error(code, "it went wrong", False, message.request_id))

    prefetch.on[FetchExperts] = fail
    with pytest.raises(error, match="it went wrong"):
        client.acquire(0, [1, 2], Origin(1))
    assert (marked(prefetch), client.unplaced_experts) == ([], 1)


def test_a_deadline_is_an_unplaced_expert(
    prefetch: FakePrefetch, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "FETCH_DEADLINE_S", 0.1)
    with pytest.raises(UnplacedExpert, match="2 experts of layer 0 were not placed"):
        client.acquire(0, [1, 2], Origin(1))
    assert prefetch.wait_for(CancelFetch).request_id == prefetch.wait_for(FetchExperts).request_id
    assert client.unplaced_experts == 1
    assert client.stall_s >= 0.1


def test_a_cancel_waits_for_the_grants_that_cross_it(prefetch: FakePrefetch, client: PoolClient) -> None:
    """The daemon grants after it was told to stop, then answers: nothing stays marked once acquire has returned."""

    def cross(message: CancelFetch, say: Say) -> None:
        say(ExpertsReady(message.request_id, prefetch.load(1, 2)))

    prefetch.on[CancelFetch] = cross
    looks = itertools.count()
    with pytest.raises(Cancelled):
        client.acquire(0, [1, 2], Origin(1), lambda: next(looks) > 2)
    assert marked(prefetch) == []
    assert client.unplaced_experts == 0


def test_grants_of_an_answer_that_comes_very_late_are_given_back(
    prefetch: FakePrefetch, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CANCEL_DEADLINE_S", 0.2)

    def grant_only(message: CancelFetch, say: Say) -> None:
        prefetch.load(1, 2)

    prefetch.on[CancelFetch] = grant_only
    looks = itertools.count()
    with pytest.raises(Cancelled):
        client.acquire(0, [1, 2], Origin(1), lambda: next(looks) > 2)
    assert marked(prefetch) == []
    old = prefetch.wait_for(FetchExperts)

    def both(message: FetchExperts, say: Say) -> None:
        prefetch.load(6, 7, 5)
        say(ExpertsReady(old.request_id, [0, 1]))
        say(ExpertsReady(message.request_id, [2]))

    prefetch.on[FetchExperts] = both
    assert client.acquire(0, [5], Origin(2)) == [2]
    assert marked(prefetch) == [2]
    client.release([2])


def test_a_repeated_answer_marks_nothing(prefetch: FakePrefetch, client: PoolClient) -> None:
    def twice(message: FetchExperts, say: Say) -> None:
        slots = prefetch.load(*message.experts)
        say(ExpertsReady(message.request_id, slots))
        say(ExpertsReady(message.request_id, slots))

    prefetch.on[FetchExperts] = twice
    client.release(client.acquire(0, [1], Origin(1)))
    prefetch.pool.grant(0, 1)  # as the daemon did for the second answer, after the client had let go

    def serve_elsewhere(message: FetchExperts, say: Say) -> None:
        assert prefetch.pool.begin_load(2, 0, 2)
        prefetch.pool.publish(2, 1)
        say(ExpertsReady(message.request_id, [2]))

    prefetch.on[FetchExperts] = serve_elsewhere
    assert client.acquire(0, [2], Origin(2)) == [2]
    assert marked(prefetch) == [2]
    client.release([2])


# --- the event ring -------------------------------------------------------------------------------------------------


def test_a_full_ring_is_waited_for_and_nothing_is_dropped(
    prefetch: FakePrefetch, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch.load(1, grants=0)
    n_events = 0
    while client.native.push_event(0, 0, 1, 0, 0, [1] * 1000, [0] * 1000):
        n_events += 1
    monkeypatch.setattr(config, "RING_DEADLINE_S", 0.05)
    experts = list(range(8)) * 100
    with pytest.raises(PeerError, match="has not read events"):
        client.look_up(0, experts, Origin(1), lambda: False)
    looks = itertools.count()
    with pytest.raises(Cancelled):
        client.look_up(0, experts, Origin(1), lambda: next(looks) > 2)
    assert (marked(prefetch), client.native.n_held) == ([], 0)
    assert len(prefetch.pool.drain(0, 2**63)) == n_events
    assert client.acquire(0, [1], Origin(3)) == [0]
    client.release([0])


# --- a daemon that comes back ---------------------------------------------------------------------------------------


def test_a_new_daemon_over_the_same_memory_changes_no_view(prefetch: FakePrefetch, client: PoolClient) -> None:
    prefetch.load(1, grants=1)  # granted by a daemon that died before it could tell
    prefetch.epoch += 1
    client.attach(5.0)
    assert (client.generation, marked(prefetch)) == (1, [])


def test_a_new_pool_is_mapped_anew(prefetch: FakePrefetch, client: PoolClient) -> None:
    old = client.regions[0].spec.name
    prefetch.new_pool()
    prefetch.epoch += 1
    client.attach(5.0)
    assert (client.generation, client.regions[0].spec.name != old) == (2, True)
    prefetch.load(4, grants=0)
    assert client.acquire(0, [4], Origin(1)) == [0]
    client.release([0])


def test_two_clients_of_one_process_have_names_of_their_own(
    prefetch: FakePrefetch, client: PoolClient, short_dir: Path
) -> None:
    other = PoolClient(RunDir(short_dir), STORE, [0], "compute")
    assert other.incarnation != client.incarnation
    assert f"-{os.getpid()}-" in other.incarnation
    other.close()
