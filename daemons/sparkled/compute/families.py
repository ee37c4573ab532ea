"""Model families that `prepare` knows, and what mlx-lm doesn't know of them: the MTP head.

Owns the reading of a checkpoint's config.json, what a user may ask for, and the choice between the layouts a checkpoint
can have (Hugging Face: one tensor per expert; MLX: stacked, perhaps quantised). A family that is not listed is refused.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config

from sparkle.errors import ConfigError, StorageError
from sparkle.manifest import Quant
from sparkled.compute.conversion import BUILD_ERRORS, EXPERT_NAME, Plan, Weights, plan
from sparkled.compute.sources import Checkpoint

FAMILIES = ("qwen3_next", "qwen3_moe")
NO_MTP = "; --no-mtp prepares the model without its MTP head"
# Zero-centred norms: the checkpoint stores w, the model multiplies by 1 + w, and MLX layout stores that sum.
MTP_NORM = re.compile(
    r"mtp\.(norm|pre_fc_norm_embedding|pre_fc_norm_hidden"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm))\.weight"
)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None = not said. Bits are a number or "none" (keep the checkpoint's dtype)."""

    bits: str | None = None
    group_size: int | None = None
    mtp_bits: str | None = None
    with_mtp: bool = True

    def quant(self, bits: str | None) -> Quant | None:
        return None if bits == "none" else Quant(int(bits or 8), self.group_size or 64, "affine")


def plan_model(checkpoint: Checkpoint, request: Request) -> tuple[Any, Plan]:
    """Return mlx-lm's model, whose arrays nobody should evaluate, and the plan of everything but the MTP head."""
    config = read_config(checkpoint)
    where, family = checkpoint.path / "config.json", config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r} is not supported; prepare knows {', '.join(FAMILIES)}")
    names = [name for name in checkpoint.tensors.where if not name.startswith("mtp.")]
    _check_layers(checkpoint, config, names)
    source_quant = _source_quant(checkpoint, config, request)
    try:
        arch = importlib.import_module(f"mlx_lm.models.{family}")
        model = arch.Model(arch.ModelArgs.from_dict(config))
    except BUILD_ERRORS as e:
        raise StorageError(f"{where} describes no {family} model that mlx-lm can build: {e}") from None
    quant = None if source_quant is not None else request.quant(request.bits)
    return model, plan(checkpoint.tensors, names, model, config, model.sanitize, source_quant, quant)


def plan_mtp(checkpoint: Checkpoint, request: Request, model: Any, config: dict[str, Any]) -> tuple[Plan, str] | None:
    """Return the plan of the MTP head and the norm shift it applies ("+1" or "none"); None if there is no head."""
    tensors = checkpoint.loose_mtp or checkpoint.tensors
    names = [name for name in tensors.where if name.startswith("mtp.")]
    if not names or not request.with_mtp:
        return None
    where = checkpoint.path
    if checkpoint.loose_mtp and any(name.startswith("mtp.") for name in checkpoint.tensors.where):
        raise StorageError(f"{where} has two MTP heads, one in the model's files and one in mtp.safetensors{NO_MTP}")
    if config["model_type"] != "qwen3_next":
        raise ConfigError(f"{where}: an MTP head of {config['model_type']} is not supported{NO_MTP}")
    is_raw = any(EXPERT_NAME.fullmatch(name) for name in names)
    if not is_raw and checkpoint.loose_mtp is None:
        why = "converted mtp.* tensors in the model's own files; nothing says whether their norms were shifted"
        raise StorageError(f"{where}: {why}{NO_MTP}")
    is_quantised = any(name.endswith(".scales") for name in names)
    if is_quantised and request.mtp_bits is not None:
        raise ConfigError(f"{where}: its MTP head is quantised already and is kept as it is; leave --mtp-bits out")
    n_layers = len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})
    try:
        head = _Qwen3NextMtp(model, max(1, n_layers))
    except BUILD_ERRORS as e:
        raise StorageError(f"{where}: config.json describes no MTP head that fits this model: {e}{NO_MTP}") from None
    quant = None if is_quantised else request.quant(request.mtp_bits)
    # Each quantised module's own parameters are read off its shapes; the values here are only nn.quantize's defaults.
    source_quant = {"bits": 8, "group_size": 64} if is_quantised else None
    sanitize = _sanitise_raw_mtp if is_raw else dict
    head_config = {key: value for key, value in config.items() if key not in ("quantization", "tie_word_embeddings")}
    return plan(tensors, names, head, head_config, sanitize, source_quant, quant), "+1" if is_raw else "none"


