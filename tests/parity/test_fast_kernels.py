"""The fast CPU kernels: the resident model's tokens, and the same bits however prompts are cut and pools are filled.

Their sums are added in another order than MLX's, so logits differ in the last places; what they may differ by is
written here. Tokens are those of the prompts in test_parity.py, greedily decoded, next to the resident float32 model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkle import _mlx_ops
from sparkle.store import Store
from sparkled.compute.families import Request
from sparkled.compute.prepare import prepare
from sparkled.front.template import ChatTemplate, clean
from sparkled.front.tokenizer import Tokenizer
from tests.conftest import SHIPPED
from tests.models_random import ALIGNED, N_TOKENS, write_qwen3_moe, write_qwen3_next
from tests.parity.streaming import resident, smallest_pool, streamed
from tests.parity.test_parity import PROMPTS

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

FAST = [name for name in _mlx_ops.kernel_names() if name != "scalar"]
N_OUT = 64
LOGITS = 5e-4  # the furthest that a logit may be off, next to the largest; errors grow with depth and steps
PROMPT = np.random.default_rng(5).integers(9, N_TOKENS, 270).tolist()
N_NEXT = 3


@pytest.mark.parametrize("kernels", FAST)
def test_tokens_of_the_resident_model(kernels: str, shipped_store: Path) -> None:
    template = ChatTemplate(Tokenizer.load(SHIPPED))
    prompts = [template.encode(clean([{"role": "user", "content": text}]), None) for text in PROMPTS]
    whole = resident(SHIPPED)
    with streamed(shipped_store, "50%", kernels) as model:
        for text, prompt in zip(PROMPTS, prompts, strict=True):
            expected, ids = whole.greedy(prompt, N_OUT)
            got, got_ids = model.greedy(prompt, N_OUT)
            if got_ids != ids:
                at = next(i for i, (a, b) in enumerate(zip(got_ids, ids, strict=True)) if a != b)
                second, first = np.sort(expected[at])[-2:]
                pytest.fail(f"{text!r}: token {at} differs where the two best are {first - second:.3g} apart")
            assert np.abs(got - expected).max() <= LOGITS * np.abs(expected).max()


def _next(path: Path) -> Path:
    return write_qwen3_next(path, "bf16", experts=16, top_k=4, mtp=False)


def _moe(path: Path) -> Path:
    return write_qwen3_moe(path, "f16", layers=4, experts=12, **ALIGNED)


@pytest.mark.parametrize("write", [_next, _moe], ids=["qwen3_next", "qwen3_moe"])
@pytest.mark.parametrize("kernels", FAST)
def test_chunks_and_misses_change_nothing(kernels: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(write(tmp_path / "hf"), store, Request(), lambda _: None)
    with streamed(store, "100%", kernels) as model:
        model.prefill_rows = 1
        expected = model.greedy(PROMPT, N_NEXT)[0]
        for rows in (2, 3, 7, 64, 65, 130):
            model.prefill_rows = rows
            assert (model.greedy(PROMPT, N_NEXT)[0] == expected).all(), f"prompt in chunks of {rows}"
    with streamed(store, smallest_pool(Store.open(store)), kernels, SPARKLE_BACKGROUND_FILL="off") as model:
        for state in ("cold", "warm"):
            assert (model.greedy(PROMPT, N_NEXT)[0] == expected).all(), f"a {state} pool"
