"""Which expert is in which slot: placing sets, choosing victims, granting slots to clients.

Owns the control segment's evictor side, the policy of each layout class, free slots, pins and pending requests. Asks
the read queue for records. Single-threaded: it is the only evictor, between two of its steps nothing leaves the pool.

INVARIANT: a request's set is placed whole or waits; a request that waits has no grants (two clients can't deadlock).
INVARIANT: a slot is published only after its record was read and checked; else it becomes EMPTY.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from sparkle import _native
from sparkle.errors import PoolError, SparkleError, StorageError
from sparkle.messages import FetchExperts
from sparkle.policy import Key, Policy
from sparkle.regions import Region
from sparkle.store import Store
from sparkle.trace import Event
from sparkled.prefetch.reads import Cause, Read, ReadQueue
from sparkled.prefetch.side import FILL, SideRegion


@dataclass(slots=True)
class Request:
    """A FetchExperts under way. `missing` are its experts that are being read; `in_use` what the step needs besides."""

    peer: bytes
    message: FetchExperts
    deadline: float
    was_hit: Set[int] = frozenset()
    in_use: Set[Key] = frozenset()
    missing: set[Key] = field(default_factory=set)
    is_placed: bool = False
    arrived: float = field(default_factory=time.monotonic)

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
        policies: Sequence[Policy],
        side_limit: int,
    ) -> None:
        self._store = store
        self._pool = pool
        self._region_of = [r for r in regions for _ in range(r.spec.n_slots)]
        self._policies = list(policies)
        self._free: list[list[int]] = [[] for _ in store.classes]
        self.side = SideRegion(side_limit)
        self.pinned: set[Key] = set()
        self._loading: dict[Key, Read] = {}
        self._waiters: dict[Key, list[Request]] = {}
        self.requests: dict[str, Request] = {}
        self._queued: list[Request] = []
        self.n_used = 0
        self.counts: Counter[str] = Counter()
        # who wants to know, set by the owner: ends of requests, and what comes and goes
        self.on_ready: Callable[[Request, list[int]], None] = lambda request, slots: None
        self.on_failed: Callable[[Request, SparkleError], None] = lambda request, error: None
        self.on_missed: Callable[[Key], None] = lambda key: None
        self.on_evicted: Callable[[Key], None] = lambda key: None
        self.reads: ReadQueue | None = None  # set once by `start`

    # --- start -----------------------------------------------------------------------------------------------------

    def start(self, reads: ReadQueue) -> int:
        """Take stock of every slot (all EMPTY or RETIRED in a new pool). Returns how many experts were found."""
        self.reads = reads
        for slot in range(self._pool.n_slots):
            must_read = self._pool.recover(slot)
            owner = self._pool.owner(slot)
            if self._pool.state(slot) == _native.RETIRED:
                continue
            if owner is None:
                self._free[self._region_of[slot].spec.layout].append(slot)
                continue
            self._policy(owner).on_load(owner, True)
            if must_read:
                self._read(owner, slot, Cause.BACKGROUND)
            else:
                self.n_used += 1
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
        slots = self._make_room(layout, absent, request.in_use | set(wanted))
        if slots is None:
            return False
        bit = 1 << request.message.bit
        request.is_placed = True
        for key in wanted:
            self._count(request, key, absent)
            slot = self._pool.lookup(*key)
            if slot >= 0:
                self._pool.grant(slot, bit)
                self.side.used(key, self._record_bytes(key))
                continue
            request.missing.add(key)
            self._waiters.setdefault(key, []).append(request)
            if key in self._loading:
                self.side.late(key, self._record_bytes(key))
                self._the_reads.promote(self._loading[key])
        for key, slot in zip(absent, slots, strict=True):
            self._read(key, slot, Cause.DEMAND)
            self.on_missed(key)
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
        self.on_ready(request, [self._pool.lookup(*k) for k in request.keys])

    def _fail(self, request: Request, error: SparkleError) -> None:
        self.counts["fetches_failed"] += 1
        self.counts["unplaced_experts"] += max(1, len(request.missing))
        self.on_failed(request, error)

    # --- slots -----------------------------------------------------------------------------------------------------

    def _make_room(self, layout: int, absent: list[Key], keep: Set[Key]) -> list[int] | None:
        """Give each absent key a slot in state LOADING. None, and nothing given, if there are not enough."""
        free = self._free[layout]
        n_victims = max(0, len(absent) - len(free))
        victims = list(self._victims(layout, keep, n_victims))
        if len(victims) < n_victims:
            return None
        slots: list[int] = []
        for key in absent:
            slot = free.pop() if free else self._evict(layout, victims, keep)
            if slot is None:  # a reader took hold of a victim in between: give back, and wait
                for given, back in zip(slots, absent, strict=False):
                    self._policies[layout].on_evict(back)
                    self._pool.abandon(given)
                free.extend(slots)
                return None
            self._pool.begin_load(slot, *key)
            self._policies[layout].on_load(key, True)
            slots.append(slot)
        return slots

    def _victims(self, layout: int, keep: Set[Key], n: int) -> Iterator[Key]:
        """The first `n` that may go: not pinned, not held. Forecasts whose turn is to come go if nothing else can."""
        spared: list[Key] = []
        for key in self._policies[layout].victims() if n > 0 else ():
            slot = self._pool.lookup(*key)
            if slot < 0 or key in keep or key in self.pinned or self._pool.mask(slot) != 0:
                continue
            if self.side.is_due(key):
                spared.append(key)
                continue
            yield key
            n -= 1
            if n == 0:
                return
        yield from spared[:n]

    def _evict(self, layout: int, victims: list[Key], keep: Set[Key]) -> int | None:
        """Empty a victim's slot. Victims are chosen already; if one is held by now, look for another."""
        while victims or (victims := list(self._victims(layout, keep, 1))):
            victim = victims.pop(0)
            slot = self._pool.lookup(*victim)
            if self._pool.unload(slot):
                self._left(victim)
                self.counts["evictions"] += 1
                return slot
        return None

    def _left(self, key: Key) -> None:
        """`key` has lost its slot."""
        self._policy(key).on_evict(key)
        self.side.wasted(key, self._record_bytes(key))
        self.n_used -= 1
        self.on_evicted(key)

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
            self._policy(read.key).on_evict(read.key)
            self.side.wasted(read.key, 0)
            self._free[read.region.spec.layout].append(read.slot)
            for request in waiting:
                self.cancel(request.message.request_id)
                self._fail(request, error)
            return
        grants = 0
        for request in waiting:
            grants |= 1 << request.message.bit
        self._pool.publish(read.slot, grants)
        self.n_used += 1
        for request in waiting:
            request.missing.discard(read.key)
            self._finish_if_complete(request)

    # --- ahead of demand -------------------------------------------------------------------------------------------

    def fill(self, key: Key, source: str, may_evict: bool) -> bool:
        """Read `key` in the background; False if there is no need, or no slot (an empty one, unless `may_evict`)."""
        layout = self._store.layers[key[0]].layout
        free = self._free[layout]
        if not self.is_absent(key) or (source != FILL and self.side.is_full):
            return False
        slot = free.pop() if free else self._evict(layout, [], {key}) if may_evict else None
        if slot is None:
            return False
        self._pool.begin_load(slot, *key)
        self._policies[layout].on_load(key, False)
        self.side.add(key, source, self._record_bytes(key))
        self._read(key, slot, Cause.BACKGROUND)
        return True

    def is_absent(self, key: Key) -> bool:
        """Whether `key` could be read: it is neither here, nor on its way, nor damaged."""
        return self._pool.lookup(*key) < 0 and key not in self._loading and key not in self._the_reads.quarantined

    # --- size ------------------------------------------------------------------------------------------------------

    def retire(self, slot: int) -> bool:
        """Take a slot out of use; False if a client holds it or a read goes to it."""
        owner = self._pool.owner(slot)
        if not self._pool.retire(slot):
            return False
        if owner is not None:
            self._left(owner)
        else:
            free = self._free[self._region_of[slot].spec.layout]
            if slot in free:
                free.remove(slot)
        return True

    def add_slots(self, slots: Sequence[int]) -> None:
        """Slots that are EMPTY and new, or back."""
        for slot in reversed(slots):
            self._free[self._region_of[slot].spec.layout].append(slot)

    # --- events ----------------------------------------------------------------------------------------------------

    def used(self, event: Event) -> None:
        """A client's event: a step needs these experts now."""
        layer = event.layer
        self._policies[self._store.layers[layer].layout].on_step(event)
        for expert, is_hit in zip(event.experts, event.is_hit, strict=True):
            if is_hit:
                self.counts["hits_resident"] += 1
                self.side.used((layer, expert), self._record_bytes((layer, expert)))
        self.side.passed(layer)

    # --- views -----------------------------------------------------------------------------------------------------

    @property
    def _the_reads(self) -> ReadQueue:
        if self.reads is None:
            raise RuntimeError("Residency.start was not called")
        return self.reads

    def _policy(self, key: Key) -> Policy:
        return self._policies[self._store.layers[key[0]].layout]

    def _record_bytes(self, key: Key) -> int:
        return self._store.layout_of(key[0]).record_bytes

    def resident(self, layout: int) -> list[Key]:
        """Keys of a class that have a slot, from the one that would be evicted first."""
        return list(self._policies[layout].victims())

    def n_usable(self, layout: int) -> int:
        """Slots of a class that are not retired."""
        return len(self.resident(layout)) + len(self._free[layout])

    @property
    def n_free(self) -> int:
        return sum(map(len, self._free))

    @property
    def n_loading(self) -> int:
        return len(self._loading)
