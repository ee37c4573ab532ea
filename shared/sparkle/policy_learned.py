"""Learned: evict the expert whose next use is worth least, by a forecast that starts from nothing.

At its turn each layer gives each of its experts a value: DISCOUNT ** i, averaged over what may come, if the expert's
next use lies i turns after the next one. The value is a logistic function of how often the expert was used of late, of
the experts that the conversation's last two tokens used (a weight for each pair, one matrix per layer), and of what
followed the same token before. All weights are learned online, by the error that the next turn reveals: what was used
was worth 1, and what was not is worth DISCOUNT times its new value. So the forecast reaches beyond one token although
one token is all that is ever waited for.
Source: Sutton 1988, "Learning to predict by the methods of temporal differences", TD(0) with a logistic function.
Measured in scripts/bench/LOG.md#policies

Owns these numbers: four bytes for each pair of experts of a layer, 50 MB for 48 layers of 512, and 8 MB of tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkle.policy_contract import Key, LayerShape
from sparkle.trace import Event

DISCOUNT = 0.6  # per turn
DECAY = 0.9  # of usage, per turn
USAGE_FLOOR = 0.025  # of an even share: keeps log-odds finite
PAIR_RATE = 0.16  # of learning, shared among a token's experts
SECOND_LAST = 0.5  # how much the token before the last counts, next to the last
SHARED_RATE = 0.06  # of learning the weights that all experts have in common, by Adagrad
MAX_STEP_ROWS = 8  # a token and its drafts; more rows are a prompt, whose union says little of what one token uses
N_OCCASIONS = 2  # on which a token's followers are remembered
MAX_TOKENS = 4096
MAX_STREAMS = 16
ACTIVE_TURNS = 4  # who had none of a layer's last turns does not count now

Floats = npt.NDArray[np.floating[Any]]  # float32
Experts = npt.NDArray[np.intp]

_NOBODY: Experts = np.zeros(0, np.intp)
_BIAS, _USAGE, _FIRST_OCCASION = 0, 1, 2  # places of the shared weights


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What a layer's turn said of its experts, and on what grounds."""

    token: int
    used: Experts  # by the step; nobody, after a prompt
    sources: Experts  # used, and what the step before used
    strengths: Floats  # of the sources, (n, 1)
    usage: Floats  # log-odds
    occasions: Sequence[Experts]  # followers of the token, the latest first
    value: Floats


class _Shared:
    """Weights that all experts of all layers have in common."""

    def __init__(self) -> None:
        self.weights = [0.0, 1.0] + [0.5] * N_OCCASIONS
        self._squares = [0.01] * len(self.weights)

    def learn(self, error: Floats, said: _Forecast) -> None:
        slopes = [float(error.sum()), float(error @ said.usage)]
        slopes += [float(error[followers].sum()) for followers in said.occasions]
        for i, slope in enumerate(slopes):
            self._squares[i] += slope * slope
            self.weights[i] += SHARED_RATE * slope / math.sqrt(self._squares[i])


class _TokenMemory:
    """Experts that the token after a token used, on its last occasions; of tokens lately seen only."""

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers
        self._tokens: OrderedDict[int, list[tuple[npt.NDArray[np.uint16], ...]]] = OrderedDict()

    def after(self, token: int, place: int) -> Sequence[Experts]:
        occasions = self._tokens.get(token)
        return [x.astype(np.intp) for x in occasions[place]] if occasions else []

    def add(self, token: int, place: int, followers: Experts) -> None:
        if token not in self._tokens:
            self._tokens[token] = [()] * self._n_layers
            if len(self._tokens) > MAX_TOKENS:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(token)
        occasions = self._tokens[token]
        occasions[place] = (followers.astype(np.uint16), *occasions[place][: N_OCCASIONS - 1])


