"""Attention of one new token a slot over that slot's keys and values (Triton, CUDA only).

Owns  the kernel.
Never materialises scores: softmax is accumulated over blocks of positions (Dao et al. 2022, FlashAttention, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 16  # query heads of one group, padded to the matrix unit's smallest tile
BLOCK = 64  # positions read at a time


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(q, kc, vc, pos, out, T, scale, G: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.program_id(0)  # slot
    h = tl.program_id(1)  # key/value head
    nkv = tl.num_programs(1)
    p = tl.load(pos + s)
    d = tl.arange(0, D)
    r = tl.arange(0, R)
    qo = (s * nkv * G + h * G + r)[:, None] * D + d[None, :]
    qv = tl.load(q + qo, mask=r[:, None] < G, other=0.0)
    m = tl.full((R,), -1e30, tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, D), tl.float32)
    base = (s.to(tl.int64) * nkv + h) * T * D
    for start in range(0, p + 1, BT):
        t = start + tl.arange(0, BT)
        k = tl.load(kc + base + t[None, :] * D + d[:, None], mask=t[None, :] <= p, other=0.0)
        v = tl.load(vc + base + t[:, None] * D + d[None, :], mask=t[:, None] <= p, other=0.0)
        sc = tl.dot(qv, k) * scale
        sc = tl.where(t[None, :] <= p, sc, -1e30)
        mn = tl.maximum(m, tl.max(sc, 1))
        a = tl.exp(m - mn)
        pr = tl.exp(sc - mn[:, None])
        total = total * a + tl.sum(pr, 1)
        acc = acc * a[:, None] + tl.dot(pr.to(tl.bfloat16), v)
        m = mn
    tl.store(out + qo, (acc / total[:, None]).to(tl.bfloat16), mask=r[:, None] < G)


def decode_attention(q: Any, keys: Any, values: Any, position: Any) -> Any:
    """q (slots, heads, dim) bf16; keys, values (slots, kv heads, length, dim); position (slots,) int32, inclusive."""
    slots, n_heads, dim = q.shape
    n_kv_heads, length = keys.shape[1], keys.shape[2]
    out = torch.empty_like(q)
    grid = (slots, n_kv_heads)
    _kernel[grid](
        q, keys, values, position, out, length, dim**-0.5, n_heads // n_kv_heads, dim, BLOCK, TILE, num_warps=2
    )
    return out