class _Qwen3NextMtp(nn.Module):  # type: ignore[misc]
    """Names and shapes of Qwen3-Next's MTP head, for checks and for quantisation; never run.

    Source: vLLM `qwen3_next_mtp.py`: fc over [embedding, hidden], full-attention MoE layers, a last norm.
    """

    def __init__(self, model: Any, n_layers: int) -> None:
        super().__init__()
        args = model.args
        full_attention = args.full_attention_interval - 1
        decoder_layer = type(model.model.layers[0])
        self.mtp = nn.Module()
        self.mtp.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.mtp.layers = [decoder_layer(args, full_attention) for _ in range(n_layers)]
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self.mtp[norm] = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.quant_predicate = model.quant_predicate
        if hasattr(model, "cast_predicate"):
            self.cast_predicate = model.cast_predicate


def _sanitise_raw_mtp(weights: Weights) -> Weights:
    """Do to mtp.* what sanitize, which drops it, does to the model: stack experts, add one to zero-centred norms."""
    result: Weights = {}
    stacks: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, value in weights.items():
        if match := EXPERT_NAME.fullmatch(name):
            stacks[f"{match['block']}.switch_mlp.{match['parameter']}"][int(match["expert"])] = value
        else:
            result[name] = value + 1.0 if MTP_NORM.fullmatch(name) else value
    for name, stack in stacks.items():
        result[name] = mx.stack([stack[expert] for expert in sorted(stack)])
    return result


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json as mlx-lm reads it, with the rotary settings that newer checkpoints nest lifted to the top."""
    where = checkpoint.path / "config.json"
    try:
        config = load_config(checkpoint.path)
        nested = config.get("rope_parameters") or {}
        lifted = {key: nested[key] for key in ("rope_theta", "partial_rotary_factor") if key in nested}
        if nested.get("rope_type", "default") != "default":
            lifted["rope_scaling"] = nested
        if clashes := [k for k, v in lifted.items() if config.get(k) is not None and config[k] != v]:
            raise ConfigError(f"{where}: {clashes[0]} differs between the top level and rope_parameters; remove one")
    except (OSError, RecursionError, *BUILD_ERRORS) as e:
        raise StorageError(f"{where} cannot be read as a model configuration: {e}") from None
    return {**config, **lifted}


def _check_layers(checkpoint: Checkpoint, config: dict[str, Any], names: list[str]) -> None:
    """Refuse a layer count that the tensors don't have before a model of that size is built."""
    layers = [int(match[1]) for name in names if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))]
    found, promised = max(layers, default=-1) + 1, config.get("num_hidden_layers")
    if promised != found:
        raise StorageError(
            f"{checkpoint.path}: config.json says num_hidden_layers {promised!r}, the tensors have {found} layers"
        )


def _source_quant(checkpoint: Checkpoint, config: dict[str, Any], request: Request) -> dict[str, Any] | None:
    """Return the quantisation that the checkpoint already has; refuse a foreign one, and a request to change it."""
    where, found = checkpoint.path / "config.json", config.get("quantization")
    if found is None:
        if foreign := config.get("quantization_config"):
            method = foreign.get("quant_method") if isinstance(foreign, dict) else foreign
            raise ConfigError(f"{where}: quantised by {method!r}; prepare reads bf16, f16, f32 and MLX checkpoints")
        return None
    if not isinstance(found, dict):
        raise StorageError(f"{where}: quantization is {found!r}, not an object")
    asked = {"bits": request.bits, "group_size": request.group_size}
    for key, value in asked.items():
        if value is not None and str(value) != str(found.get(key)):
            option = "--" + key.replace("_", "-")
            raise ConfigError(f"{where}: already quantised, {key} {found.get(key)}; {option} {value} can't change that")
    return found
