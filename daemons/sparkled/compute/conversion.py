"""Which tensors of a store come from which tensors of a checkpoint, and how.

Decided by mlx-lm's own code, so that a store holds what `mlx_lm convert` would write: the model class gives names and
shapes, its `sanitize` renames, stacks and shifts, `quantize_model` says what is quantised. All of that runs on lazy
arrays that are never evaluated; expert tensors are represented by one number each while sanitize moves them.

Owns no file and reads no tensor data; `sparkled.compute.prepare` executes the plan. Knows no model family.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import infer_quant_config, quantize_model

from sparkle.errors import ConfigError, StorageError
from sparkle.manifest import Quant
from sparkled.compute.sources import MLX_DTYPE, Tensors

Weights = dict[str, mx.array]
PARAMETERS = ("weight", "scales", "biases", "bias")  # order within a module, in files and records
CONVERT_DTYPES = ("float16", "bfloat16", "float32")  # mlx_lm.convert.MODEL_CONVERSION_DTYPES
DTYPE_NAME = {dtype: name for name, dtype in MLX_DTYPE.items()}
EXPERT_NAME = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<parameter>.+)")
# What mlx and mlx-lm raise over a broken configuration.
BUILD_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or one row of it along the first axis."""

    name: str
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the store; for experts, of one expert."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor cast to `dtype`, and quantised if `quant` is set: then it has several outputs.

    parts: where it is read; for experts, one part per expert. made: instead of parts if sanitize computes the array (a
    shifted norm, a transposed convolution): lazy, and small.
    """

    parts: tuple[Part, ...]
    made: mx.array | None
    dtype: mx.Dtype
    quant: Quant | None
    outputs: tuple[Output, ...]

    def apply(self, block: mx.array) -> list[memoryview]:
        """Return the outputs' bytes for `block`: the whole tensor, or some of its rows."""
        block = block.astype(self.dtype)
        q = self.quant
        results = mx.quantize(block, q.group_size, q.bits, mode=q.mode) if q else (block,)
        flat = [mx.contiguous(result).reshape(-1).view(mx.uint8) for result in results]
        mx.eval(flat)
        return [np.asarray(result).data for result in flat]


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """The experts of one SwitchGLU; conversions in record order, `quant` by projection."""

    module: str
    n_experts: int
    top_k: int
    conversions: tuple[Conversion, ...]
    quant: Mapping[str, Quant]


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, or its MTP head. `tensors`: where parts are read; `config`: as `mlx_lm convert` would write it.

    quant: what it is quantised to on the way; None if the source's form is kept.
    """

    tensors: Tensors
    quant: Quant | None
    switches: tuple[SwitchPlan, ...]
    resident: tuple[Conversion, ...]
    resident_quant: Mapping[str, Quant]
    config: dict[str, Any]


def plan(
    tensors: Tensors,
    names: Sequence[str],
    root: Any,
    config: dict[str, Any],
    sanitize: Callable[[Weights], Weights],
    source_quant: dict[str, Any] | None,
    quant: Quant | None,
) -> Plan:
    """Return how tensors `names` of a checkpoint become those of the module tree `root`, which this changes.

    source_quant: the "quantization" of a checkpoint that is quantised already, which is kept. quant: what to quantise
    to. Raises StorageError for a tensor that is missing, not expected or of another shape than `config` asks for.
    """
    switches = {path: module for path, module in root.named_modules() if isinstance(module, SwitchGLU)}
    if not switches:
        raise ConfigError(f"{tensors.folder}: this model has no experts to stream; mlx-lm alone serves it")
    weights, parts = _sanitised(tensors, names, switches, sanitize)
    if config.get("tie_word_embeddings"):  # a head is not used then, whatever its form
        weights = {name: value for name, value in weights.items() if not name.startswith("lm_head.")}
    if source_quant is not None:
        _quantise_like_source(tensors, root, weights, source_quant)
    _check(tensors, root, weights, parts)
    root.load_weights(list(weights.items()))
    if source_quant is None:
        _cast_like_convert(root, config)
    dtypes = {name: value.dtype for name, value in tree_flatten(root.parameters())}
    if quant is not None:
        config = _quantise_like_convert(root, config, quant)
    tree = _Tree(tensors.folder, root, switches, weights, parts, dtypes, quant is not None)
    return Plan(tensors, quant, tree.switch_plans(config), tree.resident(), tree.resident_quant(), config)


class _Tree:
    """A module tree in the form that the store will have, and where its tensors come from."""

    def __init__(
        self,
        folder: Path,
        root: Any,
        switches: Mapping[str, Any],
        weights: Weights,
        parts: Mapping[str, tuple[Part, ...]],
        dtypes: Mapping[str, mx.Dtype],
        was_quantised_here: bool,
    ) -> None:
        self._folder = folder
        self._modules: dict[str, Any] = dict(root.named_modules())
        self._arrays: Weights = dict(tree_flatten(root.parameters()))
        self._quants = {p: Quant(m.bits, m.group_size, m.mode) for p, m in self._modules.items() if "scales" in m}
        self._switches = switches
        self._weights = weights
        self._parts = parts
        self._dtypes = dtypes
        self._was_quantised_here = was_quantised_here

    def _switch_of(self, name: str) -> str | None:
        """Return the switch module that tensor `name` (switch.projection.parameter) belongs to."""
        switch = name.rsplit(".", 2)[0]
        return switch if switch in self._switches else None

    def _conversion(self, name: str) -> Conversion:
        module, _, parameter = name.rpartition(".")
        quantises = self._was_quantised_here and module in self._quants and parameter == "weight"
        made = [f"{module}.{p}" for p in PARAMETERS[:3]] if quantises else [name]
        n_stacked = 1 if self._switch_of(name) else 0
        arrays = [(n, self._arrays[n]) for n in made if n in self._arrays]
        return Conversion(
            self._parts.get(name, ()),
            None if name in self._parts else self._weights[name],
            self._dtypes[name],
            self._quants[module] if quantises else None,
            tuple(Output(n, DTYPE_NAME[array.dtype], tuple(array.shape[n_stacked:])) for n, array in arrays),
        )

    def resident(self) -> tuple[Conversion, ...]:
        """Return conversions in an order that doesn't depend on whether the source was quantised before."""
        names = [name for name in self._weights if not self._switch_of(name)]
        names.sort(key=lambda name: (name.rpartition(".")[0], _rank(name)))
        return tuple(map(self._conversion, names))

    def resident_quant(self) -> dict[str, Quant]:
        return {path: q for path, q in sorted(self._quants.items()) if not self._switch_of(f"{path}.weight")}

    def switch_plans(self, config: Mapping[str, Any]) -> tuple[SwitchPlan, ...]:
        held: dict[str, list[str]] = defaultdict(list)
        for name in self._weights:
            if switch := self._switch_of(name):
                held[switch].append(name)
        return tuple(self._switch_plan(path, held[path], config) for path in sorted(held, key=_natural))

    def _switch_plan(self, path: str, names: list[str], config: Mapping[str, Any]) -> SwitchPlan:
        projections = list(self._switches[path].children())
        names.sort(key=lambda name: (projections.index(name.split(".")[-2]), _rank(name)))
        block = self._modules[path.rpartition(".")[0]]
        quant = {p: self._quants[f"{path}.{p}"] for p in projections if f"{path}.{p}" in self._quants}
        n_experts, top_k = len(self._parts[names[0]]), getattr(block, "top_k", config.get("num_experts_per_tok"))
        if type(top_k) is not int or not 1 <= top_k <= n_experts:
            raise StorageError(f"{self._folder}: config.json has a token use {top_k!r} of {n_experts} experts ({path})")
        return SwitchPlan(path, n_experts, top_k, tuple(map(self._conversion, names)), quant)


