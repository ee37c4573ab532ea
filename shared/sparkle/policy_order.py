"""The order in which experts of many layers leave, where the scores of a layer change at its own turn only.

Owns scores and who is resident. Keeps the lowest few of each layer sorted, so that the first victims are merged from
those instead of being sought among all experts: victims are chosen while a client waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

HEAD = 32  # sorted keys per layer: a token's experts of the layer, which may not go, and some that may
FIRST = 64  # merged keys that are put in order at first

Floats = npt.NDArray[np.float32]


class LayerOrder:
    """Keys are (place of the layer, expert). `width` is the most experts that a layer has."""

    def __init__(self, n_layers: int, width: int) -> None:
        self._score = np.zeros((n_layers, width), np.float32)
        self._is_resident = np.zeros((n_layers, width), bool)
        head = min(HEAD, width)
        self._head = np.zeros((n_layers, head), np.intp)
        self._head_score = np.full((n_layers, head), np.inf, np.float32)
        # all residents below this score are in the head; -inf: the head must be sorted anew
        self._limit = np.full(n_layers, -np.inf, np.float32)

    def set_scores(self, place: int, scores: Floats) -> None:
        self._score[place, : len(scores)] = scores
        self._limit[place] = -np.inf

    def add(self, place: int, expert: int) -> None:
        self._is_resident[place, expert] = True
        if self._score[place, expert] < self._limit[place]:
            self._limit[place] = -np.inf

    def remove(self, place: int, expert: int) -> None:
        self._is_resident[place, expert] = False
        self._head_score[place, self._head[place] == expert] = np.inf

    def ascending(self, offsets: Floats) -> Iterator[tuple[int, int]]:
        """Resident keys by score plus their layer's offset, lowest first. Valid until the next other call."""
        n_left = np.count_nonzero(self._head_score < np.inf, axis=1)
        for place in np.flatnonzero((self._limit == -np.inf) | ((n_left < HEAD // 4) & (self._limit < np.inf))):
            self._sort(place)
        known = self._head_score + offsets[:, None]
        is_low = known < np.min(self._limit + offsets)  # beyond this, an expert outside of the heads may come first
        at = np.flatnonzero(is_low)
        score = known.ravel()[at]
        order = np.argpartition(score, FIRST) if len(score) > FIRST else np.arange(len(score))
        for part in (order[:FIRST], order[FIRST:]):
            places, columns = np.divmod(at[part[np.argsort(score[part], kind="stable")]], self._head.shape[1])
            yield from zip(places.tolist(), self._head[places, columns].tolist(), strict=True)
        rest = self._is_resident.copy()
        places, columns = np.divmod(at, self._head.shape[1])
        rest[places, self._head[places, columns]] = False
        places, experts = np.nonzero(rest)
        order = np.argsort(self._score[places, experts] + offsets[places], kind="stable")
        yield from zip(places[order].tolist(), experts[order].tolist(), strict=True)

    def _sort(self, place: int) -> None:
        resident = np.flatnonzero(self._is_resident[place])
        score = self._score[place, resident]
        n = self._head.shape[1]
        self._head_score[place] = np.inf
        if len(resident) <= n:
            self._limit[place] = np.inf
            part = np.arange(len(resident))
        else:
            part = np.argpartition(score, n)
            self._limit[place] = score[part[n]]
            part = part[:n]
        self._head[place, : len(part)] = resident[part]
        self._head_score[place, : len(part)] = score[part]
