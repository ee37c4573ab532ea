"""What may not change a single bit: how a prompt is cut into chunks, what the pool holds, and what a slot held before.

On random models of both families, streamed in this process and resident, against the resident model that reads its
prompt one token at a time. Float32 on the CPU; every comparison is of whole logits, without a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sparkle._native import RETIRED, Pool
from sparkle.pool_client import PoolClient
from sparkle.regions import control_name
from sparkle.store import Store
from sparkled.compute.families import Request
from sparkled.compute.prepare import prepare
from tests.mlx_sources import convert
from tests.models_random import ALIGNED, N_TOKENS, write_qwen3_moe, write_qwen3_next
from tests.parity.streaming import Logits, Model, resident, smallest_pool, streamed

pytestmark = pytest.mark.parity

# A switch sorts its rows from 64 (row, expert) pairs on, and the KV caches grow at 256 tokens.
CHUNKS = (1, 2, 3, 7, 64, 65, 130)
PROMPT = np.random.default_rng(5).integers(9, N_TOKENS, 270).tolist()
SHORT = PROMPT[:50]  # where every step waits for the disk
N_NEXT = 3
QUICK_START = {"SPARKLE_READ_DEPTH": "4", "SPARKLE_BACKGROUND_FILL": "off"}
NAN_BYTE = 0xFF  # bfloat16, float16 and float32 of these bytes are NaN

Made = tuple[Path, Path]  # checkpoint as mlx-lm reads it, store


def _next(path: Path) -> Path:
    return write_qwen3_next(path, "bf16", experts=16, top_k=4, mtp=False)


def _moe(path: Path) -> Path:
    return write_qwen3_moe(path, "f16", layers=4, experts=12, **ALIGNED)


@pytest.fixture(scope="module", params=[_next, _moe], ids=["qwen3_next", "qwen3_moe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    write: Callable[[Path], Path] = request.param
    path = tmp_path_factory.mktemp("contract")
    source = write(path / "hf")
    prepare(source, path / "store", Request(), lambda _: None)
    return convert(source, path / "mlx", quantize=True, q_bits=8, q_group_size=64), path / "store"


@pytest.fixture(scope="module")
def expected(made: Made) -> Logits:
    """Next logits of the resident model, prompt read token by token."""
    return resident(made[0], prefill_rows=1).greedy(PROMPT, N_NEXT)[0]


@pytest.fixture(scope="module")
def expected_of_short(made: Made) -> Logits:
    return resident(made[0], prefill_rows=1).greedy(SHORT, N_NEXT)[0]


def _assert_equal(model: Model, prompt: list[int], expected: Logits) -> None:
    assert (model.greedy(prompt, N_NEXT)[0] == expected).all()


@pytest.mark.parametrize("rows", CHUNKS[1:])
def test_resident_in_chunks(made: Made, expected: Logits, rows: int) -> None:
    _assert_equal(resident(made[0], rows), PROMPT, expected)


def test_streamed_in_chunks(made: Made, expected: Logits) -> None:
    with streamed(made[1], "100%", **QUICK_START) as model:
        for rows in CHUNKS:
            model.prefill_rows = rows
            _assert_equal(model, PROMPT, expected)


@pytest.mark.parametrize("pool", ["100%", "50%", "smallest"])
def test_a_warm_pool_equals_a_cold_one(made: Made, expected_of_short: Logits, pool: str) -> None:
    """Nothing of the split into hits and misses shows in a result."""
    size = smallest_pool(Store.open(made[1])) if pool == "smallest" else pool
    with streamed(made[1], size, **QUICK_START) as model:
        _assert_equal(model, SHORT, expected_of_short)
        n_cold = _misses(model)
        _assert_equal(model, SHORT, expected_of_short)
        n_warm = _misses(model) - n_cold
    assert n_cold > 0
    assert n_warm == 0 if pool == "100%" else n_warm > 0


def _misses(model: Model) -> int:
    assert model.prefetch is not None
    return int(model.prefetch.status().metrics["misses"])


def test_what_a_slot_held_before_does_not_matter(made: Made, expected_of_short: Logits) -> None:
    """Every slot is full of NaN from the moment it is released until it is read into again.

    That touches no byte which anybody may use: with the smallest pool the next layers evict a layer's experts before
    they can be asked for again, so no slot is found resident (counted below), and the prefetch daemon, whose only
    client this is, reads into slots only while a fetch is under way. A step that computed with a slot after its
    release, or with a record that was not read whole, would show. Only LRU evicts in that order for sure: a policy that
    learns finds some experts again, in slots that were poisoned.
    """
    with streamed(made[1], smallest_pool(Store.open(made[1])), SPARKLE_POLICY="lru", **QUICK_START) as model:
        assert model.client is not None and model.prefetch is not None
        assert model.prefill_rows == 1
        pool = Pool.attach(control_name(model.prefetch.run_dir.shm_prefix))
        slots = [slot for slot in range(pool.n_slots) if pool.state(slot) != RETIRED]
        _poison(model.client, pool, slots)
        _poison_what_is_released(model.client, pool)
        _assert_equal(model, SHORT, expected_of_short)
        metrics = model.prefetch.status().metrics
        assert metrics["hits_resident"] == 0
        assert metrics["evictions"] > 50 * len(slots)


def _poison_what_is_released(client: PoolClient, pool: Pool) -> None:
    release = client.release

    def release_and_poison(slots: Sequence[int]) -> None:
        release(slots)
        _poison(client, pool, [slot for slot in slots if slot >= 0])

    client.release = release_and_poison  # type: ignore[method-assign]


def _poison(client: PoolClient, pool: Pool, slots: Sequence[int]) -> None:
    for slot in slots:
        assert pool.mask(slot) == 0, "nobody holds it"
        region = next(r for r in client.regions if 0 <= slot - r.spec.first_slot < r.spec.n_slots)
        for piece in region.pieces:
            piece[slot - region.spec.first_slot] = NAN_BYTE
