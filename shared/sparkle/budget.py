"""One dial: from `memory` follow the pool, the context and the prefill step, each with its reason.

Pure arithmetic over settings and a store, so that the prefetch and compute daemons derive the same numbers. What cannot
fit is refused with the arithmetic, never clamped to something that fails later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkle.config import Settings, parse_size
from sparkle.errors import ConfigError
from sparkle.machine import memory_limit
from sparkle.store import Store

MEMORY_SHARE = 0.75  # of RAM: the rest is the system's, other programs' and the page cache's
PROCESS_BYTES = 600 << 20  # three Python processes with MLX and a tokenizer; README, "What it takes"
RESIDENT_WIDENING = 1.15  # scales and norms are widened to float32 on the CPU: 8.5 -> 9 bits and less
WORKSPACE_BYTES = 512 << 20  # activations, and the experts that one gather copies out of the pool
KV_SHARE = 0.125
MAX_PREFILL_ROWS = 256
BACKGROUND_READS = 2  # slots that background reads may keep busy beside a step's own set


@dataclass(frozen=True, slots=True)
class Budget:
    """`slots[i]` belongs to store.classes[i]. `reasons`: one printable line per derived value."""

    memory_bytes: int
    pool_bytes: int
    slots: tuple[int, ...]
    prefill_rows: int
    context_tokens: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def derive(settings: Settings, store: Store) -> Budget:
    """Return what `settings.memory` buys for this store. Raises ConfigError if it can't hold one step."""
    limit, why = memory_limit()
    memory = settings.memory or int(limit * MEMORY_SHARE)
    reason = f"{MEMORY_SHARE:.0%} of {gb(limit)} ({why})" if settings.memory == 0 else settings.origins["memory"]
    reasons = [f"memory={gb(memory)} ({reason})"]
    resident = int(store.resident_bytes * RESIDENT_WIDENING)
    context, kv_bytes = _context(settings, store.config, memory)
    reasons.append(f"context={context} tokens ({gb(kv_bytes)} of KV for {settings.max_active} requests)")
    fixed = PROCESS_BYTES + WORKSPACE_BYTES + resident + kv_bytes
    experts = sum(_class_bytes(store, i) for i in range(len(store.classes)))
    if settings.pool:
        pool = pool_bytes(settings.pool, store)
        reasons.append(f"pool={gb(pool)} ({settings.origins['pool']})")
    else:
        pool = min(memory - fixed, experts)
        reasons.append(
            f"pool={gb(max(pool, 0))} (memory {gb(memory)} - weights {gb(resident)} - KV {gb(kv_bytes)} "
            f"- workspace {gb(WORKSPACE_BYTES)} - processes {gb(PROCESS_BYTES)}, at most all experts {gb(experts)})"
        )
    if memory > limit or (settings.pool and fixed + pool > limit):
        raise ConfigError(
            f"{gb(max(memory, fixed + pool))} asked for, but {why} gives {gb(limit)}; lower SPARKLE_MEMORY"
        )
    slots = slots_for(store, pool, reasons[-1])
    rows = _prefill_rows(store, slots)
    reasons.append(
        f"slots={'+'.join(map(str, slots))} of {'+'.join(str(_class_experts(store, i)) for i in range(len(slots)))}"
    )
    reasons.append(f"prefill={rows} rows per step")
    return Budget(memory, pool, slots, rows, context, tuple(reasons), _warnings(store, slots))


