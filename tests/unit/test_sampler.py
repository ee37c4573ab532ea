"""How tokens are chosen: what a request leaves open, each filter and their order, and the noise.

The reference for the filters is written down again here, in the plainest NumPy, straight from the definition; the noise
is held by golden values, so that a NumPy whose generator gives another stream is noticed: old seeds would then no
longer replay old answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparkle.errors import BadRequest, SparkleError
from sparkle.messages import Sampling
from sparkled.compute.sampler import Choice, _filter, _uniform, choose, gumbel, resolve

pytestmark = pytest.mark.unit

VOCAB = 50
Floats = NDArray[np.float64]


def logits_of(seed: int, n: int = VOCAB, spread: float = 2.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, spread, n).astype(np.float32)


# --- what a request leaves open --------------------------------------------------------------------------------------


def resolved(sampling: Sampling | None = None, **defaults: Any) -> Choice:
    return resolve(sampling or Sampling(), defaults, 7, VOCAB)


NEUTRAL = Choice(seed=7, temperature=0.0)


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({}, NEUTRAL),
        ({"eos_token_id": [1, 2], "top_p": None, "temperature": None, "do_sample": None}, NEUTRAL),
        ({"do_sample": False, "temperature": 0.6, "top_k": 0}, NEUTRAL),
        ({"temperature": None}, NEUTRAL),
        ({"do_sample": True}, Choice(seed=7, temperature=1.0)),
        ({"do_sample": True, "temperature": None}, Choice(seed=7, temperature=1.0)),
        ({"temperature": 0.6}, Choice(seed=7, temperature=0.6)),
        ({"do_sample": True, "temperature": 0}, NEUTRAL),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "max_length": 20},
            Choice(seed=7, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05),
        ),
        (
            {"do_sample": False, "repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": 1},
            Choice(7, 0.0, repetition_penalty=1.05, presence_penalty=1.5, frequency_penalty=1.0),
        ),
    ],
)
def test_defaults_are_those_of_generation_config(defaults: dict[str, Any], expected: Choice) -> None:
    choice = resolved(**defaults)
    assert choice == expected
    assert type(choice.top_k) is int


MODEL_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1.3),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", -1.0),
    ],
)
def test_a_given_value_replaces_its_default_and_no_other(name: str, value: float) -> None:
    """Zero and one are values, not absences: an explicit temperature 0 is greedy whatever the model prefers."""
    choice = resolved(Sampling(**{name: value}), **MODEL_DEFAULTS)  # type: ignore[arg-type]
    assert getattr(choice, name) == value
    others = set(MODEL_DEFAULTS) - {name, "do_sample"}
    assert {k: getattr(choice, k) for k in others} == {k: MODEL_DEFAULTS[k] for k in others}


def test_temperature_makes_a_greedy_model_sample() -> None:
    assert resolved(Sampling(temperature=0.5), do_sample=False).temperature == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 101.0),
        ("frequency_penalty", -101.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(BadRequest, match=rf"sampling\.{name} = {value}: allowed is"):
        resolved(Sampling(**{name: value}))  # type: ignore[arg-type]


def test_logit_bias_keys_become_token_ids() -> None:
    choice = resolved(Sampling(logit_bias={"0": -100.0, "49": 2, "007": 1.5}))
    assert choice.logit_bias == {0: -100.0, 49: 2.0, 7: 1.5}


@pytest.mark.parametrize(
    "key", ["50", "-1", "", " 1", "1.0", "+1", "a", "\u00b2", "\u0661", "9" * 5000, "1_0"], ids=lambda k: k[:8]
)
def test_a_logit_bias_key_that_is_no_token_id_is_refused(key: str) -> None:
    """A superscript two is a digit to str.isdigit, and int() refuses 5000 of them: neither may become another error."""
    with pytest.raises(BadRequest, match=r"sampling\.logit_bias: .* is not a token id below 50"):
        resolved(Sampling(logit_bias={key: 1.0}))


# --- filters ---------------------------------------------------------------------------------------------------------


def penalised(logits: Sequence[float], choice: Choice, prompt: list[int], output: list[int]) -> list[float]:
    """Penalties and bias, one token at a time."""
    scores = [float(x) for x in logits]
    for token in set(prompt + output):
        penalty = choice.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= choice.presence_penalty + choice.frequency_penalty * output.count(token)
    for token, bias in choice.logit_bias.items():
        scores[token] += bias
    return scores


def survivors(scores: Sequence[float], choice: Choice) -> dict[int, float]:
    """What top_k, top_p and min_p leave, one after the other: token -> scaled score."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    scaled = {i: scores[i] / choice.temperature for i in ranked}
    if choice.top_k:
        ranked = ranked[: choice.top_k]
    best = scaled[ranked[0]]
    total = math.fsum(math.exp(scaled[i] - best) for i in ranked)
    probs = {i: math.exp(scaled[i] - best) / total for i in ranked}
    if choice.top_p < 1.0:
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += probs[i]
            if mass >= choice.top_p:
                break
        ranked = kept
    return {i: scaled[i] for i in ranked if probs[i] >= choice.min_p * probs[ranked[0]]}


