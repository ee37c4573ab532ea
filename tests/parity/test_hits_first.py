"""What is there is computed while the rest is read: at any timing, the same bits.

A second client fights for the same slots, and every wait is drawn out at random, so that the split into hits and misses
is another in each run, at each layer. The logits must not know.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkle.pool_client import Fetch, PoolClient
from sparkle.store import Store
from tests.conftest import SHIPPED
from tests.ipc.pool_user import PoolUser
from tests.parity.streaming import Logits, resident, streamed

pytestmark = pytest.mark.parity

PROMPT = [5, 9, 2, 77, 31, 8, 40]
N_TOKENS = 24
MAX_DELAY_S = 0.004


@pytest.fixture(scope="module")
def expected() -> Logits:
    return resident(SHIPPED, prefill_rows=4).greedy(PROMPT, N_TOKENS)[0]


@contextmanager
def rival(run_dir: Path, store: Store, seed: int) -> Iterator[None]:
    """Another client that asks for random experts until the block ends, and checks every byte that it gets."""
    is_over, faults = threading.Event(), list[BaseException]()

    def work() -> None:
        rng, layers = random.Random(seed), [x for x in store.layers if x.kind == "main"]
        try:
            with PoolUser(run_dir, store) as user:
                while not is_over.is_set():
                    layer = rng.choice(layers)
                    user.use(layer.index, rng.sample(range(layer.n_experts), layer.top_k))
        except BaseException as e:
            faults.append(e)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not faults


def slow_down(client: PoolClient, seed: int) -> list[int]:
    """Draw out every wait; returns a growing list of how many experts each wait was for."""
    rng, waits = random.Random(seed), list[int]()
    wait, pause = client.wait, threading.Event()

    def slow_wait(fetch: Fetch, should_abort: Callable[[], bool]) -> list[int]:
        assert client.native.n_held == 0
        waits.append(len(fetch.experts))
        pause.wait(rng.uniform(0, MAX_DELAY_S))
        return wait(fetch, should_abort)

    client.wait = slow_wait  # type: ignore[method-assign,assignment]
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_timing_does_not_show(shipped_store: Path, expected: Logits, seed: int) -> None:
    with streamed(shipped_store, "25%") as model:
        assert model.client is not None and model.prefetch is not None
        model.prefill_rows = 4
        waits, store = slow_down(model.client, seed), Store.open(shipped_store)
        with rival(model.prefetch.run_dir.path, store, seed):
            logits, _ = model.greedy(PROMPT, N_TOKENS)
    assert (logits == expected).all()
    n_split = sum(n < store.layers[0].top_k for n in waits)  # of a row's experts some were there, some were not
    assert n_split > N_TOKENS / 2, "hardly any step had both hits and misses: the test shows nothing"
