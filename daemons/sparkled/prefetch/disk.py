"""The expert files of a store, opened the way this machine reads them best.

Owns file descriptors and the choice of direct or buffered reads, engine and depth; each choice carries its reason.
Reads a few records at start to measure. Never maps files: page faults read 3 to 8 times slower than explicit reads.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkle._native import PAGE_BYTES, Reader
from sparkle.config import Settings
from sparkle.errors import ConfigError, StorageError
from sparkle.store import Store

log = logging.getLogger(__name__)

BLOCK_CANDIDATES = (512, 4096, PAGE_BYTES)
MAX_DEPTH = 8
MEASURED_DEPTHS = (1, 2, 4, 8)
GOOD_ENOUGH = 0.95  # the smallest depth with this share of the best bandwidth: deeper only adds latency
MEASURE_BYTES = 32 << 20  # per depth; a fraction of a second on any SSD
MEASURE_S = 0.25


@dataclass(frozen=True, slots=True)
class Disk:
    """Open expert files, one per store layer, and how to read them."""

    fds: tuple[int, ...]
    is_direct: bool
    block_bytes: int
    direct_io: str  # "on", or "off: reason"

    @classmethod
    def open(cls, store: Store, mode: str) -> Disk:
        """Open all expert files; mode is the setting `direct_io`. Raises StorageError or ConfigError."""
        paths = [store.path / layer.file for layer in store.layers]
        block, reason = (0, "off: setting") if mode == "off" else _probe_direct(paths[0])
        if mode == "on" and block == 0:
            raise ConfigError(f"direct_io = on, but {paths[0].parent} can't do it ({reason}); use auto")
        flags = os.O_RDONLY | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if block else 0)
        fds: list[int] = []
        try:
            for path in paths:
                fds.append(os.open(path, flags))
                if block and sys.platform == "darwin":
                    _no_cache(fds[-1])
        except OSError as e:
            for fd in fds:
                os.close(fd)
            raise StorageError(f"cannot open {path}: {e.strerror}; run sparkle-ctl models verify") from e
        return cls(tuple(fds), block > 0, block or 1, reason)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def make_reader(settings: Settings, store: Store, disk: Disk, depth: int) -> Reader:
    """Return a reader for `depth` reads at once: io_uring where allowed, else threads."""
    record = max(layout.stride_bytes for layout in store.classes)
    if settings.io != "threads":
        try:
            return Reader.with_uring(depth, disk.block_bytes, record)
        except OSError as e:
            if settings.io == "uring":
                raise ConfigError(f"io = uring, but the kernel refuses it ({e}); use auto") from e
            log.info("io_uring_refused reason=%r", e.strerror or str(e))
    return Reader.with_threads(depth, disk.block_bytes, record)


@dataclass(frozen=True, slots=True)
class Depth:
    """How many reads to keep under way, the bandwidth then (0: not measured), and why."""

    n_reads: int
    bytes_per_s: float
    reason: str


def measure_depth(settings: Settings, store: Store, disk: Disk) -> Depth:
    if settings.read_depth:
        return Depth(settings.read_depth, 0.0, settings.origins["read_depth"])
    rates = {depth: _bandwidth(settings, store, disk, depth) for depth in MEASURED_DEPTHS}
    best = max(rates.values())
    depth = next(d for d, rate in rates.items() if rate >= GOOD_ENOUGH * best)
    reason = "measured: " + ", ".join(f"{d}→{rate / 1e9:.2f} GB/s" for d, rate in rates.items())
    return Depth(depth, rates[depth], reason)


def _bandwidth(settings: Settings, store: Store, disk: Disk, depth: int) -> float:
    """Bytes per second of random whole-record reads, `depth` at a time, into private memory."""
    layers = store.layers
    record = max(layout.stride_bytes for layout in store.classes)
    memory = np.empty((depth + 1) * record, np.uint8)
    base = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    reader = make_reader(settings, store, disk, depth)
    rng = random.Random(depth)
    free, n_read, began = list(range(depth)), 0, time.monotonic()
    try:
        while n_read < MEASURE_BYTES and time.monotonic() - began < MEASURE_S:
            while free:
                layer = rng.choice(layers)
                expert = rng.randrange(layer.n_experts)
                n_bytes = store.classes[layer.layout].stride_bytes
                buffer = free.pop()
                offset = store.record_offset(layer.index, expert)
                spans = [(base + buffer * record, n_bytes)]
                reader.submit(buffer << 32 | n_bytes, disk.fds[layer.index], offset, spans, disk.is_direct)
            for tag, error, _, _ in _wait(reader):
                if error:
                    raise StorageError(f"cannot read {store.path}: {os.strerror(error)}; run sparkle-ctl models verify")
                free.append(tag >> 32)
                n_read += tag & 0xFFFFFFFF
        return n_read / (time.monotonic() - began)
    finally:
        del reader  # waits for the reads under way: their memory goes next


def _wait(reader: Reader) -> Sequence[tuple[int, int, float, int]]:
    ready, _, _ = select.select([reader.event_fd], [], [], 30.0)
    if not ready:
        raise StorageError("a read has not ended within 30 s; is the disk alive? (dmesg)")
    return reader.reap()


def _probe_direct(path: Path) -> tuple[int, str]:
    """Return the block size that direct reads of `path` need, and "on"; or 0 and why not."""
    if sys.platform == "darwin":
        return PAGE_BYTES, "on"  # F_NOCACHE: any alignment works, pages are fastest
    if not hasattr(os, "O_DIRECT"):
        return 0, "off: this system has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.EINVAL:
            return 0, "off: the file system refuses O_DIRECT"
        raise StorageError(f"cannot open {path}: {e.strerror}; run sparkle-ctl models verify") from e
    try:
        memory = np.empty(3 * PAGE_BYTES, np.uint8)
        aligned = -memory.ctypes.data % PAGE_BYTES
        for block in BLOCK_CANDIDATES:
            view = memory[aligned + block : aligned + 2 * block]  # aligned to `block` and to nothing larger
            try:
                if os.preadv(fd, [view.data], block) > 0:
                    return block, "on"
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise StorageError(f"cannot read {path}: {e.strerror}; run sparkle-ctl models verify") from e
        return 0, "off: no block size works"
    finally:
        os.close(fd)


def _no_cache(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined,unused-ignore]  # macOS only
