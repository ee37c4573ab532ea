"""The model thread: loads the model, attaches to the pool, and gives each request its turn.

Owns everything of MLX, the PoolClient and all Generations: MLX streams belong to a thread, so nothing of it leaves
this one. The socket thread talks to it through `submit`, `cancel`, `stop` and the event queue. Requests are served
round robin, one turn each, at most `max_active` at a time; the rest wait in order of arrival.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from sparkle import budget, config
from sparkle.errors import Cancelled, ConfigError, PoolError, SparkleError, StorageError
from sparkle.pool_client import PoolClient
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkled.compute import cpu
from sparkled.compute.generation import Generation, Phase, Turn
from sparkled.compute.loader import LoadedModel, load
from sparkled.compute.sampler import Choice
from sparkled.compute.slots import PoolArrays
from sparkled.compute.streamed import ExpertSource

log = logging.getLogger(__name__)

IDLE_S = 0.5
RATE_WINDOW_S = 10.0
TTFT_WINDOW = 64
WARM_UP_TOKENS = 3  # a prefill of two rows and one decode step touch every code path of a request


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can serve."""

    loaded: LoadedModel


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or broke; the daemon ends with this error."""

    error: SparkleError


@dataclass(frozen=True, slots=True)
class TokenOut:
    generation: Generation
    index: int
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`error` is None for Finished."""

    generation: Generation
    error: SparkleError | None


Event = Ready | Failed | TokenOut | Ended


