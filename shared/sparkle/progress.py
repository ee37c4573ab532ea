"""A progress line on stderr for commands that move many bytes: share done, rate, time left.

Owns one line of the terminal; redrawn at most five times a second there, and printed every few seconds when stderr is
a file or a pipe. Never writes to stdout, which belongs to the command's result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

REDRAW_S = 0.2
LINE_S = 5.0

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def size(n_bytes: float) -> str:
    """Return a size as people read it: 64.1 MB, 81.3 GB (powers of 1000, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.95:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


class Meter:
    """A `Progress` that draws itself; use as a context manager so that the line is ended however the work ends."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._is_tty = self._stream.isatty()
        self._clock = clock
        self._started = clock()
        self._last = self._started
        self._width = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if now - self._last < (REDRAW_S if self._is_tty else LINE_S):
            return
        self._last = now
        rate = done_bytes / (now - self._started)
        left_s = (total_bytes - done_bytes) / rate if rate else 0.0
        share = 100 * done_bytes / total_bytes if total_bytes else 100.0
        text = f"{self._label} {share:3.0f} %  {size(done_bytes)} of {size(total_bytes)}  {size(rate)}/s  "
        text += f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"
        if self._is_tty:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
