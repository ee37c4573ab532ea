"""Builds mlx-lm's own model class over a store: resident weights in memory, every switch replaced by a streamed one.

Reads config.json and resident.safetensors of the store. Never loads an expert, and never accepts a model that lacks a
weight or has one too many.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from sparkle.errors import BadRequest, StorageError
from sparkle.manifest import ExpertLayer, Quant
from sparkle.messages import Sampling
from sparkle.store import Store, verify_file
from sparkled.compute import cpu
from sparkled.compute.sampler import resolve
from sparkled.compute.streamed import ExpertSource, StreamedExperts

LOOK_AHEAD = 2  # MoE layers; scripts/bench/LOG.md#prefetch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`stop_ids`: every id that ends an answer, by any of the model's files."""

    model: Any
    dtype: Any
    stop_ids: frozenset[int]
    generation_config: dict[str, Any]
    vocab_size: int


def compute_dtype() -> Any | None:
    """float32 on the CPU, where MLX's bfloat16 is 5 to 8 times slower and 8 % wrong; else the checkpoint's own."""
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else None


def load(store: Store, source: ExpertSource) -> LoadedModel:
    """Return the model, its weights evaluated. Raises StorageError naming what doesn't fit.

    The source's processor, if it has one, computes quantised weights in the place of MLX's own code.
    """
    model = _build(store)
    quants = _quants(store)
    nn.quantize(model, class_predicate=lambda path, _: _as_arguments(quants.get(path)))
    _stream_experts(model, store, source)
    with store.resident_path.open("rb", buffering=0) as file:
        verify_file(store, store.resident_path.name, file)  # and into the page cache, whence mx.load reads it
    try:
        weights: Any = mx.load(str(store.resident_path))
        model.load_weights(list(weights.items()), strict=True)
    except (ValueError, RuntimeError) as e:  # RuntimeError: not a sound safetensors file
        raise StorageError(f"{store.resident_path} does not fit mlx-lm's model: {e}; prepare the store again") from e
    if source.processor is not None:
        cpu.replace_linears(model, source.processor)
    _look_ahead(model, store)
    dtype = compute_dtype()
    if dtype is not None:
        model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    generation_config = _generation_config(store)
    return LoadedModel(
        model=model,
        dtype=dtype or _float_dtype(model),
        stop_ids=_stop_ids(store, generation_config),
        generation_config=generation_config,
        vocab_size=_vocab_size(store.config),
    )


def _stream_experts(model: Any, store: Store, source: ExpertSource) -> None:
    """Put a StreamedExperts in the place of every switch."""
    for layer in _main_layers(store):
        block, name = _parent(model, layer.module)
        layout = store.classes[layer.layout]
        setattr(block, name, StreamedExperts(getattr(block, name), layer, layout, source))


def _look_ahead(model: Any, store: Store) -> None:
    """Show each StreamedExperts the routers of the layers that follow."""
    layers = _main_layers(store)
    blocks = [_parent(model, layer.module) for layer in layers]
    gates = [block.get("gate") for block, _ in blocks]
    is_router = (nn.Linear, nn.QuantizedLinear, cpu.NativeLinear)
    routers = [gate if isinstance(gate, is_router) else None for gate in gates]
    for i, (block, name) in enumerate(blocks):
        ahead = zip(layers[i + 1 : i + 1 + LOOK_AHEAD], routers[i + 1 :], strict=False)
        getattr(block, name).look_ahead([(layer, router) for layer, router in ahead if router is not None])


def _main_layers(store: Store) -> list[ExpertLayer]:
    return [layer for layer in store.layers if layer.kind == "main"]


def _build(store: Store) -> Any:
    """mlx-lm's model of the store's config.json; its arrays are random, and never evaluated."""
    try:
        model_class, args_class = _get_classes(store.config)
        return model_class(args_class.from_dict(store.config))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise StorageError(f"{store.path / 'config.json'} describes no model that this mlx-lm can build: {e}") from e


def _quants(store: Store) -> dict[str, Quant]:
    """Quantisation of every module by its path; a switch's projections take theirs from the layout class."""
    of_experts = {
        f"{layer.module}.{projection}": quant
        for layer in store.layers
        for projection, quant in store.classes[layer.layout].quant.items()
    }
    return dict(store.resident_quant) | of_experts


def _as_arguments(quant: Quant | None) -> bool | dict[str, Any]:
    return quant is not None and {"bits": quant.bits, "group_size": quant.group_size, "mode": quant.mode}


def _parent(model: Any, path: str) -> tuple[Any, str]:
    """Return the module that has the module at `path`, and its name there."""
    *parents, name = path.split(".")
    module = model
    for part in parents:
        module = module[int(part)] if isinstance(module, list) else getattr(module, part)
    return module, name


def _float_dtype(model: Any) -> Any:
    return next(v.dtype for _, v in tree_flatten(model.parameters()) if mx.issubdtype(v.dtype, mx.floating))


def _vocab_size(config: dict[str, Any]) -> int:
    return int((config.get("text_config") or config)["vocab_size"])


def _generation_config(store: Store) -> dict[str, Any]:
    """Refuse at start what would fail every request: defaults that are no numbers, or out of range."""
    path = store.path / "generation_config.json"
    config = _read_json(path)
    try:
        resolve(Sampling(), config, seed=0, vocab_size=_vocab_size(store.config))
    except (BadRequest, TypeError, ValueError, OverflowError) as e:
        raise StorageError(f"{path}: a default for sampling cannot be used: {e}; correct it in the source") from e
    return config


def _stop_ids(store: Store, generation_config: dict[str, Any]) -> frozenset[int]:
    """The union of what generation_config, config and tokenizer call end of sequence; each alone may lack some."""
    ids: set[int] = set()
    for source in (generation_config, store.config, store.config.get("text_config") or {}):
        value = source.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    eos = _read_json(store.path / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    for token in _read_json(store.path / "tokenizer.json").get("added_tokens", []):
        if token.get("content") == text:
            ids.add(int(token["id"]))
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as e:
        raise StorageError(f"cannot read {path}: {e}; prepare the store again") from e
    return value if isinstance(value, dict) else {}
