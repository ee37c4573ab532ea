"""Forecasts: experts read before anybody asks, where they come from, what they may cost, and what they bring."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sparkle.messages import Error, HintExperts, PinExperts, PinState, Status, StatusRequest
from sparkle.store import Store
from sparkle.trace import Origin
from tests.daemons import DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser
from tests.ipc.pools import ask, pool_settings, resident, wait_for_uses, write_store

pytestmark = pytest.mark.ipc

N_LAYERS, N_EXPERTS, TOP_K = 12, 8, 2
N_SLOTS = 48
SIDE_LIMIT = 2 * TOP_K  # for pools that are not tiny: sparkled.prefetch.serving
CYCLE_SLOTS = 16  # fewer than one token's 24 experts: the last used are never those used next
N_TOKENS = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("hints") / "bytes.store", N_LAYERS, N_EXPERTS, TOP_K)


@pytest.fixture
def prefetch(store: Store, short_dir: Path) -> Iterator[DaemonProcess]:
    """A daemon that listens to the clients' own forecasts."""
    with spawn("prefetch", short_dir, pool_settings(store, N_SLOTS, PREFETCH="router")) as daemon:
        daemon.wait_for_state("ready", n_slots=N_SLOTS, prefetch_active="router")
        yield daemon


@pytest.fixture
def user(prefetch: DaemonProcess, store: Store) -> Iterator[PoolUser]:
    with PoolUser(prefetch.run_dir.path, store) as user:
        yield user


