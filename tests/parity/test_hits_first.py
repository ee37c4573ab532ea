"""What is there is computed while the rest is read: at any timing, the same bits.

A second client fights for the same slots, and every wait is drawn out at random, so that the split into hits and misses
is another in each run, at each layer. The logits must not know.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkle.pool_client import Fetch, PoolClient
from sparkle.store import Store
from sparkle.trace import Origin
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


def slow_down(client: PoolClient, seed: int) -> list[tuple[int, int]]:
    """Draw out every wait; returns a growing list of (experts found, experts asked for) of each look-up with both."""
    rng, splits, found = random.Random(seed), list[tuple[int, int]](), [0]
    look_up, wait = client.look_up, client.wait
    pause = threading.Event()

    def counting_look_up(
        layer: int, experts: Sequence[int], origin: Origin, should_abort: Callable[[], bool]
    ) -> list[int]:
        slots = look_up(layer, experts, origin, should_abort)
        found[0] = sum(slot >= 0 for slot in slots)
        return slots

    def slow_wait(fetch: Fetch, should_abort: Callable[[], bool]) -> list[int]:
        if found[0] and client.native.n_held == 0:
            splits.append((found[0], len(fetch.experts)))
        pause.wait(rng.uniform(0, MAX_DELAY_S))
        return wait(fetch, should_abort)

    client.look_up = counting_look_up  # type: ignore[method-assign,assignment]
    client.wait = slow_wait  # type: ignore[method-assign,assignment]
    return splits


@pytest.mark.parametrize("seed", range(3))
def test_timing_does_not_show(shipped_store: Path, expected: Logits, seed: int) -> None:
    with streamed(shipped_store, "25%") as model:
        assert model.client is not None and model.prefetch is not None
        model.prefill_rows = 4
        splits = slow_down(model.client, seed)
        with rival(model.prefetch.run_dir.path, Store.open(shipped_store), seed):
            logits, _ = model.greedy(PROMPT, N_TOKENS)
    assert (logits == expected).all()
    assert len(splits) > N_TOKENS / 2, "hardly any step had both hits and misses: the test shows nothing"