def reference(logits: Sequence[float], choice: Choice, prompt: list[int], output: list[int]) -> int:
    scores = penalised(logits, choice, prompt, output)
    if choice.temperature == 0.0:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    left = survivors(scores, choice)
    noise = gumbel(choice.seed, len(output), len(scores))
    return max(sorted(left), key=lambda i: left[i] + noise[i])


choices = st.builds(
    Choice,
    seed=st.integers(0, 2**53),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.0, 1e-9, 0.31, 0.77, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 10 * VOCAB]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.2, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4),
)
some_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(choices, st.integers(0, 10**6), some_tokens, some_tokens)
def test_choose_equals_the_reference(choice: Choice, seed: int, prompt: list[int], output: list[int]) -> None:
    logits = logits_of(seed)
    assert choose(logits, choice, prompt, output) == reference(logits.tolist(), choice, prompt, output)


def kept(scores: Sequence[float], **filters: Any) -> list[int]:
    return list(_filter(np.array(scores, np.float64), Choice(seed=0, **filters)))


LOG_PROBS = np.log([0.05, 0.4, 0.25, 0.2, 0.1]).tolist()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 1}, [1]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 1000}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 2]),  # the token that crosses the mark stays
        ({"top_p": 0.84}, [1, 2, 3]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 1e-300}, [1]),
        ({"min_p": 0.24}, [1, 2, 3, 4]),
        ({"min_p": 0.26}, [1, 2, 3]),
        ({"min_p": 1.0}, [1]),
        # The order: top_p counts the mass of what top_k left (0.4/0.85 = 0.47, then 0.76), not of everything.
        ({"top_k": 3, "top_p": 0.75}, [1, 2]),
        ({"top_k": 3, "top_p": 0.77}, [1, 2, 3]),
        # min_p is relative to the best, so nothing before it changes what it takes.
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, [1, 2, 3]),
    ],
)
def test_each_filter(filters: dict[str, Any], expected: list[int]) -> None:
    assert kept(LOG_PROBS, **filters) == expected


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the same distribution is flatter (0.30, 0.24, 0.21, 0.15, 0.11): top_p keeps one more."""
    logits = np.array(LOG_PROBS, np.float32)

    def reachable(temperature: float) -> set[int]:
        choice = Choice(seed=1, temperature=temperature, top_p=0.6)
        return {choose(logits, choice, [], [0] * i) for i in range(200)}

    assert reachable(1.0) == {1, 2}
    assert reachable(2.0) == {1, 2, 3}


def test_ties_go_to_the_lowest_id() -> None:
    equal = np.zeros(VOCAB, np.float32)
    assert choose(equal, Choice(seed=0, temperature=0.0), [], []) == 0
    assert kept(equal.tolist(), top_k=3) == [0, 1, 2]
    assert kept([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3) == [0, 1, 3]
    assert kept([1.0, 0.0] * 1000, top_k=1500) == [*range(0, 1000), *range(1000, 2000, 2)], "with no stable sort"
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept([0.0] * 4, min_p=1.0) == [0, 1, 2, 3]


@given(st.integers(0, 2**53), st.integers(0, 10**6))
def test_top_k_1_and_a_tiny_top_p_are_greedy_at_any_temperature(seed: int, of: int) -> None:
    logits = logits_of(of)
    best = int(logits.argmax())
    for filters in ({"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0.0}, {"min_p": 1.0}):
        choice = Choice(seed=seed, temperature=100.0, **filters)
        assert choose(logits, choice, [], []) == best


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-300, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(temperature: float, filters: dict[str, Any]) -> None:
    """Dividing by it overflows; what is not the best must fall to -inf, not rise with it to +inf."""
    logits = np.array([1.0, 3.0, 2.0, 2.999, -1.0], np.float32)
    assert choose(logits, Choice(seed=3, temperature=temperature, **filters), [], []) == 1


# --- penalties and bias ----------------------------------------------------------------------------------------------


def greedy(scores: Sequence[float], prompt: list[int], output: list[int], **fields: Any) -> int:
    return choose(np.array(scores, np.float32), Choice(seed=0, temperature=0.0, **fields), prompt, output)


def test_repetition_counts_prompt_and_output() -> None:
    scores = [2.0, 1.9, -1.0]
    assert greedy(scores, [], []) == 0
    assert greedy(scores, [0], [], repetition_penalty=1.2) == 1
    assert greedy(scores, [], [0], repetition_penalty=1.2) == 1
    assert greedy(scores, [2], [], repetition_penalty=1.2) == 0
    assert greedy(scores, [0, 1], [], repetition_penalty=1.2) == 0
    assert greedy(scores, [0] * 50, [], repetition_penalty=1.01) == 0, "once, however often it occurs"


def test_repetition_pushes_negative_logits_down_too() -> None:
    assert greedy([-1.0, -1.1], [0], [], repetition_penalty=1.2) == 1


def test_presence_and_frequency_count_the_output_alone() -> None:
    scores = [2.0, 1.9]
    for name in ("presence_penalty", "frequency_penalty"):
        assert greedy(scores, [0, 0, 0], [], **{name: 1.0}) == 0
        assert greedy(scores, [], [0], **{name: 1.0}) == 1
    assert greedy(scores, [], [0] * 9, presence_penalty=0.05) == 0, "once, however often it occurs"
    assert greedy(scores, [], [0], frequency_penalty=0.05) == 0
    assert greedy(scores, [], [0] * 3, frequency_penalty=0.05) == 1, "for each time"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_logit_bias_forces_and_forbids(temperature: float) -> None:
    logits = logits_of(0)
    best = int(logits.argmax())
    for i in range(20):
        forced = Choice(seed=i, temperature=temperature, logit_bias={13: 1e5})
        assert choose(logits, forced, [13] * i, [13] * i) == 13
        forbidden = Choice(seed=i, temperature=temperature, logit_bias={best: -1e5})
        assert choose(logits, forbidden, [], [0] * i) != best


def test_bias_comes_before_top_k() -> None:
    logits = np.array([5.0, 4.0, 0.0], np.float32)
    assert choose(logits, Choice(seed=0, top_k=1, logit_bias={2: 10.0}), [], []) == 2


def test_bias_of_any_finite_size_ends_in_a_token() -> None:
    biases = {0: 1e308, 1: 1e308, 2: -1e308}
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.5}):
        tokens = {
            choose(logits_of(0), Choice(seed=s, temperature=0.01, logit_bias=biases, **filters), [], [])  # type: ignore[arg-type]
            for s in range(20)
        }
        assert tokens <= {0, 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    logits = logits_of(0)
    logits[17] = bad
    with pytest.raises(SparkleError, match="not finite"):
        choose(logits, Choice(seed=0, temperature=temperature), [], [])


def test_the_logits_are_left_alone() -> None:
    logits = logits_of(0)
    before = logits.copy()
    choose(logits, Choice(seed=0, repetition_penalty=2.0, top_k=3, logit_bias={1: 5.0}), [1, 2], [3])
    assert (logits == before).all()


# --- noise -----------------------------------------------------------------------------------------------------------

GOLDEN = {
    (0, 0): [-1.49545161157695, -0.3511371183614868, -0.7859067841514997, 0.5586754626449686],
    (0, 1): [-0.4394360086828338, -0.4282578804306737, 1.2735127182046522, 0.46475426029220757],
    (1, 0): [-0.17575800360186283, 1.8076498398198788, -0.6189814975417195, -1.2442527174409201],
    (2**53 - 1, 4095): [-0.06775847394416022, -0.7867687943228721, 0.8616415674551202, 0.8906644625622769],
    (2**63 - 1, 131072): [-0.15321758414636336, -1.3481239852050597, -0.9905981869753193, -0.10382793942034726],
}


@pytest.mark.parametrize(("seed", "index"), GOLDEN)
def test_golden_noise(seed: int, index: int) -> None:
    """Equal but for the last digits, which belong to the machine's log()."""
    np.testing.assert_allclose(gumbel(seed, index, 4), GOLDEN[seed, index], rtol=1e-12)


