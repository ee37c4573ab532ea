"""The CPU backend with Sparkle's own kernels: quantised linears, and experts computed where they lie in the pool.

Owns the Processor (kernels and threads) and the modules that take the places of mlx-lm's quantised ones. Where a model
has something that no kernel reads (unquantised or mxfp4 weights, a switch that is not a SwiGLU), MLX's own code stays.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwiGLU

from sparkle import _mlx_ops
from sparkle.errors import ConfigError
from sparkle.manifest import LayoutClass
from sparkle.regions import Region

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ARRAYS = ("weight", "scales", "biases")
SPIN_US = 30  # that an idle thread looks for work before it sleeps; scripts/bench/LOG.md#kernels


def processor(kernels: str, threads: int) -> _mlx_ops.Processor | None:
    """Return what the settings `kernels` and `threads` ask for; None if MLX's own code is to be used.

    Raises ConfigError for kernels that this machine cannot run.
    """
    if kernels == "mlx":
        return None
    name = _mlx_ops.kernel_names()[0] if kernels == "auto" else kernels
    try:
        return _mlx_ops.Processor(name, threads or default_threads(), SPIN_US)
    except ValueError as e:
        raise ConfigError(f"kernels = {kernels}: {e}") from None


def default_threads() -> int:
    """All cores but one: the prefetch daemon and the system need some time too."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 2) - 1


class NativeLinear(nn.Module):  # type: ignore[misc]  # mlx is untyped
    """Takes the place of an nn.QuantizedLinear. Its scales keep the checkpoint's dtype: widening them is exact."""

    def __init__(self, linear: nn.QuantizedLinear, use: _mlx_ops.Processor) -> None:
        super().__init__()
        self._use = use  # the underscore keeps these out of parameters(), and so out of set_dtype
        self._arrays = tuple(linear[name] for name in ARRAYS)
        self._group_size, self._bits = linear.group_size, linear.bits
        if "bias" in linear:
            self.bias = linear["bias"]

    def __call__(self, x: mx.array) -> mx.array:
        w, scales, biases = self._arrays
        y = _mlx_ops.quantized_linear(self._use, x, w, scales, biases, self._group_size, self._bits)
        return y + self.bias if "bias" in self else y


class NativeEmbedding(nn.Module):  # type: ignore[misc]
    """Takes the place of an nn.QuantizedEmbedding that is the output layer too."""

    def __init__(self, embedding: nn.QuantizedEmbedding, use: _mlx_ops.Processor) -> None:
        super().__init__()
        self._use = use
        self.table = embedding

    def __call__(self, ids: mx.array) -> mx.array:
        embedded: mx.array = self.table(ids)
        return embedded

    def as_linear(self, x: mx.array) -> mx.array:
        table = self.table
        w, scales, biases = (table[name] for name in ARRAYS)
        return _mlx_ops.quantized_linear(self._use, x, w, scales, biases, table.group_size, table.bits)


def replace_linears(model: nn.Module, use: _mlx_ops.Processor) -> None:
    """Put native modules in the places of a loaded model's quantised linears and embeddings."""
    native: list[tuple[str, nn.Module]] = []
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if getattr(module, "mode", None) != "affine":
            continue
        if isinstance(module, nn.QuantizedLinear):
            native.append((path, NativeLinear(module, use)))
        elif isinstance(module, nn.QuantizedEmbedding):
            native.append((path, NativeEmbedding(module, use)))
    mx.eval([module._arrays for _, module in native if isinstance(module, NativeLinear)])
    model.update_modules(tree_unflatten(native))


def can_read(layout: LayoutClass) -> bool:
    """Whether kernels read this class's records."""
    names = {f"{projection}.{array}" for projection in PROJECTIONS for array in ARRAYS}
    return {piece.name for piece in layout.pieces} == names and all(
        name in layout.quant and layout.quant[name].mode == "affine" for name in PROJECTIONS
    )


def can_compute(switch: Any, layout: LayoutClass) -> bool:
    """Whether ExpertMlp computes what this switch does."""
    return can_read(layout) and isinstance(getattr(switch, "activation", None), SwiGLU)


def n_outputs(layout: LayoutClass) -> int:
    """Width of what an expert gives."""
    return next(piece.shape[0] for piece in layout.pieces if piece.name == "down_proj.weight")


def expert_mlp(regions: list[Region]) -> _mlx_ops.ExpertMlp:
    """The experts of one layout class, which lie in these regions. The regions must stay mapped while it is used."""
    return _mlx_ops.ExpertMlp(
        [
            _mlx_ops.ExpertRegion(
                region.spec.first_slot, region.spec.n_slots, *(_projection(region, p) for p in PROJECTIONS)
            )
            for region in regions
        ]
    )


def _projection(region: Region, name: str) -> _mlx_ops.Projection:
    layout = region.layout
    spans = dict(zip((p.name for p in layout.pieces), region.spans(region.spec.first_slot), strict=True))
    scales = next(p for p in layout.pieces if p.name == f"{name}.scales")
    quant = layout.quant[name]
    return _mlx_ops.Projection(
        [spans[f"{name}.{array}"] for array in ARRAYS],
        scales.shape[0],
        scales.shape[1] * quant.group_size,
        quant.group_size,
        quant.bits,
        scales.dtype,
    )
