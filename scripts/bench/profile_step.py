"""Where the time of a decoded token goes: milliseconds by kind of work.

    python -m scripts.bench.profile_step models/sparkle-46m.store --tokens 48

The model runs in this process over the real pool. It decodes the same tokens twice: as it always does, which gives the
true total, and with an evaluation before and after every module, which gives the shares. What the second costs more is
printed too: it is the profile's own doing. Prints a table, as it stands in daemons/README.md, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.qwen3_next as qwen3_next
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from scripts.bench.decode import commit, machine
from sparkled.compute import cpu
from sparkled.compute.streamed import StreamedExperts
from tests.parity.streaming import Model, streamed

# Functions that mlx-lm's layers call where no module is; of other families only modules are told apart.
FUNCTIONS = {
    "gated_delta_update": "delta rule",
    "normalize_qk": "norms",
    "scaled_dot_product_attention": "attention over the KV cache",
}
WARM_UP = 4
PROMPT = [11, 23, 35, 47, 59, 61, 73, 85]


class Clock:
    """Seconds by kind; what runs within something else counts for itself only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._children_s = [0.0]

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which counts its time; its arguments and results are evaluated."""

        def run(*args: Any, **kwargs: Any) -> Any:
            mx.eval([a for _, a in tree_flatten([args, kwargs]) if isinstance(a, mx.array)])
            began = time.perf_counter()
            self._children_s.append(0.0)
            out = call(*args, **kwargs)
            mx.eval(out)
            took = time.perf_counter() - began
            self.seconds[kind] += took - self._children_s.pop()
            self.calls[kind] += 1
            self._children_s[-1] += time.perf_counter() - began
            return out

        return run


def kind_of(path: str, module: nn.Module) -> str | None:
    """What a module's own time counts as; None: as its parent's."""
    name = type(module).__name__
    if isinstance(module, StreamedExperts):
        return "experts"
    if "shared_expert" in path and isinstance(module, (nn.Linear, nn.QuantizedLinear, cpu.NativeLinear)):
        return "shared expert"
    if path.endswith(("mlp.gate", "router")):
        return "router"
    if "lm_head" in path:
        return "output layer"
    if isinstance(module, (nn.Linear, nn.QuantizedLinear, cpu.NativeLinear)):
        return "projections of attention"
    if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding, cpu.NativeEmbedding)):
        return "embedding"
    if "Norm" in name:
        return "norms"
    if isinstance(module, nn.Conv1d):
        return "convolution"
    if "rope" in path:
        return "rope"
    if "MoeBlock" in name:
        return "top-k, softmax and sum of the experts"
    if "DeltaNet" in name:
        return "rest of DeltaNet (splits, gates, state)"
    if "Attention" in name:
        return "rest of attention (KV cache, gates)"
    if name.endswith("MLP"):
        return "shared expert"
    return None


@contextmanager
def timed(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Every module of a kind is timed within the block."""
    undo: list[Callable[[], None]] = []

    def watch(module: nn.Module, kind: str) -> None:
        """Give the module a class of its own, whose calls are timed; all else about it stays."""
        plain = type(module)
        methods = {"__call__": kind, "as_linear": "output layer"}
        watched = {n: clock.timed(k, getattr(plain, n)) for n, k in methods.items() if hasattr(plain, n)}
        object.__setattr__(module, "__class__", type(plain.__name__, (plain,), watched))
        undo.append(lambda: object.__setattr__(module, "__class__", plain))

    def patch(name: str, kind: str) -> None:
        function = getattr(qwen3_next, name)
        setattr(qwen3_next, name, clock.timed(kind, function))
        undo.append(lambda: setattr(qwen3_next, name, function))

    for path, module in model.named_modules():
        if kind := kind_of(path, module):
            watch(module, kind)
    for name, kind in FUNCTIONS.items():
        patch(name, kind)
    try:
        yield
    finally:
        for action in undo:
            action()


def decode(model: Model, ids: Sequence[int]) -> tuple[float, float]:
    """Feed `ids` one by one after a short prompt; return seconds per token, and those in which the graph was built."""
    cache = make_prompt_cache(model.model)
    step(model, PROMPT, cache)
    for token in ids[:WARM_UP]:
        step(model, [token], cache)
    began, built = time.perf_counter(), 0.0
    for token in ids[WARM_UP:]:
        built += step(model, [token], cache)
    n = len(ids) - WARM_UP
    return (time.perf_counter() - began) / n, built / n


def step(model: Model, ids: Sequence[int], cache: list[Any]) -> float:
    """One step, as the engine takes it; returns the seconds until the graph was built."""
    assert model.source is not None
    model.source.begin(lambda: False, 0, ids)
    began = time.perf_counter()
    last = model.model(mx.array([list(ids)]), cache=cache)[0, -1]
    built = time.perf_counter() - began
    mx.eval(last, [c.state for c in cache])
    model.source.finish()
    return built


def table(seconds: dict[str, float], calls: dict[str, int], n: int, true_s: float) -> str:
    total = sum(seconds.values())
    lines = ["| kind of work | ms per token | share | calls |", "|---|---|---|---|"]
    for kind, s in sorted(seconds.items(), key=lambda item: -item[1]):
        lines.append(f"| {kind} | {1e3 * s / n:.2f} | {100 * s / total:.0f} % | {calls[kind] // n} |")
    lines.append(f"| all, one after another | {1e3 * total / n:.2f} | 100 % | {sum(calls.values()) // n} |")
    lines.append(f"| a token as it really runs | {1e3 * true_s:.2f} | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pool", default="100%")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    with streamed(args.store, args.pool, args.kernels, SPARKLE_THREADS=str(args.threads)) as model:
        vocab = model.model.args.vocab_size if hasattr(model.model, "args") else 1000
        ids = [(7919 * i + 13) % min(vocab, 30_000) for i in range(args.tokens + WARM_UP)]
        decode(model, ids)  # fills the pool
        true_s, built_s = decode(model, ids)
        clock = Clock()
        with timed(model.model, clock):
            cache = make_prompt_cache(model.model)
            for token in ids[:WARM_UP]:
                step(model, [token], cache)
            clock.seconds.clear()
            clock.calls.clear()
            for token in ids[WARM_UP:]:
                step(model, [token], cache)
    print(table(clock.seconds, clock.calls, args.tokens, true_s))
    record = {
        "benchmark": "profile_step",
        "commit": commit(),
        "machine": machine(),
        "model": args.store.name,
        "settings": {"pool": args.pool, "kernels": args.kernels, "threads": args.threads, "tokens": args.tokens},
        "ms_per_token": round(1e3 * true_s, 3),
        "ms_building_the_graph": round(1e3 * built_s, 3),
        "ms_by_kind": {k: round(1e3 * s / args.tokens, 3) for k, s in clock.seconds.items()},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