def test_noise_depends_on_seed_and_index_alone() -> None:
    a = gumbel(5, 3, 1000)
    np.random.default_rng().normal(size=10)
    gumbel(6, 4, 10)
    assert (gumbel(5, 3, 1000) == a).all()
    assert (gumbel(5, 3, 400) == a[:400]).all(), "a larger vocabulary does not change the noise of an id"


def test_noise_of_other_positions_and_seeds_is_other_noise() -> None:
    """Also none that is shifted: the counters of two positions never meet."""
    n = 2000
    rows = [gumbel(seed, index, n) for seed in (0, 1, 2**53 - 1) for index in (0, 1, 2, 3, 4096)]
    assert len(np.unique(np.concatenate(rows))) == len(rows) * n
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / math.sqrt(n)


def test_uniform_is_never_0_or_1() -> None:
    ends = _uniform(np.array([0, 2**64 - 1], np.uint64))
    assert 0.0 < ends[0] < ends[1] < 1.0
    assert ends[0] == 1.0 - ends[1], "and symmetric"


def test_noise_is_gumbel() -> None:
    noise = np.concatenate([gumbel(1, i, 5000) for i in range(20)])
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.pi / math.sqrt(6 * len(noise))
    uniform = np.sort(np.exp(-np.exp(-noise)))
    assert np.abs(uniform - np.arange(len(uniform)) / len(uniform)).max() < 1.95 / math.sqrt(len(uniform))  # KS, 0.1 %


