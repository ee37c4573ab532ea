"""The expert pool in use: policies, prefetch and profiles at several pool sizes, side by side in one run.

    python -m scripts.bench.pool models/sparkle-46m.store --set policy --pools 12.5%,25%,50%

Each variant is a pipeline of its own; all variants of a pool size run at once and answer the same held-out prompts in
turns, after each has answered the others (the warm-up). A turn is recorded as a routing trace, so that what Belady's
policy would have read is known exactly for the same events, starting from the same pool. Prints one JSON line; --plot
draws R_B and the rate by pool size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

import sparkle
from scripts.bench.decode import START_S, commit, connect, machine
from scripts.bench.workloads import HELD_OUT, SEEN, mixed
from sparkle.cli._ask import ask
from sparkle.cli.status import gather
from sparkle.messages import StartTrace, StopTrace
from sparkle.policy import POLICIES
from sparkle.replay import belady
from sparkle.rundir import RunDir
from sparkle.trace import read_trace

ASK_S = 10.0
N_BOOTSTRAP = 2000

Env = Mapping[str, str]
SETS: dict[str, dict[str, Env]] = {
    "policy": {name: {"SPARKLE_POLICY": name, "SPARKLE_PREFETCH": "off"} for name in POLICIES},
    "prefetch": {name: {"SPARKLE_PREFETCH": name} for name in ("off", "auto", "router", "token", "previous")},
    "profile": {name: {"SPARKLE_PROFILE": name, "SPARKLE_PREFETCH": "off"} for name in ("off", "on")},
}


@dataclass
class Turn:
    """What one variant did in one turn. tok_s: of decoding, from the first token of each answer on."""

    tok_s: float
    stall_ms: float
    misses: float
    r_b: float
    eta: float


@dataclass
class Variant:
    name: str
    run_dir: RunDir
    client: sparkle.Client
    turns: list[Turn] = field(default_factory=list)


@contextmanager
def pipeline(store: Path, pool: str, env: Env, state: Path) -> Iterator[tuple[RunDir, sparkle.Client]]:
    """The three daemons in a run directory of their own, ready."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder, ExitStack() as stack:
        settings = {"RUN_DIR": folder, "MODEL": str(store), "POOL": pool, "STATE_DIR": str(state), "GOVERNOR": "off"}
        all_env = {
            **os.environ,
            **{f"SPARKLE_{k}": v for k, v in settings.items()},
            "SPARKLE_LOG_LEVEL": "error",
            **env,
        }
        for role in ("prefetch", "compute", "front"):
            process = subprocess.Popen([sys.executable, "-m", f"sparkled.{role}"], env=all_env)
            stack.callback(process.wait, START_S)
            stack.callback(process.terminate)
        client = connect(folder)
        stack.callback(client.close)
        yield RunDir(Path(folder)), client


def answer(client: sparkle.Client, prompts: Sequence[str], n_tokens: int) -> float:
    """Answer greedily; return tokens per second of decoding over all answers."""
    n, seconds = 0, 0.0
    for prompt in prompts:
        usage = client.stream(prompt, temperature=0.0, repetition_penalty=1.0, max_tokens=n_tokens).read().usage
        if usage.decode_tps:
            n += usage.output_tokens - 1
            seconds += (usage.output_tokens - 1) / usage.decode_tps
    return n / seconds


def take_turn(variant: Variant, prompts: Sequence[str], n_tokens: int) -> Turn:
    """Answer under a trace, and judge what was read against Belady's policy on the same events."""
    before = gather(variant.run_dir)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turn.trace"
        ask(variant.run_dir, "prefetch", StartTrace("t", str(path)), ASK_S)
        rate = answer(variant.client, prompts, n_tokens)
        ask(variant.run_dir, "prefetch", StopTrace("t"), ASK_S)
        trace = read_trace(path)
        events = list(trace.events)
    after = gather(variant.run_dir)
    prefetch, compute = after["prefetch"].metrics, after["compute"].metrics
    layout = next(i for i, n in enumerate(trace.header.n_slots) if n)
    resident = trace.header.resident
    best = belady(events, trace.header.n_slots[layout], resident)
    n_read = (prefetch["bytes_read"] - before["prefetch"].metrics["bytes_read"]) / trace.header.record_bytes[layout]
    n_tokens_out = compute["output_tokens"] - before["compute"].metrics["output_tokens"]
    stall_s = (compute["stall_s"] - before["compute"].metrics["stall_s"]) / n_tokens_out
    best_s = best.n_misses * trace.header.record_bytes[layout] / n_tokens_out / prefetch["disk_bytes_per_s"]
    return Turn(
        tok_s=rate,
        stall_ms=1e3 * stall_s,
        misses=n_read / n_tokens_out,
        r_b=n_read / best.n_misses if best.n_misses else float("nan"),
        eta=max(1 / rate - stall_s, best_s) * rate,
    )