def _sanitised(
    tensors: Tensors, names: Sequence[str], switches: Mapping[str, Any], sanitize: Callable[[Weights], Weights]
) -> tuple[Weights, dict[str, tuple[Part, ...]]]:
    """Return sanitize's weights, lazy, and the parts of all those that it left as they are or stacked of experts."""
    stand_ins = [name for name in names if ".experts." in name or name.rsplit(".", 2)[0] in switches]
    n_experts = next(iter(switches.values())).gate_proj.num_experts
    _check_experts(tensors, stand_ins, n_experts)
    lazy = tensors.lazy(set(names) - set(stand_ins))
    untouched = {id(array): name for name, array in lazy.items()}
    try:
        weights = sanitize(lazy | {name: mx.array(i, mx.int32) for i, name in enumerate(stand_ins)})
    except KeyError as e:
        raise StorageError(f"{tensors.folder} lacks tensor {e.args[0]}; the download is incomplete") from None
    except BUILD_ERRORS as e:
        raise StorageError(f"{tensors.folder}: mlx-lm cannot read this checkpoint: {e}") from None

    parts: dict[str, tuple[Part, ...]] = {}
    for name, value in weights.items():
        if name.rsplit(".", 2)[0] in switches:
            parts[name] = _expert_parts(tensors, name, value, stand_ins)
            info, stacked = tensors.info(parts[name][0].name), parts[name][0].row is not None
            shape = info.shape if stacked else (len(parts[name]), *info.shape)
            weights[name] = mx.zeros(shape, MLX_DTYPE[info.dtype])
        elif id(value) in untouched:
            parts[name] = (Part(untouched[id(value)]),)
    return weights, parts


def _expert_parts(tensors: Tensors, name: str, value: mx.array, stand_ins: Sequence[str]) -> tuple[Part, ...]:
    """Return one part per expert from what sanitize made of stand-ins: one number (stacked in the file), or a stack."""
    if value.dtype != mx.int32 or value.ndim > 1:
        raise ConfigError(f"{tensors.folder}: mlx-lm computes {name} from other tensors; prepare does not support that")
    if value.ndim == 1:
        return tuple(Part(stand_ins[int(i)]) for i in np.asarray(value))
    stacked = stand_ins[int(np.asarray(value))]
    n_rows = (tensors.info(stacked).shape or (0,))[0]
    if n_rows == 0:
        raise StorageError(f"{tensors.where[stacked]}: tensor {stacked} is empty; it should hold every expert's {name}")
    return tuple(Part(stacked, row) for row in range(n_rows))


