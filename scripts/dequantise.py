"""Turn an MLX-quantised Qwen3-Next checkpoint into a Hugging Face one: `python scripts/dequantise.py CHECKPOINT DST`.

Owns  DST: bfloat16 shards (one a layer), their index, config and tokenizer files.
Reads CHECKPOINT: model*.safetensors, the mtp.safetensors beside it, and the bits of every tensor from config.json.
Never guesses bits from shapes, and never undoes the +1 of a norm twice: it knows which layout it reads.

Quantisation loses; this does not bring anything back. It gives tests, `scripts.train.held_out` and `sparkle-ctl models
prepare` a checkpoint in the usual layout, whose weights are exactly those that MLX computes with.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

from sparkle.errors import ConfigError, SparkleError, StorageError

# The norms that mlx_lm.models.qwen3_next.Model.sanitize adds 1 to, and the three more of the MTP module.
ZERO_CENTRED = (
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight", "mtp.norm.weight", ".pre_fc_norm_hidden.weight", ".pre_fc_norm_embedding.weight",
)  # fmt: skip
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

Tensors = dict[str, mx.array]


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return config.json; raise unless it is that of a Qwen3-Next quantised by MLX."""
    path = checkpoint / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read as JSON ({error}); give the folder of an MLX checkpoint") from error
    if config.get("model_type") != "qwen3_next":
        raise ConfigError(f"{path}: model_type is {config.get('model_type')!r}, only qwen3_next is known")
    if "quantization" not in config:
        raise ConfigError(f"{path}: no quantization table; the checkpoint is not quantised, use it as it is")
    return config


def load_tensors(checkpoint: Path) -> Tensors:
    """Return all tensors, lazily: bytes are read when a layer is written."""
    shards = sorted(checkpoint.glob("model*.safetensors"))
    if not shards:
        raise StorageError(f"{checkpoint}: no model*.safetensors")
    tensors: Tensors = {}
    for shard in [*shards, *checkpoint.glob("mtp.safetensors")]:
        loaded: Tensors = mx.load(str(shard))  # type: ignore[assignment]  # a dict, for safetensors
        tensors |= loaded
    if not any(".mlp.switch_mlp." in key for key in tensors):
        raise StorageError(f"{checkpoint}: no stacked experts (switch_mlp); this is not MLX's layout")
    return tensors


def dequantised(key: str, tensors: Tensors, table: dict[str, Any]) -> mx.array:
    """Return tensor `key` as MLX computes with it. table: config.json's `quantization`."""
    path = key.removesuffix(".weight")
    weight, scales = tensors[key], tensors.get(f"{path}.scales")
    if scales is None:
        return weight
    chosen = table | table.get(path, {})
    bits, group_size, mode = chosen["bits"], chosen["group_size"], chosen.get("mode", "affine")
    if weight.shape[-1] * 32 != scales.shape[-1] * group_size * bits:
        raise StorageError(
            f"{key}: {weight.shape[-1]} words a row and {scales.shape[-1]} groups of {group_size} do not fit the "
            f"{bits} bits that config.json gives; the table lacks or misnames this tensor"
        )
    return mx.dequantize(weight, scales, tensors.get(f"{path}.biases"), group_size, bits, mode)


def zero_centred(key: str, norm: mx.array) -> mx.array:
    """Return w such that 1 + w is `norm` again, bit for bit: in bfloat16 if that can be, else in float32."""
    wide = norm.astype(mx.float32) - 1.0
    for w in (wide.astype(mx.bfloat16), wide):
        if mx.array_equal((w + 1.0).astype(norm.dtype), norm).item():
            return w
    raise StorageError(f"{key}: holds values that are no 1 + w; this norm was never zero-centred, or it is damaged")


def converted(key: str, tensors: Tensors, table: dict[str, Any]) -> Tensors:
    """Return what `key` becomes in Hugging Face layout; stacked experts become one tensor each."""
    weight = dequantised(key, tensors, table)
    if key.endswith(ZERO_CENTRED):
        return {key: zero_centred(key, weight)}
    weight = weight.astype(mx.bfloat16)
    if key.endswith("conv1d.weight"):
        return {key: weight.moveaxis(2, 1)}
    if ".mlp.switch_mlp." in key:
        return {key.replace(".switch_mlp.", f".experts.{i}."): expert for i, expert in enumerate(weight)}
    return {key: weight}


def shard_of(key: str) -> str:
    """Return a name that groups the tensors of one layer: what is held in memory at a time."""
    parts = key.split(".")
    return ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else parts[0]


def dequantise(checkpoint: Path, out: Path) -> None:
    """Write the Hugging Face form of `checkpoint` to the new folder `out`."""
    config = read_config(checkpoint)
    tensors = load_tensors(checkpoint)
    groups: dict[str, list[str]] = {}
    for key in sorted(tensors):
        if not key.endswith((".scales", ".biases")):
            groups.setdefault(shard_of(key), []).append(key)
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, keys in enumerate(groups.values(), 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        part = {name: w for key in keys for name, w in converted(key, tensors, config["quantization"]).items()}
        mx.save_safetensors(str(out / shard), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
        total_bytes += sum(weight.nbytes for weight in part.values())
        for key in keys:
            del tensors[key]
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    plain = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (out / "config.json").write_text(json.dumps(plain | {"torch_dtype": "bfloat16"}, indent=2), encoding="utf-8")
    for name in COPIED:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, out / name)


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("dst", type=click.Path(exists=False, path_type=Path))
def main(checkpoint: Path, dst: Path) -> None:
    """Write the MLX-quantised CHECKPOINT to the new folder DST in Hugging Face layout, bfloat16."""
    if dst.exists():
        raise click.UsageError(f"{dst} exists; name a new folder")
    try:
        dequantise(checkpoint, dst)
    except SparkleError as error:
        shutil.rmtree(dst, ignore_errors=True)
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{dst}: written. An 8-bit store: sparkle-ctl models prepare {dst} STORE --bits 8")


if __name__ == "__main__":
    main()
