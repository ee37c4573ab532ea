"""Learned: evict the expert whose next use is worth least, by a forecast that starts from nothing.

At its turn each layer gives each of its experts a value: DISCOUNT ** i, averaged over what may come, if the expert's
next use lies i turns after the next one. The value is a logistic function of how often the expert was used of late, of
the experts that the conversation's last two tokens used (a weight for each pair, one matrix per layer), and of what
followed the same token before. All weights are learned online, by the error that the next turn reveals: what was used
was worth 1, and what was not is worth DISCOUNT times its new value. So the forecast reaches beyond one token although
one token is all that is ever waited for.
Source: Sutton 1988, "Learning to predict by the methods of temporal differences", TD(0) with a logistic function.
Measured in scripts/bench/LOG.md#policies

Computed by native/src/learned.h, where all its constants are (DISCOUNT is kDiscount); this module makes a policy of it.
Owns, by it, the numbers: four bytes for each pair of experts of a layer, 50 MB for 48 layers of 512, of which only what
was learned takes memory, and 9 MB of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparkle._native import LearnedPolicy
from sparkle.policy_contract import Key, LayerShape
from sparkle.trace import Event

_BATCH = 16  # victims that are fetched at once: rarely are more asked for


class Learned:
    """See the module. The layers take turns in the order in which they are given."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self._layers = layers
        self._place = {shape.index: i for i, shape in enumerate(layers)}
        self._native = LearnedPolicy.create([(shape.n_experts, shape.top_k) for shape in layers])

    def on_step(self, event: Event) -> None:
        self._native.turn(self._place[event.layer], event.stream, event.rows, event.token, event.experts)

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._native.put(self._place[key[0]], key[1])

    def on_evict(self, key: Key) -> None:
        self._native.take(self._place[key[0]], key[1])

    def seed(self, usage: Mapping[Key, float]) -> None:
        if not usage:
            return
        for place, shape in enumerate(self._layers):
            shares = [usage.get((shape.index, expert), 0.0) for expert in range(shape.n_experts)]
            self._native.seed(place, shares)

    def victims(self) -> Iterator[Key]:
        victims = self._native.victims()
        while batch := victims.next(_BATCH):
            for place, expert in batch:
                yield self._layers[place].index, expert
