"""The pool's clients: their bits, their proofs of life, and what each did last.

Owns the client table of the control segment, and the reading end of every event ring. A client holds a lock on a file
of its own; only when that lock is free is it dead, silence proves nothing. Never clears a bit without that proof.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sparkle import _native
from sparkle.errors import PoolError, ProtocolError
from sparkle.messages import ExpertsReady
from sparkle.rundir import RunDir, lock_is_free
from sparkle.store import Store
from sparkle.trace import Event

log = logging.getLogger(__name__)

INCARNATION = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]+")  # becomes a file name: nothing else may come in
EVERYTHING = 2**63


class Clients:
    """`on_gone(incarnation, bit)` gives back what a client held, and returns how many slots that were."""

    def __init__(self, rundir: RunDir, store: Store, pool: _native.Pool, on_gone: Callable[[str, int], int]) -> None:
        """Clients of a predecessor keep their bits; those that died meanwhile are found by `bury_the_dead`."""
        self._rundir = rundir
        self._store = store
        self._pool = pool
        self._on_gone = on_gone
        self._bits = {name: bit for bit in range(_native.MAX_CLIENTS) if (name := pool.client_name(bit))}
        self._layers: dict[str, tuple[int, ...]] = {}
        self.last_event: dict[int, Event] = {}
        self.last_answer: dict[int, ExpertsReady] = {}
        for path in rundir.clients.glob("*.lock"):  # of clients that died while nobody looked
            if lock_is_free(path):
                path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._bits)

    def bit_of(self, incarnation: str) -> int | None:
        return self._bits.get(incarnation)

    @property
    def layers(self) -> set[int]:
        """Store layers that clients use."""
        return {layer for layers in self._layers.values() for layer in layers}

    def layers_after(self, layer: int) -> list[int]:
        """The layers whose turn follows, in the order of a step of the client that uses the most layers."""
        order = max(self._layers.values(), key=len, default=())
        return [x for x in order if x > layer] + [x for x in order if x < layer]

    def attach(self, incarnation: str, layers: list[int]) -> int:
        """Return the client's bit; a client that is known keeps its own. Raises ProtocolError, PoolError."""
        if not INCARNATION.fullmatch(incarnation) or len(incarnation) > 47:
            raise ProtocolError(f"AttachPool.incarnation {incarnation[:60]!r} is not <role>-<pid>-<hex time>")
        if any(not 0 <= i < len(self._store.layers) for i in layers):
            raise ProtocolError(f"AttachPool.layers: the store has layers 0 to {len(self._store.layers) - 1}")
        if incarnation not in self._bits:
            if lock_is_free(self._lock_path(incarnation)):
                raise ProtocolError(f"AttachPool: nobody holds the lock {self._lock_path(incarnation)}")
            self._bits[incarnation] = self._take_bit(incarnation)
            log.info("client_attached client=%s bit=%d", incarnation, self._bits[incarnation])
        self._layers[incarnation] = tuple(sorted(set(layers)))
        return self._bits[incarnation]

    def _take_bit(self, incarnation: str) -> int:
        self.bury_the_dead()
        free = set(range(_native.MAX_CLIENTS)) - set(self._bits.values())
        if not free:
            raise PoolError(f"the pool has {_native.MAX_CLIENTS} clients already; end one")
        bit = min(free)
        self._pool.reset_ring(bit)
        self.last_event.pop(bit, None)
        self._pool.set_client(bit, incarnation)
        return bit

    def forget(self, incarnation: str, why: str) -> None:
        """A client has left, or is proved dead."""
        if incarnation not in self._bits:
            return
        n_held = self._on_gone(incarnation, self._bits[incarnation])
        bit = self._bits.pop(incarnation)
        self._layers.pop(incarnation, None)
        self.last_answer.pop(bit, None)
        self._pool.set_client(bit, "")
        log.info("%s client=%s slots_held=%d", why, incarnation, n_held)

    def bury_the_dead(self) -> None:
        for name in [n for n in self._bits if lock_is_free(self._lock_path(n))]:
            self.forget(name, "client_died")
            self._lock_path(name).unlink(missing_ok=True)

    def drain(self, bit: int, limit: int = EVERYTHING) -> Iterator[Event]:
        """What a client did, up to word `limit` of its ring. Its bytes may mislead the policy, but end nothing."""
        try:
            events = self._pool.drain(bit, limit)
        except RuntimeError as e:
            log.warning("ring_damaged bit=%d %s", bit, e)
            self._pool.reset_ring(bit)
            return
        for fields in events:
            event = Event(*fields)
            n_experts = self._store.layers[event.layer].n_experts if event.layer < len(self._store.layers) else 0
            if any(e >= n_experts for e in event.experts):
                log.warning("ring_damaged bit=%d event of layer %d, or of experts, that do not exist", bit, event.layer)
                continue
            self.last_event[bit] = event
            yield event

    def drain_all(self) -> Iterator[Event]:
        for bit in list(self._bits.values()):
            yield from self.drain(bit)

    def _lock_path(self, incarnation: str) -> Path:
        return self._rundir.clients / f"{incarnation}.lock"
