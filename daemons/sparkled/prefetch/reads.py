"""The queue of record reads: demand before background, a bounded number under way, every record checked.

Owns the native reader and which reads wait or run. Reports each end through one callback. A read is retried once after
an I/O error or a wrong checksum; a record that fails again is quarantined: asking for it is an error until the daemon
is started anew. Never hands on bytes of a record that this process has not verified once.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from sparkle._native import Reader
from sparkle.errors import StorageError
from sparkle.policy import Key
from sparkle.regions import Region
from sparkle.store import Store
from sparkled.prefetch.disk import Disk

log = logging.getLogger(__name__)

LATENCIES = 512  # demand reads over which percentiles are taken
MAX_ATTEMPTS = 2


class Cause(Enum):
    DEMAND = "demand"
    BACKGROUND = "background"


@dataclass(slots=True)
class Read:
    """One record on its way into one slot."""

    key: Key
    slot: int
    region: Region
    cause: Cause
    n_attempts: int = 0


@dataclass(slots=True)
class ReadStats:
    """Counters by the names of sparkle.telemetry."""

    bytes_read: int = 0
    bytes_read_demand: int = 0
    bytes_read_background: int = 0
    read_busy_s: float = 0.0
    reads_retried: int = 0
    checksums_verified: int = 0
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))


class ReadQueue:
    """`on_end(read, error)` is called in `reap`, with None or the reason why the record can't be had."""

    def __init__(
        self,
        store: Store,
        disk: Disk,
        reader: Reader,
        depth: int,
        checksum_frac: float,
        on_end: Callable[[Read, StorageError | None], None],
    ) -> None:
        self._store = store
        self._disk = disk
        self._reader = reader
        self._depth = depth
        self._checksum_frac = checksum_frac
        self._on_end = on_end
        self._random = random.Random(0)
        self._demand: deque[Read] = deque()
        self._background: deque[Read] = deque()
        self._running: dict[int, Read] = {}
        self._next_tag = 0
        self._busy_since = 0.0
        self._verified: set[Key] = set()
        self.quarantined: dict[Key, StorageError] = {}
        self.stats = ReadStats()

    @property
    def event_fd(self) -> int:
        return self._reader.event_fd

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs that a client asked for."""
        return not self._demand and all(r.cause is Cause.BACKGROUND for r in self._running.values())

    @property
    def n_background(self) -> int:
        return len(self._background) + sum(r.cause is Cause.BACKGROUND for r in self._running.values())

    def add(self, read: Read) -> None:
        (self._demand if read.cause is Cause.DEMAND else self._background).append(read)
        self._issue()

    def promote(self, read: Read) -> None:
        """A client asks for what is being read in the background: the same read, now in front."""
        read.cause = Cause.DEMAND
        if read in self._background:
            self._background.remove(read)
            self._demand.append(read)
            self._issue()

    def reap(self) -> None:
        """Take what has ended; call when `event_fd` is readable."""
        for tag, error, seconds, n_retries in self._reader.reap():
            read = self._running.pop(tag)
            self.stats.reads_retried += n_retries
            if not self._running:
                self.stats.read_busy_s += time.monotonic() - self._busy_since
            self._end(read, error, seconds)
        self._issue()

    def _issue(self) -> None:
        while len(self._running) < self._depth:
            if self._demand:
                read = self._demand.popleft()
            elif self._background and self.is_idle:
                read = self._background.popleft()
            else:
                return
            if not self._running:
                self._busy_since = time.monotonic()
            layer, expert = read.key
            read.n_attempts += 1
            self._next_tag += 1
            self._running[self._next_tag] = read
            self._reader.submit(
                self._next_tag,
                self._disk.fds[layer],
                self._store.record_offset(layer, expert),
                read.region.spans(read.slot),
                self._disk.is_direct,
            )

    def _end(self, read: Read, error: int, seconds: float) -> None:
        n_bytes = read.region.layout.record_bytes
        problem = self._problem(read, error)
        if problem is None:
            self.stats.bytes_read += n_bytes
            if read.cause is Cause.DEMAND:
                self.stats.bytes_read_demand += n_bytes
                self.stats.latencies_ms.append(seconds * 1e3)
            else:
                self.stats.bytes_read_background += n_bytes
            self._on_end(read, None)
        elif read.n_attempts < MAX_ATTEMPTS:
            log.warning("read_retried layer=%d expert=%d %s", *read.key, problem)
            self.stats.reads_retried += 1
            (self._demand if read.cause is Cause.DEMAND else self._background).appendleft(read)
        else:
            log.error("record_quarantined layer=%d expert=%d %s", *read.key, problem)
            self.quarantined[read.key] = problem
            self._on_end(read, problem)

    def _problem(self, read: Read, error: int) -> StorageError | None:
        layer = self._store.layers[read.key[0]]
        where = f"expert {read.key[1]} of layer {layer.index} in {self._store.path / layer.file}"
        if error:
            return StorageError(f"cannot read {where}: {os.strerror(error)}; run sparkle-ctl models verify")
        if read.key in self._verified and self._random.random() >= self._checksum_frac:
            return None
        self.stats.checksums_verified += 1
        if _checksum(read.region, read.slot) != layer.checksums[read.key[1]]:
            return StorageError(f"{where} is damaged: its checksum is wrong; prepare the store again")
        self._verified.add(read.key)
        return None

    def close(self) -> None:
        """End all reads: the native reader waits for what is under way, after that the slots' memory may go."""
        del self._reader

    @property
    def busy_s(self) -> float:
        return self.stats.read_busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)


def percentile(values: Sequence[float], frac: float) -> float:
    """The value below which `frac` of `values` lie; 0 for none."""
    return sorted(values)[min(len(values) - 1, int(frac * len(values)))] if values else 0.0


def _checksum(region: Region, slot: int) -> int:
    digest = xxhash.xxh3_64()
    for piece in region.pieces:
        digest.update(piece[slot - region.spec.first_slot])
    return int(digest.intdigest())
