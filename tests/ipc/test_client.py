"""The clients against a front daemon that is scripted: streams, sessions, cancellation, and every deadline."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparkle
from sparkle import config
from sparkle._requests import Options
from sparkle.messages import (
    Cancel,
    Chat,
    ChatDone,
    CloseSession,
    Error,
    Hello,
    Progress,
    Sampling,
    SessionRequest,
    Text,
)
from tests.fakes import USAGE, FakeFront, Say

pytestmark = pytest.mark.ipc


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKLE_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def front(run_dir: Path) -> Iterator[FakeFront]:
    with FakeFront(run_dir) as fake:
        yield fake


def leave_open(front: FakeFront) -> None:
    """Make the front daemon say its pieces and then nothing more."""
    front.on[Chat] = front.say_pieces


# --- asking ---------------------------------------------------------------------------------------------------------


def test_ask_returns_the_text(front: FakeFront) -> None:
    with sparkle.Client() as client:
        assert client.ask("What is the capital of France?") == "Paris."
    assert front.wait_for(Chat).messages == [{"role": "user", "content": "What is the capital of France?"}]
    assert front.wait_for(Hello).role == "client"


def test_stream_yields_pieces_and_then_the_reply(front: FakeFront) -> None:
    seen: list[Progress] = []
    with sparkle.Client() as client:
        stream = client.stream("q", on_progress=seen.append)
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.reply
        assert list(stream) == ["Par", "is", "."]
    assert (stream.reply.text, stream.reply.reason, stream.reply.usage) == ("Paris.", "stop", USAGE)
    assert [(p.done, p.total) for p in seen] == [(3, 7)]


def test_stream_is_an_iterator_too(front: FakeFront) -> None:
    with sparkle.Client() as client:
        stream = client.stream("q")
        assert [next(stream), next(stream), next(stream)] == ["Par", "is", "."]
        with pytest.raises(StopIteration):
            next(stream)


def test_options_reach_the_daemon(front: FakeFront) -> None:
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 11}
    tools = [{"type": "function", "function": {"name": "f"}}]
    with sparkle.Client() as client:
        reply = client.stream("q", system="be brief", max_tokens=9, stop=["\n"], tools=tools, **options).read()
    chat = front.wait_for(Chat)
    assert chat.sampling == Sampling(**options)
    assert (chat.max_tokens, chat.stop, chat.tools, chat.session_id) == (9, ["\n"], tools, None)
    assert chat.messages[0] == {"role": "system", "content": "be brief"}
    assert reply.seed == 11


def test_every_sampling_field_is_an_option() -> None:
    assert set(Sampling.__dataclass_fields__) <= set(Options.__annotations__)


def test_a_misspelt_option_is_refused(front: FakeFront) -> None:
    wrong: Any = {"temprature": 0.5}
    with sparkle.Client() as client, pytest.raises(TypeError, match="temprature"):
        client.ask("q", **wrong)


@pytest.mark.parametrize("prompt", ["\ud83d", [{"role": "user", "content": object()}], [{"n": 2**70}]])
def test_a_prompt_that_cannot_travel_is_a_bad_request(front: FakeFront, prompt: Any) -> None:
    with sparkle.Client() as client:
        with pytest.raises(sparkle.BadRequest):
            client.ask(prompt)
        assert client.ask("q") == "Paris."


def test_text_beyond_the_basic_plane_arrives_whole(run_dir: Path) -> None:
    with FakeFront(run_dir, pieces=("巴", "黎 👩‍🚀", "", "é")), sparkle.Client() as client:
        assert client.ask("首都？") == "巴黎 👩‍🚀é"


def test_streams_may_interleave_on_one_client(front: FakeFront) -> None:
    with sparkle.Client() as client:
        pairs = list(zip(client.stream("a"), client.stream("b"), strict=True))
    assert pairs == [("Par", "Par"), ("is", "is"), (".", ".")]


# --- sessions -------------------------------------------------------------------------------------------------------


def test_a_session_begins_with_its_system_text_once(front: FakeFront) -> None:
    with sparkle.Client() as client:
        chat = client.session("s1", system="be kind")
        assert chat.ask("Hello").text == "Paris."
        assert list(chat.stream("And then?")) == ["Par", "is", "."]
        assert [m["role"] for m in chat.history()] == ["system", "user", "assistant", "user", "assistant"]
        chat.reset()
        assert chat.history() == []
        chat.ask("Hello again")
        assert chat.history()[0]["role"] == "system"
    assert {m.session_id for m in front.received if isinstance(m, Chat)} == {"s1"}


def test_a_session_with_another_system_text_is_refused(front: FakeFront) -> None:
    with sparkle.Client() as client:
        client.session("s1", system="be kind").ask("Hello")
        with pytest.raises(sparkle.BadRequest, match="another system text"):
            client.session("s1", system="be rude").ask("Hello")
        client.session("s1").ask("Hello")


def test_new_sessions_differ(front: FakeFront) -> None:
    with sparkle.Client() as client:
        assert client.session().session_id != client.session().session_id


def test_a_session_waits_for_its_cancelled_answer(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is busy with the session until the second probe after the cancellation."""
    monkeypatch.setattr(config, "LIVENESS_S", 0.05)
    hellos_after_cancel: list[Hello] = []

    def on_hello(message: Hello, say: Say) -> None:
        front.welcome(message, say)
        if any(isinstance(m, Cancel) for m in front.received):
            hellos_after_cancel.append(message)
            if len(hellos_after_cancel) == 2:
                say(ChatDone(front.wait_for(Chat).request_id, "cancelled", USAGE, 5))

    def on_chat(message: Chat, say: Say) -> None:
        if len([m for m in front.received if isinstance(m, Chat)]) == 1:
            front.say_pieces(message, say)
        elif len(hellos_after_cancel) < 2:
            say(Error("overloaded", "the session is busy", True, message.request_id))
        else:
            front.chat(message, say)

    front.on |= {Hello: on_hello, Chat: on_chat}
    del front.on[Cancel]
    with sparkle.Client() as client:
        chat = client.session("s1")
        for _ in chat.stream("one"):
            break
        assert chat.ask("two").text == "Paris."