class _Layer:
    """What is known of one layer's experts, and which of them are in the pool."""

    def __init__(self, shape: LayerShape, place: int, shared: _Shared, memory: _TokenMemory) -> None:
        self.index = shape.index
        self._place = place
        self._top_k = shape.top_k
        self._shared = shared
        self._memory = memory
        share = min(0.5, shape.top_k / shape.n_experts)
        self._floor = USAGE_FLOOR * share
        self._usage = np.full(shape.n_experts, share, np.float32)
        self._pairs = np.zeros((shape.n_experts, shape.n_experts), np.float32)
        self._last: OrderedDict[int, _Forecast] = OrderedDict()  # of each stream
        self._turns: deque[int] = deque(maxlen=ACTIVE_TURNS)  # whose they were
        self._is_here = np.zeros(shape.n_experts, np.bool_)
        self._rank(self._usage)

    def seed(self, shares: Floats) -> None:
        self._usage[:] = shares
        self._rank(self._usage + self._floor)

    def turn(self, event: Event) -> None:
        used = np.asarray(event.experts, np.intp)
        share = min(1.0, self._top_k / max(1, len(used)))  # many rows count as one token
        self._usage *= DECAY
        self._usage[used] += (1 - DECAY) * share
        last = self._last.pop(event.stream, None)
        forecast = self._forecast(event, used, last)
        if event.rows <= MAX_STEP_ROWS and last is not None and len(last.used):
            self._learn(last, used, forecast.value)
            if event.rows == 1:
                self._memory.add(last.token, self._place, used)
        self._last[event.stream] = forecast
        if len(self._last) > MAX_STREAMS:
            self._last.popitem(last=False)
        self._turns.append(event.stream)
        self._rank(self._value_to_all())

    def _forecast(self, event: Event, used: Experts, last: _Forecast | None) -> _Forecast:
        if event.rows > MAX_STEP_ROWS:
            used, last = _NOBODY, None
        before = _NOBODY if last is None else last.used
        sources = np.concatenate((used, before))
        strengths = np.empty((len(sources), 1), np.float32)
        strengths[: len(used)] = min(1.0, self._top_k / max(1, len(used)))
        strengths[len(used) :] = SECOND_LAST * min(1.0, self._top_k / max(1, len(before)))
        usage = np.log((self._usage + self._floor) / (1 + self._floor - self._usage))
        weights = self._shared.weights
        odds = strengths[:, 0] @ self._pairs[sources]
        odds += weights[_USAGE] * usage + weights[_BIAS]
        occasions = self._memory.after(event.token, self._place) if event.rows <= MAX_STEP_ROWS else ()
        for weight, followers in zip(weights[_FIRST_OCCASION:], occasions, strict=False):
            odds[followers] += weight
        return _Forecast(event.token, used, sources, strengths, usage, occasions, 1 / (1 + np.exp(-odds)))

    def _learn(self, said: _Forecast, used: Experts, value: Floats) -> None:
        """`used` were used at the turn that `said` spoke of, and `value` is what is said now."""
        error = DISCOUNT * value
        error[used] = 1.0
        error -= said.value
        self._pairs[said.sources] += said.strengths * (PAIR_RATE / self._top_k * error)
        self._shared.learn(error, said)

    def _value_to_all(self) -> Floats:
        """Whichever of the streams that are active comes next, an expert may be of use to it."""
        active = [self._last[stream].value for stream in set(self._turns) if stream in self._last]
        return active[0] if len(active) == 1 else 1 - np.prod([1 - value for value in active], axis=0)

    # --- order -----------------------------------------------------------------------------------------------------

    def _rank(self, value: Floats) -> None:
        self.log_value = np.log(value)
        self._order = np.argsort(value)
        self._ranked: list[int] | None = None

    def ranked(self) -> list[int]:
        """Experts in the pool, the one of least value first."""
        if self._ranked is None:
            self._ranked = self._order[self._is_here[self._order]].tolist()
        return self._ranked

    def put(self, expert: int) -> None:
        self._is_here[expert] = True
        self._ranked = None

    def take(self, expert: int) -> None:
        self._is_here[expert] = False
        if self._ranked is not None:
            self._ranked.remove(expert)


class Learned:
    """See the module. A layer's turn comes once in a token: `_at` is the layer that had it last."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        shared, memory = _Shared(), _TokenMemory(len(layers))
        self._layers = [_Layer(shape, i, shared, memory) for i, shape in enumerate(layers)]
        self._of = {shape.index: i for i, shape in enumerate(layers)}
        self._at = 0

    def on_step(self, event: Event) -> None:
        self._at = self._of[event.layer]
        self._layers[self._at].turn(event)

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._layers[self._of[key[0]]].put(key[1])

    def on_evict(self, key: Key) -> None:
        self._layers[self._of[key[0]]].take(key[1])

    def seed(self, usage: Mapping[Key, float]) -> None:
        if not usage:
            return
        for layer in self._layers:
            shares = [usage.get((layer.index, e), 0.0) for e in range(len(layer.log_value))]
            layer.seed(np.array(shares, np.float32))

    def victims(self) -> Iterator[Key]:
        """The layers' orders, merged as far as they are asked for; a value counts less, the longer until its turn."""
        n, heap = len(self._layers), []
        for i, layer in enumerate(self._layers):
            if ranked := layer.ranked():
                wait = ((i - self._at - 1) % n + 1) / n * math.log(DISCOUNT)
                heap.append((wait + layer.log_value.item(ranked[0]), i, 0, wait, ranked))
        heapq.heapify(heap)
        while heap:
            _, i, place, wait, ranked = heap[0]
            layer = self._layers[i]
            if place + 1 < len(ranked):
                score = wait + layer.log_value.item(ranked[place + 1])
                heapq.heapreplace(heap, (score, i, place + 1, wait, ranked))
            else:
                heapq.heappop(heap)
            yield layer.index, ranked[place]
