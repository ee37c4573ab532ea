"""The side region: experts that were read before anybody asked, and what came of each.

Owns the set of slots that were filled ahead of demand and not used yet, and the account of bytes by who wanted them.
A use turns such a slot into an ordinary one where it lies. Never reads or evicts by itself.

    loaded ──► used      a step found it in the pool
      │  └───► late      a step asked while it was still being read
      └──────► wasted    evicted without a use
"""

from __future__ import annotations

from collections import Counter

from sparkle.policy import Key

FILL = "fill"  # the pool's own filling of empty slots; every other name is a predictor's
OUTCOMES = ("issued", "used", "late", "wasted")


class SideRegion:
    """`limit`: most slots that forecasts may occupy before their turn: a bad predictor costs no more than that."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._wanted_by: dict[Key, str] = {}
        self._is_due: dict[Key, None] = {}  # forecasts whose layer's turn has not come, oldest first
        self.n_bytes: dict[str, Counter[str]] = {}

    def add(self, key: Key, source: str, n_bytes: int) -> None:
        """`key` is being read because `source` wants it."""
        self._wanted_by[key] = source
        if source != FILL:
            self._is_due[key] = None
        self._count(source, "issued", n_bytes)

    def used(self, key: Key, n_bytes: int) -> None:
        self._end(key, "used", n_bytes)

    def late(self, key: Key, n_bytes: int) -> None:
        self._end(key, "late", n_bytes)

    def wasted(self, key: Key, n_bytes: int) -> None:
        self._end(key, "wasted", n_bytes)

    def passed(self, layer: int) -> None:
        """The layer has had its turn: what was forecast for it is worth no more than anything else."""
        for key in [k for k in self._is_due if k[0] == layer]:
            del self._is_due[key]

    def is_due(self, key: Key) -> bool:
        """Whether `key` waits for its layer's turn: evicting it now would waste the read for sure."""
        return key in self._is_due

    @property
    def is_full(self) -> bool:
        return len(self._is_due) >= self.limit

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted_by

    def __len__(self) -> int:
        return len(self._wanted_by)

    def _end(self, key: Key, outcome: str, n_bytes: int) -> None:
        source = self._wanted_by.pop(key, None)
        self._is_due.pop(key, None)
        if source is not None:
            self._count(source, outcome, n_bytes)

    def _count(self, source: str, outcome: str, n_bytes: int) -> None:
        self.n_bytes.setdefault(source, Counter(dict.fromkeys(OUTCOMES, 0)))[outcome] += n_bytes
