"""Stores of random bytes, larger than a random model's and made in milliseconds, and what tests ask a pool about.

Nothing but the prefetch daemon can serve such a store: there is no model in it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkle import manifest, regions
from sparkle import store as stores
from sparkle._native import Pool
from sparkle.manifest import ExpertLayer, FileSum, expert_header, layout_class
from sparkle.messages import Message
from sparkle.policy import Key
from sparkle.store import Store
from tests.daemons import WAIT_S, DaemonProcess

PIECES = [("up_proj.weight", "U8", (16384,)), ("up_proj.scales", "U8", (4096,))]  # whole pages: no slot shares one
SETS = ("hits_resident", "hits_in_flight", "hits_late", "misses")


def write_store(root: Path, layers: int, experts: int, top_k: int, seed: int = 0) -> Store:
    """Write a store of one layout class, each record different, and open it."""
    (root / "experts").mkdir(parents=True)
    rng, layout = random.Random(seed), layout_class("bytes", PIECES, {})
    header = expert_header(layout, experts)
    pad, written = bytes(layout.stride_bytes - layout.record_bytes), list[ExpertLayer]()
    for i in range(layers):
        records = [rng.randbytes(layout.record_bytes) for _ in range(experts)]
        (root / stores.expert_file(i)).write_bytes(header + b"".join(r + pad for r in records))
        sums = tuple(stores.checksum(r) for r in records)
        written.append(
            ExpertLayer(i, f"layers.{i}", "main", 0, experts, top_k, stores.expert_file(i), len(header), sums)
        )
    config = {"num_hidden_layers": layers, "num_attention_heads": 1, "hidden_size": 64}
    for name, data in {stores.CONFIG: json.dumps(config).encode(), stores.RESIDENT: b"\2" + bytes(7) + b"{}"}.items():
        (root / name).write_bytes(data)
    files = {p.name: FileSum(p.stat().st_size, stores.checksum(p.read_bytes())) for p in root.iterdir() if p.is_file()}
    (root / manifest.MANIFEST).write_text(json.dumps(manifest.to_json([layout], written, {}, files, {})))
    return Store.open(root)


def pool_settings(store: Store, n_slots: int, **settings: str) -> dict[str, str]:
    """A pool of so many slots, in which nothing happens by itself unless `settings` (by name, in capitals) say so.

    Least recently used goes first: tests can tell beforehand what that is.
    """
    quiet = {
        "POLICY": "lru",
        "BACKGROUND_FILL": "off",
        "PROFILE": "off",
        "PREFETCH": "off",
        "GOVERNOR": "off",
        "READ_DEPTH": "4",
    }
    named = quiet | {"MODEL": str(store.path), "POOL": str(n_slots * store.classes[0].record_bytes)} | settings
    return {f"SPARKLE_{name}": value for name, value in named.items()}


def ask(daemon: DaemonProcess, message: Message) -> Message:
    """Return the answer to a message, whatever it is."""
    peer = daemon.peer()
    peer.send(message)
    return peer.receive()


def wait_for_uses(daemon: DaemonProcess, n_experts: int) -> dict[str, Any]:
    """Return the metrics once the daemon has seen clients use so many experts: events travel without a message."""
    deadline = time.monotonic() + WAIT_S
    while True:
        metrics = daemon.status().metrics
        if (n := sum(metrics[name] for name in SETS)) >= n_experts or time.monotonic() > deadline:
            assert n == n_experts, metrics
            return metrics


def resident(daemon: DaemonProcess, store: Store) -> set[Key]:
    """The experts that have a slot, as clients find them."""
    pool = Pool.attach(regions.control_name(daemon.run_dir.shm_prefix))
    return {(x.index, e) for x in store.layers for e in range(x.n_experts) if pool.lookup(x.index, e) >= 0}


def skewed_set(rng: random.Random, order: Sequence[int], n: int) -> list[int]:
    """Draw `n` distinct members of `order`, the first of it the most often (Zipf's law)."""
    chosen: dict[int, None] = {}
    while len(chosen) < n:
        chosen.update(dict.fromkeys(rng.choices(order, [1 / (i + 1) for i in range(len(order))], k=n - len(chosen))))
    return list(chosen)
