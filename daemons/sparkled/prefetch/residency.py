"""Which expert is in which slot: placing sets, choosing victims, granting slots to clients.

Owns the control segment's evictor side, the policy of each layout class, free slots and pending requests. Asks the read
queue for records. Single-threaded: it is the only evictor, so between two of its steps nothing leaves the pool.

INVARIANT: a request's set is placed whole or waits; a request that waits has no grants (two clients can't deadlock).
INVARIANT: a slot is published only after its record was read and checked; else it becomes EMPTY.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sparkle import _native
from sparkle.errors import PoolError, SparkleError, StorageError
from sparkle.messages import FetchExperts
from sparkle.policy import LRU, Key, Policy
from sparkle.regions import Region
from sparkle.store import Store
from sparkled.prefetch.reads import Cause, Read, ReadQueue


@dataclass(slots=True)
class Request:
    """A FetchExperts under way. `missing` are its experts that are being read."""

    peer: bytes
    message: FetchExperts
    deadline: float
    was_hit: frozenset[int]
    missing: set[Key] = field(default_factory=set)
    is_placed: bool = False

    @property
    def keys(self) -> list[Key]:
        return [(self.message.layer, e) for e in self.message.experts]


class Residency:
    """See the module. `on_ready(request, slots)` and `on_failed(request, error)` end a request."""

    def __init__(
        self,
        store: Store,
        pool: _native.Pool,
        regions: Sequence[Region],
        on_ready: Callable[[Request, list[int]], None],
        on_failed: Callable[[Request, SparkleError], None],
        policy: Callable[[], Policy] = LRU,
    ) -> None:
        self._store = store
        self._pool = pool
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._region_of = [r for r in regions for _ in range(r.spec.n_slots)]
        self._policies = [policy() for _ in store.classes]
        self._free: list[list[int]] = [[] for _ in store.classes]
        self._side: set[Key] = set()
        self._loading: dict[Key, Read] = {}
        self._waiters: dict[Key, list[Request]] = {}
        self.requests: dict[str, Request] = {}
        self._queued: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.reads: ReadQueue | None = None  # set once by `start`

    # --- start -----------------------------------------------------------------------------------------------------

    def start(self, reads: ReadQueue) -> int:
        """Take stock of every slot (all EMPTY in a new pool). Returns how many experts were found."""
        self.reads = reads
        for slot in range(self._pool.n_slots):
            must_read = self._pool.recover(slot)
            owner = self._pool.owner(slot)
            if owner is None:
                self._free[self._region_of[slot].spec.layout].append(slot)
            elif must_read:
                self._read(owner, slot, Cause.BACKGROUND)
            else:
                self._policy(owner).on_load(owner, True)
        for free in self._free:
            free.reverse()  # pop() takes the lowest slot first
        return self.n_used

    # --- requests --------------------------------------------------------------------------------------------------

    def fetch(self, request: Request) -> None:
        """Place a set, or queue it; it ends through on_ready or on_failed, perhaps at once."""
        damaged = next((self._the_reads.quarantined[k] for k in request.keys if k in self._the_reads.quarantined), None)
        if damaged is not None:
            self._fail(request, damaged)
            return
        self.requests[request.message.request_id] = request
        self.counts["fetches"] += 1
        if not self._place(request):
            self.counts["fetches_queued"] += 1
            self._queued.append(request)

    def cancel(self, request_id: str) -> bool:
        """Forget a request. True if it was under way; its client then gives back what it was granted."""
        request = self.requests.pop(request_id, None)
        if request is not None and not request.is_placed:
            self._queued.remove(request)
        return request is not None

    def drop_client(self, incarnation: str, bit: int) -> int:
        """Forget a client that is proved dead or has left: its requests, and its bit in every mask."""
        for request in [r for r in self.requests.values() if r.message.incarnation == incarnation]:
            self.cancel(request.message.request_id)
        return self._pool.clear_client(bit)

    def retry_queued(self) -> None:
        """Try sets that had no room; first come, first served."""
        while self._queued and self._place(self._queued[0]):
            self._queued.pop(0)

    def expire(self) -> None:
        """End requests that have outlived their deadline."""
        now = time.monotonic()
        for request in [r for r in self.requests.values() if now > r.deadline]:
            waited_for = f"{len(request.missing)} records" if request.is_placed else "slots that other clients hold"
            self.cancel(request.message.request_id)
            self._fail(request, PoolError(f"layer {request.message.layer}: waited in vain for {waited_for}"))

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def _place(self, request: Request) -> bool:
        """Grant what is there and start reads for the rest; False, and no grant made, if there is no room."""
        layout = self._store.layers[request.message.layer].layout
        wanted = request.keys
        absent = [k for k in wanted if self._pool.lookup(*k) < 0 and k not in self._loading]
        slots = self._make_room(layout, absent, keep=set(wanted))
        if slots is None:
            return False
        bit = 1 << request.message.bit
        request.is_placed = True
        for key in wanted:
            self._count(request, key, absent)
            slot = self._pool.lookup(*key)
            if slot >= 0:
                self._pool.grant(slot, bit)
                continue
            request.missing.add(key)
            self._waiters.setdefault(key, []).append(request)
            if key in self._loading:
                self._the_reads.promote(self._loading[key])
        for key, slot in zip(absent, slots, strict=True):
            self._read(key, slot, Cause.DEMAND)
        self._finish_if_complete(request)
        return True

    def _count(self, request: Request, key: Key, absent: list[Key]) -> None:
        """Say how an expert that the client did not find was met; see hits_* in sparkle.telemetry."""
        if key[1] in request.was_hit:
            return
        if key in absent:
            self.counts["misses"] += 1
        elif key in self._loading and self._loading[key].cause is Cause.BACKGROUND:
            self.counts["hits_late"] += 1
        else:
            self.counts["hits_in_flight"] += 1

    def _finish_if_complete(self, request: Request) -> None:
        if request.missing or self.requests.pop(request.message.request_id, None) is None:
            return
        slots = [self._pool.lookup(*k) for k in request.keys]
        self._side.difference_update(request.keys)
        self._on_ready(request, slots)

    def _fail(self, request: Request, error: SparkleError) -> None:
        self.counts["fetches_failed"] += 1
        self.counts["unplaced_experts"] += max(1, len(request.missing))
        self._on_failed(request, error)

    # --- slots -----------------------------------------------------------------------------------------------------

    def _make_room(self, layout: int, absent: list[Key], keep: set[Key]) -> list[int] | None:
        """Give each absent key a slot in state LOADING. None, and nothing given, if there are not enough."""
        free, policy = self._free[layout], self._policies[layout]
        n_victims = max(0, len(absent) - len(free))
        victims = list(self._victims(policy, keep, n_victims))
        if len(victims) < n_victims:
            return None
        slots: list[int] = []
        for key in absent:
            if free:
                slot = free.pop()
                self._pool.begin_load(slot, *key)
            elif (taken := self._evict(policy, victims, keep, key)) is None:
                for given in slots:  # a reader took hold of a victim in between: give back, and wait
                    self._pool.abandon(given)
                free.extend(slots)
                return None
            else:
                slot = taken
            slots.append(slot)
        return slots

    def _victims(self, policy: Policy, keep: set[Key], n: int) -> Iterator[Key]:
        for key in policy.victims():
            if n <= 0:
                return
            slot = self._pool.lookup(*key)
            if key not in keep and slot >= 0 and self._pool.mask(slot) == 0:
                n -= 1
                yield key

    def _evict(self, policy: Policy, victims: list[Key], keep: set[Key], key: Key) -> int | None:
        """Put `key` in a victim's place. Victims are chosen already; if one is held by now, look for another."""
        while victims or (victims := list(self._victims(policy, keep, 1))):
            victim = victims.pop(0)
            slot = self._pool.lookup(*victim)
            if self._pool.begin_load(slot, *key):
                policy.on_evict(victim)
                self._side.discard(victim)
                self.counts["evictions"] += 1
                return slot
        return None

    def _read(self, key: Key, slot: int, cause: Cause) -> None:
        read = Read(key, slot, self._region_of[slot], cause)
        self._loading[key] = read
        self._the_reads.add(read)

    def read_ended(self, read: Read, error: StorageError | None) -> None:
        """The read queue's report: publish the slot, or empty it and fail those who wait."""
        del self._loading[read.key]
        waiting = [r for r in self._waiters.pop(read.key, []) if r.message.request_id in self.requests]
        if error is not None:
            self._pool.abandon(read.slot)
            self._free[read.region.spec.layout].append(read.slot)
            for request in waiting:
                self.cancel(request.message.request_id)
                self._fail(request, error)
            return
        grants = 0
        for request in waiting:
            grants |= 1 << request.message.bit
        self._pool.publish(read.slot, grants)
        self._policy(read.key).on_load(read.key, read.cause is Cause.DEMAND)
        if read.cause is Cause.BACKGROUND:
            self._side.add(read.key)
        for request in waiting:
            request.missing.discard(read.key)
            self._finish_if_complete(request)

    def fill(self, key: Key) -> bool:
        """Read `key` into an empty slot in the background; False if there is none, or no need."""
        free = self._free[self._store.layers[key[0]].layout]
        if not free or self._pool.lookup(*key) >= 0 or key in self._loading or key in self._the_reads.quarantined:
            return False
        slot = free.pop()
        self._pool.begin_load(slot, *key)
        self._read(key, slot, Cause.BACKGROUND)
        return True

    # --- events ----------------------------------------------------------------------------------------------------

    def used(self, layer: int, experts: list[tuple[int, bool]]) -> None:
        """A client's event: these experts were needed; True marks those it found resident."""
        for expert, is_hit in experts:
            key = (layer, expert)
            self._policy(key).on_use(key)
            if is_hit:
                self._side.discard(key)
                self.counts["hits_resident"] += 1

    # --- views -----------------------------------------------------------------------------------------------------

    @property
    def _the_reads(self) -> ReadQueue:
        if self.reads is None:
            raise RuntimeError("Residency.start was not called")
        return self.reads

    def _policy(self, key: Key) -> Policy:
        return self._policies[self._store.layers[key[0]].layout]

    @property
    def n_free(self) -> int:
        return sum(map(len, self._free))

    @property
    def n_loading(self) -> int:
        return len(self._loading)

    @property
    def n_used(self) -> int:
        return self._pool.n_slots - self.n_free - self.n_loading

    @property
    def n_side(self) -> int:
        return len(self._side)
