"""Which expert leaves the pool: what every policy must keep to, and what tells each from the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle.errors import ConfigError
from sparkle.policy import DEFAULT_POLICY, POLICIES, Key, LayerShape, Policy, make_policy, policy_name
from sparkle.replay import replay
from sparkle.trace import Event

pytestmark = pytest.mark.unit

LAYERS = [LayerShape(0, 4, 2), LayerShape(2, 6, 2)]
KEYS = st.sampled_from([(x.index, e) for x in LAYERS for e in range(x.n_experts)])


def event(layer: int, experts: Sequence[int], step: int = 0, stream: int = 0, rows: int = 1) -> Event:
    return Event(step, 0, stream, rows, 0, layer, list(experts), [False] * len(experts))


def loaded(name: str, keys: Sequence[Key]) -> Policy:
    policy = make_policy(name, LAYERS)
    for key in keys:
        policy.on_load(key, is_demand=True)
    return policy


@pytest.mark.parametrize("name", POLICIES)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["load", "fill", "use", "prompt", "evict"]), KEYS)),
    is_seeded=st.booleans(),
)
def test_every_policy_names_each_resident_key_once(name: str, calls: list[tuple[str, Key]], is_seeded: bool) -> None:
    policy, resident = make_policy(name, LAYERS), set[Key]()
    if is_seeded:
        policy.seed({(0, 1): 0.5, (2, 5): 1.0})
    for step, (call, key) in enumerate(calls):
        if call in ("load", "fill") and key not in resident:
            policy.on_load(key, is_demand=call == "load")
            resident.add(key)
        elif call == "use":
            policy.on_step(event(key[0], [key[1], (key[1] + 1) % 4], step, stream=step % 3))
        elif call == "prompt":
            policy.on_step(event(key[0], range(4), step, rows=100))
        elif call == "evict" and key in resident:
            policy.on_evict(key)
            resident.remove(key)
        named = list(policy.victims())
        assert len(named) == len(resident)
        assert set(named) == resident


def test_names() -> None:
    assert policy_name("auto") == DEFAULT_POLICY
    assert policy_name("lru") == "lru"
    with pytest.raises(ConfigError, match=r"policy = 'mru': expected auto or one of lru, lfu"):
        make_policy("mru", LAYERS)


@given(st.lists(st.tuples(st.sampled_from(["load", "fill", "use", "evict"]), KEYS)))
def test_lru_is_a_list_in_order_of_last_use(calls: list[tuple[str, Key]]) -> None:
    lru, order = make_policy("lru", LAYERS), list[Key]()
    for call, key in calls:
        is_in = key in order
        if call in ("load", "fill") and not is_in:
            lru.on_load(key, is_demand=call == "load")
            order = [*order, key] if call == "load" else [key, *order]
        elif call == "use":
            lru.on_step(event(key[0], [key[1]]))
            order = [*(k for k in order if k != key), key] if is_in else order
        elif call == "evict" and is_in:
            lru.on_evict(key)
            order.remove(key)
        assert list(lru.victims()) == order


@pytest.mark.parametrize("name", ["lfu", "lfuda", "learned"])
def test_what_is_used_often_outlives_what_was_used_last(name: str) -> None:
    policy = loaded(name, [(0, e) for e in range(4)])
    for step in range(30):
        policy.on_step(event(0, [0, 1], step))
    policy.on_step(event(0, [2, 3], 30))
    assert {key[1] for key in list(policy.victims())[:2]} == {2, 3}


@pytest.mark.parametrize("name", ["lfu", "learned"])
def test_old_habits_are_forgotten(name: str) -> None:
    policy = loaded(name, [(0, e) for e in range(4)])
    for step in range(200):
        policy.on_step(event(0, [0, 1] if step < 100 else [2, 3], step))
    assert {key[1] for key in list(policy.victims())[:2]} == {0, 1}


@pytest.mark.parametrize("name", ["lfu", "lfuda", "learned"])
def test_recorded_usage_decides_at_first(name: str) -> None:
    policy = make_policy(name, LAYERS)
    policy.seed({(2, 3): 0.9, (2, 4): 0.4, (2, 5): 0.1})
    for expert in range(6):
        policy.on_load((2, expert), is_demand=False)
    assert [key[1] for key in policy.victims()][3:] == [5, 4, 3]


def test_pinned_keeps_the_hottest_half_of_its_slots() -> None:
    policy = make_policy("pinned", LAYERS)
    policy.seed({(0, 0): 0.9, (0, 1): 0.8, (2, 0): 0.1})
    for key in ((0, 0), (0, 1), (2, 0), (2, 1)):
        policy.on_load(key, is_demand=True)
    policy.on_step(event(2, [0, 1]))
    assert list(policy.victims())[:2] == [(2, 0), (2, 1)]


def test_learned_learns_who_follows_whom() -> None:
    """Two sets of a layer take turns: what the last token used is not what the next one needs."""
    policy = loaded("learned", [(2, e) for e in range(4)])
    for step in range(200):
        policy.on_step(event(2, [0, 1] if step % 2 else [2, 3], step))
    assert {key[1] for key in list(policy.victims())[:2]} == {0, 1}  # the last step used them


@pytest.mark.parametrize("name", ["lfu", "learned"])
def test_learning_policies_beat_lru_where_usage_is_skewed(name: str) -> None:
    rng = random.Random(3)
    layers = [LayerShape(i, 32, 4) for i in range(4)]
    events = [
        event(layer, sorted({min(31, int(rng.expovariate(0.15))) for _ in range(4)}), step)
        for step in range(300)
        for layer in range(4)
    ]
    misses = {n: replay(events, layers, 40, make_policy(n, layers)).n_misses for n in ("lru", name)}
    assert misses[name] < 0.9 * misses["lru"]
