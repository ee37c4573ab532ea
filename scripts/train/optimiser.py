"""Muon for matrices, and which parameters go to it and which to AdamW.

Owns  Muon's momentum.
Reads gradients, and clears them after a step.
Never updates embeddings, head, router or one-dimensional parameters: those are AdamW's.

Source: Jordan et al. 2024, "Muon"; update scale 0.2 sqrt(max(in, out)) of Liu et al. 2025, "Muon is scalable for LLM
training", section 2.2, which makes AdamW's learning rates and weight decay fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ADAM_MATRICES = ("embed", "head.", "mlp.gate.", "shared_expert_gate", "in_proj_ba")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of Muon's reference implementation
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Groups:
    muon: list[Tensor]
    adam: list[Tensor]
    adam_undecayed: list[Tensor]  # norms, biases, decay rates, convolution taps


def group_parameters(model: nn.Module) -> Groups:
    groups = Groups([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "conv_weight" in name:
            groups.adam_undecayed.append(parameter)
        elif any(part in name for part in ADAM_MATRICES):
            groups.adam.append(parameter)
        else:
            groups.muon.append(parameter)
    return groups


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices of the same singular vectors with singular values near 1, in bfloat16."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Nesterov momentum, orthogonalised. Parameters of one shape are stepped together."""

    def __init__(self, parameters: list[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self._groups = [(group, [torch.zeros_like(p) for p in group]) for group in by_shape.values()]
        self._weight_decay, self._momentum = weight_decay, momentum

    def step(self, lr: float) -> None:
        with torch.no_grad():
            for parameters, averages in self._groups:
                gradients = [p.grad for p in parameters]
                torch._foreach_lerp_(averages, gradients, 1 - self._momentum)
                updates = torch.stack(torch._foreach_lerp(gradients, averages, self._momentum))
                shape = parameters[0].shape
                if len(shape) == 3:  # stacked experts are matrices of their own
                    updates = updates.flatten(0, -3)
                scale = 0.2 * math.sqrt(max(shape[-2:]))
                updates = orthogonalise(updates).view(len(parameters), *shape).float() * scale
                torch._foreach_mul_(parameters, 1 - lr * self._weight_decay)
                torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-lr)
                for parameter in parameters:
                    parameter.grad = None
