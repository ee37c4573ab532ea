"""What a recorded trace would have cost under another policy, and under the best there can be.

Drives a policy with the calls of the prefetch daemon, in its order; counts, and owns nothing else. The optimum comes
from native/src/belady.h.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sparkle import _native
from sparkle.errors import PoolError
from sparkle.policy import Key, LayerShape, Policy
from sparkle.trace import Event


@dataclass(frozen=True, slots=True)
class Score:
    """Steps, experts that they used, and those of them that had to be read first; the latter also by layer."""

    n_steps: int
    n_uses: int
    n_misses: int
    layer_misses: Mapping[int, int]

    @property
    def miss_frac(self) -> float:
        return self.n_misses / max(1, self.n_uses)


def gap_recovered(score: Score, lru: Score, best: Score) -> float:
    """The share of what LRU misses beyond the optimum that a policy does not miss: 0 is LRU, 1 the optimum."""
    return (lru.n_misses - score.n_misses) / max(1, lru.n_misses - best.n_misses)


def replay(
    events: Iterable[Event], layers: Sequence[LayerShape], n_slots: int, policy: Policy, resident: Sequence[Key] = ()
) -> Score:
    """Run a policy over the events of `layers`; those of others are passed over. `policy` is new, or seeded.

    resident: what is in the pool at the start, in the order in which it came; without it the pool is empty.
    Raises PoolError if an event's experts do not fit in `n_slots` all at once.
    """
    n_misses = {layer.index: 0 for layer in layers}
    steps: set[tuple[int, int]] = set()
    n_uses = 0
    pool = set(resident)
    for key in resident:
        policy.on_load(key, True)
    for event in events:
        if event.layer not in n_misses:
            continue
        wanted = [(event.layer, expert) for expert in dict.fromkeys(event.experts)]
        absent = [key for key in wanted if key not in pool]
        steps.add((event.stream, event.step))
        n_uses += len(wanted)
        n_misses[event.layer] += len(absent)
        policy.on_step(event._replace(is_hit=[(event.layer, expert) in pool for expert in event.experts]))
        n_victims = max(0, len(pool) + len(absent) - n_slots)
        keep = set(wanted)
        victims = list(islice((key for key in policy.victims() if key not in keep), n_victims)) if n_victims else []
        if len(victims) < n_victims:
            raise _too_large(event.step, event.layer, len(wanted), n_slots)
        n_free = n_slots - len(pool)
        for i, key in enumerate(absent):  # free slots first, as the daemon does
            if i >= n_free:
                policy.on_evict(victims[i - n_free])
                pool.remove(victims[i - n_free])
            policy.on_load(key, True)
            pool.add(key)
    return Score(len(steps), n_uses, sum(n_misses.values()), n_misses)


def belady(events: Sequence[Event], n_slots: int, resident: Sequence[Key] = (), has_bypass: bool = False) -> Score:
    """Return the score of the best decisions that the future allows, for events of one layout class.

    has_bypass: an expert may be read into memory outside of the pool and dropped after its use; else each event's
    experts must all be in the pool at once, as they must for `replay`, and PoolError is raised if they do not fit.
    Releases the GIL for the better part: a million uses take a second.
    """
    width = 1 + max((expert for event in events for expert in event.experts), default=0)
    width = max(width, 1 + max((expert for _, expert in resident), default=0))
    keys, sizes = array("I"), array("L")
    for event in events:
        base = event.layer * width
        distinct = dict.fromkeys(event.experts)
        if len(distinct) > n_slots and not has_bypass:
            raise _too_large(event.step, event.layer, len(distinct), n_slots)
        keys.extend([base + expert for expert in distinct])
        sizes.append(len(distinct))
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.asarray(sizes, np.uint64), dtype=np.uint64)])
    start = np.array([layer * width + expert for layer, expert in resident], np.uint32)
    misses = _native.belady(np.asarray(keys, np.uint32), offsets, n_slots, start, has_bypass)
    layers = np.fromiter((event.layer for event in events), np.int64, len(events))
    by_layer = {int(i): int(misses[layers == i].sum()) for i in np.unique(layers)}
    return Score(len({(e.stream, e.step) for e in events}), len(keys), int(misses.sum()), by_layer)


def _too_large(step: int, layer: int, n_experts: int, n_slots: int) -> PoolError:
    return PoolError(
        f"step {step}, layer {layer}: {n_experts} experts must be in the pool at once and it has {n_slots} slots; "
        "replay with more slots, or a trace with fewer rows per step"
    )
