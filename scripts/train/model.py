"""Qwen3-Next in PyTorch: for training on packed rows, and as a reference on the CPU.

Owns  the whole model: embedding, layers, head, and the MTP module that drafts.
Reads token ids and document numbers, both (rows, tokens).
Never knows a file format: checkpoint.py translates to and from Hugging Face names.

The maths is that of transformers' Qwen3NextForCausalLM; the MTP module follows vLLM's qwen3_next_mtp.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.train.delta_rule import gated_delta_rule
from scripts.train.experts import INIT_STD, Experts, gather_sum, linear, swiglu
from scripts.train.layers import Attention, GatedDeltaNet, RMSNorm, attend

RESIDUAL_WRITERS = ("o_proj", "out_proj", "mlp.down", "shared_down")  # initialised smaller, by depth


@dataclass(frozen=True, slots=True)
class Config:
    """Shape of the model; the fields are those of a Hugging Face config.json."""

    vocab_size: int = 6144
    hidden_size: int = 320
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    rms_norm_eps: float = 1e-6
    full_attention_interval: int = 4

    def is_linear(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True, slots=True)
class Context:
    """What a batch of rows says about its documents; shared by all layers.

    document (rows, tokens): number within the row. same (rows, tokens, 3): the token 1, 2, 3 before is of the same
    document. position (rows, tokens). mask (rows, 1, tokens, tokens): causal, within a document.
    """

    document: Tensor
    same: Tensor
    position: Tensor
    mask: Tensor

    @classmethod
    def of(cls, document: Tensor) -> Context:
        rows, n_tokens = document.shape
        back = [F.pad(document, (j, 0), value=-1)[:, :n_tokens] == document for j in (1, 2, 3)]
        place = torch.arange(n_tokens, device=document.device)
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (place[:, None] >= place[None, :])
        return cls(document, torch.stack(back, -1), place[None].expand(rows, n_tokens), mask)

    def first_rows(self, n_rows: int) -> Context:
        return Context(self.document[:n_rows], self.same[:n_rows], self.position[:n_rows], self.mask[:n_rows])


@dataclass(frozen=True, slots=True)
class Routing:
    """What one MoE layer did: its balance loss, the share of each expert, and the experts chosen (tokens, k)."""

    balance: Tensor
    load: Tensor
    experts: Tensor


class Layer(nn.Module):
    """Mixer and MoE. `before` and `after` are the dense pieces around the mixer; they can be compiled."""

    def __init__(self, c: Config, is_linear: bool) -> None:
        super().__init__()
        self.is_linear = is_linear
        self.mixer = GatedDeltaNet(c) if is_linear else Attention(c)
        self.input_norm, self.mlp_norm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.mlp = Experts(c)

    def before(self, x: Tensor, extra: Tensor) -> tuple[Tensor, ...]:
        """extra: Context.same for a DeltaNet layer, Context.position for an attention layer."""
        projected: tuple[Tensor, ...] = self.mixer.project(self.input_norm(x), extra)
        return projected

    def after(self, x: Tensor, mixed: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the residual stream with the shared expert added, the MoE's input, and its routing."""
        x = x + self.mixer.output(mixed, gate)
        y = self.mlp_norm(x).flatten(0, 1)
        weight, expert, balance, load = self.mlp.route(y)
        return x + self.mlp.shared(y).view_as(x), y, weight, expert, balance, load

    def finish(self, x: Tensor, mixed: Tensor, gate: Tensor, record: list[Routing]) -> Tensor:
        x, y, weight, expert, balance, load = self.after(x, mixed, gate)
        record.append(Routing(balance, load, expert))
        return x + self.mlp.routed(y, weight, expert).view_as(x)

    def forward(self, x: Tensor, context: Context, record: list[Routing]) -> Tensor:
        if self.is_linear:
            q, k, v, decay, beta, z = self.before(x, context.same)
            return self.finish(x, gated_delta_rule(q, k, v, decay, beta), z, record)
        q, k, v, gate = self.before(x, context.position)
        return self.finish(x, attend(q, k, v, context.mask), gate, record)


class MTP(nn.Module):
    """Multi-token prediction: one attention layer over the next token's embedding and the hidden state before it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layer = Layer(c, is_linear=False)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        return linear(both, self.fc.weight)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, c.is_linear(i)) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.mtp = MTP(c)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and "conv_weight" not in name:
                nn.init.normal_(parameter, std=INIT_STD)
                if any(writer in name for writer in RESIDUAL_WRITERS):
                    parameter.data.mul_(1 / math.sqrt(2 * c.num_hidden_layers))

    def compile_pieces(self) -> None:
        """Compile the dense pieces, one graph a kind of layer. Delta rule, attention and experts stay outside."""
        import torch._dynamo as dynamo

        dynamo.config.cache_size_limit = 64
        dynamo.config.allow_unspec_int_on_nn_module = True
        fast_swiglu, fast_gather = torch.compile(swiglu), torch.compile(gather_sum)
        for layer in [*self.layers, self.mtp.layer]:
            layer.before = torch.compile(layer.before, dynamic=False)
            layer.after = torch.compile(layer.after, dynamic=False)
            layer.mlp.swiglu, layer.mlp.gather_sum = fast_swiglu, fast_gather
        self.mtp.fuse = torch.compile(self.mtp.fuse, dynamic=False)  # type: ignore[method-assign]

    def trunk(self, ids: Tensor, context: Context, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Routing]]:
        """Return the final-normed hidden states and the routing of every layer."""
        x = self.embed(ids).to(dtype)
        record: list[Routing] = []
        for layer in self.layers:
            x = layer(x, context, record)
        return self.norm(x), record

    def draft(self, hidden: Tensor, ids: Tensor, context: Context, depths: int, record: list[Routing]) -> list[Tensor]:
        """Return the MTP module's hidden states for depths 1..depths.

        hidden (rows, tokens, H): final-normed states of the trunk; ids (rows, at least tokens + depths). Depth d at
        column t stands for position t + d - 1 and predicts ids[t + d + 1]; its queries see the depth-1 keys of columns
        up to t and then their own chain, which is what a recursive drafter sees.
        """
        rows, n_tokens, _ = hidden.shape
        layer, out = self.mtp.layer, []
        mask, keys, values = context.mask, [], []
        own = torch.eye(n_tokens, dtype=torch.bool, device=hidden.device)[None, None].expand(rows, 1, -1, -1)
        for depth in range(1, depths + 1):
            x = self.mtp.fuse(self.embed(ids[:, depth : depth + n_tokens]).to(hidden.dtype), hidden)
            q, k, v, gate = layer.before(x, context.position + (depth - 1))
            keys.append(k)
            values.append(v)
            if depth > 1:
                mask = torch.cat([mask, own], -1)
            mixed = attend(q, torch.cat(keys, 2), torch.cat(values, 2), mask) if depth > 1 else attend(q, k, v, mask)
            hidden = self.mtp.norm(layer.finish(x, mixed, gate, record))
            out.append(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head.weight)
