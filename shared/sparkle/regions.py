"""Where the pool's bytes lie: regions of shared memory, one gapless array per piece.

    region object        header page │ gate.weight [n_slots, …] │ pad │ gate.scales [n_slots, …] │ pad │ …
                         16 KiB      └ every array starts on a 16 KiB boundary (Apple's page)

A region belongs to one layout class; slot numbers run through all regions. Where the system can take back parts of
shared memory (CAN_DISCARD), a region is as large as all experts of its class and has memory only behind the slots in
force; elsewhere it has just the slots that there will ever be. The header page says that this is a region; in the
first region's, the prefetch daemon notes the size that a user has asked for. Owns names, offsets and mappings. The
prefetch daemon creates and unlinks regions, everyone else attaches. Never decides what is in a slot: the control
segment (native/src/control.h, named `<prefix>-c`) says that.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from sparkle._native import CAN_DISCARD, PAGE_BYTES, Mapping
from sparkle.budget import gb
from sparkle.errors import ConfigError, PoolError
from sparkle.store import LayoutClass

MAX_REGION_BYTES = 4 << 30  # unit of allocation and release; one Metal buffer may not be larger than its budget either
MAX_REGIONS_PER_CLASS = 8
REGION_MAGIC = b"SPKREGN1"


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One region: slots first_slot … first_slot + n_slots - 1, of layout class `layout`.

    `n_planned` of them were in force at the beginning: another plan would be another pool.
    """

    name: str
    layout: int
    first_slot: int
    n_slots: int
    n_bytes: int
    n_planned: int


def control_name(prefix: str) -> str:
    return f"{prefix}-c"