# --- cancelling -----------------------------------------------------------------------------------------------------


def test_cancel_ends_the_stream_with_what_had_arrived(front: FakeFront) -> None:
    leave_open(front)
    with sparkle.Client() as client:
        stream = client.stream("q")
        pieces = []
        for piece in stream:
            pieces.append(piece)
            stream.cancel()
    assert (pieces, stream.reply.reason, stream.reply.text) == (["Par", "is", "."], "cancelled", "Paris.")
    assert front.wait_for(Cancel).request_id == front.wait_for(Chat).request_id


def test_cancel_from_another_thread(front: FakeFront) -> None:
    leave_open(front)
    with sparkle.Client() as client:
        stream = client.stream("q")
        assert next(stream) == "Par"
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        assert stream.read().reason == "cancelled"
        thread.join()


def test_leaving_the_loop_cancels(front: FakeFront) -> None:
    leave_open(front)
    with sparkle.Client() as client:
        stream = client.stream("q")
        for _ in stream:
            break
        front.wait_for(Cancel)
        with pytest.raises(RuntimeError):
            _ = stream.reply
        front.on[Chat] = front.chat
        assert client.ask("next") == "Paris."  # what the cancelled answer still sent is not taken for this one


def test_closing_the_client_cancels(front: FakeFront) -> None:
    leave_open(front)
    with sparkle.Client() as client:
        next(client.stream("q"))
    front.wait_for(Cancel)


def test_a_stream_closed_before_its_start_sends_nothing(front: FakeFront) -> None:
    with sparkle.Client() as client:
        stream = client.stream("q")
        stream.close()
        client.ask("other")
    assert [m.messages[0]["content"] for m in front.received if isinstance(m, Chat)] == ["other"]


