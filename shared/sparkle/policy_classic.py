"""The field's standard orders: by last use, by frequency, by frequency with ageing, by last use beside fixed pins.

They are what a learned order must beat, and the choice of those who want to know beforehand what leaves the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparkle.policy_contract import Key, LayerShape
from sparkle.trace import Event

DECAY = 0.95  # per turn of a layer; scripts/bench/LOG.md#policies
PINNED_FRAC = 0.5  # of the slots; scripts/bench/LOG.md#policies
FIRST = 64  # victims that are put in order at first; hardly ever are more asked for


class LRU:
    """Least recently used goes first; what came in the background and was never used goes before anything used."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def on_step(self, event: Event) -> None:
        for expert in event.experts:
            key = (event.layer, expert)
            if key in self._order:
                self._order.move_to_end(key)

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._order[key] = None
        self._order.move_to_end(key, last=is_demand)

    def on_evict(self, key: Key) -> None:
        del self._order[key]

    def seed(self, usage: Mapping[Key, float]) -> None:
        """Recency has no use for frequencies."""

    def victims(self) -> Iterator[Key]:
        return iter(self._order)


class Pinned:
    """The hottest experts of the recorded usage stay, in a fraction of the slots; the rest is LRU. The seed's AUTOPIN.

    Without recorded usage it is LRU. Pins go only if nothing else may, the coldest first.
    """

    def __init__(self, layers: Sequence[LayerShape], frac: float = PINNED_FRAC) -> None:
        self._lru = LRU(layers)
        self._frac = frac
        self._hottest: list[Key] = []
        self._n_resident = 0
        self._pins: set[Key] = set()

    def on_step(self, event: Event) -> None:
        self._lru.on_step(event)

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._lru.on_load(key, is_demand)
        self._resize(1)

    def on_evict(self, key: Key) -> None:
        self._lru.on_evict(key)
        self._resize(-1)

    def seed(self, usage: Mapping[Key, float]) -> None:
        self._hottest = sorted(usage, key=lambda key: -usage[key])

    def _resize(self, change: int) -> None:
        """The pool's size is known by its content only; pins are asked about when it is full."""
        before, self._n_resident = self._n_pins(), self._n_resident + change
        for key in self._hottest[before : self._n_pins()]:
            self._pins.add(key)
        for key in self._hottest[self._n_pins() : before]:
            self._pins.discard(key)

    def _n_pins(self) -> int:
        return int(self._frac * self._n_resident)

    def victims(self) -> Iterator[Key]:
        yield from (key for key in self._lru.victims() if key not in self._pins)
        resident = set(self._lru.victims())
        yield from (key for key in reversed(self._hottest) if key in self._pins and key in resident)


class Ranked:
    """Keys of all layers in one row of scores; the lowest goes first. What a score is, subclasses say."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        ends = np.cumsum([layer.n_experts for layer in layers])
        self._rows = {x.index: slice(int(end) - x.n_experts, int(end)) for x, end in zip(layers, ends, strict=True)}
        self._top_k = {x.index: x.top_k for x in layers}
        self._keys = [(x.index, expert) for x in layers for expert in range(x.n_experts)]
        self._score = np.zeros(len(self._keys))
        self._is_resident = np.zeros(len(self._keys), bool)

    def _at(self, key: Key) -> int:
        return self._rows[key[0]].start + key[1]

    def _weight(self, event: Event) -> float:
        """What one use counts. An event of many rows names who was used by any of them: it counts as one token's."""
        return min(1.0, self._top_k[event.layer] / max(1, len(event.experts)))

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._is_resident[self._at(key)] = True

    def on_evict(self, key: Key) -> None:
        self._is_resident[self._at(key)] = False

    def victims(self) -> Iterator[Key]:
        resident = np.flatnonzero(self._is_resident)
        score = self._score[resident]
        order = np.argpartition(score, FIRST) if len(score) > FIRST else np.arange(len(score))
        for part in (order[:FIRST], order[FIRST:]):
            yield from (self._keys[i] for i in resident[part[np.argsort(score[part], kind="stable")]])


class LFU(Ranked):
    """Least frequently used goes first, where a use counts less with every later turn of its layer."""

    def on_step(self, event: Event) -> None:
        row = self._score[self._rows[event.layer]]
        row *= DECAY
        row[event.experts] += self._weight(event)

    def seed(self, usage: Mapping[Key, float]) -> None:
        for key, share in usage.items():
            self._score[self._at(key)] = share / (1 - DECAY)  # what it would be had this been so forever


class LFUDA(Ranked):
    """LFU with dynamic ageing: a use sets an expert's score to its count plus the score of the last that was evicted.

    What was hot once is overtaken by what is used now. Counts outlive eviction: all experts that have left are ghosts.
    Source: Arlitt et al. 2000, "Evaluating content management techniques for Web proxy caches", section 3.
    """

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        super().__init__(layers)
        self._count = np.zeros(len(self._keys))
        self._age = 0.0

    def on_step(self, event: Event) -> None:
        at = np.asarray(event.experts) + self._rows[event.layer].start
        self._count[at] += self._weight(event)
        self._score[at] = self._count[at] + self._age

    def on_evict(self, key: Key) -> None:
        super().on_evict(key)
        self._age = max(self._age, float(self._score[self._at(key)]))

    def seed(self, usage: Mapping[Key, float]) -> None:
        for key, share in usage.items():
            self._count[self._at(key)] = self._score[self._at(key)] = share / (1 - DECAY)
