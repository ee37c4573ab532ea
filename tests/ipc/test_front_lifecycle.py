"""The front daemon as a process: bytes of any origin, compute daemons that come and go, start and end."""

from __future__ import annotations

import dataclasses
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sparkle import store, telemetry, wire
from sparkle.messages import (
    Accepted,
    Cancel,
    ChatDone,
    Error,
    ExpertsReady,
    Finished,
    Generate,
    Hello,
    Ping,
    Pong,
    Progress,
    Session,
    SessionRequest,
    StatusRequest,
    Welcome,
)
from sparkled.front.tokenizer import Tokenizer
from tests.daemons import DaemonProcess, Peer, spawn
from tests.fakes import FakeCompute
from tests.ipc.fronts import EPOCHS, SEED, USAGE, begin, chat, end, text_of, tokens, wait_for_text

pytestmark = pytest.mark.ipc


# --- bytes of any origin ---------------------------------------------------------------------------------------------


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/sparkle-was-here"),))


MALFORMED: list[list[bytes]] = [
    [b""],
    [pickle.dumps(Exploit())],
    [wire.MAGIC],
    [b"SPK0", b"Ping", b"\x80"],
    [wire.MAGIC, b"Chat", pickle.dumps(Exploit())],
    [wire.MAGIC, b"Chat", b"\xc1"],
    [wire.MAGIC, b"Chat", b"\x81\x90\x01"],
    [wire.MAGIC, b"Chat", b"\x81\xaarequest_id\x05"],
    [wire.MAGIC, b"Ping", b"\x91" * 100_000],
    [wire.MAGIC, b"\xff\xfe", b"\x80"],
    [wire.MAGIC, b"Ping", b"\x80", b"more"],
]


@pytest.mark.parametrize("frames", MALFORMED)
def test_malformed_bytes_are_refused_and_counted(
    front: DaemonProcess, client: Peer, compute: FakeCompute, frames: list[bytes]
) -> None:
    before = front.status().metrics["bad_messages"]
    client.send(frames)
    assert client.wait_for(Error).code == "protocol"
    client.send(Ping())
    client.wait_for(Pong)
    assert front.status().metrics["bad_messages"] == before + 1
    assert not Path("/tmp/sparkle-was-here").exists()


def test_unknown_kinds_get_an_error(client: Peer, compute: FakeCompute) -> None:
    client.send([wire.MAGIC, b"Dance", b"\x81\xaarequest_id\xa1x"])
    error = client.wait_for(Error)
    assert (error.code, error.request_id) == ("protocol", "x")
    assert "Dance" in error.message
    client.send(ExpertsReady("y", [1]))
    error = client.wait_for(Error)
    assert error.request_id == "y"
    assert "front daemon does not take ExpertsReady" in error.message


def test_malformed_bytes_of_compute_are_survived(client: Peer, compute: FakeCompute) -> None:
    message = chat()
    generate = begin(client, compute, message)
    compute.tell(*MALFORMED, Hello("compute", 1), Finished(generate.request_id, "stop", USAGE))
    end(client, message.request_id)


# --- compute comes and goes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_before", [0, 1, 4, 6])
def test_an_answer_outlives_a_restart_of_compute(
    front: DaemonProcess, client: Peer, compute: FakeCompute, tokenizer: Tokenizer, n_before: int
) -> None:
    text = "a😀b STOP"
    ids = tokenizer.encode(text)  # the restart falls inside the emoji, then inside what may be a stop string
    message = chat(stop=["STOPPED"], max_tokens=20)
    first = begin(client, compute, message)
    compute.tell(*tokens(first, ids[:n_before]))
    if n_before:
        wait_for_text(client, message.request_id, "a😀b" if n_before == 6 else "a")
    compute.stop()
    front.wait_for_state("starting")
    client.send(refused := chat())
    error = client.wait_for(Error)
    assert (error.code, error.retryable, error.request_id) == ("peer", True, refused.request_id)
    assert "compute daemon is not running" in error.message
    with FakeCompute(front.run_dir.path, state="starting", epoch=next(EPOCHS)) as again:
        again.wait_for(Hello, 2)
        assert not [m for m in again.received if isinstance(m, Generate)]  # not before it is ready
        again.state = "ready"
        second = again.wait_for(Generate)
        assert second.resume_tokens == ids[: len(second.resume_tokens)]
        assert len(second.resume_tokens) == n_before
        assert second == dataclasses.replace(
            first,
            request_id=second.request_id,
            resume_tokens=second.resume_tokens,
            sampling=dataclasses.replace(first.sampling, seed=SEED),
        )
        again.tell(Accepted(second.request_id, SEED, 0), *tokens(second, ids[n_before:], n_before))
        again.tell(Finished(second.request_id, "stop", USAGE))
        whole, done = end(client, message.request_id)
        assert whole == text
        assert isinstance(done, ChatDone)
        assert (done.seed, done.usage.output_tokens) == (SEED, len(ids))
        assert len([m for m in client.received if isinstance(m, Accepted)]) == 1
    front.wait_for_state("starting")


