"""Which expert leaves the pool when another must come in: pure bookkeeping over (layer, expert) keys.

Owns the list of policies, nothing else. A policy has no clock, no I/O, no slots: the prefetch daemon and an offline
replay (sparkle.replay) drive the same objects with the same calls, so that what is scored is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparkle.errors import ConfigError
from sparkle.policy_classic import LFU, LFUDA, LRU, Pinned
from sparkle.policy_contract import Key, LayerShape, Policy
from sparkle.policy_learned import Learned

__all__ = ["DEFAULT_POLICY", "POLICIES", "Key", "LayerShape", "Policy", "make_policy", "policy_name"]

POLICIES: Mapping[str, Callable[[Sequence[LayerShape]], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "lfuda": LFUDA,
    "pinned": Pinned,
    "learned": Learned,
}
DEFAULT_POLICY = "learned"  # scripts/bench/LOG.md#policies


def policy_name(setting: str) -> str:
    """The policy that a setting means."""
    return DEFAULT_POLICY if setting == "auto" else setting


def make_policy(name: str, layers: Sequence[LayerShape]) -> Policy:
    """Return a new policy for the layers of one layout class. Raises ConfigError for an unknown name."""
    name = policy_name(name)
    if name not in POLICIES:
        raise ConfigError(f"policy = {name!r}: expected auto or one of {', '.join(POLICIES)}")
    return POLICIES[name](layers)
