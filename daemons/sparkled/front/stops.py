"""Stop strings over text that arrives in pieces.

Owns the text that may still turn out to be the beginning of a stop string. The stop string that is complete first ends
the answer, so the result does not depend on how the text was cut into pieces; of two that are complete with the same
character the longer counts. Never lets a character of the matched stop string out, and holds no more than needed.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One Knuth-Morris-Pratt automaton per stop string: linear in the text, whatever the stop strings are."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: not empty strings."""
        self._stops = list(stops)
        self._fallbacks = [_fallback(stop) for stop in stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text so far ends with
        self._held = ""
        self.is_hit = False

    def feed(self, piece: str) -> str:
        """Return the text that is certain to be no part of a stop string. After a hit there is none."""
        if self.is_hit or not self._stops:
            return "" if self.is_hit else piece
        text, start = self._held + piece, len(self._held)
        for end in range(start, len(text)):
            if n := self._step(text[end]):
                self.is_hit, self._held = True, ""
                return text[: end + 1 - n]
        n_held = max(self._matched)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return what was held: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Take in one character; return the length of the stop string that it completes, or 0."""
        longest = 0
        for i, stop in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != char:
                n = self._fallbacks[i][n]
            n += stop[n] == char
            self._matched[i] = n
            if n == len(stop):
                longest = max(longest, n)
        return longest


def _fallback(stop: str) -> list[int]:
    """Return for each n the length of the longest proper prefix of `stop` that ends its first n characters."""
    table = [0, 0]
    for end in range(1, len(stop)):
        n = table[end]
        while n and stop[n] != stop[end]:
            n = table[n]
        table.append(n + (stop[n] == stop[end]))
    return table
