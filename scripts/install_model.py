"""Install a Hugging Face checkpoint as a model that ships with the repository: `python scripts/install_model.py SRC`.

Owns  models/<name>: one MLX-quantised `model.safetensors`, `mtp.safetensors`, config, tokenizer and documents.
Reads SRC, a Qwen3-Next checkpoint in Hugging Face layout (per-expert keys, `mtp.*` kept, zero-centred norms).
Never leaves a half-written model: everything is built and checked in a sibling folder, which then takes the name.

The main model goes through `mlx_lm convert`, so its keys, its +1 on zero-centred norms and its 8-bit router are those
of mlx-lm. That drops `mtp.*`; this script writes the module itself, by the same rules.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx_lm import generate, load
from mlx_lm.convert import convert
from mlx_lm.models.qwen3_next import ModelArgs

from sparkle.errors import ConfigError, SparkleError, StorageError

MODELS = Path(__file__).resolve().parent.parent / "models"
GROUP_SIZE = 64
MAX_BYTES = 32_000_000  # what a git checkout of the repository may be asked to carry
ROUTER_BITS = 8  # mlx_lm.models.qwen3_next.Model.quant_predicate: router and shared expert gate stay at 8 bit
QUESTION, ANSWER = "What is the capital of France?", "Paris"

# What SRC's generation_config.json leaves out; the values are the shipped model's (MODEL_CARD.md, "Sampling").
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.15}

DOCUMENTS = ("MODEL_CARD.md", "NOTICE")  # written by people: taken from SRC, else kept from the model replaced
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; StorageError names the file if it is absent or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path}: cannot be read as JSON ({error}); is this a complete checkpoint folder?"
        ) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path}: holds no JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def checked_config(source: Path) -> dict[str, Any]:
    """Return SRC's config after checking that its layout is the one this script understands."""
    config = read_json(source / "config.json")
    if config.get("model_type") != "qwen3_next":
        raise ConfigError(f"{source}/config.json: model_type is {config.get('model_type')!r}, only qwen3_next is known")
    if "quantization" in config:
        raise ConfigError(f"{source}/config.json: the checkpoint is quantised; run scripts/dequantise.py on it first")
    index = source / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(read_json(index)["weight_map"].values()))
        if missing := [shard for shard in shards if not (source / shard).exists()]:
            raise StorageError(f"{source}: shards named by the index are absent: {', '.join(missing)}")
    return config


def mtp_weights(source: Path, n_experts: int) -> dict[str, mx.array]:
    """Return the MTP module of SRC in MLX layout: experts stacked, the +1 of zero-centred norms applied once."""
    weights: dict[str, mx.array] = {}
    for shard in sorted(source.glob("model*.safetensors")):
        loaded: dict[str, mx.array] = mx.load(str(shard))  # type: ignore[assignment]  # a dict, for safetensors
        weights |= {key: value for key, value in loaded.items() if key.startswith("mtp.")}
    if not weights:
        raise StorageError(f"{source}: no tensor mtp.* in any shard; a model without MTP module cannot draft")
    prefix = "mtp.layers.0.mlp"
    for name in PROJECTIONS:
        keys = [f"{prefix}.experts.{expert}.{name}.weight" for expert in range(n_experts)]
        if missing := [key for key in keys if key not in weights]:
            raise StorageError(f"{source}: {len(missing)} of {n_experts} experts are absent, the first is {missing[0]}")
        weights[f"{prefix}.switch_mlp.{name}.weight"] = mx.stack([weights.pop(key) for key in keys])
    # Every norm of the module is zero-centred (it holds no DeltaNet); in bfloat16, as mlx-lm's sanitize does it.
    return {key: value + 1.0 if "norm" in key else value for key, value in weights.items()}


def write_mtp(source: Path, staged: Path, config: dict[str, Any], bits: int) -> dict[str, dict[str, int]]:
    """Write `mtp.safetensors` and return its entries for the config's `quantization` table."""
    tensors: dict[str, mx.array] = {}
    table: dict[str, dict[str, int]] = {}
    for key, weight in mtp_weights(source, ModelArgs.from_dict(config).num_experts).items():
        path = key.removesuffix(".weight")
        if weight.ndim < 2 or weight.shape[-1] % GROUP_SIZE:
            tensors[key] = weight
            continue
        is_router = path.endswith(("mlp.gate", "shared_expert_gate"))
        table[path] = {"group_size": GROUP_SIZE, "bits": ROUTER_BITS if is_router else bits}
        packed, scales, biases = mx.quantize(weight, GROUP_SIZE, table[path]["bits"])
        tensors |= {key: packed, f"{path}.scales": scales, f"{path}.biases": biases}
    metadata = {"format": "mlx", "bits": str(bits), "group_size": str(GROUP_SIZE), "norms": "one-centred"}
    mx.save_safetensors(str(staged / "mtp.safetensors"), tensors, metadata=metadata)
    return dict(sorted(table.items()))


