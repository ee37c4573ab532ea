"""Which expert leaves the pool when another must come in: pure bookkeeping over (layer, expert) keys.

Owns an order, nothing else: no clock, no I/O, no slots. The prefetch daemon and an offline replay drive the same
objects with the same calls, so that what is scored is what runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

Key = tuple[int, int]  # (store layer, expert)


class Policy(Protocol):
    """Decides for one layout class; every key it knows is in the pool."""

    def on_load(self, key: Key, is_demand: bool) -> None:
        """`key` entered the pool, because a client asked or in the background."""

    def on_use(self, key: Key) -> None:
        """A step used `key`. A key that is not in the pool (it left meanwhile) is passed over."""

    def on_evict(self, key: Key) -> None:
        """`key` left the pool."""

    def victims(self) -> Iterator[Key]:
        """Keys from the one to evict first; the caller passes over those that it may not take."""


class LRU:
    """Least recently used goes first; what came in the background and was never used goes before anything used."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def on_load(self, key: Key, is_demand: bool) -> None:
        self._order[key] = None
        self._order.move_to_end(key, last=is_demand)

    def on_use(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def on_evict(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)