def ratio(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Median of the paired ratios, and the ends of its 95 % interval (bootstrap over pairs)."""
    pairs = [a / b for a, b in zip(of, to, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(N_BOOTSTRAP))
    low, high = medians[int(0.025 * N_BOOTSTRAP)], medians[int(0.975 * N_BOOTSTRAP)]
    return [round(x, 3) for x in (statistics.median(pairs), low, high)]


def measure(store: Path, pool: str, variants: Mapping[str, Env], runs: int, n_tokens: int) -> list[Variant]:
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = [
            Variant(name, *stack.enter_context(pipeline(store, pool, env, state / name)))
            for name, env in variants.items()
        ]
        for variant in running:
            answer(variant.client, mixed(SEEN), n_tokens)
        prompts = mixed(HELD_OUT)
        share = max(1, len(prompts) // runs)
        for run in range(runs):
            some = [prompts[(run * share + i) % len(prompts)] for i in range(share)]
            order = running[run % len(running) :] + running[: run % len(running)]
            for variant in order:
                variant.turns.append(take_turn(variant, some, n_tokens))
            print(f"{pool}: {run + 1} of {runs}", file=sys.stderr)
        return running


def row(variant: Variant, base: Variant) -> dict[str, object]:
    def middle(name: str) -> float:
        values: list[float] = [getattr(turn, name) for turn in variant.turns]
        return round(statistics.median(values), 3)

    rates = [turn.tok_s for turn in variant.turns]
    return {
        "variant": variant.name,
        **{name: middle(name) for name in ("tok_s", "stall_ms", "misses", "r_b", "eta")},
        "tok_s_range": [round(min(rates), 1), round(max(rates), 1)],
        f"ratio_to_{base.name}": ratio(rates, [turn.tok_s for turn in base.turns]),
    }


def plot(path: Path, results: Mapping[str, Sequence[Variant]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [variant.name for variant in next(iter(results.values()))]
    pools = [float(pool.rstrip("%")) for pool in results]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (key, label) in zip(
        axes, (("r_b", "bytes read / Belady's"), ("tok_s", "tokens per second")), strict=True
    ):
        for i, name in enumerate(names):
            values = [statistics.median(getattr(t, key) for t in variants[i].turns) for variants in results.values()]
            axis.plot(pools, values, marker="osD^vP*"[i % 7], linestyle=("-", "--", ":", "-.")[i % 4], label=name)
        axis.set(xlabel="pool, % of all experts", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle("The expert pool on held-out prompts")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--set", choices=SETS, default="policy")
    parser.add_argument("--pools", default="12.5%,25%,50%,75%,100%")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    pools = args.pools.split(",")
    results = {pool: measure(args.store.absolute(), pool, SETS[args.set], args.runs, args.tokens) for pool in pools}
    if args.plot:
        plot(args.plot, results)
    table = {pool: [row(variant, variants[0]) for variant in variants] for pool, variants in results.items()}
    head = {
        "bench": "pool",
        "set": args.set,
        "commit": commit(),
        "machine": machine(),
        "device": str(mx.default_device()),
    }
    setting = {
        "model": args.store.name,
        "tokens": args.tokens,
        "runs": args.runs,
        "minutes": (time.monotonic() - began) / 60,
    }
    print(json.dumps({**head, **setting, "pools": table}))


if __name__ == "__main__":
    main()