def plan(
    prefix: str, classes: Sequence[LayoutClass], slots: Sequence[int], planned: Sequence[int] | None = None
) -> tuple[RegionSpec, ...]:
    """Divide `slots[i]` slots of each class into regions, the first `planned[i]` of them in force (default: all).

    Names are new each time: a live name is never reused.
    """
    specs: list[RegionSpec] = []
    tag = secrets.token_hex(3)
    first_slot = 0
    for i, (layout, n) in enumerate(zip(classes, slots, strict=True)):
        left = n if planned is None else planned[i]
        n_regions = min(MAX_REGIONS_PER_CLASS, max(1, -(-n * layout.record_bytes // MAX_REGION_BYTES))) if n else 0
        for r in range(n_regions):
            share = n * (r + 1) // n_regions - n * r // n_regions
            name, n_planned = f"{prefix}-{tag}{i:x}{r}", min(left, share)
            specs.append(RegionSpec(name, i, first_slot, share, region_bytes(layout, share), n_planned))
            first_slot, left = first_slot + share, left - n_planned
    return tuple(specs)


def piece_offsets(layout: LayoutClass, n_slots: int) -> list[int]:
    """Start of each piece's array in a region of `n_slots` slots."""
    offsets, at = [], PAGE_BYTES
    for piece in layout.pieces:
        offsets.append(at)
        at = _round_up(at + piece.nbytes * n_slots)
    return offsets


def region_bytes(layout: LayoutClass, n_slots: int) -> int:
    return _round_up(piece_offsets(layout, n_slots)[-1] + layout.pieces[-1].nbytes * n_slots)


def _round_up(n: int) -> int:
    return -(-n // PAGE_BYTES) * PAGE_BYTES


def to_json(specs: Sequence[RegionSpec]) -> str:
    return json.dumps([asdict(s) for s in specs], separators=(",", ":"))


def from_json(text: str) -> tuple[RegionSpec, ...]:
    try:
        return tuple(RegionSpec(**item) for item in json.loads(text))
    except (ValueError, TypeError) as e:
        raise PoolError(f"the pool's region table is damaged: {e}; restart the prefetch daemon") from None


class Region:
    """A mapped region. `pieces[p]` is a (n_slots, nbytes) uint8 view of piece p; the views keep the memory mapped."""

    def __init__(self, spec: RegionSpec, layout: LayoutClass, mapping: Mapping) -> None:
        self.spec = spec
        self.layout = layout
        self._mapping = mapping
        self._address = mapping.address
        self._offsets = piece_offsets(layout, spec.n_slots)
        memory = mapping.array()
        self._asked_bytes = memory[len(REGION_MAGIC) : 2 * len(REGION_MAGIC)].view(np.int64)
        self.pieces: list[npt.NDArray[np.uint8]] = [
            memory[at : at + p.nbytes * spec.n_slots].reshape(spec.n_slots, p.nbytes)
            for at, p in zip(self._offsets, layout.pieces, strict=True)
        ]

    @classmethod
    def create(cls, spec: RegionSpec, layout: LayoutClass) -> Region:
        """Make a region without memory behind its slots; see `reserve`."""
        try:
            mapping = Mapping.create_sparse(spec.name, spec.n_bytes)
            mapping.reserve(0, PAGE_BYTES)
        except OSError as e:
            Mapping.unlink(spec.name)
            raise ConfigError(f"cannot create shared memory {spec.name}: {e}; make /dev/shm larger") from e
        mapping.array()[: len(REGION_MAGIC)] = np.frombuffer(REGION_MAGIC, np.uint8)
        return cls(spec, layout, mapping)

    @property
    def asked_bytes(self) -> int:
        """What the prefetch daemon has noted in the header page, in one aligned store; 0 in a new region."""
        return int(self._asked_bytes[0])

    @asked_bytes.setter
    def asked_bytes(self, n_bytes: int) -> None:
        self._asked_bytes[0] = n_bytes

    def reserve(self, first: int, end: int) -> None:
        """Put memory behind slots first … end - 1 of this region, counted from its own start.

        Raises ConfigError, with nothing kept, if shared memory is full.
        """
        try:
            for at, n_bytes in self._ranges(first, end):
                self._mapping.reserve(at, n_bytes)
        except OSError as e:
            if CAN_DISCARD:
                self.discard(first, end)
            if e.errno in (errno.ENOSPC, errno.ENOMEM):
                n_bytes = (end - first) * self.layout.record_bytes
                raise ConfigError(
                    f"shared memory is full: no room for {gb(n_bytes)} of experts; make /dev/shm larger "
                    "(mount -o remount,size=…; containers: --shm-size), or lower SPARKLE_MEMORY or SPARKLE_POOL"
                ) from e
            raise ConfigError(f"cannot allocate shared memory {self.spec.name}: {e}") from e

    def discard(self, first: int, end: int) -> int:
        """Give the memory of slots first … end - 1 back to the system; nobody may read them. Returns the bytes."""
        return sum(self._mapping.discard(at, n_bytes) for at, n_bytes in self._ranges(first, end))

    def _ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the slots' part of each piece's array."""
        return [
            (at + first * p.nbytes, (end - first) * p.nbytes)
            for at, p in zip(self._offsets, self.layout.pieces, strict=True)
        ]

    @classmethod
    def attach(cls, spec: RegionSpec, layout: LayoutClass) -> Region:
        """Map a region made by the prefetch daemon. Raises PoolError if it is gone or not what the table says."""
        try:
            mapping = Mapping.attach(spec.name)
        except OSError as e:
            raise PoolError(f"shared memory {spec.name} of the pool is gone: {e}; restart the daemons") from e
        if mapping.n_bytes != spec.n_bytes or spec.n_bytes != region_bytes(layout, spec.n_slots):
            raise PoolError(
                f"region {spec.name} has {mapping.n_bytes} bytes, expected {spec.n_bytes}; restart the daemons"
            )
        if mapping.array()[: len(REGION_MAGIC)].tobytes() != REGION_MAGIC:
            raise PoolError(f"shared memory {spec.name} is not a region of a pool; restart the daemons")
        return cls(spec, layout, mapping)

    def spans(self, slot: int) -> list[tuple[int, int]]:
        """(address, bytes) of each piece of `slot`, in record order."""
        i = slot - self.spec.first_slot
        return [
            (self._address + at + i * p.nbytes, p.nbytes)
            for at, p in zip(self._offsets, self.layout.pieces, strict=True)
        ]

    def backed(self, n_slots: int) -> list[tuple[int, int]]:
        """(address, bytes) of the first `n_slots` slots in each piece's array."""
        return [(self._address + at, n_bytes) for at, n_bytes in self._ranges(0, n_slots)]
