"""The compute daemon as a process, with a real prefetch daemon: what a request gets, and which ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkle import telemetry, wire
from sparkle.messages import Accepted, Chat, Error, Finished, Generate, Sampling
from tests.daemons import DaemonProcess, Peer
from tests.ipc.computes import (
    CONTEXT,
    EOS_IDS,
    GREEDY,
    LIMITS,
    PENALISED,
    PROMPT,
    VOCAB,
    ask,
    finish,
    pair,
    refusal,
    request,
    sampled,
    tokens_of,
)

pytestmark = pytest.mark.ipc


@pytest.fixture(scope="module")
def daemon(tiny_store: Path) -> Iterator[DaemonProcess]:
    """One compute daemon for all tests here; a pool of half the experts keeps fetching."""
    with pair(tiny_store, LIMITS) as daemons:
        yield daemons.compute


@pytest.fixture
def compute(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The same; a test must leave no request behind."""
    yield daemon
    daemon.wait_for_state("ready", n_active=0, n_queued=0)


@pytest.fixture
def peer(compute: DaemonProcess) -> Iterator[Peer]:
    peer = compute.peer()
    yield peer
    peer.close()


# --- one request -----------------------------------------------------------------------------------------------------


def test_an_answer(peer: Peer) -> None:
    """Accepted first, tokens with consecutive indices, one end: `finish` checks it, here and in every test below."""
    answer = ask(peer, request(sampling=sampled(11)))
    assert answer.accepted == Accepted(answer.accepted.request_id, seed=11, queue_position=0)
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, len(answer.tokens)) == ("length", 12)
    usage = answer.end.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), 12)
    assert usage.ttft_ms > 0 and usage.decode_tps > 0


def test_metrics_are_declared_and_count(compute: DaemonProcess, peer: Peer) -> None:
    before = compute.status().metrics
    telemetry.check("compute", before)
    ask(peer, request())
    after = compute.wait_for_state("ready", n_active=0).metrics
    added = {k: after[k] - before[k] for k in ("requests", "requests_finished", "requests_failed", "output_tokens")}
    assert added == {"requests": 1, "requests_finished": 1, "requests_failed": 0, "output_tokens": 12}
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    assert after["context_tokens"] == CONTEXT


def test_greedy_twice_is_equal(peer: Peer) -> None:
    assert tokens_of(peer, request()) == tokens_of(peer, request())


def test_seeds(peer: Peer) -> None:
    """The same seed gives the same answer, another seed another; without one a seed is drawn and told."""
    first = tokens_of(peer, request(sampling=sampled(1)))
    assert tokens_of(peer, request(sampling=sampled(1))) == first
    assert tokens_of(peer, request(sampling=sampled(2))) != first
    drawn = [ask(peer, request(sampling=sampled(None))) for _ in range(2)]
    assert drawn[0].accepted.seed != drawn[1].accepted.seed
    assert drawn[0].tokens != drawn[1].tokens
    assert all(0 <= a.accepted.seed < 2**53 for a in drawn)
    assert tokens_of(peer, request(sampling=sampled(drawn[0].accepted.seed))) == drawn[0].tokens


def test_one_token(peer: Peer) -> None:
    answer = ask(peer, request(max_tokens=1))
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, len(answer.tokens)) == ("length", 1)


def test_a_stop_id_of_the_request_ends_it(peer: Peer) -> None:
    tokens = tokens_of(peer, request())
    n = next(i for i in range(1, 12) if tokens[i] not in tokens[:i])
    answer = ask(peer, request(stop_ids=[VOCAB - 1, tokens[n]]))
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, answer.tokens) == ("stop", tokens[:n])
    assert tokens_of(peer, request()) == tokens, "of that request alone"


@pytest.mark.parametrize("stop_id", EOS_IDS)
def test_ends_of_sequence_of_all_files_end_it(peer: Peer, stop_id: int) -> None:
    answer = ask(peer, request(sampling=Sampling(temperature=0.0, logit_bias={str(stop_id): 1000.0})))
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, answer.tokens) == ("stop", [])
    forced = ask(peer, request(sampling=Sampling(temperature=0.0, logit_bias={"9": 1000.0})))
    assert forced.tokens == [9] * 12, "an ordinary token does not"


@pytest.mark.parametrize(
    "sampling", [GREEDY, sampled(5), sampled(6, frequency_penalty=0.3, **PENALISED)], ids=["greedy", "sampled", "all"]
)
def test_resumed_at_any_point_the_answer_goes_on_as_it_was(peer: Peer, sampling: Sampling) -> None:
    """With the same tokens at the same indices, nothing sent twice; `ask` checks that the first index follows."""
    whole = tokens_of(peer, request(sampling=sampling))
    assert len(whole) == 12
    for n in range(len(whole) + 1):
        answer = ask(peer, request(sampling=sampling, resume_tokens=whole[:n]))
        assert answer.tokens == whole[n:], f"resumed after {n}"
        assert isinstance(answer.end, Finished) and answer.end.reason == "length"


def test_more_resumed_than_asked_for_costs_nothing(compute: DaemonProcess, peer: Peer) -> None:
    before = compute.status().metrics["prompt_tokens"]
    answer = ask(peer, request(max_tokens=5, resume_tokens=[30] * 2 * CONTEXT))
    assert isinstance(answer.end, Finished) and answer.end.reason == "length"
    assert answer.tokens == []
    assert compute.status().metrics["prompt_tokens"] == before


