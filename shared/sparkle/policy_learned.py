"""Evict what will be of use latest, by a forecast that is learnt from the events themselves, from nothing.

Each layer's turn gives each of its experts a value: the sum of DISCOUNT**i over the chance that its next use is i turns
after the next. It is a logistic function of how often the expert was used of late, of the experts that the last two
tokens used (a weight for each pair), and of what followed the same token before. The weights follow the error of the
forecast at the next turn, temporal difference learning: what came is the next use, or DISCOUNT times the new forecast.
Source: Sutton 1988, "Learning to predict by the methods of temporal differences", TD(0). scripts/bench/LOG.md#eviction

Owns the forecast. No event of many rows teaches it: who was used by any row says little of what one token uses.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkle.policy_contract import Key, LayerShape
from sparkle.policy_order import Floats, LayerOrder
from sparkle.trace import Event

DISCOUNT = 0.6  # per turn; .5 to .8 differ by little, see scripts/bench/LOG.md#eviction
DECAY = 0.9  # of usage, per turn
PAIR_RATE = 0.16  # step of the pair weights, shared among the experts of a token
LAG_WEIGHT = 0.5  # of the last token but one
SHARED_RATE = 0.06  # step of the weights that all experts share, Adagrad
MAX_STEP_ROWS = 8  # more rows are a prompt
N_REMEMBERED = 2  # occasions per token
MAX_TOKENS = 4096  # that are remembered: 8 MB at 48 layers and top 10
MAX_STREAMS = 8  # whose last routing is kept
ACTIVE_TURNS = 4  # a stream that had none of a layer's last turns has ended or pauses

USAGE_FLOOR = 0.025  # of an even share: keeps log-odds finite

Ints = npt.NDArray[np.intp]

_NOBODY = np.zeros(0, np.intp)
_CONSTANT, _USAGE, _KNOWN, _OCCASION = 0, 1, 2, 3  # the shared weights


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What was said of a layer's experts at its turn, and on what grounds."""

    token: int
    own: Ints  # experts that the step used; empty for a prompt
    sources: Ints  # own, and those of the step before
    source_weights: Floats
    usage: Floats  # (n_experts,) log-odds
    remembered: list[Ints]  # experts that followed the token before, latest first
    value: Floats  # (n_experts,)


