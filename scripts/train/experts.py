"""The mixture of experts: router, routed experts as grouped products, shared expert.

Owns  the expert weights, stacked (experts, in, out) while training.
Reads hidden states (tokens, hidden).
Never drops a token: groups have whatever size the router gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from scripts.train.model import Config

INIT_STD = 0.02


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Weights are kept in float32 and used in the dtype of the activations."""
    return F.linear(x, weight.to(x.dtype))


def gather_sum(y: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    return y[inverse].view(-1, top_k, y.shape[-1]).sum(1)


def swiglu(h: Tensor, weight: Tensor) -> Tensor:
    """h (rows, 2 I), weight (rows,): the router's weight is applied here, where rows are narrow."""
    gate, up = h.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * weight[:, None].float()).to(h.dtype)


class _Dispatch(torch.autograd.Function):
    """x (tokens, H) -> rows sorted by expert (tokens * k, H); its gradient is a gather too, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor, top_k: int, gather: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k, ctx.gather = top_k, gather
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.gather(grad, ctx.saved_tensors[0], ctx.top_k), None, None, None, None


class _Combine(torch.autograd.Function):
    """Weighted rows sorted by expert (tokens * k, H) -> sums (tokens, H)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, inverse: Tensor, top_k: int, gather: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(token)
        return gather(y, inverse, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad[ctx.saved_tensors[0]], None, None, None, None


class _Permute(torch.autograd.Function):
    """weights in the order of `order`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return weight[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows [offsets[e - 1], offsets[e]) of x by weight[e]."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight, offs=offsets)
    out, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        out.append(x[start:end] @ weight[expert])
        start = end
    return torch.cat(out)


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, width, shared = c.hidden_size, c.moe_intermediate_size, c.shared_expert_intermediate_size
        self.top_k, self.n_experts = c.num_experts_per_tok, c.num_experts
        self.gate = nn.Linear(hidden, c.num_experts, bias=False)  # the router, named as in the checkpoints
        self.gate_up = nn.Parameter(torch.randn(c.num_experts, hidden, 2 * width) * INIT_STD)
        self.down = nn.Parameter(torch.randn(c.num_experts, width, hidden) * INIT_STD)
        self.shared_gate_up = nn.Linear(hidden, 2 * shared, bias=False)
        self.shared_down = nn.Linear(shared, hidden, bias=False)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        self.swiglu: Callable[..., Any] = swiglu  # Model.compile_pieces puts compiled forms here
        self.gather_sum: Callable[..., Any] = gather_sum

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights and experts (both tokens, k), the load-balance loss, and each expert's share of the load."""
        probability = torch.softmax(linear(x, self.gate.weight).float(), -1)
        weight, expert = probability.topk(self.top_k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        if x.is_cuda:
            one = torch.ones((), device=x.device).expand(expert.numel())
            count = torch.zeros(self.n_experts, device=x.device).index_add_(0, expert.flatten(), one)
        else:
            count = F.one_hot(expert, self.n_experts).sum((0, 1))
        load = count.float() / expert.numel()
        balance = self.n_experts * (load.detach() * probability.mean(0)).sum()
        return weight.to(x.dtype), expert, balance, load

    def shared(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.shared_gate_up.weight).chunk(2, -1)
        out = linear(F.silu(gate) * up, self.shared_down.weight)
        return out * torch.sigmoid(linear(x, self.shared_expert_gate.weight).float()).to(x.dtype)

    def routed(self, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        sorted_experts, order = torch.sort(expert.flatten().to(torch.uint8))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=x.device)
        ids = torch.arange(self.n_experts, device=x.device, dtype=torch.int32)
        offsets = torch.searchsorted(sorted_experts.to(torch.int32), ids, right=True).int()
        token = order // self.top_k
        rows = _Dispatch.apply(x, token, inverse, self.top_k, self.gather_sum)
        weights = _Permute.apply(weight.flatten(), order, inverse)
        h = self.swiglu(grouped_mm(rows, self.gate_up.to(x.dtype), offsets), weights)
        out = grouped_mm(h, self.down.to(x.dtype), offsets)
        return _Combine.apply(out, token, inverse, self.top_k, self.gather_sum)