# --- errors and deadlines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in sparkle.__all__ if n.isidentifier() and n[0].isupper()])
def test_errors_arrive_as_their_class(front: FakeFront, name: str) -> None:
    cls = getattr(sparkle, name)
    if not issubclass(cls, sparkle.SparkleError):
        return
    front.on[Chat] = lambda message, say: say(Error(cls.code, "because", cls.retryable, message.request_id))
    with sparkle.Client() as client, pytest.raises(cls, match="because") as caught:
        client.ask("q")
    assert type(caught.value) is cls


def test_no_daemon(run_dir: Path) -> None:
    started = time.monotonic()
    with pytest.raises(sparkle.PeerError, match=r"not running.*honcho start"):
        sparkle.Client()
    assert time.monotonic() - started < 1


def test_a_dead_daemons_socket_file(run_dir: Path) -> None:
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "front.sock"))
    with pytest.raises(sparkle.PeerError, match="not running"):
        sparkle.Client()


def test_a_silent_daemon(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HELLO_DEADLINE_S", 0.2)
    del front.on[Hello]
    with pytest.raises(sparkle.PeerError, match=r"not answered for 0\.2 s"):
        sparkle.Client()


def test_a_refused_hello(front: FakeFront) -> None:
    front.on[Hello] = lambda message, say: say(Error("protocol", "client speaks protocol 1, this daemon 2"))
    with pytest.raises(sparkle.ProtocolError, match="speaks protocol"):
        sparkle.Client()


def test_silence_about_a_request(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LIVENESS_S", 0.05)
    monkeypatch.setattr(config, "REQUEST_SILENCE_S", 0.4)
    leave_open(front)
    with sparkle.Client() as client:
        stream = client.stream("q")
        with pytest.raises(sparkle.PeerError, match=r"said nothing about the request for 0\.4 s"):
            stream.read()
        front.wait_for(Cancel)  # should the daemon come to itself
    assert len([m for m in front.received if isinstance(m, Hello)]) > 2  # its welcomes were no news of the request


def test_progress_is_life(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LIVENESS_S", 0.05)
    monkeypatch.setattr(config, "REQUEST_SILENCE_S", 0.3)
    chats: list[Chat] = []

    def on_hello(message: Hello, say: Say) -> None:
        """Every probe is answered with progress, so that the answer takes longer than the silence allowed."""
        front.welcome(message, say)
        if chats:
            n_probes = len([m for m in front.received if isinstance(m, Hello)])
            say(Progress(chats[0].request_id, n_probes, 8))
            if n_probes == 8:
                say(ChatDone(chats[0].request_id, "stop", USAGE, 1))

    front.on[Hello] = on_hello
    front.on[Chat] = lambda message, say: chats.append(message)
    with sparkle.Client() as client:
        started = time.monotonic()
        assert client.ask("q") == ""
        assert time.monotonic() - started > 0.3


def test_the_daemon_dies_in_the_middle(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LIVENESS_S", 0.1)

    def say_and_die(message: Chat, say: Say) -> None:
        front.say_pieces(message, say)
        front.die()

    front.on[Chat] = say_and_die
    with sparkle.Client() as client:
        stream = client.stream("q")
        assert next(stream) == "Par"
        with pytest.raises(sparkle.PeerError, match="has gone"):
            stream.read()


def test_the_daemon_restarts_in_the_middle(front: FakeFront, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LIVENESS_S", 0.1)
    leave_open(front)
    with sparkle.Client() as client:
        stream = client.stream("q")
        assert next(stream) == "Par"
        front.stop()
        with FakeFront(run_dir, epoch=2):
            with pytest.raises(sparkle.PeerError, match="restarted"):
                stream.read()
            assert client.ask("q") == "Paris."


def test_a_restart_between_requests_goes_unnoticed(front: FakeFront, run_dir: Path) -> None:
    with sparkle.Client() as client:
        assert client.ask("q") == "Paris."
        front.stop()
        with FakeFront(run_dir, epoch=2):
            assert client.ask("q") == "Paris."


def test_a_missing_piece_is_an_error(front: FakeFront) -> None:
    def skip(message: Chat, say: Say) -> None:
        say(Text(message.request_id, 0, "Par"))
        say(Text(message.request_id, 5, "."))

    front.on[Chat] = skip
    with sparkle.Client() as client, pytest.raises(sparkle.ProtocolError, match="missing"):
        client.ask("q")
    front.wait_for(Cancel)


@pytest.mark.parametrize("reply", [[b"junk"], [b"SPK1", b"Text", b"\xc1"], [b"SPK1", b"Chat", b"\x80"]])
def test_malformed_frames_are_an_error(front: FakeFront, reply: list[bytes]) -> None:
    front.on[Chat] = lambda message, say: say(reply)
    with sparkle.Client() as client:
        with pytest.raises(sparkle.ProtocolError):
            client.ask("q")
        front.on[Chat] = front.chat
        assert client.ask("q") == "Paris."


def test_an_error_about_no_request_ends_the_request(front: FakeFront) -> None:
    # the only answer to a message that the daemon could not read
    front.on[Chat] = lambda message, say: say(Error("protocol", "cannot read that"))
    with sparkle.Client() as client, pytest.raises(sparkle.ProtocolError, match="cannot read"):
        client.ask("q")


# --- asyncio --------------------------------------------------------------------------------------------------------


def test_async_ask_and_stream(front: FakeFront) -> None:
    async def main() -> None:
        async with sparkle.AsyncClient() as client:
            assert await client.ask("q", system="s", seed=3) == "Paris."
            stream = client.stream("q")
            assert [piece async for piece in stream] == ["Par", "is", "."]
            assert stream.reply.usage == USAGE

    asyncio.run(main())


def test_async_streams_run_together(front: FakeFront) -> None:
    """No answer goes on before all are open: a client that took them one by one would wait for ever."""
    waiting: list[tuple[Chat, Say]] = []

    def answer_all_when_three(message: Chat, say: Say) -> None:
        waiting.append((message, say))
        if len(waiting) == 3:
            for chat, reply in waiting:
                front.chat(chat, reply)

    front.on[Chat] = answer_all_when_three

    async def main() -> list[str]:
        async with sparkle.AsyncClient() as client:
            return await asyncio.gather(*(client.ask(str(i)) for i in range(3)))

    assert asyncio.run(main()) == ["Paris."] * 3


def test_async_leaving_the_loop_cancels(front: FakeFront) -> None:
    leave_open(front)

    async def main() -> None:
        async with sparkle.AsyncClient() as client:
            chat = client.session("s1", system="be kind")
            async for _ in chat.stream("one"):
                break
            gc.collect()
            await asyncio.to_thread(front.wait_for, Cancel)
            front.on[Chat] = front.chat
            assert (await chat.ask("two")).text == "Paris."
            await chat.reset()
            assert await chat.history() == []

    asyncio.run(main())
    front.wait_for(CloseSession)
    front.wait_for(SessionRequest)


def test_async_cancelled_task_leaves_the_client_usable(front: FakeFront) -> None:
    leave_open(front)

    async def main() -> None:
        async with sparkle.AsyncClient() as client:
            task = asyncio.ensure_future(client.ask("one"))
            await asyncio.to_thread(front.wait_for, Chat)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            front.on[Chat] = front.chat
            assert await client.ask("two") == "Paris."

    asyncio.run(main())
    front.wait_for(Cancel)


def test_async_errors(front: FakeFront, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LIVENESS_S", 0.1)
    front.on[Chat] = lambda message, say: front.die()

    async def main() -> None:
        async with sparkle.AsyncClient() as client:
            with pytest.raises(sparkle.PeerError, match="has gone"):
                await client.ask("q")
        with pytest.raises(sparkle.PeerError, match="not running"):
            async with sparkle.AsyncClient():
                raise AssertionError("entered without a daemon")

    asyncio.run(main())
