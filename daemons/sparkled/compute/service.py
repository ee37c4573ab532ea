"""The compute daemon's socket side: requests in, tokens out; the model runs in the engine's thread.

Checks requests, keeps who asked for what, and relays the engine's events. Everything here is the loop's thread.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from typing import Any

from sparkle import budget, config
from sparkle.errors import BadRequest, ContextTooLong, Overloaded, PeerError, SparkleError
from sparkle.lifecycle import Daemon, State
from sparkle.messages import Accepted, Cancel, Finished, Generate, Message, Progress, Tokens
from sparkle.store import Store
from sparkle.wire import error_of
from sparkled.compute.engine import Ended, Engine, Event, Failed, Ready, TokenOut
from sparkled.compute.generation import Generation
from sparkled.compute.loader import LoadedModel
from sparkled.compute.sampler import resolve

log = logging.getLogger(__name__)

SEED_BITS = 53  # survives every client's JSON numbers
ENGINE_STOP_S = 2.5  # of the shutdown's SHUTDOWN_S


class ComputeDaemon(Daemon):
    """See the package's docstring."""

    role = "compute"

    def __init__(self, settings: config.Settings) -> None:
        # Before locks and sockets are taken: a start that cannot succeed leaves nothing behind.
        self._store = Store.open(settings.resolved_model())
        self._plan = budget.derive(settings, self._store)
        super().__init__(settings)
        self._engine = Engine(settings, self._store, self._plan, self.rundir, self.wake)
        self._loaded: LoadedModel | None = None
        self._running: dict[tuple[bytes, str], Generation] = {}

    def start(self) -> None:
        self.become(State.STARTING, "waiting for the prefetch daemon, then loading the model")
        self._engine.start()
        self.every(config.PROGRESS_S / 2, self._report_progress)

    def stop(self) -> None:
        for generation in self._running.values():
            generation.cancel()
        if not self._engine.stop(ENGINE_STOP_S):
            log.warning("engine_still_busy; ending anyway")
        self.on_wake()  # what the engine said last
        for generation in list(self._running.values()):
            generation.reason = "cancelled"
            self._end(generation, self.error)

    def model_fingerprint(self) -> str:
        return self._store.fingerprint

    # --- requests --------------------------------------------------------------------------------------------------

    def on_generate(self, peer: bytes, message: Generate) -> None:
        if self._loaded is None:
            raise PeerError(f"the compute daemon is {self.state.value}: {self.detail}")
        key = (peer, message.request_id)
        if key in self._running:
            raise BadRequest(f"request_id {message.request_id!r} is in use")
        if len(self._running) >= self.settings.max_active + self.settings.max_queue:
            raise Overloaded(f"{len(self._running)} requests are running or waiting already; try again later")
        generation = self._generation(peer, message, self._loaded)
        self._running[key] = generation
        self._engine.counts["requests"] += 1
        position = max(0, len(self._running) - self.settings.max_active)
        self.reply(peer, Accepted(message.request_id, generation.choice.seed, position))
        self._engine.submit(generation)

    def _generation(self, peer: bytes, message: Generate, loaded: LoadedModel) -> Generation:
        for name in ("token_ids", "resume_tokens", "stop_ids"):
            if any(not 0 <= t < loaded.vocab_size for t in getattr(message, name)):
                raise BadRequest(f"Generate.{name}: ids must be from 0 to {loaded.vocab_size - 1}")
        seed = secrets.randbits(SEED_BITS) if message.sampling.seed is None else message.sampling.seed
        if seed < 0:
            raise BadRequest(f"sampling.seed = {seed}: must not be negative")
        return Generation(
            peer=peer,
            request_id=message.request_id,
            prompt=message.token_ids,
            choice=resolve(message.sampling, loaded.generation_config, seed, loaded.vocab_size),
            stop_ids=loaded.stop_ids | frozenset(message.stop_ids),
            max_output=self._max_output(message),
            output=list(message.resume_tokens),
        )

    def _max_output(self, message: Generate) -> int:
        n_prompt, limit = len(message.token_ids), self._plan.context_tokens
        if n_prompt == 0:
            raise BadRequest("Generate.token_ids: an answer needs at least one prompt token")
        if message.max_tokens is not None and message.max_tokens < 1:
            raise BadRequest(f"max_tokens = {message.max_tokens}: must be at least 1")
        if n_prompt >= limit or n_prompt + (message.max_tokens or 0) > limit:
            asked = f" and max_tokens {message.max_tokens}" if message.max_tokens else ""
            raise ContextTooLong(f"a prompt of {n_prompt} tokens{asked} exceeds the context of {limit} tokens")
        return message.max_tokens or limit - n_prompt

    def on_cancel(self, peer: bytes, message: Cancel) -> None:
        generation = self._running.get((peer, message.request_id))
        if generation is not None:  # else it has ended already: its Finished is on the way
            generation.cancel()

    def on_peer_lost(self, peer: bytes) -> None:
        for (owner, _), generation in self._running.items():
            if owner == peer:
                generation.cancel()

    # --- events ----------------------------------------------------------------------------------------------------

    def on_wake(self) -> None:
        while True:
            try:
                self._on_event(self._engine.events.get_nowait())
            except queue.Empty:
                return

    def _on_event(self, event: Event) -> None:
        match event:
            case Ready(loaded):
                self._loaded = loaded
                self.become(State.READY, f"{self._store.name} on {self._engine.device}")
            case Failed(error):
                self.fail(error)
            case TokenOut(generation, index, token):
                self._send(generation, Tokens(generation.request_id, index, [token]))
            case Ended(generation, error):
                self._end(generation, error)

    def _end(self, generation: Generation, error: SparkleError | None) -> None:
        self._running.pop((generation.peer, generation.request_id), None)
        if error is not None:
            log.warning("request_failed request=%s code=%s %s", generation.request_id, error.code, error)
            self._send(generation, error_of(error, generation.request_id))
        else:
            self._send(generation, Finished(generation.request_id, generation.reason, generation.usage()))

    def _report_progress(self) -> None:
        """Say something about every request once a second: in prefill, in the queue, or waiting for the disk."""
        now = time.monotonic()
        for rank, generation in enumerate(list(self._running.values()), start=1):  # in order of arrival
            if now - generation.last_sent_at >= config.PROGRESS_S:
                position = max(0, rank - self.settings.max_active)
                total = len(generation.context)
                self._send(generation, Progress(generation.request_id, generation.done, total, position))

    def _send(self, generation: Generation, message: Message) -> None:
        generation.last_sent_at = time.monotonic()
        self.reply(generation.peer, message)

    # --- telemetry -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        engine = self._engine
        counters = ("requests", "requests_finished", "requests_failed", "prompt_tokens", "output_tokens", "steps")
        ttft = sorted(engine.ttft_ms)
        return {
            "device": engine.device,
            "model_type": str(self._store.config.get("model_type")),
            "resident_bytes": self._store.resident_bytes,
            "active_bytes": engine.active_bytes,
            "context_tokens": self._plan.context_tokens,
            "prefill_rows": self._plan.prefill_rows,
            **{name: engine.counts[name] for name in counters},
            "n_active": engine.n_active,
            "n_queued": engine.n_waiting,
            "decode_tps": engine.decode_rate.value(),
            "prefill_tps": engine.prefill_rate.value(),
            "ttft_p50_ms": ttft[len(ttft) // 2] if ttft else 0.0,
            "stall_s": engine.stall_s,
            "unplaced_experts": engine.unplaced_experts,
        }