def test_an_answer_is_not_sent_again_to_the_same_incarnation(
    front: DaemonProcess, client: Peer, compute: FakeCompute, tokenizer: Tokenizer
) -> None:
    message = chat()
    generate = begin(client, compute, message)
    compute.state = "starting"  # its prefetch daemon was restarted, say
    assert "compute daemon is starting" in front.wait_for_state("starting").detail
    compute.state = "ready"
    front.wait_for_state("ready")
    compute.tell(*tokens(generate, tokenizer.encode("ok")), Finished(generate.request_id, "stop", USAGE))
    assert end(client, message.request_id)[0] == "ok"
    assert len([m for m in compute.received if isinstance(m, Generate)]) == 1


def test_a_cancelled_answer_ends_without_compute(
    front: DaemonProcess, client: Peer, compute: FakeCompute, tokenizer: Tokenizer
) -> None:
    cancelled, stopped = chat(), chat(stop=["STOP"])
    first, second = begin(client, compute, cancelled), begin(client, compute, stopped)
    compute.tell(*tokens(first, tokenizer.encode("half an")), *tokens(second, tokenizer.encode("ok STOP")))
    wait_for_text(client, cancelled.request_id, "half an")
    compute.wait_for(Cancel)
    compute.stop()  # before it could say Finished
    done = client.wait_for(ChatDone)
    assert (done.request_id, done.reason) == (stopped.request_id, "stop")
    assert text_of(client, stopped.request_id) == "ok "
    assert done.usage.output_tokens >= 1
    front.wait_for_state("starting")
    client.send(Cancel(cancelled.request_id))
    text, done_too = end(client, cancelled.request_id)
    assert text == "half an"
    assert isinstance(done_too, ChatDone)
    assert (done_too.reason, done_too.seed) == ("cancelled", SEED)


# --- state -----------------------------------------------------------------------------------------------------------


def test_status_and_greeting(front: DaemonProcess, client: Peer, compute: FakeCompute, store_dir: Path) -> None:
    status = front.wait_for_state("ready")
    telemetry.check("front", status.metrics)
    assert {name for role, name in telemetry.METRICS if role == "front"} == set(status.metrics)
    assert status.metrics["compute_state"] == "ready"
    assert status.detail == "serving tiny.store"
    fingerprint = store.Store.open(store_dir).fingerprint
    assert compute.wait_for(Hello).model == fingerprint
    client.send(Hello("client", 1))
    assert client.wait_for(Welcome).model == fingerprint
    client.send(Hello("client", 1, model="another"))
    assert client.wait_for(Error).code == "config"


def test_a_long_prompt_does_not_hold_up_the_others(front: DaemonProcess, client: Peer, compute: FakeCompute) -> None:
    message = chat(messages=[{"role": "user", "content": "The quick brown fox. " * 100_000}])
    client.send(message)
    begun, longest_s = time.monotonic(), 0.0
    while not any(isinstance(m, Generate) for m in compute.received):
        asked = time.monotonic()
        front.status()
        longest_s = max(longest_s, time.monotonic() - asked)
    assert longest_s < (time.monotonic() - begun) / 2  # encoding takes a second or more, an answer a few milliseconds
    generate = compute.wait_for(Generate)
    compute.tell(Error("context_too_long", "x", request_id=generate.request_id))
    end(client, message.request_id)