# --- the distribution ------------------------------------------------------------------------------------------------

N_DRAWS = 4000


def chi_squared(counts: Floats, probs: Floats) -> float:
    expected = probs * counts.sum()
    return float((((counts - expected) ** 2) / expected).sum())


def critical(df: int) -> float:
    """The value that chance exceeds once in 1000 times (Wilson and Hilferty's approximation; z = 3.09)."""
    return df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3


def test_critical_values() -> None:
    for df, tabulated in ((3, 16.27), (5, 20.52), (10, 29.59), (19, 43.82)):
        assert critical(df) == pytest.approx(tabulated, rel=0.02)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 6},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 1.0}},
    ],
    ids=str,
)
def test_tokens_over_positions_follow_the_filtered_softmax(fields: dict[str, Any]) -> None:
    """One seed, many positions of one answer: what a user sees. Deterministic, so it passes always or never."""
    logits = logits_of(11, n=20, spread=1.2)
    choice = Choice(seed=20_24, **fields)
    left = survivors(penalised(logits.tolist(), choice, [], []), choice)
    ids = sorted(left)
    weights = np.exp([left[i] for i in ids])
    probs = weights / weights.sum()
    counts = draw(logits, choice, range(N_DRAWS))
    assert counts.sum() == counts[ids].sum(), "a token that the filters took away"
    assert chi_squared(counts[ids], probs) < critical(len(ids) - 1)
    reused = draw(logits, choice, [i % 8 for i in range(N_DRAWS)])  # the fault to find
    assert chi_squared(reused[ids], probs) > 10 * critical(len(ids) - 1)


def test_tokens_of_many_seeds_follow_the_softmax() -> None:
    """The other direction: the first token of many requests, each with a seed of its own."""
    logits = logits_of(12, n=20, spread=1.2)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum()
    counts = np.zeros(20)
    for seed in range(N_DRAWS):
        counts[choose(logits, Choice(seed=seed), [], [])] += 1
    assert chi_squared(counts, probs) < critical(19)


def draw(logits: NDArray[np.float32], choice: Choice, positions: Sequence[int] | range) -> Floats:
    """How often each token is chosen at `positions`, the logits being the same at each."""
    counts = np.zeros(len(logits))
    tokens = [0] * N_DRAWS
    for i in positions:
        counts[choose(logits, choice, [], tokens[:i])] += 1
    return counts