class Hinter:
    """Sends hints, and waits until the daemon has done with them what it will."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._peer = daemon.peer()

    def send(self, layer: int, experts: Sequence[int], predictor: str = "router") -> None:
        self._peer.send(HintExperts("compute-1-a", layer, list(experts), predictor))
        self._peer.send(StatusRequest())
        self._peer.wait_for(Status)  # in order: the hint has been taken
        self._daemon.wait_for_state("ready", slots_loading=0)


@pytest.fixture
def hinter(prefetch: DaemonProcess) -> Hinter:
    return Hinter(prefetch)


def account(daemon: DaemonProcess, store: Store, source: str = "router") -> dict[str, int]:
    """What came of the records that a predictor wanted."""
    size = store.classes[0].record_bytes
    n_bytes = daemon.status().metrics["predicted_bytes"].get(source, {})
    assert all(n % size == 0 for n in n_bytes.values())
    return {outcome: n // size for outcome, n in n_bytes.items()}


# --- what comes of a hint --------------------------------------------------------------------------------------------


def test_hinted_experts_are_there_when_they_are_asked_for(
    prefetch: DaemonProcess, store: Store, user: PoolUser, hinter: Hinter
) -> None:
    hinter.send(1, [3, 5])
    assert resident(prefetch, store) == {(1, 3), (1, 5)}
    assert account(prefetch, store) == {"issued": 2, "used": 0, "late": 0, "wasted": 0}
    assert prefetch.status().metrics["slots_side"] == 2
    user.use(1, [5, 3])
    metrics = wait_for_uses(prefetch, 2)
    assert (metrics["hits_resident"], metrics["misses"], metrics["bytes_read_demand"]) == (2, 0, 0)
    assert account(prefetch, store) == {"issued": 2, "used": 2, "late": 0, "wasted": 0}
    assert metrics["slots_side"] == 0
    hinter.send(1, [3, 5])  # here already
    assert account(prefetch, store)["issued"] == 2


def test_an_expert_asked_for_while_it_is_read_is_late(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    """Who comes first is a matter of microseconds: try until the request does."""
    n_hinted = n_used = 0
    while not (seen := account(prefetch, store)).get("late"):
        layer, expert = n_hinted // N_EXPERTS % N_LAYERS, n_hinted % N_EXPERTS
        n_hinted += 1
        n_used += 1
        user.client.hint(layer, [expert], "router")
        user.use(layer, [expert])
    metrics = wait_for_uses(prefetch, n_used)
    assert metrics["hits_late"] == seen["late"]
    assert metrics["bytes_read"] == n_used * store.classes[0].record_bytes, "each was read once"
    assert seen["used"] + seen["late"] == seen["issued"]


def test_a_forecast_that_did_not_come_true_is_wasted_once_evicted(
    prefetch: DaemonProcess, store: Store, user: PoolUser, hinter: Hinter
) -> None:
    hinter.send(1, [3, 5])
    user.use(1, [5])  # the layer's turn
    for layer in range(2, N_LAYERS):
        user.use(layer, range(N_EXPERTS))
    assert account(prefetch, store) == {"issued": 2, "used": 1, "late": 0, "wasted": 1}
    assert prefetch.status().metrics["slots_side"] == 0


def test_bytes_add_up_whatever_is_forecast_and_used(prefetch: DaemonProcess, store: Store, user: PoolUser) -> None:
    rng, n_used = random.Random(0), 0
    for _ in range(40):
        for layer in range(N_LAYERS):
            guess = rng.sample(range(N_EXPERTS), 3)
            ahead = (layer + 1) % N_LAYERS
            user.client.hint(ahead, guess, "router")
            experts = rng.sample(guess, 1) + rng.sample(range(N_EXPERTS), 2)
            user.use(layer, list(dict.fromkeys(experts)))
            n_used += len(set(experts))
    wait_for_uses(prefetch, n_used)
    metrics = prefetch.wait_for_state("ready", slots_loading=0, slots_held=0).metrics
    seen, size = account(prefetch, store), store.classes[0].record_bytes
    assert min(seen.values()) > 0, seen
    assert seen["issued"] == seen["used"] + seen["late"] + seen["wasted"] + metrics["slots_side"]
    assert metrics["bytes_read"] == (metrics["misses"] + seen["issued"]) * size
    assert metrics["unplaced_experts"] == 0


# --- what a hint may not do ------------------------------------------------------------------------------------------


def test_forecasts_take_no_more_than_their_share_of_the_pool(
    prefetch: DaemonProcess, store: Store, user: PoolUser, hinter: Hinter
) -> None:
    for layer in range(4):
        hinter.send(layer, range(N_EXPERTS))
    assert prefetch.status().metrics["slots_side"] == SIDE_LIMIT
    assert resident(prefetch, store) == {(0, e) for e in range(SIDE_LIMIT)}  # the likeliest come first
    user.use(0, [0, 7])  # the layer's turn: what was forecast for it no longer counts
    prefetch.wait_for_state("ready", slots_loading=0, slots_held=0)
    wait_for_uses(prefetch, 2)
    hinter.send(1, range(N_EXPERTS))
    assert account(prefetch, store)["issued"] == 2 * SIDE_LIMIT


def test_forecasts_evict_neither_what_is_held_nor_what_is_pinned(
    prefetch: DaemonProcess, store: Store, user: PoolUser, hinter: Hinter
) -> None:
    n_pinned = 8
    state = ask(prefetch, PinExperts("p", 0, list(range(n_pinned))))
    assert state == PinState("p", n_pinned, N_SLOTS - N_EXPERTS - 2, n_pinned, n_pinned)
    prefetch.wait_for_state("ready", slots_used=n_pinned)
    slots = [slot for layer in range(1, 6) for slot in user.hold(layer, range(N_EXPERTS))]
    assert len(slots) == N_SLOTS - n_pinned
    before, data = resident(prefetch, store), [user.bytes_in(slot) for slot in slots]
    for layer in range(6, N_LAYERS):
        hinter.send(layer, range(N_EXPERTS))
    assert resident(prefetch, store) == before
    assert [user.bytes_in(slot) for slot in slots] == data
    assert account(prefetch, store) == {}
    user.release()
    hinter.send(6, [1])
    assert before - resident(prefetch, store) <= {(layer, e) for layer in range(1, 6) for e in range(N_EXPERTS)}
    assert account(prefetch, store)["issued"] > 0


def test_hints_of_what_does_not_exist_are_errors_and_change_nothing(prefetch: DaemonProcess, store: Store) -> None:
    for layer, experts, text in (
        (N_LAYERS, [0], "HintExperts.layer 12: the store has 12 layers"),
        (-1, [0], "HintExperts.layer -1"),
        (0, [], "at least one"),
        (0, [1, N_EXPERTS], "from 0 to 7"),
        (0, [-1], "from 0 to 7"),
        (0, [3, 3], "named once"),
    ):
        error = ask(prefetch, HintExperts("compute-1-a", layer, experts, "router"))
        assert isinstance(error, Error), (layer, experts)
        assert error.code == "protocol"
        assert text in error.message
    assert prefetch.status().metrics["predicted_bytes"] == {}
    assert resident(prefetch, store) == set()


def test_hints_of_predictors_that_are_not_active_are_passed_over(
    prefetch: DaemonProcess, store: Store, hinter: Hinter
) -> None:
    for predictor in ("token", "previous", "fill", "", "x" * 1000):
        hinter.send(0, [1, 2], predictor)
    assert prefetch.status().metrics["predicted_bytes"] == {}
    assert resident(prefetch, store) == set()


@pytest.mark.parametrize(("mode", "wants_hints"), [("off", False), ("token", False), ("router", True)])
def test_clients_see_whether_hints_are_of_use(store: Store, short_dir: Path, mode: str, wants_hints: bool) -> None:
    with (
        spawn("prefetch", short_dir, pool_settings(store, N_SLOTS, PREFETCH=mode)) as daemon,
        PoolUser(short_dir, store) as user,
    ):
        assert user.client.native.wants_hints == wants_hints
        Hinter(daemon).send(0, [1, 2])
        metrics = daemon.status().metrics
        assert metrics["prefetch_active"] == mode
        assert bool(metrics["bytes_read"]) == wants_hints
        assert resident(daemon, store) == ({(0, 1), (0, 2)} if wants_hints else set())


# --- what forecasts bring --------------------------------------------------------------------------------------------


def routing_of_one(token: int, layer: int) -> list[int]:
    """Every token uses the same: what a step used is what the next will use."""
    return [layer % N_EXPERTS, (layer + 3) % N_EXPERTS]


def routing_of_two(token: int, layer: int) -> list[int]:
    """Two tokens take turns, and use different experts: only the token says which."""
    return [(layer + 4 * token) % N_EXPERTS, (layer + 4 * token + 1) % N_EXPERTS]


def hits(store: Store, run_dir: Path, predictor: str, routing: Callable[[int, int], list[int]]) -> int:
    """Decode a few tokens, each layer's set when the daemon has nothing left to read; return how many were hits."""
    with (
        spawn("prefetch", run_dir, pool_settings(store, CYCLE_SLOTS, PREFETCH=predictor)) as daemon,
        PoolUser(run_dir, store) as user,
    ):
        n_used = 0
        for step in range(N_TOKENS):
            for layer in range(N_LAYERS):
                token = step % 2
                experts = routing(token, layer)
                slots = user.client.acquire(layer, experts, Origin(step, token=token))
                for slot, expert in zip(slots, experts, strict=True):
                    assert user.bytes_in(slot) == user._record(layer, expert)
                user.client.release(slots)
                n_used += len(experts)
                wait_for_uses(daemon, n_used)
                metrics = daemon.wait_for_state("ready", slots_loading=0).metrics
        assert metrics["unplaced_experts"] == 0
        return int(metrics["hits_resident"])


@pytest.mark.parametrize(("predictor", "routing"), [("previous", routing_of_one), ("token", routing_of_two)])
def test_forecasts_hit_where_the_pool_alone_does_not(
    store: Store, tmp_path: Path, short_dir: Path, predictor: str, routing: Callable[[int, int], list[int]]
) -> None:
    n_alone = hits(store, short_dir, "off", routing)
    n_helped = hits(store, short_dir, predictor, routing)
    n_used = N_TOKENS * N_LAYERS * TOP_K
    assert n_alone == 0, "a cycle longer than the pool"
    assert n_helped > n_used / 2
