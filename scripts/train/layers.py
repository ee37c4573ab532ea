"""The parts of a Qwen3-Next layer that mix tokens: gated DeltaNet and gated attention, with norms and rotation.

Owns  these modules' weights, named as in the Hugging Face checkpoints where torch allows it.
Reads hidden states (batch, tokens, hidden) and what `Context` in model.py says about documents.
Never runs the delta rule or the attention itself: each mixer has a `project` before it and an `output` after it, so
      that these dense pieces can be compiled apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.train.delta_rule import RESET
from scripts.train.experts import linear

if TYPE_CHECKING:
    from scripts.train.model import Config


class RMSNorm(nn.Module):
    """Zero-centred as in Qwen3-Next: the scale is 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).to(x.dtype)


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, position: Tensor, c: Config) -> Tensor:
    """Apply rotary position embedding to the first part of each head.  x (batch, tokens, heads, dim)."""
    size = int(c.head_dim * c.partial_rotary_factor)
    inverse = 1.0 / c.rope_theta ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angle = position.float()[..., None] * inverse
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    y = x[..., :size].float()
    a, b = y[..., : size // 2], y[..., size // 2 :]
    return torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype), x[..., size:]], -1)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.n_key_heads, self.n_value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.key_dim, self.value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        self.keys, self.values = self.n_key_heads * self.key_dim, self.n_value_heads * self.value_dim
        self.n_taps, self.eps = c.linear_conv_kernel_dim, c.rms_norm_eps
        self.in_proj_qkvz = nn.Linear(c.hidden_size, 2 * self.keys + 2 * self.values, bias=False)
        self.in_proj_ba = nn.Linear(c.hidden_size, 2 * self.n_value_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(2 * self.keys + self.values, self.n_taps) * 0.3)
        self.A_log = nn.Parameter(torch.log(torch.empty(self.n_value_heads).uniform_(1, 16)))
        dt = torch.exp(torch.empty(self.n_value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.norm_weight = nn.Parameter(torch.ones(self.value_dim))  # not zero-centred
        self.out_proj = nn.Linear(self.values, c.hidden_size, bias=False)

    def _convolve(self, x: Tensor, same: Tensor) -> Tensor:
        """Causal depthwise convolution, float32, whose taps stop at the start of the document."""
        weight = self.conv_weight.float()
        out = x * weight[:, self.n_taps - 1]
        for back in range(1, self.n_taps):
            shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * same[..., back - 1 : back].float()
            out = out + shifted * weight[:, self.n_taps - 1 - back]
        return F.silu(out)

    def project(self, x: Tensor, same: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, log decay, beta and the output gate z.

        same (batch, tokens, taps - 1) bool: the token 1 + j before is of the same document.
        """
        batch, n_tokens, _ = x.shape
        ratio = self.n_value_heads // self.n_key_heads
        grouped = linear(x, self.in_proj_qkvz.weight).view(batch, n_tokens, self.n_key_heads, -1)
        sizes = [self.key_dim, self.key_dim, ratio * self.value_dim, ratio * self.value_dim]
        q, k, v, z = grouped.split(sizes, -1)
        ba = linear(x, self.in_proj_ba.weight).view(batch, n_tokens, self.n_key_heads, 2 * ratio)
        b, a = ba.split([ratio, ratio], -1)
        flat = (batch, n_tokens, -1)
        qkv = torch.cat([q.reshape(flat), k.reshape(flat), v.reshape(flat)], -1).float()
        q, k, v = self._convolve(qkv, same).split([self.keys, self.keys, self.values], -1)
        q = l2norm(q.reshape(batch, n_tokens, self.n_key_heads, self.key_dim)).repeat_interleave(ratio, 2)
        k = l2norm(k.reshape(batch, n_tokens, self.n_key_heads, self.key_dim)).repeat_interleave(ratio, 2)
        step = F.softplus(a.reshape(flat).float() + self.dt_bias.float())
        decay = -self.A_log.float().exp() * step
        decay = torch.where(same[..., :1], decay, torch.full_like(decay, RESET))
        beta = torch.sigmoid(b.reshape(flat).float())
        heads = (batch, n_tokens, self.n_value_heads, self.value_dim)
        dtype = x.dtype
        return q.to(dtype), k.to(dtype), v.reshape(heads).to(dtype), decay, beta.to(dtype), z.reshape(heads)

    def output(self, o: Tensor, z: Tensor) -> Tensor:
        y = o.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm_weight.float()
        return linear((y * F.silu(z.float())).to(z.dtype).flatten(2), self.out_proj.weight)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        hidden, dim = c.hidden_size, c.head_dim
        self.q_proj = nn.Linear(hidden, c.num_attention_heads * dim * 2, bias=False)  # queries and output gate
        self.k_proj = nn.Linear(hidden, c.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, c.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim, c.rms_norm_eps), RMSNorm(dim, c.rms_norm_eps)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (batch, heads, tokens, dim) and the output gate (batch, tokens, heads * dim)."""
        c, shape = self.c, x.shape[:2]
        q, gate = linear(x, self.q_proj.weight).view(*shape, c.num_attention_heads, -1).chunk(2, -1)
        k = linear(x, self.k_proj.weight).view(*shape, c.num_key_value_heads, -1)
        v = linear(x, self.v_proj.weight).view(*shape, c.num_key_value_heads, -1)
        q, k = rotate(self.q_norm(q), position, c), rotate(self.k_norm(k), position, c)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.reshape(*shape, -1)

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        o = o.transpose(1, 2).flatten(2)
        return linear(o * torch.sigmoid(gate.float()).to(o.dtype), self.o_proj.weight)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