class Learned:
    """See the module. Memory: 4 bytes for each pair of experts of a layer."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._layers = sorted(layers, key=lambda layer: layer.index)
        self._place = {layer.index: i for i, layer in enumerate(self._layers)}
        self._usage = [np.full(x.n_experts, x.top_k / x.n_experts, np.float32) for x in self._layers]
        self._pairs = [np.zeros((x.n_experts, x.n_experts), np.float32) for x in self._layers]
        self._shared = np.zeros(_OCCASION + N_REMEMBERED, np.float32)
        self._shared[_USAGE], self._shared[_OCCASION:] = 1.0, 0.5
        self._gradients = np.full(len(self._shared), 1e-2, np.float32)
        self._streams: OrderedDict[int, list[_Forecast | None]] = OrderedDict()
        self._turns = [deque[int](maxlen=ACTIVE_TURNS) for _ in layers]
        self._memory = _TokenMemory(self._layers)
        self._order = LayerOrder(len(layers), max(layer.n_experts for layer in layers))
        self._now = 0  # place of the layer whose turn it is
        for place, usage in enumerate(self._usage):
            self._order.set_scores(place, np.log(usage))

    # --- what happens ----------------------------------------------------------------------------------------------

    def on_step(self, event: Event) -> None:
        place = self._now = self._place[event.layer]
        experts = np.asarray(event.experts, np.intp)
        usage = self._usage[place]
        usage *= DECAY
        usage[experts] += (1 - DECAY) * min(1.0, self._layers[place].top_k / max(1, len(experts)))
        stream = self._stream(event.stream)
        last = stream[place]
        new = self._forecast(place, event, experts, last)
        if event.rows <= MAX_STEP_ROWS and last is not None and len(last.own):
            self._learn(place, last, experts, new.value)
            if event.rows == 1:
                self._memory.add(last.token, place, experts)
        stream[place] = new
        self._turns[place].append(event.stream)
        self._order.set_scores(place, np.log(self._value(place)))

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._order.add(self._place[key[0]], key[1])

    def on_evict(self, key: Key) -> None:
        self._order.remove(self._place[key[0]], key[1])

    def seed(self, usage: Mapping[Key, float]) -> None:
        for (layer, expert), share in usage.items():
            self._usage[self._place[layer]][expert] = share
        for place, row in enumerate(self._usage):
            self._order.set_scores(place, np.log(row + 1e-6))

    def victims(self) -> Iterator[Key]:
        """By value, discounted for the part of a turn that passes until the layer's turn comes."""
        n = len(self._layers)
        until = (np.arange(n) - self._now - 1) % n + 1
        offsets = (np.log(DISCOUNT) / n * until).astype(np.float32)
        return ((self._layers[place].index, expert) for place, expert in self._order.ascending(offsets))

    # --- the forecast ----------------------------------------------------------------------------------------------

    def _forecast(self, place: int, event: Event, experts: Ints, last: _Forecast | None) -> _Forecast:
        layer = self._layers[place]
        own = experts if event.rows <= MAX_STEP_ROWS else _NOBODY
        before = _NOBODY if last is None else last.own
        sources = np.concatenate([own, before])
        weights = np.full(len(sources), layer.top_k, np.float32)  # a step of several rows counts as one token
        weights[: len(own)] /= max(layer.top_k, len(own))
        weights[len(own) :] *= LAG_WEIGHT / max(layer.top_k, len(before))
        floor = USAGE_FLOOR * layer.top_k / layer.n_experts
        usage = np.log((self._usage[place] + floor) / (1 + floor - self._usage[place]))
        odds = self._shared[_USAGE] * usage
        odds += self._shared[_CONSTANT]
        odds += weights @ self._pairs[place][sources]
        remembered = self._memory.after(event.token, place)
        if remembered:
            odds += self._shared[_KNOWN]
            for i, followers in enumerate(remembered):
                odds[followers] += self._shared[_OCCASION + i]
        return _Forecast(event.token, own, sources, weights, usage, remembered, 1 / (1 + np.exp(-odds)))

    def _learn(self, place: int, said: _Forecast, experts: Ints, value: Floats) -> None:
        """`experts` were used at the turn that `said` spoke of, and `value` is what is said now."""
        error = DISCOUNT * value
        error[experts] = 1.0
        error -= said.value
        rate = PAIR_RATE / self._layers[place].top_k
        self._pairs[place][said.sources] += (rate * said.source_weights)[:, None] * error
        gradient = np.zeros(len(self._shared), np.float32)
        gradient[_CONSTANT] = error.sum()
        gradient[_USAGE] = error @ said.usage
        if said.remembered:
            gradient[_KNOWN] = gradient[_CONSTANT]
            for i, followers in enumerate(said.remembered):
                gradient[_OCCASION + i] = error[followers].sum()
        self._gradients += gradient * gradient
        self._shared += SHARED_RATE * gradient / np.sqrt(self._gradients)

    def _value(self, place: int) -> Floats:
        """Of the streams that had one of the layer's last turns: whichever comes next, an expert is of use to any."""
        active = [self._streams[i][place] for i in set(self._turns[place]) if i in self._streams]
        unused = [1 - forecast.value for forecast in active if forecast is not None]
        return 1 - np.prod(unused, axis=0) if len(unused) > 1 else 1 - unused[0]

    def _stream(self, stream: int) -> list[_Forecast | None]:
        if stream not in self._streams:
            self._streams[stream] = [None] * len(self._layers)
            if len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        self._streams.move_to_end(stream)
        return self._streams[stream]


class _TokenMemory:
    """The experts that the token after a token used, on the last occasions. Only tokens lately seen are kept."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._shape = (len(layers), N_REMEMBERED, max(layer.top_k for layer in layers))
        self._tokens: OrderedDict[int, npt.NDArray[np.int16]] = OrderedDict()

    def after(self, token: int, place: int) -> list[Ints]:
        """Experts of the layer on each occasion, latest first."""
        occasions = self._tokens.get(token)
        return [] if occasions is None else [x[x >= 0].astype(np.intp) for x in occasions[place] if x[0] >= 0]

    def add(self, token: int, place: int, experts: Ints) -> None:
        if token not in self._tokens:
            self._tokens[token] = np.full(self._shape, -1, np.int16)
            if len(self._tokens) > MAX_TOKENS:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(token)
        occasions = self._tokens[token][place]
        occasions[1:] = occasions[:-1].copy()
        occasions[0, : len(experts)] = experts[: occasions.shape[1]]
        occasions[0, len(experts) :] = -1
