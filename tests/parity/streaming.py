"""A streamed model next to the resident one: the real prefetch daemon, the real pool, the model in this process.

    with streamed(store, pool="25%") as model:
        logits, ids = model.greedy(prompt, n_tokens)

Both sides run the same loop over mlx-lm's caches, so what differs is where experts come from, and nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from sparkle import budget, config
from sparkle.errors import ConfigError
from sparkle.pool_client import PoolClient
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkled.compute import cpu
from sparkled.compute.loader import load
from sparkled.compute.slots import PoolArrays
from sparkled.compute.streamed import ExpertSource
from tests.daemons import DaemonProcess, spawn

Logits = NDArray[np.float32]
ATTACH_S = 30.0


class Model:
    """A model with one way to run it. `source` is None for the resident one, as are `client` and `prefetch`."""

    def __init__(self, model: Any, source: ExpertSource | None, prefill_rows: int) -> None:
        self.model = model
        self.source = source
        self.prefill_rows = prefill_rows
        self.client: PoolClient | None = None
        self.prefetch: DaemonProcess | None = None

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> tuple[Logits, list[int]]:
        """Return the logits (n_tokens, vocab) of each step, and the tokens that greedy decoding picks."""
        cache = make_prompt_cache(self.model)
        for start in range(0, len(prompt) - 1, self.prefill_rows):
            self._run(prompt[start : min(start + self.prefill_rows, len(prompt) - 1)], cache)
        rows, ids = [], [prompt[-1]]
        for _ in range(n_tokens):
            rows.append(self._run(ids[-1:], cache))
            ids.append(int(rows[-1].argmax()))
        return np.stack(rows), ids[1:]

    def _run(self, ids: Sequence[int], cache: list[Any]) -> Logits:
        if self.source is not None:
            self.source.begin(lambda: False, 0, ids)
        last = self.model(mx.array([list(ids)]), cache=cache)[0, -1]
        mx.eval(last, [c.state for c in cache])
        if self.source is not None:
            self.source.finish()
        return np.array(last)


def resident(checkpoint: Path, prefill_rows: int = 64) -> Model:
    """mlx-lm's own model, all experts in memory, float32."""
    model, _ = load_model(checkpoint)
    model.set_dtype(mx.float32)
    return Model(model, None, prefill_rows)


@contextmanager
def streamed(store_path: Path, pool: str, kernels: str = "scalar", **env: str) -> Iterator[Model]:
    """The same model over a pool of `pool` (a share or a size). Checks at the end that no expert was unplaced."""
    store = Store.open(store_path)
    environ = {"SPARKLE_MODEL": str(store_path), "SPARKLE_POOL": pool, "SPARKLE_THREADS": "2", **env}
    settings = config.load(environ=environ)
    plan = budget.derive(settings, store)
    with (
        tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder,
        spawn("prefetch", Path(folder), environ) as prefetch,
    ):
        prefetch.wait_for_state("ready")
        main_layers = [layer.index for layer in store.layers if layer.kind == "main"]
        client = PoolClient(RunDir(Path(folder)), store, main_layers, "test")
        try:
            client.attach(ATTACH_S)
            source = ExpertSource(client, PoolArrays(client, mx.float32), cpu.processor(kernels, settings.threads))
            loaded = load(store, source)
            model = Model(loaded.model, source, plan.prefill_rows)
            model.client, model.prefetch = client, prefetch
            yield model
            metrics = prefetch.status().metrics
            assert metrics["unplaced_experts"] == 0 and client.unplaced_experts == 0
            assert client.native.n_held == 0, "a slot is still held after the last step"
        finally:
            client.close()


def smallest_pool(store: Store) -> str:
    """The smallest pool that the guard allows: one row's experts and the background reads, in each class."""
    n_bytes = 0
    experts = sum(x.n_experts * store.classes[x.layout].record_bytes for x in store.layers if x.kind == "main")
    for share in range(1, 10_001):
        n_bytes = experts * share // 10_000
        try:
            budget.derive(config.load(environ={"SPARKLE_POOL": str(n_bytes)}), store)
        except ConfigError as e:
            if "cannot hold one step" not in str(e):
                raise
        else:
            return str(n_bytes)
    raise AssertionError("no pool is large enough")
