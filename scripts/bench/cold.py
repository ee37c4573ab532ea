"""The first 64 tokens after a start: what a recorded usage profile is worth.

    python -m scripts.bench.cold models/sparkle-46m.store --pools 12.5%,25%,50%

For each pool size and held-out prompt, a fresh pipeline answers after its pool has been filled: from nothing, in the
store's order, from a profile of the same kind of prompts, and from a profile of other kinds. The page cache is out of
play where the daemons read directly. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from scripts.bench.decode import commit, machine
from scripts.bench.pool import Env, answer, pipeline
from scripts.bench.workloads import HELD_OUT, KINDS, SEEN
from sparkle.cli.status import gather
from sparkle.rundir import RunDir

FILL_S = 20.0
START: Mapping[str, Env] = {
    "empty": {"SPARKLE_PROFILE": "off", "SPARKLE_BACKGROUND_FILL": "off"},
    "no profile": {"SPARKLE_PROFILE": "off"},
    "same kind": {},
    "other kinds": {},
}


def record(store: Path, state: Path, prompts: list[str], n_tokens: int) -> None:
    """Leave a usage profile in `state`."""
    with pipeline(store, "100%", {"SPARKLE_PREFETCH": "off"}, state) as (_, client):
        answer(client, prompts, n_tokens)


def wait_until_filled(run_dir: RunDir) -> None:
    end = time.monotonic() + FILL_S
    while time.monotonic() < end:
        m = gather(run_dir)["prefetch"].metrics
        if m["slots_used"] == m["n_slots"]:
            return
    raise SystemExit(f"the pool was not filled within {FILL_S:.0f} s")


def first_tokens(store: Path, pool: str, env: Env, state: Path, prompt: str, n_tokens: int) -> tuple[float, float]:
    """Return the share of experts found in the pool, and tokens per second, of an answer right after the start."""
    with pipeline(store, pool, {**env, "SPARKLE_PREFETCH": "off"}, state) as (run_dir, client):
        if env.get("SPARKLE_BACKGROUND_FILL") != "off":
            wait_until_filled(run_dir)
        before = gather(run_dir)["prefetch"].metrics
        rate = answer(client, [prompt], n_tokens)
        after = gather(run_dir)["prefetch"].metrics
    names = ("hits_resident", "hits_in_flight", "hits_late", "misses")
    hits, *others = (after[name] - before[name] for name in names)
    return hits / (hits + sum(others)), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--pools", default="25%,50%")
    parser.add_argument("--kinds", default="chat,code,story")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2)
    args = parser.parse_args()
    store, kinds = args.store.absolute(), args.kinds.split(",")
    table: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            record(store, Path(folder) / f"same-{kind}", SEEN[kind], args.tokens)
            others = [prompt for other in KINDS if other != kind for prompt in SEEN[other]]
            record(store, Path(folder) / f"other-{kind}", others, args.tokens)
        for pool in args.pools.split(","):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in START}
            for kind in kinds:
                for i, prompt in enumerate(HELD_OUT[kind][: args.prompts]):
                    for name, env in START.items():
                        # the daemon adds to its profile at the end: each start gets the one that was recorded
                        source = Path(folder) / f"{'other' if name == 'other kinds' else 'same'}-{kind}"
                        state = Path(folder) / f"run-{pool}-{kind}-{i}-{name}"
                        state.mkdir()
                        for file in source.glob("*.json"):
                            (state / file.name).write_bytes(file.read_bytes())
                        found[name].append(first_tokens(store, pool, env, state, prompt, args.tokens))
                print(f"{pool}: {kind}", file=sys.stderr)
            table[pool] = {
                name: {
                    "hits": round(statistics.mean(hits for hits, _ in runs), 3),
                    "tok_s": round(statistics.median(rate for _, rate in runs), 1),
                }
                for name, runs in found.items()
            }
    head = {"bench": "cold", "commit": commit(), "machine": machine(), "device": str(mx.default_device())}
    print(json.dumps({**head, "model": store.name, "tokens": args.tokens, "kinds": kinds, "pools": table}))


if __name__ == "__main__":
    main()
