"""What the pool's work is worth: time per token, experts read again too soon, and the bytes next to the optimum's.

Owns a log of the last minutes' events, cut into chapters that begin with a list of what the pool contained. A finished
chapter is judged in a thread of its own: what would Belady's policy, which knows the future, have read? Never on the
path of a request, and never changes anything.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np

from sparkle import _native
from sparkle.policy import Key
from sparkle.trace import Event

CHAPTER_S = 60.0
CHAPTER_USES = 1_000_000  # or this many experts used: what Belady's policy needs is a second's work
CHAPTERS = 5  # that figures are taken over
REGRET_TOKENS = 8  # an expert read again within so many tokens of its eviction should have stayed
MAX_TOKEN_S = 5.0  # a longer gap is a pause of the client, not a token


@dataclass(slots=True)
class Chapter:
    """A stretch of one layout class's uses, as _native.belady takes them, and what really happened in it."""

    n_slots: int
    resident: Sequence[Key]
    began: float = field(default_factory=time.monotonic)
    keys: array[int] = field(default_factory=lambda: array("I"))  # layer << 16 | expert
    ends: array[int] = field(default_factory=lambda: array("Q", [0]))  # of each event, in `keys`
    is_decoding: bytearray = field(default_factory=bytearray)  # of each event
    n_tokens: int = 0
    n_misses: int = 0
    decode_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decoding in a stretch of time: experts read, and those that Belady's policy would have read, in bytes; the tokens
    whose time is known, that time, and the part of it without their experts."""

    tokens: int = 0
    bytes_read: int = 0
    bytes_belady: int = 0
    decode_s: float = 0.0
    stall_s: float = 0.0


class Meter:
    """`begin_chapter(layout)` returns (slots in force, keys in the pool) of a layout class."""

    def __init__(self, begin_chapter: Callable[[int], tuple[int, Sequence[Key]]], record_bytes: Sequence[int]) -> None:
        self._begin_chapter = begin_chapter
        self._record_bytes = record_bytes
        self._chapters: dict[int, Chapter] = {}
        self._verdicts: deque[Verdict] = deque(maxlen=CHAPTERS)
        self._judge: threading.Thread | None = None
        self._evicted_at: dict[Key, int] = {}
        self._last: Event | None = None
        self._stall_s = 0.0
        self.counts: Counter[str] = Counter()
        self.on_token: Callable[[float, float], None] = lambda seconds, stall_s: None

    # --- what happens ----------------------------------------------------------------------------------------------

    def observe(self, event: Event, layout: int) -> None:
        chapter = self._chapters.get(layout)
        if chapter is None:
            chapter = self._chapters[layout] = Chapter(*self._begin_chapter(layout))
        base = event.layer << 16
        chapter.keys.extend([base | expert for expert in event.experts])
        chapter.ends.append(len(chapter.keys))
        chapter.is_decoding.append(event.rows == 1)
        if event.rows == 1:
            chapter.n_misses += event.is_hit.count(False)
        last = self._last
        if last is None or (event.step, event.stream) != (last.step, last.stream):
            self._step(event, chapter)

    def _step(self, event: Event, chapter: Chapter) -> None:
        """The first event of a step: what the step before took is known now."""
        last, stall_s = self._last, self._stall_s
        self._last, self._stall_s = event, 0.0
        self.counts["tokens"] += event.rows
        if last is None or event.rows != 1 or last.rows != 1:
            return
        seconds = (event.time_us - last.time_us) % 2**32 / 1e6
        if event.stream == last.stream and event.step == last.step + 1 and seconds < MAX_TOKEN_S:
            chapter.n_tokens += 1
            chapter.decode_s += seconds
            chapter.stall_s += min(stall_s, seconds)
            self.on_token(seconds, min(stall_s, seconds))

    def stalled(self, seconds: float) -> None:
        """A client waited so long for a set."""
        self._stall_s += seconds

    def evicted(self, key: Key) -> None:
        self._evicted_at[key] = self.counts["tokens"]

    def missed(self, key: Key) -> None:
        """`key` is read because a client asked."""
        evicted_at = self._evicted_at.pop(key, None)
        if evicted_at is not None and self.counts["tokens"] - evicted_at <= REGRET_TOKENS:
            self.counts["regrets"] += 1

    def resized(self) -> None:
        """The pool has another size: a chapter's optimum would be that of neither."""
        self._chapters.clear()

    # --- judgement -------------------------------------------------------------------------------------------------

    def turn_pages(self) -> None:
        """Close chapters that are long enough, and have them judged; call every few seconds."""
        if self._judge is not None and self._judge.is_alive():
            return
        now = time.monotonic()
        for layout, chapter in list(self._chapters.items()):
            if now - chapter.began < CHAPTER_S and len(chapter.keys) < CHAPTER_USES:
                continue
            del self._chapters[layout]
            size = self._record_bytes[layout]
            self._judge = threading.Thread(target=self._read, args=(chapter, size), name="judge", daemon=True)
            self._judge.start()
            return

    def _read(self, chapter: Chapter, record_bytes: int) -> None:
        """In the judge's thread: what the loop sees of it is one more verdict at the end."""
        resident = np.array([layer << 16 | expert for layer, expert in chapter.resident], np.uint32)
        keys, ends = np.asarray(chapter.keys, np.uint32), np.asarray(chapter.ends, np.uint64)
        misses = _native.belady(keys, ends, chapter.n_slots, resident, False)
        n_best = int(misses[np.frombuffer(chapter.is_decoding, np.bool_)].sum())
        self._verdicts.append(
            Verdict(
                chapter.n_tokens,
                chapter.n_misses * record_bytes,
                n_best * record_bytes,
                chapter.decode_s,
                chapter.stall_s,
            )
        )

    def judged(self) -> Verdict:
        """The sum of the last chapters' verdicts."""
        verdicts = [astuple(v) for v in self._verdicts]
        return Verdict(*map(sum, zip(*verdicts, strict=True))) if verdicts else Verdict()