# --- requests that cannot be served ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "text"),
    [
        (CONTEXT, None, f"a prompt of {CONTEXT} tokens exceeds the context of {CONTEXT} tokens"),
        (CONTEXT + 1, None, f"a prompt of {CONTEXT + 1} tokens exceeds"),
        (CONTEXT - 5, 6, f"a prompt of {CONTEXT - 5} tokens and max_tokens 6 exceeds the context of {CONTEXT} tokens"),
        (10, 10**9, "a prompt of 10 tokens and max_tokens 1000000000 exceeds"),
    ],
)
def test_too_long_is_refused_before_prefill(
    compute: DaemonProcess, peer: Peer, n_prompt: int, max_tokens: int | None, text: str
) -> None:
    before = compute.status().metrics["steps"]
    error = refusal(peer, request([20] * n_prompt, max_tokens=max_tokens))
    assert (error.code, error.retryable) == ("context_too_long", False)
    assert text in error.message
    assert compute.status().metrics["steps"] == before


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(CONTEXT - 5, 5), (CONTEXT - 1, None)])
def test_the_context_can_be_filled_to_its_last_token(peer: Peer, n_prompt: int, max_tokens: int | None) -> None:
    answer = ask(peer, request([20 + i % 200 for i in range(n_prompt)], max_tokens=max_tokens))
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, n_prompt + len(answer.tokens)) == ("length", CONTEXT)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("Generate.token_ids", {"token_ids": []}),
    ("Generate.token_ids", {"token_ids": [20, VOCAB]}),
    ("Generate.token_ids", {"token_ids": [-1]}),
    ("Generate.token_ids", {"token_ids": [2**62]}),
    ("Generate.resume_tokens", {"resume_tokens": [VOCAB]}),
    ("Generate.stop_ids", {"stop_ids": [-3]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("sampling.seed", {"sampling": Sampling(seed=-1)}),
    ("sampling.temperature", {"sampling": Sampling(temperature=-0.1)}),
    ("sampling.temperature", {"sampling": Sampling(temperature=1e9)}),
    ("sampling.top_p", {"sampling": Sampling(top_p=1.1)}),
    ("sampling.top_k", {"sampling": Sampling(top_k=-1)}),
    ("sampling.min_p", {"sampling": Sampling(min_p=2.0)}),
    ("sampling.repetition_penalty", {"sampling": Sampling(repetition_penalty=0.0)}),
    ("sampling.logit_bias", {"sampling": Sampling(logit_bias={str(VOCAB): 1.0})}),
    ("sampling.logit_bias", {"sampling": Sampling(logit_bias={"²": 1.0})}),
    ("sampling.logit_bias", {"sampling": Sampling(logit_bias={"9" * 5000: 1.0})}),
]


def test_a_bad_field_is_named(peer: Peer) -> None:
    for name, fields in BAD:
        error = refusal(peer, Generate(**{"request_id": f"bad {fields}"[:60], "token_ids": PROMPT, **fields}))
        assert (error.code, error.retryable) == ("bad_request", False)
        assert name in error.message
    assert len(tokens_of(peer, request())) == 12


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-300), Sampling(logit_bias={"40": 1e308, "41": 1e308})])
def test_values_at_the_edge_of_what_is_allowed_give_an_answer(peer: Peer, sampling: Sampling) -> None:
    assert len(tokens_of(peer, request(sampling=sampling))) == 12


MALFORMED: list[list[bytes]] = [
    [wire.MAGIC, b"Generate", b"\x81\xaarequest_id\xa1x"],  # token_ids is missing
    [wire.MAGIC, b"Generate", b"\x82\xaarequest_id\xa1x\xa9token_ids\xa3abc"],
    [wire.MAGIC, b"Generate", b"\x82\xaarequest_id\xa1x\xa9token_ids\x91\xc3"],  # true is no token id
    [wire.MAGIC, b"Generate", b"\x83\xaarequest_id\xa1x\xa9token_ids\x91\x09\xa8sampling\x91\x01"],
    [wire.MAGIC, b"Generate", b"\x93\x01\x02\x03"],
    [wire.MAGIC, b"Generate", b"\xc1"],
    [wire.MAGIC, b"Generate"],
    [b"", b""],
]


def test_malformed_messages_get_an_error(peer: Peer) -> None:
    for frames in MALFORMED:
        peer.send(frames)
        error = peer.receive()
        assert isinstance(error, Error) and error.code == "protocol"
        assert error.request_id == ("x" if b"request_id" in frames[-1] else None)
    peer.send(Chat("x", [{"role": "user", "content": "Hi!"}]))
    assert "does not take Chat" in peer.wait_for(Error).message
    assert len(tokens_of(peer, request())) == 12


def test_a_request_id_in_use_is_refused(peer: Peer) -> None:
    first = request()
    peer.send(first)
    peer.send(first)
    error = peer.wait_for(Error)
    assert (error.code, error.request_id) == ("bad_request", first.request_id)
    assert "in use" in error.message
    peer.received.remove(error)
    tokens = finish(peer, first.request_id).tokens
    assert tokens == tokens_of(peer, request())
    peer.received.clear()
    assert tokens_of(peer, first) == tokens, "once it has ended it may be used again"