def test_a_start_is_answered_from_the_first_moment(short_dir: Path, store_dir: Path) -> None:
    with spawn("front", short_dir, {"SPARKLE_MODEL": str(store_dir)}) as front:
        client, times_s = front.peer(), []
        detail = front.status().detail  # it is bound now
        while detail == "loading the tokenizer":
            started = time.monotonic()
            client.send(StatusRequest())
            client.send(message := chat())
            error = client.wait_for(Error)
            times_s.append(time.monotonic() - started)
            assert (error.code, error.retryable, error.request_id) == ("peer", True, message.request_id)
            detail = front.status().detail
        assert detail == "waiting: the compute daemon is not running"
        assert sorted(times_s)[len(times_s) // 2] < 0.1
        assert "loading the tokenizer" in {m.message.split(": ")[1].split(";")[0] for m in errors(client)}


def errors(client: Peer) -> list[Error]:
    return [m for m in client.received if isinstance(m, Error)]


def test_too_many_requests(short_dir: Path, store_dir: Path) -> None:
    env = {"SPARKLE_MODEL": str(store_dir), "SPARKLE_MAX_ACTIVE": "1", "SPARKLE_MAX_QUEUE": "1"}
    with FakeCompute(short_dir) as compute, spawn("front", short_dir, env) as front:
        front.wait_for_state("ready")
        client = front.peer()
        messages = [chat(), chat(), chat()]
        for message in messages:
            client.send(message)
        error = client.wait_for(Error)
        assert (error.code, error.retryable, error.request_id) == ("overloaded", True, messages[2].request_id)
        compute.tell(Finished(compute.wait_for(Generate).request_id, "stop", USAGE))
        client.wait_for(ChatDone)
        begin(client, compute, chat())  # there is room again; then the daemon is ended with two answers under way
        front.terminate()
        ends = [client.wait_for(Error), client.wait_for(Error)]
        assert {e.code for e in ends} == {"cancelled"}
        assert len({e.request_id for e in ends}) == 2


def test_a_shutdown_while_the_tokenizer_loads(short_dir: Path, store_dir: Path) -> None:
    with spawn("front", short_dir, {"SPARKLE_MODEL": str(store_dir)}) as front:
        assert front.status().detail == "loading the tokenizer"
        front.terminate()


def test_a_silent_compute_daemon_is_waited_for(short_dir: Path, store_dir: Path, tokenizer: Tokenizer) -> None:
    env, deadlines = {"SPARKLE_MODEL": str(store_dir)}, {"LIVENESS_S": 1.5}
    with FakeCompute(short_dir) as compute, spawn("front", short_dir, env, deadlines) as front:
        front.wait_for_state("ready")
        client, message = front.peer(), chat()
        generate = begin(client, compute, message)
        answers = dict(compute.on)
        compute.on.clear()
        status = front.wait_for_state("starting", compute_state="unresponsive")
        assert "silent" in status.detail
        client.wait_for(Progress)  # the client is told that its request lives
        compute.on.update(answers)
        compute.tell(*tokens(generate, tokenizer.encode("ok")), Finished(generate.request_id, "stop", USAGE))
        assert end(client, message.request_id)[0] == "ok"
        front.wait_for_state("ready")


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_request_that_nobody_answers_ends_at_its_deadline(short_dir: Path, store_dir: Path, is_gone: bool) -> None:
    deadlines = {"START_DEADLINE_S" if is_gone else "REQUEST_SILENCE_S": 2.0}
    compute = FakeCompute(short_dir)
    with spawn("front", short_dir, {"SPARKLE_MODEL": str(store_dir)}, deadlines) as front:
        front.wait_for_state("ready")
        client, message = front.peer(), chat(session_id="s")
        generate = begin(client, compute, message)
        if is_gone:
            compute.stop()
        _, error = end(client, message.request_id)
        assert isinstance(error, Error)
        assert (error.code, error.retryable) == ("peer", True)
        if not is_gone:
            assert compute.wait_for(Cancel) == Cancel(generate.request_id)
        client.send(SessionRequest("q", "s"))
        assert client.wait_for(Session) == Session("q", "s", [])
        assert front.status().metrics["chats_failed"] == 1
    compute.stop()


def test_a_start_without_compute_ends_at_its_deadline(short_dir: Path, store_dir: Path) -> None:
    with spawn("front", short_dir, {"SPARKLE_MODEL": str(store_dir)}, {"START_DEADLINE_S": 0.5}) as front:
        assert front.wait_for_exit() == 69
        assert "no compute daemon has answered" in front.stderr()


def test_a_compute_daemon_with_another_model_is_refused(short_dir: Path, store_dir: Path) -> None:
    with FakeCompute(short_dir) as compute:
        compute.on[Hello] = lambda message, say: say(Error("config", "front serves model aaaa, compute bbbb"))
        with spawn("front", short_dir, {"SPARKLE_MODEL": str(store_dir)}) as front:
            assert front.wait_for_exit() == 78
            assert "compute bbbb" in front.stderr()


def test_a_store_that_is_none_is_refused(short_dir: Path, tmp_path: Path) -> None:
    with spawn("front", short_dir, {"SPARKLE_MODEL": str(tmp_path)}) as front:
        assert front.wait_for_exit() == 74
        assert str(tmp_path) in front.stderr()


def test_no_prompt_text_in_the_log(short_dir: Path, store_dir: Path, tokenizer: Tokenizer) -> None:
    env = {"SPARKLE_MODEL": str(store_dir), "SPARKLE_LOG_LEVEL": "debug"}
    with FakeCompute(short_dir) as compute, spawn("front", short_dir, env) as front:
        front.wait_for_state("ready")
        client, message = front.peer(), chat(messages=[{"role": "user", "content": "xyzzy <|im_end|>"}])
        generate = begin(client, compute, message)
        compute.tell(*tokens(generate, tokenizer.encode("plugh")), Finished(generate.request_id, "stop", USAGE))
        assert end(client, message.request_id)[0] == "plugh"
        front.process.send_signal(signal.SIGTERM)
        front.wait_for_exit()
        assert "generate request=" in front.stderr()
        assert "xyzzy" not in front.stderr()
        assert "plugh" not in front.stderr()
