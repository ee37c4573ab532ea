"""The gated delta rule of Qwen3-Next's linear attention: a reference, a chunked form, and the fast form for CUDA.

Owns  how the recurrence is computed. With state S (dk x dv) of one head, at each token
          S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
Reads tensors (batch, tokens, heads, dim); g and beta are (batch, tokens, heads).
Never carries state across calls. A document's first token has g = RESET, which clears the state of the one before.

Source: Yang et al. 2024, "Gated Delta Networks", section 3.3 (chunked form); flash-linear-attention for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RESET = -20.0  # log decay; exp(-20) = 2e-9 is nothing beside bfloat16's 4e-3
CHUNK = 64


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute token by token, float32; q already scaled. The reference for the other forms."""
    batch, n_tokens, heads, dim = k.shape
    state = torch.zeros(batch, heads, dim, v.shape[-1], dtype=torch.float32, device=q.device)
    out = []
    for t in range(n_tokens):
        state = state * g[:, t, :, None, None].exp()
        delta = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[..., None, :]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Compute the same in products over chunks of tokens (UT transform), float32; q already scaled."""
    batch, n_tokens, heads, dim = k.shape
    n_chunks = -(-n_tokens // chunk)

    def split(x: Tensor) -> Tensor:  # (batch, heads, chunks, chunk[, dim]), zeros after the last token
        pad = (0, 0) * (x.dim() - 2) + (0, n_chunks * chunk - n_tokens)
        return F.pad(x, pad).unflatten(1, (n_chunks, chunk)).movedim(3, 1)

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta)
    decay = g.cumsum(-1)
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    k_beta = k * beta[..., None]
    mix = ((k_beta @ k.mT) * between).tril(-1) + torch.eye(chunk, device=q.device)
    right = torch.cat([v * beta[..., None], k_beta * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(mix, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], dim], -1)
    state = torch.zeros(batch, heads, dim, v.shape[-1], device=q.device)
    within = (q @ k.mT) * between
    out = []
    for i in range(n_chunks):
        v_new = u[:, :, i] - w[:, :, i] @ state
        out.append((q[:, :, i] * decay[:, :, i, :, None].exp()) @ state + within[:, :, i] @ v_new)
        last = decay[:, :, i, -1:]
        state = state * last[..., None].exp() + (k[:, :, i] * (last - decay[:, :, i]).exp()[..., None]).mT @ v_new
    return torch.stack(out, 2).flatten(2, 3)[:, :, :n_tokens].transpose(1, 2)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor, g: Tensor, dv: Tensor, scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the chunked rule with respect to q, k, w and the decay, in batched products.

    g: cumulative decay within each chunk, in log2 units. h, dh (batch, chunks, heads, dk, dv): the state before each
    chunk, and the gradient of the state after it.
    """
    batch, n_tokens, heads, _ = k.shape
    n_chunks = n_tokens // chunk

    def split(x: Tensor) -> Tensor:
        return x.view(batch, n_chunks, chunk, heads, x.shape[-1]).transpose(2, 3)

    def merge(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(batch, n_tokens, heads, -1)

    q, k, v, do, dv = split(q), split(k), split(v), split(do), split(dv)
    g = g.view(batch, n_chunks, chunk, heads).transpose(2, 3).float()
    h, dh = h.to(do.dtype), dh.to(do.dtype)
    last = g[..., -1:]
    dw = -(dv.to(do.dtype) @ h.mT)
    dq = (do @ h.mT).float() * (torch.exp2(g) * scale)[..., None]
    dk = (v @ dh.mT).float() * torch.exp2(last - g)[..., None]
    d_last = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(last[..., 0]) + (dk * k.float()).sum((-1, -2))
    ds = (do @ v.mT).float() * torch.exp2((g[..., :, None] - g[..., None, :]).clamp(max=0)) * scale
    ds = ds.tril().to(k.dtype)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + d_last[..., None]], -1)
    dg = dg.transpose(2, 3).reshape(batch, n_tokens, heads)
    return merge(dq.to(q.dtype)), merge(dk.to(q.dtype)), merge(dw.to(q.dtype)), dg


@cache
def _flash() -> Callable[..., Any]:
    """Return flash-linear-attention's chunked rule with one kernel of its backward pass replaced by `_gradients`.

    fla-core 0.6.0 refuses that kernel on Hopper with Triton 3.4 to 3.7, where its results are wrong
    (flash-linear-attention issue 640). Checked against `chunked` by check_gpu.py.
    """
    import fla.ops.gated_delta_rule.chunk as fla  # CUDA only

    fast = torch.compile(_gradients, dynamic=False)

    def replacement(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor = None, g: Tensor = None,
        dv: Tensor = None, scale: float | None = None, chunk_size: int = CHUNK, **_: Any,
    ) -> Any:  # fmt: skip
        return fast(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)

    fla.chunk_bwd_dqkwg = replacement
    fast_rule: Callable[..., Any] = torch.compiler.disable(fla.chunk_gated_delta_rule)
    return fast_rule


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return o in v's dtype.  q and k are l2-normalised and not scaled; g is the log decay."""
    scale = q.shape[-1] ** -0.5
    if q.is_cuda:
        return _flash()(q, k, v, g, beta, scale=scale)[0]
    return chunked(q.float() * scale, k.float(), v.float(), g.float(), beta.float()).to(v.dtype)
