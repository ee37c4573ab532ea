"""Tiny checkpoints with random weights, in Hugging Face layout, for every test that needs a model but no sense.

Two families, float types, one or more shards, with and without an MTP head; also a byte-level tokenizer with a ChatML
template. NumPy only, so that tests without mlx can use it. A checkpoint takes a few milliseconds to write.

Scales are chosen so that things vary as in a trained model: router logits spread by 1.5 (routing differs from token to
token), hidden states stay near unit size, output logits spread by 2. Rows of the output head for special tokens and for
ids beyond the tokenizer's are zero: greedy decoding never ends early and never leaves the vocabulary.

In-features are multiples of 64 (quantisation groups). With the default sizes, pieces of a record are *not* all
multiples of 512 bytes (one way to read); with `**ALIGNED` they are (the other).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkle.safetensors_header import encode

Array = NDArray[Any]
Tensors = dict[str, Array]

ALIGNED: Mapping[str, Any] = {"hidden": 128, "moe_intermediate": 128}  # smallest piece: 128 x 2 scales of 2 bytes
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
EOS_ID = SPECIAL.index("<|im_end|>")
N_TOKENS = len(SPECIAL) + 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_HEAD_DIM, CONV_KERNEL = 2, 4, 32, 4


def write_qwen3_next(
    path: Path,
    dtype: str = "bf16",
    *,
    hidden: int = 64,
    layers: int = 4,
    experts: int = 8,
    top_k: int = 2,
    moe_intermediate: int = 64,
    vocab: int = 320,
    mtp: bool = True,
    tie: bool = False,
    shards: int = 2,
    seed: int = 0,
) -> Path:
    """Write a Qwen3-Next checkpoint (three linear-attention layers, then a full one) and return `path`.

    dtype: "bf16", "f16" or "f32". vocab: at least N_TOKENS. mtp: one MTP layer with experts of its own.
    """
    g = _Weights(seed)
    key_dim, value_dim = LINEAR_KEY_HEADS * LINEAR_HEAD_DIM, LINEAR_VALUE_HEADS * LINEAR_HEAD_DIM

    def layer(prefix: str, is_linear: bool) -> None:
        g.centred(f"{prefix}.input_layernorm.weight", hidden)
        g.centred(f"{prefix}.post_attention_layernorm.weight", hidden)
        if is_linear:
            at = f"{prefix}.linear_attn"
            g.linear(f"{at}.in_proj_qkvz.weight", 2 * key_dim + 2 * value_dim, hidden)
            g.linear(f"{at}.in_proj_ba.weight", 2 * LINEAR_VALUE_HEADS, hidden)
            g.linear(f"{at}.out_proj.weight", hidden, value_dim)
            g.normal(f"{at}.conv1d.weight", (2 * key_dim + value_dim, 1, CONV_KERNEL), 0.5)
            g.uniform(f"{at}.A_log", (LINEAR_VALUE_HEADS,), 0.0, 2.7)  # log of a decay rate of 1 to 16
            g.uniform(f"{at}.dt_bias", (LINEAR_VALUE_HEADS,), -4.0, 0.0)
            g.uniform(f"{at}.norm.weight", (LINEAR_HEAD_DIM,), 0.8, 1.2)
        else:
            _attention(g, f"{prefix}.self_attn", hidden, gated=True)
            g.centred(f"{prefix}.self_attn.q_norm.weight", HEAD_DIM)
            g.centred(f"{prefix}.self_attn.k_norm.weight", HEAD_DIM)
        _experts(g, f"{prefix}.mlp", hidden, moe_intermediate, experts)
        for name, n_out, n_in in _projections(hidden, moe_intermediate):
            g.linear(f"{prefix}.mlp.shared_expert.{name}.weight", n_out, n_in)
        g.linear(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden)

    for i in range(layers):
        layer(f"model.layers.{i}", (i + 1) % 4 != 0)
    g.centred("model.norm.weight", hidden)
    _embeddings(g, hidden, vocab, tie)
    if mtp:
        layer("mtp.layers.0", is_linear=False)
        g.linear("mtp.fc.weight", hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            g.centred(f"mtp.{name}.weight", hidden)
    config = {
        **_config("Qwen3NextForCausalLM", "qwen3_next", hidden, layers, experts, top_k, moe_intermediate, vocab, tie),
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_VALUE_HEADS,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": moe_intermediate,
    }
    return _write(path, g.tensors, config, dtype, shards)


def write_qwen3_moe(
    path: Path,
    dtype: str = "bf16",
    *,
    hidden: int = 64,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    moe_intermediate: int = 64,
    vocab: int = 320,
    tie: bool = False,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write a Qwen3-MoE checkpoint (attention and experts only; no shared expert, no MTP head) and return `path`."""
    g = _Weights(seed)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        g.uniform(f"{prefix}.input_layernorm.weight", (hidden,), 0.8, 1.2)
        g.uniform(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.8, 1.2)
        _attention(g, f"{prefix}.self_attn", hidden, gated=False)
        g.uniform(f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,), 0.8, 1.2)
        g.uniform(f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,), 0.8, 1.2)
        _experts(g, f"{prefix}.mlp", hidden, moe_intermediate, experts)
    g.uniform("model.norm.weight", (hidden,), 0.8, 1.2)
    _embeddings(g, hidden, vocab, tie)
    config = _config("Qwen3MoeForCausalLM", "qwen3_moe", hidden, layers, experts, top_k, moe_intermediate, vocab, tie)
    return _write(path, g.tensors, config, dtype, shards)