class Rate:
    """Items per second of busy time over a sliding window."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, int, float]] = deque()

    def add(self, n: int, seconds: float) -> None:
        self._turns.append((time.monotonic(), n, seconds))
        while self._turns and self._turns[0][0] < time.monotonic() - RATE_WINDOW_S:
            self._turns.popleft()

    def value(self) -> float:
        turns = [t for t in list(self._turns) if t[0] >= time.monotonic() - RATE_WINDOW_S]
        busy_s = sum(seconds for _, _, seconds in turns)
        return sum(n for _, n, _ in turns) / busy_s if busy_s > 0 else 0.0


class Engine:
    """See the module. `notify` is called, from the model thread, after an event was put into `events`."""

    def __init__(
        self, settings: config.Settings, store: Store, plan: budget.Budget, rundir: RunDir, notify: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._store = store
        self._plan = plan
        self._rundir = rundir
        self._notify = notify
        self._inbox: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._active: deque[Generation] = deque()
        self._client: PoolClient | None = None
        self._is_stopping = threading.Event()
        self._n_streams = 0
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.counts: Counter[str] = Counter()
        self.decode_rate, self.prefill_rate = Rate(), Rate()
        self.ttft_ms: deque[float] = deque(maxlen=TTFT_WINDOW)
        self.device = ""
        self.active_bytes = 0

    # --- from the socket thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def stop(self, deadline_s: float) -> bool:
        """End the thread: running steps are cut short. True if it ended in time."""
        self._is_stopping.set()
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    @property
    def stall_s(self) -> float:
        return self._client.stall_s if self._client else 0.0

    @property
    def unplaced_experts(self) -> int:
        return self._client.unplaced_experts if self._client else 0

    @property
    def n_active(self) -> int:
        return len(self._active)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + self._inbox.qsize()

    # --- model thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            loaded, source = self._open()
            self._warm_up(loaded, source)
            self._emit(Ready(loaded))
            while not self._is_stopping.is_set():
                self._receive(may_wait=not self._active)
                self._admit()
                if self._active:
                    self._turn(self._active[0], loaded, source)
        except Cancelled:
            log.info("stopped while starting")
        except SparkleError as e:
            self._emit(Failed(e))
        except Exception as e:  # the process edge of this thread: the daemon must learn of its end
            log.exception("engine_broke")
            self._emit(Failed(SparkleError(f"the model thread broke: {type(e).__name__}: {e}")))
        finally:
            if self._client is not None:
                self._client.close()

    def _open(self) -> tuple[LoadedModel, ExpertSource]:
        self.device = _choose_device(self._settings.device)
        mx.set_cache_limit(budget.WORKSPACE_BYTES)
        layers = [layer.index for layer in self._store.layers if layer.kind == "main"]
        self._client = PoolClient(self._rundir, self._store, layers, "compute")
        self._client.attach(config.START_DEADLINE_S, self._is_stopping.is_set)
        is_cpu = mx.default_device().type == mx.DeviceType.cpu
        arrays = PoolArrays(self._client, widen_to=mx.float32 if is_cpu else None)
        processor = cpu.processor(self._settings.kernels, self._settings.threads) if is_cpu else None
        source = ExpertSource(self._client, arrays, processor)
        began = time.monotonic()
        loaded = load(self._store, source)
        if processor is not None:
            self.device += f" ({processor.kernels}, {processor.n_threads} threads)"
        self.device += f", {str(loaded.dtype).rpartition('.')[2]}"
        log.info("loaded model_type=%s seconds=%.1f", self._store.config.get("model_type"), time.monotonic() - began)
        return loaded, source

    def _warm_up(self, loaded: LoadedModel, source: ExpertSource) -> None:
        """Run a small request, so that the first user does not wait for what happens only once."""
        prompt, choice = [min(loaded.stop_ids, default=0)] * WARM_UP_TOKENS, Choice(seed=0, temperature=0.0)
        warm = Generation(b"", "warm-up", prompt, choice, frozenset(), 1, _cancelled=self._is_stopping)
        try:
            while warm.phase is not Phase.DONE:
                warm.advance(loaded, source, self._plan.prefill_rows)
        except (StorageError, PoolError) as e:  # one bad record: requests that need it fail, others need not
            log.warning("warm_up_failed code=%s %s", e.code, e)
        self.active_bytes = mx.get_active_memory()

    def _receive(self, may_wait: bool) -> None:
        """Take what the socket thread has sent; wait for it if there is nothing else to do."""
        try:
            item = self._inbox.get(timeout=IDLE_S) if may_wait and not self._waiting else self._inbox.get_nowait()
            while True:
                if item is not None:
                    self._n_streams += 1
                    item.stream = self._n_streams
                    self._waiting.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _admit(self) -> None:
        for generation in [g for g in self._waiting if g.is_cancelled]:
            self._waiting.remove(generation)
            generation.reason = "cancelled"
            self._end(generation, None)
        while self._waiting and len(self._active) < self._settings.max_active:
            self._active.append(self._waiting.popleft())

    def _turn(self, generation: Generation, loaded: LoadedModel, source: ExpertSource) -> None:
        self._active.rotate(-1)
        error: SparkleError | None = None
        try:
            turn = generation.advance(loaded, source, self._plan.prefill_rows)
            self._account(generation, turn)
        except Cancelled:
            generation.reason = "cancelled"
        except SparkleError as e:
            error = e
        except Exception as e:  # MLX's faults end this request, not the daemon
            log.exception("step_failed request=%s", generation.request_id)
            error = SparkleError(f"the step failed: {type(e).__name__}: {e}")
        if generation.phase is Phase.DONE or generation.reason or error is not None:
            self._active.remove(generation)
            self._end(generation, error)

    def _account(self, generation: Generation, turn: Turn) -> None:
        self.counts["steps"] += turn.seconds > 0
        self.counts["prompt_tokens"] += turn.n_prompt
        if generation.phase is Phase.PREFILL:
            self.prefill_rate.add(turn.n_prompt, turn.seconds)
        elif turn.token is not None and not turn.n_prompt:
            self.decode_rate.add(1, turn.seconds)
        if turn.n_prompt and generation.first_token_at:
            self.ttft_ms.append((generation.first_token_at - generation.arrived) * 1e3)
            self.active_bytes = mx.get_active_memory()
        if turn.token is not None:
            self.counts["output_tokens"] += 1
            self._emit(TokenOut(generation, len(generation.output) - 1, turn.token))

    def _end(self, generation: Generation, error: SparkleError | None) -> None:
        generation.end()
        self.counts["requests_failed" if error else "requests_finished"] += 1
        self._emit(Ended(generation, error))

    def _emit(self, event: Event) -> None:
        self.events.put(event)
        self._notify()


def _choose_device(wanted: str) -> str:
    """Set MLX's default device; return its name for the status."""
    has_gpu = mx.is_available(mx.gpu)
    if wanted == "gpu" and not has_gpu:
        raise ConfigError("device = gpu, but this mlx has no GPU backend; use auto")
    if not has_gpu or wanted == "cpu":
        mx.set_default_device(mx.cpu)
        return "CPU"
    mx.set_default_device(mx.gpu)
    return "Metal GPU" if mx.metal.is_available() else "CUDA GPU"
