"""Many requests at once with the compute daemon: turns, limits, cancels, and clients that go or do not read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkle import wire
from sparkle.config import PROGRESS_S
from sparkle.messages import Accepted, Cancel, Finished, Generate, Ping, Progress, Tokens
from tests.daemons import DaemonProcess, Peer
from tests.ipc.computes import (
    CONTEXT,
    GREEDY,
    LIMITS,
    MAX_ACTIVE,
    MAX_QUEUE,
    PENALISED,
    PROMPT,
    Answer,
    catch_up,
    finish,
    n_tokens,
    pair,
    refusal,
    request,
    sampled,
    tokens_of,
    wait_for_tokens,
)

pytestmark = pytest.mark.ipc

QUICK_S = 1.5  # "quickly": a few steps of a few milliseconds, and what two busy cores make of them
LONG = 900  # more tokens than any test waits for


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


@pytest.fixture
def other(compute: DaemonProcess) -> Iterator[Peer]:
    peer = compute.peer()
    yield peer
    peer.close()


# --- many requests ---------------------------------------------------------------------------------------------------


def various(n: int) -> list[Generate]:
    """Requests that differ in length of prompt and answer, and in how tokens are chosen."""
    return [
        request(
            [20 + (7 * i + j) % 200 for j in range(3 + 13 * i)],
            max_tokens=10 + 6 * i,
            sampling=GREEDY if i % 2 else sampled(i, **PENALISED),
        )
        for i in range(n)
    ]


def test_interleaved_requests_give_what_they_give_alone(peer: Peer, other: Peer) -> None:
    messages = various(MAX_ACTIVE + MAX_QUEUE)
    for message, client in zip(messages, itertools.cycle((peer, other)), strict=False):
        client.send(message)
    together = [
        finish(client, message.request_id).tokens
        for message, client in zip(messages, itertools.cycle((peer, other)), strict=False)
    ]
    peer.received.clear()
    assert together == [tokens_of(peer, message) for message in messages]


def test_one_request_too_many_is_refused_and_the_others_go_on(peer: Peer, other: Peer) -> None:
    expected = tokens_of(peer, request())
    messages = [request(max_tokens=80) for _ in range(MAX_ACTIVE + MAX_QUEUE)]
    for message in messages:
        peer.send(message)
    catch_up(peer)
    error = refusal(other, request())
    assert (error.code, error.retryable) == ("overloaded", True)
    answers = [finish(peer, message.request_id) for message in messages]
    assert [a.accepted.queue_position for a in answers] == [0] * MAX_ACTIVE + [i + 1 for i in range(MAX_QUEUE)]
    assert all(a.tokens == answers[0].tokens for a in answers)
    assert answers[0].tokens[:12] == expected
    assert tokens_of(other, request()) == expected


def test_active_requests_take_turns(peer: Peer) -> None:
    """Token by token, from the first of the one that came second until one of them ends."""
    long, short = request(max_tokens=60), request(max_tokens=20)
    peer.send(long)
    wait_for_tokens(peer, long.request_id, 3)
    peer.send(short)
    finish(peer, short.request_id)
    finish(peer, long.request_id)
    order = [m.request_id for m in peer.received if isinstance(m, Tokens)]
    first, last = order.index(short.request_id), len(order) - 1 - order[::-1].index(short.request_id)
    both = order[first : last + 1]
    assert both == [short.request_id, long.request_id] * 19 + [short.request_id]


def test_a_short_request_is_not_starved(peer: Peer) -> None:
    """Behind a very long one, and queued behind both: it has its turn as soon as the shorter of them ends."""
    long, shorter, queued = request(max_tokens=LONG), request(max_tokens=40), request(max_tokens=5)
    for message in (long, shorter, queued):
        peer.send(message)
    assert len(finish(peer, queued.request_id).tokens) == 5
    ends = [m.request_id for m in peer.received if isinstance(m, Finished)]
    assert ends == [shorter.request_id, queued.request_id]
    assert n_tokens(peer, long.request_id) < 60
    peer.send(Cancel(long.request_id))
    finish(peer, long.request_id)


def test_a_long_prompt_does_not_stop_the_others(peer: Peer) -> None:
    """Prefill takes turns too: while a prompt of many chunks is read, another request gets tokens."""
    answering, reading = request(max_tokens=LONG), request([20] * 600, max_tokens=1)
    peer.send(answering)
    wait_for_tokens(peer, answering.request_id, 3)
    peer.send(reading)
    finish(peer, reading.request_id)
    order = [m.request_id for m in peer.received if isinstance(m, Tokens | Accepted)]
    accepted = order.index(reading.request_id)
    assert order[accepted + 1 : -1].count(answering.request_id) > 20
    peer.send(Cancel(answering.request_id))
    finish(peer, answering.request_id)


def test_who_waits_hears_at_least_once_a_second(peer: Peer, other: Peer) -> None:
    busy = [request(max_tokens=None) for _ in range(MAX_ACTIVE)]
    for message in busy:
        peer.send(message)
    catch_up(peer)
    queued = [request(max_tokens=3), request(max_tokens=3)]
    for message in queued:
        other.send(message)
    heard = {message.request_id: [time.monotonic()] for message in queued}
    n_progress = 0
    while n_progress < 4:
        said: Any = other.receive(timeout_s=2.0)
        heard[said.request_id].append(time.monotonic())
        n_progress += isinstance(said, Progress)
    for message in busy:
        peer.send(Cancel(message.request_id))
        finish(peer, message.request_id)
    for place, message in enumerate(queued, start=1):
        assert finish(other, message.request_id).accepted.queue_position == place
        progress = [m for m in other.received if isinstance(m, Progress) and m.request_id == message.request_id]
        assert progress[0] == Progress(message.request_id, 0, len(PROMPT), place)
        gaps = [b - a for a, b in itertools.pairwise(heard[message.request_id])]
        assert max(gaps) < 1.0, f"every {PROGRESS_S} s"


def test_the_same_request_id_of_two_clients(peer: Peer, other: Peer) -> None:
    a, b = request(max_tokens=40), request([100, 101], max_tokens=40)
    alone = tokens_of(peer, a), tokens_of(peer, b)
    peer.received.clear()
    b = Generate(a.request_id, b.token_ids, b.max_tokens, b.sampling)
    peer.send(a)
    other.send(b)
    assert (finish(peer, a.request_id).tokens, finish(other, b.request_id).tokens) == alone
    peer.received.clear()
    other.received.clear()
    peer.send(a)
    other.send(b)
    wait_for_tokens(other, b.request_id, 1)
    other.send(Cancel(b.request_id))
    end = finish(other, b.request_id).end
    assert isinstance(end, Finished) and end.reason == "cancelled"
    assert finish(peer, a.request_id).tokens == alone[0], "a Cancel is for the sender's own"


# --- requests that are given up --------------------------------------------------------------------------------------


def cancel(peer: Peer, message: Generate) -> Answer:
    """Cancel and check that it ends quickly and once; `finish` sees a second end, `catch_up` brings it."""
    began = time.monotonic()
    peer.send(Cancel(message.request_id))
    answer = finish(peer, message.request_id)
    assert time.monotonic() - began < QUICK_S
    assert isinstance(answer.end, Finished) and answer.end.reason == "cancelled"
    peer.send(Cancel(message.request_id))  # it has ended: nothing to say
    assert len(tokens_of(peer, request(max_tokens=2))) == 2
    catch_up(peer)
    assert finish(peer, message.request_id) == answer
    return answer


def test_cancelled_in_decode(peer: Peer) -> None:
    message = request(max_tokens=LONG)
    peer.send(message)
    wait_for_tokens(peer, message.request_id, 5)
    assert 5 <= len(cancel(peer, message).tokens) < LONG


def test_cancelled_in_prefill(compute: DaemonProcess, peer: Peer) -> None:
    before = compute.status().metrics["prompt_tokens"]
    message = request([20] * (CONTEXT - 20))
    peer.send(message)
    while (n_read := compute.status().metrics["prompt_tokens"] - before) == 0:
        pass
    assert n_read < CONTEXT - 20
    answer = cancel(peer, message)
    assert answer.tokens == []
    assert compute.status().metrics["prompt_tokens"] - before < CONTEXT - 20, "the rest of the prompt was not read"


def test_cancelled_in_the_queue(peer: Peer, other: Peer) -> None:
    busy = [request(max_tokens=LONG), request(max_tokens=LONG)]
    for message in busy:
        other.send(message)
    catch_up(other)
    queued = request()
    peer.send(queued)
    began = time.monotonic()
    peer.send(Cancel(queued.request_id))
    answer = finish(peer, queued.request_id)
    assert time.monotonic() - began < QUICK_S
    assert isinstance(answer.end, Finished)
    assert (answer.end.reason, answer.tokens) == ("cancelled", [])
    catch_up(other)
    assert not [m for m in other.received if isinstance(m, Finished)], "while the others went on"
    for message in busy:
        other.send(Cancel(message.request_id))
        finish(other, message.request_id)


def test_a_cancel_of_an_unknown_request_does_nothing(peer: Peer) -> None:
    peer.send(Cancel("nobody's"))
    catch_up(peer)
    assert len(peer.received) == 1


def test_a_client_that_vanishes_ends_its_requests(compute: DaemonProcess, other: Peer) -> None:
    """Without a word: in decode the next token cannot be delivered, in the queue and in prefill the next Progress."""
    expected = tokens_of(other, request(max_tokens=60))
    other.received.clear()
    before = compute.status().metrics["output_tokens"]
    vanishing = compute.peer()
    messages = [request(max_tokens=LONG), request([20] * (CONTEXT - 1), max_tokens=None), request(max_tokens=LONG)]
    for message in messages:
        vanishing.send(message)
    wait_for_tokens(vanishing, messages[0].request_id, 2)
    staying = request(max_tokens=60)
    other.send(staying)
    catch_up(other)
    vanishing.close()
    assert finish(other, staying.request_id).tokens == expected
    metrics = compute.wait_for_state("ready", n_active=0, n_queued=0).metrics
    assert metrics["output_tokens"] - before < LONG


def test_a_client_that_never_reads_loses_its_stream_and_no_more(compute: DaemonProcess, other: Peer) -> None:
    """Replies pile up to the high-water marks, then its requests end; memory is bounded, others are not disturbed."""
    staying = request(max_tokens=200)
    expected = tokens_of(other, staying)
    other.received.clear()
    before = compute.status()
    deaf = compute.peer()
    deaf.send(request(max_tokens=None))
    other.send(staying)
    n_pings = 30_000
    for _ in range(n_pings):
        deaf.send(Ping())
    after = compute.wait_for_state("ready", n_active=0)
    assert finish(other, staying.request_id).tokens == expected
    assert after.metrics["output_tokens"] - before.metrics["output_tokens"] < CONTEXT - len(PROMPT) + 200
    assert after.rss_bytes - before.rss_bytes < 32 << 20
    n_kept = 0
    while deaf._socket.poll(100):
        deaf.receive()
        n_kept += 1
    assert 2 * wire.SEND_HWM <= n_kept < n_pings
    deaf.close()
