"""One request on its way: prompt, caches, output so far; advanced one turn at a time.

    QUEUED ──► PREFILL ──► DECODE ──► DONE
       └──────────┴───────────┴─────►

Owns the request's KV caches and recurrent state. A turn is one prefill chunk or one decode step. Used by the model
thread, except for `cancel`, `reason` and the progress counts, which the socket thread may look at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from sparkle.messages import Usage
from sparkled.compute.loader import LoadedModel
from sparkled.compute.sampler import Choice, choose
from sparkled.compute.streamed import ExpertSource


class Phase(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True)
class Turn:
    """What one turn did. `token` is a new output token, if any."""

    token: int | None = None
    n_prompt: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)  # two requests are never the same
class Generation:
    """`peer` and `request_id` say where results go; `max_output` is decided at admission (max_tokens or context)."""

    peer: bytes
    request_id: str
    prompt: list[int]
    choice: Choice
    stop_ids: frozenset[int]
    max_output: int
    output: list[int] = field(default_factory=list)  # starts as the tokens a resumed client already has
    phase: Phase = Phase.QUEUED
    reason: str = ""
    done: int = 0  # prompt tokens prefilled
    arrived: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    last_sent_at: float = field(default_factory=time.monotonic)
    n_resumed: int = 0
    stream: int = 0
    _cache: list[Any] = field(default_factory=list)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.n_resumed = len(self.output)

    @property
    def context(self) -> list[int]:
        """What has to be in the caches before the next token can be chosen, the last token excepted."""
        return self.prompt + self.output[: self.n_resumed]

    def cancel(self) -> None:
        """From any thread: end at the next chance, even in the middle of a step."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def advance(self, loaded: LoadedModel, source: ExpertSource, prefill_rows: int) -> Turn:
        """Do one turn. Raises Cancelled from within a step; the request is over then, and its caches are dropped."""
        began = time.monotonic()
        if self.is_cancelled:
            self._finish("cancelled")
            return Turn()
        if len(self.output) >= self.max_output:  # a resumed request may have nothing left to do
            self._finish("length")
            return Turn()
        if self.phase is Phase.QUEUED:
            self._cache = make_prompt_cache(loaded.model)
            self.phase = Phase.PREFILL
        turn = self._prefill(loaded, source, prefill_rows) if self._left() else self._decode(loaded, source)
        turn.seconds = time.monotonic() - began
        return turn

    def _left(self) -> int:
        """Context tokens still to prefill: all but the last, whose step gives the first logits."""
        return max(0, len(self.context) - 1 - self.done)

    def _prefill(self, loaded: LoadedModel, source: ExpertSource, rows: int) -> Turn:
        chunk = self.context[self.done : self.done + min(rows, self._left())]
        self._forward(loaded, source, chunk, wants_logits=False)
        self.done += len(chunk)
        return Turn(n_prompt=len(chunk))

    def _decode(self, loaded: LoadedModel, source: ExpertSource) -> Turn:
        is_first = self.phase is Phase.PREFILL
        last = self.output[-1] if self.output else self.prompt[-1]
        logits = self._forward(loaded, source, [last], wants_logits=True)
        self.phase = Phase.DECODE
        self.done = len(self.context)
        token = choose(logits, self.choice, self.prompt, self.output)
        self.last_token_at = time.monotonic()
        if is_first:
            self.first_token_at = self.last_token_at
        if token in self.stop_ids:
            self._finish("stop")
            return Turn(n_prompt=int(is_first))
        self.output.append(token)
        if len(self.output) >= self.max_output:
            self._finish("length")
        return Turn(token=token, n_prompt=int(is_first))

    def _forward(self, loaded: LoadedModel, source: ExpertSource, ids: Sequence[int], wants_logits: bool) -> Any:
        """Run the main model over `ids`; logits (vocab,) float32 of the last one, if wanted.

        Everything built is evaluated before the slots go back. After an exception the caches are of no use: the request
        ends.
        """
        source.begin(lambda: self.is_cancelled, self.stream, ids)
        try:
            logits = loaded.model(mx.array([ids]), cache=self._cache)
            if wants_logits:
                last = logits[0, -1].astype(mx.float32)
                mx.eval(last, [c.state for c in self._cache])
            else:
                mx.eval([c.state for c in self._cache])
            source.finish()
        except BaseException:
            self._cache = []
            source.abandon()
            raise
        return np.array(last) if wants_logits else None

    def _finish(self, reason: str) -> None:
        self.reason = reason
        self.end()

    def end(self) -> None:
        """Drop the caches; after an error, or when done."""
        self.phase = Phase.DONE
        self._cache = []

    def usage(self) -> Usage:
        """Counts of what was returned; rates of this run (after a resume: since the resume)."""
        n_new = len(self.output) - self.n_resumed
        decode_s = self.last_token_at - self.first_token_at
        return Usage(
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.output),
            ttft_ms=max(0.0, self.first_token_at - self.arrived) * 1e3,
            decode_tps=(n_new - 1) / decode_s if n_new > 1 and decode_s > 0 else 0.0,
        )
