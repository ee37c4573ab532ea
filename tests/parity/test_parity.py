"""Streamed equals resident, bit for bit: the reason why this project exists.

Logits of the streamed model are compared with those of mlx-lm's resident float32 model, element by element and without
a tolerance, at every step of greedy decoding; so are the tokens. On the shipped model and on random ones of both
families, from bf16 and f16 sources, with one and with mixed bit widths, with the pool at 100, 50 and 25 % of the
experts and at the smallest size that the guard allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkle import safetensors_header
from sparkle.manifest import fingerprint_of
from sparkle.store import Store
from sparkled.compute.families import Request
from sparkled.compute.prepare import prepare
from sparkled.front.template import ChatTemplate, clean
from sparkled.front.tokenizer import Tokenizer
from tests.mlx_sources import convert, mixed_bits
from tests.models_random import ALIGNED, N_TOKENS, write_qwen3_moe, write_qwen3_next
from tests.parity.streaming import Logits, resident, smallest_pool, streamed

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "sparkle-46m"
POOLS = ("100%", "50%", "25%", "smallest")
PROMPTS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "And what is the capital of Japan?",
    "What is 17 plus 25?",
    "What is 9 times 8?",
    "List three colours.",
    "List the days of the week.",
    "Write a Python function that adds two numbers.",
    "Write a Python function that tells whether a number is prime.",
    "Tell me a story about a cat.",
    "Tell me a story about a ship in a storm.",
    "How do I say 'water' in French?",
    "Why is the sky blue?",
    "What is the opposite of 'big'?",
    "Give me a recipe for soup.",
    "Write a short poem about rain.",
    "I feel sad today.",
    "What will the weather be tomorrow?",
    "Bonjour, comment ça va? 你好 😀",
)
Answers = list[tuple[Logits, list[int]]]


def _assert_equal(got: Answers, expected: Answers) -> None:
    for i, ((logits, ids), (want_logits, want_ids)) in enumerate(zip(got, expected, strict=True)):
        wrong = np.flatnonzero((logits != want_logits).any(axis=1))
        assert len(wrong) == 0, f"prompt {i}: logits differ first at step {wrong[0]}"
        assert ids == want_ids, f"prompt {i}: tokens differ"


def _pool(store: Path, name: str) -> str:
    return smallest_pool(Store.open(store)) if name == "smallest" else name


# --- the shipped model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("shipped") / "shipped.store"
    prepare(SHIPPED, store, Request(), lambda _: None)
    return store


@pytest.fixture(scope="module")
def shipped_prompts() -> list[list[int]]:
    template = ChatTemplate(Tokenizer.load(SHIPPED))
    return [template.encode(clean([{"role": "user", "content": text}]), None) for text in PROMPTS]


@pytest.fixture(scope="module")
def shipped_answers(shipped_prompts: list[list[int]]) -> Answers:
    model = resident(SHIPPED)
    return [model.greedy(prompt, 64) for prompt in shipped_prompts]


@pytest.mark.parametrize("pool", POOLS)
def test_shipped_model(
    pool: str, shipped_store: Path, shipped_prompts: list[list[int]], shipped_answers: Answers
) -> None:
    with streamed(shipped_store, _pool(shipped_store, pool)) as model:
        _assert_equal([model.greedy(prompt, 64) for prompt in shipped_prompts], shipped_answers)


# --- random models --------------------------------------------------------------------------------------------------


def _next_bf16(path: Path) -> tuple[Path, Path]:
    src = write_qwen3_next(path / "hf", "bf16", experts=16, top_k=4)
    return convert(src, path / "mlx", quantize=True, q_bits=8, q_group_size=64), src


def _next_f16_aligned(path: Path) -> tuple[Path, Path]:
    src = write_qwen3_next(path / "hf", "f16", **ALIGNED)
    return convert(src, path / "mlx", quantize=True, q_bits=8, q_group_size=64), src


def _moe_f16(path: Path) -> tuple[Path, Path]:
    src = write_qwen3_moe(path / "hf", "f16")
    return convert(src, path / "mlx", quantize=True, q_bits=8, q_group_size=64), src


def _moe_mixed(path: Path) -> tuple[Path, Path]:
    mlx = convert(
        write_qwen3_moe(path / "hf", "bf16", experts=16),
        path / "mlx",
        quantize=True,
        q_bits=4,
        quant_predicate=mixed_bits,
    )
    return mlx, mlx


def _next_4bit_mtp_8bit(path: Path) -> tuple[Path, Path]:
    src = write_qwen3_next(path / "hf", "bf16")
    return convert(src, path / "mlx", quantize=True, q_bits=4, q_group_size=64), src


RANDOM: dict[str, tuple[Callable[[Path], tuple[Path, Path]], Request]] = {
    "next-bf16": (_next_bf16, Request()),
    "next-f16-aligned": (_next_f16_aligned, Request()),
    "moe-f16": (_moe_f16, Request()),
    "moe-mixed-bits": (_moe_mixed, Request()),
    "next-4bit-mtp-8bit": (_next_4bit_mtp_8bit, Request(bits="4", mtp_bits="8")),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_models(name: str, tmp_path: Path) -> None:
    make, request = RANDOM[name]
    checkpoint, source = make(tmp_path)
    store = tmp_path / "store"
    prepare(source, store, request, lambda _: None)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(9, N_TOKENS, n).tolist() for n in (3, 17, 70, 130)]
    model = resident(checkpoint)
    expected = [model.greedy(prompt, 16) for prompt in prompts]
    for pool in POOLS:
        with streamed(store, _pool(store, pool)) as model:
            _assert_equal([model.greedy(prompt, 16) for prompt in prompts], expected)


def test_mtp_has_its_own_bits(tmp_path: Path) -> None:
    """The 4-bit store with an 8-bit drafter really has two layout classes."""
    _, source = _next_4bit_mtp_8bit(tmp_path)
    store = prepare(source, tmp_path / "store", Request(bits="4", mtp_bits="8"), lambda _: None)
    bits = {layer.kind: {q.bits for q in store.classes[layer.layout].quant.values()} for layer in store.layers}
    assert bits == {"main": {4}, "mtp": {8}}


# --- the checks bite ------------------------------------------------------------------------------------------------


def _swap_experts(store: Path, a: int, b: int) -> None:
    """Exchange two records of layer 0 *and* their checksums: every expert is sound, two stand in the wrong place."""
    opened = Store.open(store)
    layer = opened.layers[0]
    n = opened.classes[layer.layout].record_bytes
    with (store / layer.file).open("r+b") as f:
        records = {}
        for expert in (a, b):
            f.seek(opened.record_offset(0, expert))
            records[expert] = f.read(n)
        for expert, other in ((a, b), (b, a)):
            f.seek(opened.record_offset(0, expert))
            f.write(records[other])
    _edit_checksums(store, a, b)


def _edit_checksums(store: Path, a: int, b: int) -> None:
    path = store / "sparkle.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    sums = manifest["layers"][0]["xxh3"]
    sums[a], sums[b] = sums[b], sums[a]
    manifest["fingerprint"] = fingerprint_of(manifest)
    path.write_text(json.dumps(manifest))


def test_a_swapped_expert_is_noticed(tmp_path: Path) -> None:
    checkpoint, source = _next_bf16(tmp_path)
    store = tmp_path / "store"
    prepare(source, store, Request(), lambda _: None)
    assert safetensors_header.read(store / Store.open(store).layers[0].file)
    _swap_experts(store, 3, 4)
    prompt = np.random.default_rng(7).integers(9, N_TOKENS, 40).tolist()
    expected = [resident(checkpoint).greedy(prompt, 16)]
    with streamed(store, "50%") as model:
        got = [model.greedy(prompt, 16)]
    with pytest.raises(AssertionError, match="logits differ"):
        _assert_equal(got, expected)
