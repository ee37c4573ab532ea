"""Chooses tokens: filters, then position-keyed Gumbel noise.

Token i of an answer = argmax(log p_i + Gumbel(seed, i)) over what the filters leave. The noise is that of a
counter-based generator, so a token depends on the seed and its place alone: not on batching, drafts, or a crash in
between. Pure NumPy on the host: the same logits give the same token on every backend. Owns nothing; never draws from a
global generator.

Filters, in this order: penalties, logit bias, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkle.errors import BadRequest, SparkleError
from sparkle.messages import Sampling

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampling with every value decided. temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = no filter."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def resolve(sampling: Sampling, defaults: Mapping[str, Any], seed: int, vocab_size: int) -> Choice:
    """Fill what a client left open from the model's generation_config, as transformers reads it; check every value.

    A model whose generation_config neither samples nor names a temperature is greedy.
    """
    defaults = {k: v for k, v in defaults.items() if v is not None}
    samples = bool(defaults.get("do_sample", "temperature" in defaults))
    neutral: dict[str, Any] = {
        "temperature": float(defaults.get("temperature", 1.0)) if samples else 0.0,
        "top_p": float(defaults.get("top_p") or 1.0),
        "top_k": int(defaults.get("top_k") or 0),
        "min_p": float(defaults.get("min_p") or 0.0),
        "repetition_penalty": float(defaults.get("repetition_penalty") or 1.0),
        "presence_penalty": float(defaults.get("presence_penalty") or 0.0),
        "frequency_penalty": float(defaults.get("frequency_penalty") or 0.0),
    }
    values = {k: v if (given := getattr(sampling, k)) is None else given for k, v in neutral.items()}
    ranges = {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, 2**31),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-3, 100.0),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
    }
    for name, (low, high) in ranges.items():
        if not low <= values[name] <= high:
            raise BadRequest(f"sampling.{name} = {values[name]}: allowed is {low} to {high}")
    return Choice(seed=seed, logit_bias=_biases(sampling.logit_bias, vocab_size), **values)


def _biases(given: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= vocab_size:  # int() refuses "²" and 5000 digits
            raise BadRequest(f"sampling.logit_bias: {key!r} is not a token id below {vocab_size}")
        out[int(key)] = float(value)
    return out


def choose(logits: npt.NDArray[np.float32], choice: Choice, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Return the next token's id. logits: (vocab,) float32, of the position after prompt + output.

    Raises SparkleError if the logits are not numbers: a wrong answer is worse than none.
    """
    scores = logits.astype(np.float64)
    if not np.isfinite(scores).all():
        raise SparkleError("the model produced logits that are not finite; this is a fault: please report it")
    if choice.has_penalties:
        _penalise(scores, choice, prompt, output)
    for token, bias in choice.logit_bias.items():
        scores[token] += bias
    if choice.temperature == 0.0:
        return int(scores.argmax())
    with np.errstate(over="ignore"):  # too far below the best for a float64: -inf, which no noise lifts
        scaled = (scores - scores.max()) / choice.temperature
    ids = _filter(scaled, choice)
    noise = gumbel(choice.seed, len(output), len(scores))[ids]
    return int(ids[(scaled[ids] + noise).argmax()])


def gumbel(seed: int, index: int, n: int) -> Floats:
    """Gumbel noise of output position `index` for ids 0 … n - 1: Philox 4x64, keyed by seed, counted by position."""
    raw = np.random.Philox(key=seed, counter=[0, index, 0, 0]).random_raw(n)
    return np.asarray(-np.log(-np.log(_uniform(raw))), np.float64)


def _uniform(raw: npt.NDArray[np.uint64]) -> Floats:
    """In (0, 1), never 0 or 1: the middles of 2^52 equal steps. With one bit more the last would round to 1."""
    return np.asarray(((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52, np.float64)


def _penalise(scores: Floats, choice: Choice, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Repetition as transformers defines it (prompt and output), presence and frequency as OpenAI does (output)."""
    if choice.repetition_penalty != 1.0:
        seen = np.unique(np.fromiter((*prompt, *output), np.int64))
        of = scores[seen]
        scores[seen] = np.where(of > 0, of / choice.repetition_penalty, of * choice.repetition_penalty)
    if output and (choice.presence_penalty or choice.frequency_penalty):
        ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        scores[ids] -= choice.presence_penalty + choice.frequency_penalty * counts


def _filter(scaled: Floats, choice: Choice) -> npt.NDArray[np.int64]:
    """Ids that top_k, top_p and min_p leave, ascending. Equal scores stay or go by id, lowest first."""
    if choice.top_k == 0 and choice.top_p == 1.0 and choice.min_p == 0.0:
        return np.arange(len(scaled))
    k = min(choice.top_k or len(scaled), len(scaled))
    candidates = np.flatnonzero(scaled >= np.partition(scaled, -k)[-k])
    order = candidates[np.lexsort((candidates, -scaled[candidates]))][:k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    probs = weights / weights.sum()
    # The token that crosses top_p stays; so does the most likely one, whatever top_p says.
    n_kept = int(np.searchsorted(np.cumsum(probs), choice.top_p)) + 1 if choice.top_p < 1.0 else len(order)
    kept = order[:n_kept]
    return np.sort(kept[probs[:n_kept] >= choice.min_p * probs[0]])
