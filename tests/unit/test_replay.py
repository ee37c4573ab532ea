"""Replay and the optimum: Belady against a slow reference and against every possible choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkle.errors import PoolError
from sparkle.policy import POLICIES, LayerShape, make_policy
from sparkle.replay import belady, gap_recovered, replay
from sparkle.trace import Event, read_trace

pytestmark = pytest.mark.unit

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
Sets = list[list[int]]  # experts of layer 0, request by request
SETS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), max_size=30)


def events_of(sets: Sets) -> list[Event]:
    return [Event(i, 0, 0, 1, 0, 0, experts, [False] * len(experts)) for i, experts in enumerate(sets)]


def slow_belady(sets: Sets, n_slots: int, resident: Sequence[int]) -> int:
    """Evict, outside of the request, who is used again last."""
    pool, misses = set(resident), 0
    for i, wanted in enumerate(sets):
        absent = [e for e in wanted if e not in pool]
        misses += len(absent)
        pool |= set(absent)
        while len(pool) > n_slots:
            uses = {e: next((j for j in range(i + 1, len(sets)) if e in sets[j]), 10**9) for e in pool - set(wanted)}
            pool.remove(max(uses, key=lambda e: (uses[e], e)))
    return misses


def best_of_all(sets: Sets, n_slots: int) -> int:
    """The fewest misses over every choice of what stays."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for wanted in sets:
        after: dict[frozenset[int], int] = {}
        for pool, n in states.items():
            cost = n + sum(e not in pool for e in wanted)
            others = sorted(pool - set(wanted))
            room = n_slots - len(wanted)
            for kept in itertools.combinations(others, min(room, len(others))):
                state = frozenset(wanted) | frozenset(kept)
                after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


@given(SETS, st.integers(3, 5), st.lists(st.integers(0, 5), max_size=3, unique=True))
def test_belady_is_the_textbook_rule(sets: Sets, n_slots: int, resident: list[int]) -> None:
    score = belady(events_of(sets), n_slots, [(0, e) for e in resident])
    assert score.n_misses == slow_belady(sets, n_slots, resident)
    assert score.n_uses == sum(map(len, sets))


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), max_size=9), st.integers(2, 3))
def test_nothing_does_better_than_belady(sets: Sets, n_slots: int) -> None:
    assert belady(events_of(sets), n_slots).n_misses == (best_of_all(sets, n_slots) if sets else 0)


@pytest.mark.parametrize("name", POLICIES)
@given(sets=SETS, n_slots=st.integers(3, 6))
def test_no_policy_beats_the_optimum(name: str, sets: Sets, n_slots: int) -> None:
    layers = [LayerShape(0, 6, 2)]
    score = replay(events_of(sets), layers, n_slots, make_policy(name, layers))
    best, bypass = belady(events_of(sets), n_slots), belady(events_of(sets), n_slots, has_bypass=True)
    assert bypass.n_misses <= best.n_misses <= score.n_misses <= score.n_uses
    assert score.n_uses == best.n_uses
    if n_slots == 6:
        assert score.n_misses == best.n_misses == len({e for s in sets for e in s})


@pytest.mark.parametrize("judge", ["replay", "belady"])
def test_a_set_that_does_not_fit_is_an_error_that_says_so(judge: str) -> None:
    layers, events = [LayerShape(0, 6, 2)], events_of([[0], [1, 2, 3]])
    with pytest.raises(PoolError, match="step 1, layer 0: 3 experts must be in the pool at once and it has 2 slots"):
        replay(events, layers, 2, make_policy("lru", layers)) if judge == "replay" else belady(events, 2)


def test_what_is_there_at_the_start_counts() -> None:
    layers, resident = [LayerShape(0, 6, 2)], [(0, 0), (0, 1)]
    events = events_of([[0, 1], [2, 3], [0, 1]])
    assert replay(events, layers, 4, make_policy("lru", layers), resident).n_misses == 2
    assert belady(events, 4, resident).n_misses == 2
    assert replay(events, layers, 2, make_policy("lru", layers), resident).layer_misses == {0: 4}


def _recorded(names: Sequence[str]) -> tuple[list[Event], list[LayerShape]]:
    traces = [read_trace(TRACES / f"{name}.trace") for name in names]
    header = traces[0].header
    used: set[int] = {event.layer for trace in traces for event in trace.events}
    layers = [LayerShape(x.index, x.n_experts, x.top_k) for x in header.layers if x.index in used]
    return [event for trace in traces for event in trace.events if event.rows == 1], layers


@pytest.mark.parametrize(("share", "least"), [(0.125, 0.3), (0.25, 0.4)])
def test_the_default_recovers_a_good_part_of_what_lru_loses(share: float, least: float) -> None:
    """On what the shipped model does with prompts of five kinds; scripts/bench/LOG.md#policies has the whole table."""
    learned, layers = _recorded(["topics"])
    events, _ = _recorded(["arithmetic", "chat", "code", "french", "story"])
    n_slots = int(share * sum(layer.n_experts for layer in layers))
    default = make_policy("auto", layers)
    for event in learned:
        default.on_step(event)
    lru, best = replay(events, layers, n_slots, make_policy("lru", layers)), belady(events, n_slots)
    recovered = gap_recovered(replay(events, layers, n_slots, default), lru, best)
    assert recovered > least, f"{recovered:.1%} of the gap between LRU and Belady at {share:.1%}"


def test_the_gap_is_none_of_lru_and_all_of_the_optimum() -> None:
    layers, events = [LayerShape(0, 6, 1)], events_of([[0], [1], [2]] * 4)
    lru, best = replay(events, layers, 2, make_policy("lru", layers)), belady(events, 2)
    assert lru.n_misses > best.n_misses
    assert (gap_recovered(lru, lru, best), gap_recovered(best, lru, best)) == (0.0, 1.0)
