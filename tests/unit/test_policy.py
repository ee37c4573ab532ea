"""Which expert leaves the pool: what every policy must keep to, and what tells each from the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle._native import LearnedPolicy
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


# --- what `learned` computes ----------------------------------------------------------------------------------------

SHAPES = [(12, 3), (70, 4), (6, 6)]  # experts and top_k of three layers
DISCOUNT = 0.6
Floats = npt.NDArray[np.float64]


class Said(NamedTuple):
    """What the slow reference said at a turn, and why."""

    token: int
    strengths: list[tuple[int, float]]  # of sources; of two with the same expert, the later one learns
    used: list[int]
    odds: Floats
    occasions: list[list[int]]
    value: Floats


class SlowLearned:
    """The formulas of native/src/learned.h, plainly and in double precision.

    streams: of each layer, the 16 that had a turn last, the latest at the end. memory: by token and layer, the experts
    of the last two occasions; the token that was added to last is at the end.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.top_k = [top_k for _, top_k in shapes]
        shares = [min(0.5, top_k / n) for n, top_k in shapes]
        self.floor = [0.025 * share for share in shares]
        self.usage = [np.full(n, share) for (n, _), share in zip(shapes, shares, strict=True)]
        self.values = [usage.copy() for usage in self.usage]
        self.pairs = [np.zeros((n, n)) for n, _ in shapes]
        self.streams: list[list[tuple[int, Said]]] = [[] for _ in shapes]
        self.turns: list[list[int]] = [[] for _ in shapes]
        self.weights, self.squares = [0.0, 1.0, 0.5, 0.5], [0.01] * 4
        self.memory: dict[int, dict[int, list[list[int]]]] = {}

    def seed(self, place: int, shares: Sequence[float]) -> None:
        self.usage[place] = np.array(shares)
        self.values[place] = self.usage[place] + self.floor[place]

    def turn(self, place: int, stream: int, rows: int, token: int, experts: Sequence[int]) -> None:
        used = list(experts)
        self.usage[place] *= 0.9
        self.usage[place][used] += 0.1 * self.strength(place, used)
        last = next((said for who, said in self.streams[place] if who == stream), None)
        said = self.say(place, token, used, last) if rows <= 8 else self.say(place, None, [], None)
        if rows <= 8 and last is not None and last.used:
            self.learn(place, last, used, said.value)
            if rows == 1:
                self.remember(last.token, place, used)
        self.streams[place] = [*((who, s) for who, s in self.streams[place] if who != stream), (stream, said)][-16:]
        self.turns[place].append(stream)
        is_idle = np.ones_like(said.value)
        for who, by in self.streams[place]:
            if who in self.turns[place][-4:]:
                is_idle *= 1 - by.value
        self.values[place] = 1 - is_idle

    def strength(self, place: int, used: Sequence[int]) -> float:
        return min(1.0, self.top_k[place] / len(used)) if used else 1.0

    def say(self, place: int, token: int | None, used: list[int], last: Said | None) -> Said:
        before = last.used if last else []
        strengths = [(e, self.strength(place, used)) for e in used]
        strengths += [(e, 0.5 * self.strength(place, before)) for e in before]
        usage, floor = self.usage[place], self.floor[place]
        log_odds = np.log((usage + floor) / (1 + floor - usage))
        odds = self.weights[0] + self.weights[1] * log_odds
        for source, strength in strengths:
            odds = odds + strength * self.pairs[place][source]
        occasions = self.memory.get(token, {}).get(place, []) if token is not None else []
        for weight, followers in zip(self.weights[2:], occasions, strict=False):
            odds[followers] += weight
        return Said(token or 0, strengths, used, log_odds, list(occasions), 1 / (1 + np.exp(-odds)))

    def learn(self, place: int, said: Said, used: list[int], value: Floats) -> None:
        worth = DISCOUNT * value
        worth[used] = 1
        error = worth - said.value
        for source, strength in dict(said.strengths).items():
            self.pairs[place][source] += strength * 0.16 / self.top_k[place] * error
        slopes = [error.sum(), (error * said.odds).sum(), *(error[followers].sum() for followers in said.occasions)]
        for i, slope in enumerate(slopes):
            self.squares[i] += slope**2
            self.weights[i] += 0.06 * slope / self.squares[i] ** 0.5

    def remember(self, token: int, place: int, used: list[int]) -> None:
        known = self.memory.pop(token, {})
        known[place] = [used, *known.get(place, [])][:2]
        self.memory[token] = known
        if len(self.memory) > 4096:
            del self.memory[next(iter(self.memory))]


def expected_victims(policy: LearnedPolicy, at: int, pool: set[Key]) -> list[Key]:
    """The pool in the order of the values that the policy reports, after a turn of `at`."""
    n = len(SHAPES)
    discounts = [DISCOUNT ** (((place - at - 1) % n + 1) / n) for place in range(n)]
    values = [policy.values(place).tolist() for place in range(n)]
    return sorted(pool, key=lambda key: (values[key[0]][key[1]] * discounts[key[0]], key))