def write_tokenizer(source: Path, staged: Path) -> None:
    """Write the tokenizer files; `tokenizer.json` is SRC's own, byte for byte.

    Not the copy that `mlx_lm convert` saves: transformers clears there the special flag of <tool_call>, <think> and
    their kin, after which text that a user typed can no longer be encoded as text (`split_special_tokens`).
    """
    config = read_json(source / "tokenizer_config.json")
    template = config.pop("chat_template", None)
    config.pop("added_tokens_decoder", None)  # INVARIANT: tokenizer.json alone says which tokens are special
    if (source / "chat_template.jinja").exists():
        template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    if not template:
        raise StorageError(f"{source}: neither chat_template.jinja nor a chat_template in tokenizer_config.json")
    shutil.copyfile(source / "tokenizer.json", staged / "tokenizer.json")
    (staged / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(staged / "tokenizer_config.json", config)


def build(source: Path, staged: Path, bits: int, mtp_bits: int) -> None:
    """Write every machine-made file of the model into `staged`."""
    config = checked_config(source)
    convert(str(source), str(staged), quantize=True, q_group_size=GROUP_SIZE, q_bits=bits)
    for name in ("README.md", "model.safetensors.index.json", "generation_config.json"):
        (staged / name).unlink(missing_ok=True)  # mlx-lm's generic card, and an index of one shard
    converted = read_json(staged / "config.json")
    converted["quantization"] |= write_mtp(source, staged, config, mtp_bits)
    del converted["quantization_config"]  # the same table again, for the Hugging Face site
    write_json(staged / "config.json", converted)
    generation = source / "generation_config.json"
    write_json(staged / "generation_config.json", SAMPLING | (read_json(generation) if generation.exists() else {}))
    write_tokenizer(source, staged)


def check(staged: Path) -> tuple[int, str]:
    """Return the folder's size and the model's answer to QUESTION; raise if either is not good enough."""
    n_bytes = sum(path.stat().st_size for path in staged.iterdir())
    if n_bytes > MAX_BYTES:
        raise ConfigError(f"{staged}: {n_bytes:,} bytes, at most {MAX_BYTES:,} ship with the repository; lower --bits")
    if not (staged / "model.safetensors").exists():
        raise ConfigError(f"{staged}: the weights were split into several shards; too large to ship")
    model, tokenizer = load(str(staged))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)  # MLX's CPU kernels are slow and inexact with bfloat16 activations
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    answer = generate(model, tokenizer, prompt, max_tokens=40)
    if ANSWER not in answer:
        raise StorageError(
            f"{staged}: asked {QUESTION!r} the model answers {answer!r}; the weights or the template are wrong"
        )
    return n_bytes, answer


def replace(staged: Path, target: Path) -> None:
    """Give `staged` the name of `target`; the model that was there is put back if that fails."""
    retired = target.with_name(f".{target.name}.old")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        target.rename(retired)
    try:
        staged.rename(target)
    except OSError:
        if retired.exists():
            retired.rename(target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="sparkle-46m", show_default=True, help="Folder under models/ to replace.")
@click.option("--bits", type=click.Choice([4, 8]), default=4, show_default=True, help="Bits of the main model.")
@click.option("--mtp-bits", type=click.Choice([4, 8]), default=8, show_default=True, help="Bits of the MTP module.")
def main(source: Path, name: str, bits: int, mtp_bits: int) -> None:
    """Quantise the Hugging Face checkpoint SOURCE, check it and put it in place of models/NAME."""
    if not name or Path(name).name != name or name.startswith("."):
        raise click.UsageError(f"--name {name!r} is not a plain folder name")
    target, staged = MODELS / name, MODELS / f".{name}.new"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        build(source, staged, bits, mtp_bits)
        for document in DOCUMENTS:
            origin = next((folder for folder in (source, target) if (folder / document).exists()), None)
            if origin is None:
                click.echo(f"{document}: in neither folder; write it before you commit", err=True)
            else:
                shutil.copyfile(origin / document, staged / document)
                click.echo(f"{document}: from {origin}; see that it still describes the weights", err=True)
        n_bytes, answer = check(staged)
        replace(staged, target)
    except SparkleError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    click.echo(f"{QUESTION} {answer.strip()}")
    click.echo(f"models/{name}: {n_bytes:,} bytes. A store of the model before is out of date; make it anew:")
    click.echo(f"  rm -rf models/{name}.store; sparkle-ctl models prepare models/{name} models/{name}.store")


if __name__ == "__main__":
    main()
