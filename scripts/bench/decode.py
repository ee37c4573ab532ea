"""Decode speed of the whole pipeline next to resident mlx-lm, in one run on one machine.

    python scripts/bench/decode.py models/sparkle-46m models/sparkle-46m.store --pools 100%,50%,25%

A and B alternate: for each repetition the resident model generates, then the pipeline at every pool size, the same
greedy tokens of one prompt. Prints one JSON line: medians, and ratios to the resident rate. Decoding only: the rate
counts tokens after the first. The page cache plays no part where direct I/O is on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import sparkle
from sparkle.errors import SparkleError
from sparkled.front.template import ChatTemplate, clean
from sparkled.front.tokenizer import Tokenizer

PROMPT = "Tell me a story about a cat."
START_S = 180.0


class Resident:
    """mlx-lm's model with all experts in memory, in the dtype that is right for the device."""

    def __init__(self, checkpoint: Path, prompt: list[int]) -> None:
        self._model, _ = load_model(checkpoint)
        if mx.default_device().type == mx.DeviceType.cpu:
            self._model.set_dtype(mx.float32)
        self._prompt = prompt

    def rate(self, n_tokens: int) -> float:
        """Tokens per second after the first, greedy."""
        cache = make_prompt_cache(self._model)
        token, began = self._step(self._prompt, cache), time.monotonic()
        for _ in range(n_tokens - 1):
            token = self._step([token], cache)
        return (n_tokens - 1) / (time.monotonic() - began)

    def _step(self, ids: list[int], cache: list[Any]) -> int:
        return int(self._model(mx.array([ids]), cache=cache)[0, -1].argmax())


@contextmanager
def pipeline(store: Path, pool: str) -> Iterator[sparkle.Client]:
    """The three daemons in a run directory of their own; yields a client when they are ready."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder, ExitStack() as stack:
        env = {**os.environ, "SPARKLE_RUN_DIR": folder, "SPARKLE_MODEL": str(store), "SPARKLE_POOL": pool}
        env["SPARKLE_LOG_LEVEL"] = "warning"
        for role in ("prefetch", "compute", "front"):
            process = subprocess.Popen([sys.executable, "-m", f"sparkled.{role}"], env=env)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        client = connect(folder)
        stack.callback(client.close)
        yield client


def connect(run_dir: str) -> sparkle.Client:
    end = time.monotonic() + START_S
    while True:
        try:
            client = sparkle.Client(run_dir)
            if client.state == "ready":
                return client
            client.close()
        except SparkleError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _rate(client: sparkle.Client, n_tokens: int) -> float:
    stream = client.stream(PROMPT, temperature=0.0, repetition_penalty=1.0, max_tokens=n_tokens)
    return stream.read().usage.decode_tps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--pools", default="100%,50%,25%")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    prompt = ChatTemplate(Tokenizer.load(args.checkpoint)).encode(clean([{"role": "user", "content": PROMPT}]), None)
    resident = Resident(args.checkpoint, prompt)
    pools = args.pools.split(",")
    rates: dict[str, list[float]] = {"resident": [], **{pool: [] for pool in pools}}
    with ExitStack() as stack:
        clients = {pool: stack.enter_context(pipeline(args.store, pool)) for pool in pools}
        for client in clients.values():
            _rate(client, args.tokens)  # warm: the figures are of a pool that has seen this workload
        resident.rate(8)
        for _ in range(args.runs):
            rates["resident"].append(resident.rate(args.tokens))
            for pool, client in clients.items():
                rates[pool].append(_rate(client, args.tokens))
    base = statistics.median(rates["resident"])
    print(
        json.dumps(
            {
                "bench": "decode",
                "commit": commit(),
                "machine": machine(),
                "device": str(mx.default_device()),
                "model": args.checkpoint.name,
                "tokens": args.tokens,
                "runs": args.runs,
                "tok_s": {
                    name: [round(x, 1) for x in (min(v), statistics.median(v), max(v))] for name, v in rates.items()
                },
                "ratio_to_resident": {name: round(statistics.median(v) / base, 3) for name, v in rates.items()},
            }
        )
    )


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