def gb(n_bytes: float, rounded: Callable[[float], int] = round) -> str:
    """A size for people: two or three significant digits; `math.ceil` for what must be enough when it is asked for."""
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if abs(n_bytes) >= s or u == "kB")
    digits = 1 if unit != "kB" and abs(n_bytes) < 100 * size else 0
    return f"{rounded(n_bytes / size * 10**digits) / 10**digits:.{digits}f} {unit}"


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes that one token adds to the KV caches of the full-attention layers, in float32."""
    n_layers = int(config["num_hidden_layers"])
    if "layer_types" in config:
        n_layers = sum(t != "linear_attention" for t in config["layer_types"])
    elif "full_attention_interval" in config:
        n_layers = n_layers // int(config["full_attention_interval"])
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return n_layers * 2 * heads * head_dim * 4


def _context(settings: Settings, config: Mapping[str, Any], memory: int) -> tuple[int, int]:
    per_token = kv_bytes_per_token(config)
    trained = int(config.get("max_position_embeddings", 32768))
    context = trained
    if per_token:  # else no layer has full attention: the state does not grow
        context = min(trained, int(memory * KV_SHARE) // (per_token * settings.max_active))
    return context, context * per_token * settings.max_active


def _main_layers(store: Store, class_index: int) -> list[Any]:
    return [layer for layer in store.layers if layer.layout == class_index and layer.kind == "main"]


def _class_experts(store: Store, class_index: int) -> int:
    return sum(layer.n_experts for layer in _main_layers(store, class_index))


def _class_bytes(store: Store, class_index: int) -> int:
    return _class_experts(store, class_index) * store.classes[class_index].record_bytes


def pool_bytes(text: str, store: Store) -> int:
    """Bytes of a pool that is asked for as a size or a share, at most all experts. `text` is as config takes it."""
    experts = sum(_class_bytes(store, i) for i in range(len(store.classes)))
    return min(experts, int(experts * float(text[:-1]) / 100)) if text.endswith("%") else min(experts, parse_size(text))


def floor_slots(store: Store, rows: int) -> tuple[int, ...]:
    """The guard: slots of each class below which a step of `rows` rows cannot be served while it runs."""
    classes = range(len(store.classes))
    return tuple(min(_least_slots(store, i, rows), _class_experts(store, i)) for i in classes)


def _least_slots(store: Store, class_index: int, rows: int) -> int:
    """The largest per-layer union of a step of `rows` rows, and the slots that background reads keep busy."""
    layers = _main_layers(store, class_index)
    return max((min(x.n_experts, rows * x.top_k) for x in layers), default=0) + (BACKGROUND_READS if layers else 0)


def slots_for(store: Store, pool: int, reason: str) -> tuple[int, ...]:
    """Give each class what one row needs, and share the rest by what each class still lacks.

    Raises ConfigError, which begins with `reason`, if a pool of so many bytes can't hold one row's step.
    """
    every = [_class_experts(store, i) for i in range(len(store.classes))]
    least = floor_slots(store, rows=1)
    sizes = [layout.record_bytes for layout in store.classes]
    needed = sum(n * size for n, size in zip(least, sizes, strict=True))
    if pool < needed:
        parts = " + ".join(f"{n} of {gb(size)}" for n, size in zip(least, sizes, strict=True) if n)
        raise ConfigError(
            f"{reason} cannot hold one step, which needs {gb(needed, math.ceil)} ({parts}: top_k experts of a layer "
            f"and {BACKGROUND_READS} reads under way); raise SPARKLE_MEMORY (or SPARKLE_POOL)"
        )
    experts = sum(n * size for n, size in zip(every, sizes, strict=True))
    rest, lacking = pool - needed, experts - needed
    return tuple(n + (rest * (total - n) // lacking if lacking else 0) for n, total in zip(least, every, strict=True))


def _prefill_rows(store: Store, slots: tuple[int, ...]) -> int:
    """The most rows whose experts fit the pool and the workspace whatever the router chooses."""
    rows = MAX_PREFILL_ROWS
    for i, n in enumerate(slots):
        for layer in _main_layers(store, i):
            record = store.classes[i].record_bytes
            fits_all = n >= min(layer.n_experts + BACKGROUND_READS, _class_experts(store, i))
            by_pool = MAX_PREFILL_ROWS if fits_all else (n - BACKGROUND_READS) // layer.top_k
            union = WORKSPACE_BYTES // record
            by_workspace = MAX_PREFILL_ROWS if union >= layer.n_experts else union // layer.top_k
            rows = min(rows, max(1, by_pool), max(1, by_workspace))
    return rows


def _warnings(store: Store, slots: tuple[int, ...]) -> tuple[str, ...]:
    out = []
    for i, n in enumerate(slots):
        step = sum(layer.top_k for layer in _main_layers(store, i))
        if n < step:
            out.append(f"{n} slots are fewer than one token's {step} experts: nearly every expert will be read again")
    return tuple(out)
