"""Foresight: evict the expert that is least likely to be used soon, by what has been learned while running.

An expert's chance at its layer's next turn comes from a logistic regression over two kinds of evidence: how often it
was used of late (averages over several spans), and which experts the same conversation's last two tokens used in that
layer (a matrix of expert to expert, one per layer). The matrix is learned online, from nothing, by one small gradient
step per layer and token, so that it follows any model and any workload; the averages' weights were fitted once, on half
of the shipped model's conversations, and judged on the other half: scripts/bench/LOG.md#policies

The worth of keeping an expert is its chance at the next turn, plus a discounted rest: what lies further ahead matters
little, for a slot changes hands within a few tokens. Of experts that are worth the same, the one whose layer has just
had its turn goes first.

Owns these numbers: four bytes for each pair of experts of a layer, 50 MB for 48 layers of 512.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkle.policy_contract import Key, LayerShape
from sparkle.trace import Event

SPANS = (0.5, 0.8, 0.95, 0.99, 0.998)  # decay per token of each average: 2 to 500 tokens
WEIGHTS = (1.65, -2.62, 7.19, -1.02, 0.94)
RATE = 0.05  # of learning: 0.03 to 0.12 differ by half a point
SECOND_LAST = 0.4  # how much the token before the last counts, next to the last
DISCOUNT = 0.25  # per turn: 0.15 to 0.3 are alike, 0.7 is worse
SHARPNESS = 1.0  # a whole token ahead counts as much as a factor of e to the 1 / SHARPNESS in worth
MANY_ROWS = 8
MAX_STREAMS = 64

Floats = npt.NDArray[np.floating[Any]]  # float32


class _Layer:
    """What is known of one layer's experts. `wait[e]`: how long e can wait, which is minus the log of its worth."""

    def __init__(self, shape: LayerShape) -> None:
        self.index = shape.index
        self._top_k = shape.top_k
        share = min(0.5, shape.top_k / shape.n_experts)
        self._kept = np.array(SPANS, np.float32)[:, None]
        self._weights = np.array(WEIGHTS, np.float32)
        self._bias = math.log(share / (1 - share)) - share * sum(WEIGHTS)  # no evidence: the average chance
        self._averages = np.full((len(SPANS), shape.n_experts), share, np.float32)
        self._follows = np.zeros((shape.n_experts, shape.n_experts), np.float32)
        self._soon: Floats = np.zeros(0, np.float32)  # chances at the next turn of stream `_soon_of`
        self._soon_of = -1
        self._last: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()  # of each stream: last, second last
        self._is_here = np.zeros(shape.n_experts, np.bool_)
        self.wait: list[float] = []
        self._order: npt.NDArray[np.int64] = np.arange(shape.n_experts)
        self._ranked: list[int] | None = None
        self._expect(-1, [], [])

    def seed(self, shares: Floats) -> None:
        self._averages[:] = shares
        self._expect(-1, [], [])

    def learn(self, event: Event) -> None:
        used = np.zeros(len(self._is_here), np.float32)
        last, second = self._last.pop(event.stream, ([], []))
        kept = self._kept
        if event.rows == 1:
            used[event.experts] = 1.0
            if last:
                if event.stream != self._soon_of:  # another conversation came in between
                    self._expect(event.stream, last, second)
                step = RATE * (used - self._soon)
                self._follows[last] += step
                if second:
                    self._follows[second] += SECOND_LAST * step
            last, second = event.experts, last
            self._last[event.stream] = last, second
            if len(self._last) > MAX_STREAMS:
                self._last.popitem(last=False)
        else:  # a union over rows says little of each: its share of the uses, spread evenly
            used[event.experts] = min(1.0, self._top_k / max(1, len(event.experts)))
            kept = kept ** min(event.rows, MANY_ROWS)
            last, second = [], []
        self._averages *= kept
        self._averages += (1 - kept) * used
        self._expect(event.stream, last, second)

    def _expect(self, stream: int, last: list[int], second: list[int]) -> None:
        """Weigh all experts, for the turn after `last`."""
        self._soon_of = stream
        score = self._weights @ self._averages + self._bias
        usual = _chance(score)
        later = DISCOUNT * usual / (1 - DISCOUNT * (1 - usual))  # of a use at any later turn, each discounted once more
        if last:
            score = score + self._follows[last].sum(axis=0)
        if second:
            score += SECOND_LAST * self._follows[second].sum(axis=0)
        self._soon = _chance(score)
        wait = -np.log(self._soon + (1 - self._soon) * later)
        self.wait, self._order, self._ranked = wait.tolist(), np.argsort(-wait, kind="stable"), None

    def ranked(self) -> list[int]:
        """Experts in the pool, the one that can wait longest first."""
        if self._ranked is None:
            self._ranked = self._order[self._is_here[self._order]].tolist()
        return self._ranked

    def put(self, expert: int, is_here: bool) -> None:
        self._is_here[expert] = is_here
        self._ranked = None


def _chance(score: Floats) -> Floats:
    chance: Floats = 1 / (1 + np.exp(-score))
    return chance


class Foresight:
    """See the module. A layer's turn comes once in a token: `_at` is the layer that had it last."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._layers = [_Layer(shape) for shape in layers]
        self._of = {shape.index: i for i, shape in enumerate(layers)}
        self._at = 0

    def on_step(self, event: Event) -> None:
        self._at = self._of[event.layer]
        self._layers[self._at].learn(event)

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._layers[self._of[key[0]]].put(key[1], True)

    def on_evict(self, key: Key) -> None:
        self._layers[self._of[key[0]]].put(key[1], False)

    def seed(self, usage: Mapping[Key, float]) -> None:
        if not usage:
            return
        for layer in self._layers:
            shares = [usage.get((layer.index, e), 0.0) for e in range(len(layer.wait))]
            layer.seed(np.array(shares, np.float32))

    def victims(self) -> Iterator[Key]:
        """The layers' orders, merged as far as they are asked for."""
        n, heap = len(self._layers), []
        for i, layer in enumerate(self._layers):
            if ranked := layer.ranked():
                ahead = ((i - self._at - 1) % n + 1) / n / SHARPNESS
                heap.append((-ahead - layer.wait[ranked[0]], i, 0, ahead, ranked))
        heapq.heapify(heap)
        while heap:
            _, i, place, ahead, ranked = heap[0]
            layer = self._layers[i]
            if place + 1 < len(ranked):
                wait = layer.wait[ranked[place + 1]]
                heapq.heapreplace(heap, (-ahead - wait, i, place + 1, ahead, ranked))
            else:
                heapq.heappop(heap)
            yield layer.index, ranked[place]
