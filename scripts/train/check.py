"""Check that the fast forms of the delta rule and of the experts equal plain torch, forward and backward.

Owns  the random inputs and the limits.
Never needs a corpus: run it before training on a new GPU or with new versions of torch, Triton or fla-core. Without a
      GPU it checks the maths only.

    python -m scripts.train.check
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train import delta_rule
from scripts.train.experts import Experts
from scripts.train.model import Config

MAX_FORMULA_ERROR = 1e-5  # relative, float32
MAX_GPU_ERROR = 2e-2  # relative, bfloat16 (rounds by up to 4e-3) against float32


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def random_inputs(shape: tuple[int, int, int, int], device: str) -> list[Tensor]:
    """Return q, k, v, g, beta in float32; three documents begin within each row."""
    q, k = (F.normalize(torch.randn(shape, device=device), dim=-1) for _ in "qk")
    v = torch.randn(shape, device=device)
    g, beta = -torch.rand(shape[:3], device=device) * 0.2, torch.rand(shape[:3], device=device)
    g[:, (0, 100, 130)] = delta_rule.RESET
    return [q, k, v, g, beta]


def formula_errors() -> dict[str, float]:
    """On the CPU: the chunked form against the recurrence, and `_gradients` against autograd.

    `_gradients` is the backward pass of the part of the chunked rule that is left when u and w are given:
    v_new = u - w S; o = scale (q 2^g S + tril(q k^T 2^(g - g')) v_new); S' = 2^last S + (k 2^(last - g))^T v_new.
    """
    inputs = random_inputs((2, 150, 3, 16), "cpu")
    errors = {"chunked delta rule": relative(delta_rule.chunked(*inputs), delta_rule.recurrent(*inputs))}
    rows, n_chunks, chunk, heads, dim, scale = 2, 3, 16, 3, 8, 0.3
    shape = (rows, n_chunks * chunk, heads, dim)
    q, k, u, w, do = (torch.randn(shape) * 0.5 for _ in range(5))
    decay = -torch.rand(rows, n_chunks, chunk, heads).cumsum(2).view(shape[:3]) * 0.1  # natural log, within each chunk
    leaves = [x.requires_grad_() for x in (q, k, w, decay)]
    state = torch.zeros(rows, heads, dim, dim)
    states, ends, new, out = [], [], [], []
    for i in range(n_chunks):
        at = slice(i * chunk, (i + 1) * chunk)
        q_i, k_i, u_i, w_i = (x[:, at].transpose(1, 2) for x in (q, k, u, w))
        g_i = decay[:, at].transpose(1, 2)
        states.append(state)
        v_new = u_i - w_i @ state
        between = (g_i[..., :, None] - g_i[..., None, :]).tril().exp().tril()
        out.append(scale * ((q_i * g_i.exp()[..., None]) @ state + ((q_i @ k_i.mT) * between) @ v_new))
        last = g_i[..., -1:]
        state = state * last.exp()[..., None] + (k_i * (last - g_i).exp()[..., None]).mT @ v_new
        new.append(v_new)
        ends.append(state)
    o = torch.cat([x.transpose(1, 2) for x in out], 1)
    inner = torch.autograd.grad(o, [*new, *ends[:-1]], do, retain_graph=True)  # the last state has no reader
    dv = torch.cat([x.transpose(1, 2) for x in inner[:n_chunks]], 1)
    dh = torch.stack([*inner[n_chunks:], torch.zeros_like(state)], 1)
    v = torch.cat([x.transpose(1, 2) for x in new], 1)
    with torch.no_grad():
        log2 = decay / math.log(2)
        formula = delta_rule._gradients(q, k, v, do, torch.stack(states, 1), dh, w, log2, dv, scale, chunk)
    expected = torch.autograd.grad(o, leaves, do)
    names = ("q", "k", "w", "decay")
    return errors | {
        f"formula, gradient of {n}": relative(a, b) for n, a, b in zip(names, formula, expected, strict=True)
    }


def delta_rule_errors() -> dict[str, float]:
    q, k, v, g, beta = random_inputs((4, 512, 8, 64), "cuda")
    q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
    do = torch.randn_like(v)
    fast = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    out = delta_rule.gated_delta_rule(*fast)
    out.backward(do)
    plain = [x.float().clone().requires_grad_() for x in (q, k, v, g, beta)]
    expected = delta_rule.chunked(plain[0] * q.shape[-1] ** -0.5, *plain[1:])
    expected.backward(do.float())
    errors = {"delta rule": relative(out, expected)}
    pairs = zip(("q", "k", "v", "g", "beta"), fast, plain, strict=True)
    return errors | {f"delta rule, gradient of {name}": relative(a.grad, b.grad) for name, a, b in pairs}


def _plain_experts(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    """All experts on all tokens, weighted by the router; float32. chosen: what the fast form chose."""
    probability = torch.softmax(x @ experts.gate.weight.T, -1)
    weight = probability.gather(1, chosen)
    dense = torch.zeros_like(probability).scatter(1, chosen, weight / weight.sum(-1, keepdim=True))
    out = torch.zeros_like(x)
    for expert in range(experts.n_experts):
        gate, up = (x @ experts.gate_up[expert]).chunk(2, -1)
        out = out + dense[:, expert : expert + 1] * ((F.silu(gate) * up) @ experts.down[expert])
    return out


def expert_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    c = Config()
    experts = Experts(c).to(device)
    x = (torch.randn(1024, c.hidden_size, device=device) * 0.5).to(dtype).requires_grad_()
    parameters: Sequence[Tensor] = (experts.gate_up, experts.down, experts.gate.weight)
    weight, chosen, _, _ = experts.route(x)
    out = experts.routed(x, weight, chosen)
    fast = torch.autograd.grad(out, (x, *parameters), torch.ones_like(out))
    wide = x.detach().float().requires_grad_()
    expected = _plain_experts(experts, wide, chosen)
    plain = torch.autograd.grad(expected, (wide, *parameters), torch.ones_like(expected))
    names = ("x", "gate_up", "down", "router")
    gradients = {f"experts, gradient of {n}": relative(a, b) for n, a, b in zip(names, fast, plain, strict=True)}
    return {"experts": relative(out, expected)} | gradients


def too_large(errors: dict[str, float], limit: float) -> bool:
    for name, error in errors.items():
        click.echo(f"{error:.2e}  {name}")
    return any(not error < limit for error in errors.values())


@click.command()
def main() -> None:
    """Print the relative errors; exit with 1 if one is too large."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    plain = formula_errors() | expert_errors("cpu", torch.float32)
    failed = too_large(plain, MAX_FORMULA_ERROR)
    if torch.cuda.is_available():
        click.echo("on the GPU, bfloat16 against float32:")
        fast = delta_rule_errors() | expert_errors("cuda", torch.bfloat16)
        failed = too_large(fast, MAX_GPU_ERROR) or failed
    sys.exit(failed)


if __name__ == "__main__":
    main()
