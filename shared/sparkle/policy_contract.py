"""What an eviction policy is: the calls that it gets and the question that it answers. Owns types, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from sparkle.trace import Event

Key = tuple[int, int]  # (store layer, expert)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer whose experts share the pool: its index in the store, its experts, and how many one token uses."""

    index: int
    n_experts: int
    top_k: int


class Policy(Protocol):
    """Decides for one layout class. The calls come in this order: on_step, then victims/on_evict/on_load for misses."""

    def on_step(self, event: Event) -> None:
        """A step uses these experts of a layer. Some may not be in the pool: they are about to be loaded."""

    def on_load(self, key: Key, is_demand: bool) -> None:
        """`key` was given a slot, because a client asked or in the background."""

    def on_evict(self, key: Key) -> None:
        """`key` lost its slot."""

    def seed(self, usage: Mapping[Key, float]) -> None:
        """Take over recorded usage: the share of tokens that used each key, in [0, 1]. Called before anything else."""

    def victims(self) -> Iterator[Key]:
        """Keys that have a slot, from the one to evict first; the caller passes over those that it may not take.

        Valid until the next other call.
        """