def step_of(rng: random.Random, place: int, rows: int) -> list[int]:
    """Experts of a step: each row prefers some, so that there is something to learn."""
    n, top_k = SHAPES[place]
    rows_of_experts = [rng.sample(range(n), top_k) if rng.random() < 0.5 else range(top_k) for _ in range(rows)]
    return list({e: None for row in rows_of_experts for e in row})


@pytest.mark.parametrize(
    ("n_streams", "rows", "is_seeded"), [(1, [1], False), (3, [1, 1, 1, 4, 8, 9, 40], True), (20, [1], False)]
)
def test_learned_computes_its_formulas(n_streams: int, rows: list[int], is_seeded: bool) -> None:
    rng = random.Random(n_streams)
    policy, slow, pool = LearnedPolicy.create(SHAPES), SlowLearned(SHAPES), set[Key]()
    if is_seeded:
        for place, (n, _) in enumerate(SHAPES):
            shares = [rng.random() for _ in range(n)]
            policy.seed(place, shares)
            slow.seed(place, shares)
    for i in range(900):
        place = i % len(SHAPES)
        n_rows = rng.choice(rows)
        turn = (place, rng.randrange(n_streams), n_rows, rng.randrange(30), step_of(rng, place, n_rows))
        policy.turn(*turn)
        slow.turn(*turn)
        np.testing.assert_allclose(policy.values(place), slow.values[place], rtol=2e-4)
        for _ in range(3):
            key = (other := rng.randrange(len(SHAPES)), rng.randrange(SHAPES[other][0]))
            (policy.take if key in pool else policy.put)(*key)
            pool ^= {key}
        assert policy.victims().next(len(pool) + 1) == expected_victims(policy, place, pool)
    np.testing.assert_allclose(policy.weights, slow.weights, atol=1e-4)
    assert np.ptp(policy.values(1)) > 0.1


def test_learned_remembers_the_tokens_that_it_saw_last() -> None:
    """4096 of them: what followed others is forgotten, and what was seen again is not."""
    shapes, rng = [(6, 2)], random.Random(5)
    policy, slow = LearnedPolicy.create(shapes), SlowLearned(shapes)
    for token in [*range(3000), 7, *range(3000, 4110), *range(20)]:
        turn = (0, 0, 1, token, rng.sample(range(6), 2))
        policy.turn(*turn)
        slow.turn(*turn)
        np.testing.assert_allclose(policy.values(0), slow.values[0], rtol=1e-3)


def test_victims_come_in_batches() -> None:
    policy = LearnedPolicy.create(SHAPES)
    keys = {(place, e) for place, (n, _) in enumerate(SHAPES) for e in range(n)}
    for key in keys:
        policy.put(*key)
    whole, victims = policy.victims().next(1000), policy.victims()
    batches = list(takewhile(len, (victims.next(7) for _ in range(100))))
    assert [key for batch in batches for key in batch] == whole == expected_victims(policy, 0, keys)
    assert {len(batch) for batch in batches[:-1]} == {7}
    assert victims.next(1) == []


def test_an_order_outlives_its_policy() -> None:
    policy = LearnedPolicy.create(SHAPES)
    policy.put(1, 5)
    victims = policy.victims()
    del policy
    assert victims.next(2) == [(1, 5)]


def test_what_a_client_names_twice_counts_once() -> None:
    once, twice = LearnedPolicy.create(SHAPES), LearnedPolicy.create(SHAPES)
    for step in range(50):
        once.turn(0, 0, 1, step % 5, [step % 4, 11])
        twice.turn(0, 0, 1, step % 5, [11, step % 4, 11, step % 4])
    assert twice.values(0).tolist() == once.values(0).tolist()


def test_ids_that_are_none_change_nothing() -> None:
    policy, untouched = LearnedPolicy.create(SHAPES), LearnedPolicy.create(SHAPES)
    for place, expert in ((0, 12), (3, 0), (2**40, 0), (0, 2**32 - 1)):
        for call in (policy.put, policy.take, lambda p, e: policy.turn(p, 0, 1, 0, [0, e])):
            with pytest.raises(IndexError):
                call(place, expert)
    with pytest.raises(ValueError, match="shares"):
        policy.seed(0, [0.5])
    assert policy.values(0).tolist() == untouched.values(0).tolist()
    assert policy.victims().next(1) == []


@pytest.mark.parametrize("shape", [(0, 1), (4, 0), (4, 5), (1 << 16, 1)])
def test_layers_that_cannot_be_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="layer"):
        LearnedPolicy.create([(4, 2), shape])


def test_layers_that_have_learned_nothing_take_no_memory() -> None:
    """64 layers of 2048 experts have a gigabyte of pairs."""
    before = psutil.Process().memory_info().rss
    policy = LearnedPolicy.create([(2048, 8)] * 64)
    for step in range(20):
        policy.turn(3, 0, 1, step, range(step, step + 8))
    assert psutil.Process().memory_info().rss - before < 100 << 20