def write_tensors(path: Path, tensors: Tensors, dtype: str, metadata: Mapping[str, str]) -> None:
    """Write `tensors`, whatever their type, as a safetensors file of `dtype` ("bf16", "f16" or "f32")."""
    name = {"bf16": "BF16", "f16": "F16", "f32": "F32"}[dtype]
    with path.open("wb") as file:
        file.write(encode(((key, name, value.shape) for key, value in tensors.items()), metadata))
        for value in tensors.values():
            file.write(_as(value, dtype).tobytes())


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of the checkpoint's config.json; None removes one."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=2))


class _Weights:
    """Collects random float32 tensors by name."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Array:
        self.tensors[name] = self._random.normal(0.0, std, shape).astype(np.float32)
        return self.tensors[name]

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> None:
        self.tensors[name] = self._random.uniform(low, high, shape).astype(np.float32)

    def linear(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        self.normal(name, (n_out, n_in), gain / n_in**0.5)

    def centred(self, name: str, n: int) -> None:
        """A norm that the model multiplies by 1 + w, as Qwen3-Next does."""
        self.normal(name, (n,), 0.1)


def _projections(hidden: int, intermediate: int) -> tuple[tuple[str, int, int], ...]:
    return (
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    )


def _attention(g: _Weights, prefix: str, hidden: int, gated: bool) -> None:
    g.linear(f"{prefix}.q_proj.weight", HEADS * HEAD_DIM * (2 if gated else 1), hidden)
    g.linear(f"{prefix}.k_proj.weight", KV_HEADS * HEAD_DIM, hidden)
    g.linear(f"{prefix}.v_proj.weight", KV_HEADS * HEAD_DIM, hidden)
    g.linear(f"{prefix}.o_proj.weight", hidden, HEADS * HEAD_DIM)


def _experts(g: _Weights, prefix: str, hidden: int, intermediate: int, experts: int) -> None:
    g.linear(f"{prefix}.gate.weight", experts, hidden, gain=1.5)
    for e in range(experts):
        for name, n_out, n_in in _projections(hidden, intermediate):
            g.linear(f"{prefix}.experts.{e}.{name}.weight", n_out, n_in)


def _embeddings(g: _Weights, hidden: int, vocab: int, tie: bool) -> None:
    if vocab < N_TOKENS:
        raise ValueError(f"vocab must be at least {N_TOKENS}")
    g.normal("model.embed_tokens.weight", (vocab, hidden), 1.0)
    if not tie:
        head = g.normal("lm_head.weight", (vocab, hidden), 2.0 / hidden**0.5)
        head[: len(SPECIAL)] = head[N_TOKENS:] = 0.0


def _config(
    architecture: str,
    model_type: str,
    hidden: int,
    layers: int,
    experts: int,
    top_k: int,
    moe_intermediate: int,
    vocab: int,
    tie: bool,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_bias": False,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "eos_token_id": EOS_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": moe_intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "vocab_size": vocab,
    }


def _write(path: Path, tensors: Tensors, config: dict[str, Any], dtype: str, shards: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    torch_dtype = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": torch_dtype}, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 0], "pad_token_id": 0}))
    _write_tokenizer(path)
    names = list(tensors)
    if shards == 1:
        write_tensors(path / "model.safetensors", tensors, dtype, {"format": "pt"})
        return path
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        held = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_tensors(path / file, {name: tensors[name] for name in held}, dtype, {"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _as(value: Array, dtype: str) -> Array:
    value = np.asarray(value, np.float32)
    if dtype == "f32":
        return value
    if dtype == "f16":
        return value.astype(np.float16)
    bits = value.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # bfloat16, round to nearest even


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _write_tokenizer(path: Path) -> None:
    """One token per byte and the special tokens first; no merges."""
    added = [
        {"id": i, "content": text, "special": text.startswith("<|")}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {text: i for i, text in enumerate([*SPECIAL, *_byte_characters()])}
    unset = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", **dict.fromkeys(unset), **flags, "vocab": vocab, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))


CHAT_TEMPLATE = r"""{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- "You can call these functions. Each line describes one as JSON:\n<tools>" }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\nTo call one, answer only with\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (m.content or '') }}
{%- for call in (m.tool_calls or []) %}
{%- set f = call.function if call.function is defined else call %}
{{- ('\n' if (m.content or not loop.first) else '') + '<tool_call>\n{"name": ' + (f.name | tojson) }}
{{- ', "arguments": ' + (f.arguments if f.arguments is string else (f.arguments | tojson)) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif not (m.role == 'system' and loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
