"""The life of one token: the walk of daemons/README.md, made with the real daemons and the shipped model.

Each stop is looked at from outside, through the same door that the next process uses. What comes out at the end must be
what mlx-lm's resident model says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

import sparkle
from sparkle._native import READY, Pool
from sparkle.messages import Accepted, Finished, Generate, Sampling, Tokens
from sparkle.pool_client import PoolClient
from sparkle.regions import control_name
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkle.trace import Origin
from sparkled.front.template import ChatTemplate, clean
from sparkled.front.tokenizer import Tokenizer
from tests.conftest import SHIPPED
from tests.parity.streaming import resident
from tests.system import System, pipeline

pytestmark = pytest.mark.parity

QUESTION = "What is the capital of France?"
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)


@pytest.fixture(scope="module")
def system(shipped_store: Path) -> Iterator[System]:
    with pipeline(shipped_store, pool="25%") as running:
        yield running


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Stop 1, the front daemon: from here on nobody sees text."""
    return ChatTemplate(Tokenizer.load(SHIPPED)).encode(clean([{"role": "user", "content": QUESTION}]), None)


def test_1_text_becomes_ids(prompt: list[int]) -> None:
    tokenizer = Tokenizer.load(SHIPPED)
    ids = tokenizer.added_tokens
    assert prompt[0] == ids["<|im_start|>"]
    assert prompt.count(ids["<|im_start|>"]) == 2, "one user turn, and the answer's beginning"
    assert prompt.count(ids["<|im_end|>"]) == 1


def test_2_ids_become_tokens(system: System, prompt: list[int]) -> None:
    """The compute daemon: accepted with a seed, tokens one by one with their index, exactly one end."""
    peer = system.compute.peer()
    peer.send(Generate("life", prompt, max_tokens=20, sampling=GREEDY))
    finished = peer.wait_for(Finished)
    assert isinstance(peer.received[0], Accepted)
    tokens = [m for m in peer.received if isinstance(m, Tokens)]
    assert [m.index for m in tokens] == list(range(len(tokens)))
    assert finished.usage.prompt_tokens == len(prompt)
    assert finished.usage.output_tokens == len(tokens)

    _, expected = resident(SHIPPED).greedy(prompt, len(tokens) + 1)
    assert [t for m in tokens for t in m.ids] == expected[:-1], "streamed tokens are the resident model's"
    assert finished.reason == "stop", "the next token is <|im_end|>, which ends the answer and is no part of it"
    assert expected[-1] == Tokenizer.load(SHIPPED).added_tokens["<|im_end|>"]


def test_3_a_missing_expert_is_fetched_into_a_slot(system: System, shipped_store: Path) -> None:
    """The prefetch daemon: the whole set is granted; the slot holds the record that the store promises."""
    store = Store.open(shipped_store)
    client = PoolClient(RunDir(system.run_dir), store, [0], "test")
    try:
        client.attach(10.0)
        before = system.prefetch.status().metrics
        experts = list(range(0, 64, 4))
        slots = client.acquire(0, experts, Origin(1))
        for expert, slot in zip(experts, slots, strict=True):
            region = next(r for r in client.regions if 0 <= slot - r.spec.first_slot < r.spec.n_slots)
            digest = xxhash.xxh3_64()
            for piece in region.pieces:
                digest.update(piece[slot - region.spec.first_slot].tobytes())
            assert digest.intdigest() == store.layers[0].checksums[expert]
        pool = Pool.attach(control_name(RunDir(system.run_dir).shm_prefix))
        assert all(pool.state(s) == READY and pool.mask(s) for s in slots), "held: no evictor may touch them"
        assert client.acquire(0, experts, Origin(2)) == slots, "hits need no message"
        client.release(slots)
        client.release(slots)
        assert not any(pool.mask(s) for s in slots)
        after = system.prefetch.status().metrics
        asked = ("hits_resident", "hits_in_flight", "hits_late", "misses")
        assert sum(after[name] - before[name] for name in asked) >= len(experts)
    finally:
        client.close()


def test_4_tokens_become_text(system: System) -> None:
    """The front daemon and the client: pieces that concatenate to the answer."""
    with sparkle.Client(system.run_dir) as client:
        stream = client.stream(QUESTION, temperature=0.0, repetition_penalty=1.0)
        pieces = list(stream)
    assert "".join(pieces) == stream.reply.text == "The capital of France is Paris."
    assert len(pieces) > 1, "it streams"


def test_5_counters_moved(system: System) -> None:
    metrics = system.prefetch.status().metrics
    assert metrics["misses"] > 0 and metrics["hits_resident"] > 0
    assert metrics["bytes_read"] > 0 and metrics["evictions"] > 0, "a pool of 25 % cannot keep everything"
    assert metrics["unplaced_experts"] == 0
    assert metrics["slots_held"] == 0, "between steps nothing is held"
    assert system.compute.status().metrics["unplaced_experts"] == 0