def _check_experts(tensors: Tensors, names: Sequence[str], n_experts: int) -> None:
    """Refuse a layer with an expert too few or too many; sanitize would drop or misnumber in silence."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        if match := EXPERT_NAME.fullmatch(name):
            found[match["block"], match["parameter"]].add(int(match["expert"]))
    for (block, parameter), experts in found.items():
        if (highest := max(experts)) >= n_experts:
            extra = f"{block}.experts.{highest}.{parameter}"
            raise StorageError(f"{tensors.folder} has tensor {extra}, but config.json says {n_experts} experts")
        if len(experts) < n_experts:
            lost = next(e for e in range(n_experts) if e not in experts)
            raise StorageError(
                f"{tensors.folder} lacks tensor {block}.experts.{lost}.{parameter} (expert {lost} of {n_experts}); "
                "the download is incomplete"
            )


def _check(tensors: Tensors, root: Any, weights: Weights, parts: Mapping[str, tuple[Part, ...]]) -> None:
    """Compare names and shapes with those of the model that config.json describes."""
    expected: Weights = dict(tree_flatten(root.parameters()))
    if missing := sorted(expected.keys() - weights.keys()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StorageError(f"{tensors.folder} lacks tensor {missing[0]}{more}, in any form that prepare knows")
    if surplus := sorted(weights.keys() - expected.keys()):
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise StorageError(f"{tensors.folder}: tensor {surplus[0]}{more} has no place in the model of config.json")
    for name, array in expected.items():
        value, held = weights[name], parts.get(name, ())
        wanted, found = tuple(array.shape), tuple(value.shape)
        for part in held:  # of experts: each alone, so that the one that is wrong is named
            info, dtype = tensors.info(part.name), tensors.info(held[0].name).dtype
            part_wanted = wanted[len(wanted) - len(info.shape) :]  # one expert has no stacked axis
            if info.shape != part_wanted or info.dtype != dtype:
                raise _misfit(tensors, part.name, f"{info.dtype} {info.shape}", f"{dtype} {part_wanted}", name)
        named = held[0].name if held else name
        if found != wanted:
            raise _misfit(tensors, named, f"shape {found}", f"shape {wanted}", name)
        is_packed = not mx.issubdtype(array.dtype, mx.floating)
        if value.dtype != array.dtype if is_packed else not mx.issubdtype(value.dtype, mx.floating):
            raise _misfit(tensors, named, f"dtype {DTYPE_NAME[value.dtype]}", f"dtype {DTYPE_NAME[array.dtype]}", name)


def _misfit(tensors: Tensors, named: str, found: str, wanted: str, name: str) -> StorageError:
    where = tensors.where.get(named, tensors.folder)
    return StorageError(f"{where}: tensor {named} has {found}; expected {wanted} by config.json, for {name}")


def _quantise_like_source(tensors: Tensors, root: Any, weights: Weights, source_quant: dict[str, Any]) -> None:
    """Give `root` the quantised modules that the checkpoint has, by the rules of mlx_lm.utils.load_model."""

    def params(path: str, module: Any) -> bool | dict[str, Any]:
        if path in source_quant:
            return source_quant[path]  # type: ignore[no-any-return]
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, module, weights)  # type: ignore[no-any-return]

    try:
        size, bits, mode = source_quant["group_size"], source_quant["bits"], source_quant.get("mode", "affine")
        nn.quantize(root, size, bits, mode=mode, class_predicate=params)
    except BUILD_ERRORS as e:
        raise StorageError(f"{tensors.folder}: config.json's quantization does not fit the model: {e}") from None


def _cast_like_convert(root: Any, config: Mapping[str, Any]) -> None:
    """Apply the dtype policy of mlx_lm.convert: config's torch_dtype, where the model's cast_predicate allows it."""
    dtype = config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if dtype not in CONVERT_DTYPES:
        return
    is_cast = getattr(root, "cast_predicate", lambda _: True)

    def cast(name: str, value: mx.array) -> mx.array:
        is_float = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(getattr(mx, dtype)) if is_cast(name) and is_float else value

    root.update(tree_map_with_path(cast, root.parameters()))


def _quantise_like_convert(root: Any, config: dict[str, Any], quant: Quant) -> dict[str, Any]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints bits per weight
            _, config = quantize_model(root, config, quant.group_size, quant.bits, mode=quant.mode)
    except BUILD_ERRORS as e:
        raise ConfigError(f"--bits {quant.bits} --group-size {quant.group_size} does not fit the model: {e}") from None
    return config


def _rank(name: str) -> tuple[int, str]:
    parameter = name.rpartition(".")[2]
    return (PARAMETERS.index(parameter) if parameter in PARAMETERS else len(PARAMETERS), parameter)


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.10 after layers.9."""
    return [(int(step), "") if step.isdigit() else (-1, step) for step in path.split(".")]
