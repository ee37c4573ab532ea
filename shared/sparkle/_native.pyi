"""Contract of the C++ core (native/src/native_module.cpp), written by hand; tests/unit/test_native.py holds it true.

System calls that fail raise OSError with errno. Ids out of range raise IndexError, damaged segments RuntimeError.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_CLIENTS: int
RING_WORDS: int
PAGE_BYTES: int
CAN_DISCARD: bool
EMPTY: int
LOADING: int
READY: int
EVICTING: int
RETIRED: int

class Mapping:
    """A shared-memory object, mapped; space is reserved at creation, so that a full /dev/shm fails there."""

    @staticmethod
    def create(name: str, n_bytes: int) -> Mapping: ...
    @staticmethod
    def create_sparse(name: str, n_bytes: int) -> Mapping:
        """Create without memory behind it. What is not reserved must not be touched, not even read."""
    @staticmethod
    def attach(name: str) -> Mapping: ...
    @staticmethod
    def unlink(name: str) -> bool: ...
    @property
    def address(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def backed_bytes(self) -> int:
        """Bytes that have memory behind them."""
    def reserve(self, offset: int, n_bytes: int) -> None:
        """Put memory behind every page that the range touches; OSError, and nothing reserved, if /dev/shm is full.

        Not so at a control group's limit: there the kernel kills. Look at sparkle.machine first.
        """
    def discard(self, offset: int, n_bytes: int) -> int:
        """Give back the pages that lie whole in the range, in all processes; returns the bytes given back.

        Nothing may read into them or have them pinned (`Reader.register_memory`). OSError ENOTSUP unless CAN_DISCARD.
        """
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as bytes; the array keeps the mapping alive."""

class Pool:
    """The control segment as its owner (prefetch) sees it; steps E1-E7 of native/src/slots.h."""

    @staticmethod
    def create(name: str, n_layers: int, n_experts: int, n_slots: int, fingerprint: str, layout: str) -> Pool: ...
    @staticmethod
    def attach(name: str) -> Pool: ...
    def complete(self) -> None:
        """Let clients in: everything, regions too, is there."""
    @property
    def is_complete(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def n_slots(self) -> int: ...
    epoch: int
    wants_hints: bool  # tells clients whether HintExperts are of use now
    def client_name(self, bit: int) -> str: ...
    def set_client(self, bit: int, name: str) -> None: ...
    def reset_ring(self, bit: int) -> None: ...
    def lookup(self, layer: int, expert: int) -> int: ...
    def state(self, slot: int) -> int: ...
    def owner(self, slot: int) -> tuple[int, int] | None: ...
    def mask(self, slot: int) -> int: ...
    def gen(self, slot: int) -> int: ...
    def n_held(self) -> int: ...
    def begin_load(self, slot: int, layer: int, expert: int) -> bool: ...
    def publish(self, slot: int, grants: int) -> None: ...
    def abandon(self, slot: int) -> None: ...
    def unload(self, slot: int) -> bool:
        """Make a READY slot EMPTY; False if a client holds it."""

    def retire(self, slot: int) -> bool:
        """Take a slot out of use: its memory may go. False if a client holds it or a read is under way."""

    def restore(self, slot: int) -> None:
        """Make a retired slot, whose memory is back, EMPTY."""

    def grant(self, slot: int, bits: int) -> bool: ...
    def clear_client(self, bit: int) -> int: ...
    def recover(self, slot: int) -> bool: ...
    def drain(self, bit: int, limit: int) -> list[tuple[int, int, int, int, int, int, list[int], list[bool]]]:
        """Events up to word `limit`, as the fields of sparkle.trace.Event."""

class PoolClient:
    """The control segment as one client sees it; steps R1-R4. Used by one thread."""

    @staticmethod
    def attach(name: str, bit: int) -> PoolClient: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def n_held(self) -> int: ...
    @property
    def ring_position(self) -> int: ...
    def hold(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Slot of each expert, held; -1 where it is not in the pool."""
    def release(self, slots: Sequence[int]) -> None:
        """Undo holds; -1 is passed over."""
    def drop_grants(self, slots: Sequence[int]) -> None: ...
    def reconcile(self) -> None: ...
    @property
    def wants_hints(self) -> bool: ...
    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that no slot holds now; nothing is held."""

    def push_event(
        self,
        step: int,
        stream: int,
        rows: int,
        token: int,
        layer: int,
        experts: Sequence[int],
        slots: Sequence[int],
    ) -> bool:
        """Tell the policy what a step of `rows` rows, the last of them `token`, uses; False if the ring is full."""

    def share(self) -> object:
        """This client for sparkle._mlx_ops, which keeps it alive."""

class Reader:
    """Record reads, many at a time; see native/src/reader.h."""

    @staticmethod
    def with_threads(depth: int, block_bytes: int, record_bytes: int) -> Reader: ...
    @staticmethod
    def with_uring(depth: int, block_bytes: int, record_bytes: int) -> Reader: ...
    def submit(self, tag: int, fd: int, offset: int, spans: Sequence[tuple[int, int]], is_direct: bool) -> None: ...
    def reap(self) -> list[tuple[int, int, float, int]]:
        """(tag, errno or 0, seconds, retries) of each finished read."""
    def register_memory(self, spans: Sequence[tuple[int, int]]) -> bool: ...
    def keep_open(self, fd: int) -> None:
        """Keep a file open until no read can write to memory any more, even if this process is killed."""
    @property
    def event_fd(self) -> int: ...
    @property
    def name(self) -> str: ...

class LearnedVictims:
    """Keys in the pool, from the one to evict first; means nothing after another call of the policy."""

    def next(self, n: int) -> list[tuple[int, int]]:
        """The next `n` (place, expert), fewer only at the end."""

class LearnedPolicy:
    """What the policy `learned` computes; see native/src/learned.h. A layer is named by its place in `layers`.

    Used by one thread. Ids out of range raise IndexError and change nothing.
    """

    @staticmethod
    def create(layers: Sequence[tuple[int, int]]) -> LearnedPolicy:
        """layers: (n_experts, top_k) in the order of their turns. ValueError for one that can't be."""
    def seed(self, place: int, shares: Sequence[float]) -> None:
        """Recorded usage, one share in [0, 1] for each expert."""
    def turn(self, place: int, stream: int, rows: int, token: int, experts: Sequence[int]) -> None:
        """A step uses these experts of a layer; the arguments are the fields of sparkle.trace.Event."""
    def put(self, place: int, expert: int) -> None: ...
    def take(self, place: int, expert: int) -> None: ...
    def victims(self) -> LearnedVictims:
        """The order that follows from `values`, each times 0.6 ** (layers until the layer's turn / all layers).

        Of equals, the smaller place and expert come first.
        """
    def values(self, place: int) -> npt.NDArray[np.float32]:
        """Of each expert, as of its layer's last turn; a copy."""
    @property
    def weights(self) -> list[float]:
        """What all experts have in common: bias, usage, and the token's followers, its last occasion first."""

def belady(
    keys: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.uint64],
    n_slots: int,
    resident: npt.NDArray[np.uint32],
    has_bypass: bool,
) -> npt.NDArray[np.uint32]:
    """Misses of each request under the optimal policy; see native/src/belady.h. Releases the GIL.

    Request i is keys[offsets[i]:offsets[i + 1]], small numbers. ValueError if it has more keys than there are slots.
    """
