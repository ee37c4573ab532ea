"""A decode-only sampler: every slot advances by one token a step, prompt tokens too.

Owns  the slots (token, position, prompt, turn), their KV cache, and the log of every step.
Reads the teacher's weights and the prompts' tokens.
Never synchronises with the host inside a step: all shapes are static, so that one CUDA graph replays the whole step,
      sampling and slot recycling included.

A conversation is a forced first part, sampled tokens up to EOS, and, where there is a second forced part (whose token 0
is that EOS, so that it enters the KV cache), a second sampled turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from scripts.train import teacher as t
from scripts.train.teacher import Teacher

MIN_ROOM = 24  # positions that must be left for an answer to the second part


@dataclass(frozen=True, slots=True)
class Forced:
    """Forced tokens of all prompts, padded: (prompts, longest) int32; length 0 = the prompt has no such part."""

    tokens: Any
    lengths: Any

    @classmethod
    def of(cls, parts: list[list[int]], width: int) -> Forced:
        tokens = np.zeros((len(parts), width), np.int32)
        for row, part in zip(tokens, parts, strict=True):
            row[: len(part)] = part
        return cls(tokens, np.array([len(part) for part in parts], np.int32))

    def to(self, device: str) -> Forced:
        return Forced(*(torch.as_tensor(x, dtype=torch.int32, device=device) for x in (self.tokens, self.lengths)))


@dataclass(frozen=True, slots=True)
class Settings:
    slots: int = 4096
    length: int = 352  # positions of a slot: system prompt, both turns
    max_steps: int = 1000
    temperature: float = 0.7
    min_p: float = 0.06


class Sampler:
    """Plays all prompts through the slots, in order, again from the start when they run out."""

    def __init__(
        self, teacher: Teacher, first: Forced, second: Forced, prefix: list[int], settings: Settings, device: str
    ) -> None:
        """prefix: tokens of the system prompt, the same for all slots."""
        self.teacher, self.settings, self.device = teacher, settings, device
        self.first, self.second = first.to(device), second.to(device)
        self.n_prompts, self.n_prefix = len(first.lengths), len(prefix)
        slots, length = settings.slots, settings.length
        shape = (t.N_LAYERS, slots, t.N_KV_HEADS, length, t.HEAD_DIM)
        self.keys = torch.zeros(shape, dtype=teacher.embedding.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.slot = torch.arange(slots, device=device)
        inverse = 1.0 / t.ROPE_THETA ** (torch.arange(0, t.HEAD_DIM, 2, device=device).float() / t.HEAD_DIM)
        angles = torch.arange(length, device=device).float()[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()
        self.token, self.position, self.turn, self.at = (self._per_slot() for _ in range(4))
        self.prompt = torch.arange(slots, dtype=torch.int32, device=device) % self.n_prompts
        self.n_started = torch.tensor(slots, dtype=torch.int32, device=device)
        self.log_token = torch.zeros(settings.max_steps, slots, dtype=torch.int32, device=device)
        self.log_turn = torch.zeros_like(self.log_token)  # prompt * 2 + turn
        self.n_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.graph: Any = None
        compiled: Callable[[Any], Any] = (
            (lambda f: torch.compile(f, dynamic=False)) if device.startswith("cuda") else (lambda f: f)
        )
        self._project, self._finish, self._sample = compiled(t.project), compiled(t.finish), compiled(t.sample)
        for i, token in enumerate(prefix):  # the same keys and values in every slot, never overwritten
            self.token.fill_(token)
            self.position.fill_(i)
            self.forward()
        self.position.fill_(self.n_prefix)
        self.token.copy_(self.first.tokens[self.prompt.long(), 0])

    def _per_slot(self) -> Any:
        return torch.zeros(self.settings.slots, dtype=torch.int32, device=self.device)

    def forward(self) -> Any:
        """Return logits (slots, vocab) after each slot's token; writes its keys and values."""
        at = self.position.long()
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.teacher.embedding[self.token.long()]
        for block, keys, values in zip(self.teacher.blocks, self.keys, self.values, strict=True):
            q, k, v = self._project(x, block.attention_norm, block.qkv, cos, sin)
            keys[self.slot, :, at] = k
            values[self.slot, :, at] = v
            attended = t.attend(q, keys, values, self.position)
            x = self._finish(x, attended, block.output, block.mlp_norm, block.gate_up, block.down)
        return F.rms_norm(x, (t.HIDDEN,), self.teacher.norm, t.NORM_EPS) @ self.teacher.embedding.T

    def step(self) -> None:
        sampled = self._sample(self.forward(), self.settings.temperature, self.settings.min_p)
        prompt, first, second = self.prompt.long(), self.first, self.second
        is_first = self.turn == 0
        at, position = self.at + 1, self.position + 1
        is_forced = at < torch.where(is_first, first.lengths[prompt], second.lengths[prompt])
        forced = torch.where(
            is_first,
            first.tokens[prompt, at.long().clamp(max=first.tokens.shape[1] - 1)],
            second.tokens[prompt, at.long().clamp(max=second.tokens.shape[1] - 1)],
        )
        token = torch.where(is_forced, forced, sampled)
        row = self.n_steps.view(1)  # a tensor as index: no host synchronisation
        self.log_token.index_copy_(0, row, token[None])
        self.log_turn.index_copy_(0, row, (self.prompt * 2 + self.turn)[None])

        length = self.settings.length
        is_end = ~is_forced & (sampled == t.EOS)
        has_second = (second.lengths[prompt] > 0) & (position + second.lengths[prompt] + MIN_ROOM < length)
        turns = is_end & is_first & has_second
        done = (is_end & ~turns) | (position + 1 >= length)
        fresh = (self.n_started + done.int().cumsum(0) - 1) % self.n_prompts
        self.n_started += done.int().sum()
        self.prompt.copy_(torch.where(done, fresh, self.prompt))
        self.turn.copy_(torch.where(done, 0, torch.where(turns, 1, self.turn)))
        self.at.copy_(torch.where(done | turns, 0, at))
        self.position.copy_(torch.where(done, self.n_prefix, position))
        prompt = self.prompt.long()
        next_token = torch.where(turns, second.tokens[prompt, 0], token)
        self.token.copy_(torch.where(done, first.tokens[prompt, 0], next_token))
        self.n_steps += 1

    def run(self, n_steps: int) -> None:
        """Advance by n_steps; the first call on a GPU captures the graph."""
        if not self.device.startswith("cuda"):
            for _ in range(n_steps):
                self.step()
            return
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # two steps compile and warm up outside the capture
                self.step()
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            n_steps -= 2
        for _ in range(n_steps):
            self.graph.replay()

    def conversations(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield (prompt, sampled tokens of its one or two turns) of all conversations that are complete."""
        n_steps = int(self.n_steps)
        tokens, turns = self.log_token[:n_steps].T.cpu().numpy(), self.log_turn[:n_steps].T.cpu().numpy()
        n_first, n_second = self.first.lengths.cpu().numpy(), self.second.lengths.cpu().numpy()
        for slot_tokens, slot_turns in zip(tokens, turns, strict=True):
            parts = np.split(np.arange(n_steps), np.flatnonzero(np.diff(slot_turns)) + 1)[:-1]  # the last is unfinished
            i = 0
            while i < len(parts):
                prompt, turn = slot_turns[parts[i][0]] >> 1, slot_turns[parts[i][0]] & 1
                sampled = slot_tokens[parts[i]][max(0, n_first[prompt] - 1) :].tolist()
                after = slot_turns[parts[i][-1] + 1]
                i += 1
                if turn == 1:  # its first turn lies before the log
                    continue
                if after != prompt * 2 + 1:
                    yield int(prompt), [sampled]
                elif i < len(parts):
                    yield int(prompt), [sampled, slot_tokens[parts[i]][max(0, n_second[prompt] - 1) :].tolist()]
                    i += 1
