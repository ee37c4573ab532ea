"""Peers that speak the protocol from a thread of the test process; what they answer is up to the test."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from sparkle import wire
from sparkle.messages import (
    PROTOCOL,
    Cancel,
    Chat,
    ChatDone,
    CloseSession,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Session,
    SessionRequest,
    Status,
    StatusRequest,
    Text,
    Usage,
    Welcome,
)
from sparkle.rundir import RunDir

M = TypeVar("M", bound=Message)
Say = Callable[[Message | list[bytes]], None]
WAIT_S = 10.0
USAGE = Usage(prompt_tokens=7, output_tokens=3, cached_tokens=2, ttft_ms=12.5, decode_tps=40.0)


class FakeDaemon:
    """Answers Hello, StatusRequest and Ping as a daemon does. `on[kind]` is what it does with a message of that kind.

    Replace or delete entries of `on` to script it: a handler gets the message and a `say` that replies to its sender.
    """

    def __init__(
        self,
        run_dir: Path,
        role: str = "front",
        state: str = "ready",
        epoch: int = 1,
        metrics: dict[str, Any] | None = None,
        detail: str = "serving a fake",
    ) -> None:
        self.role, self.state, self.epoch, self.metrics, self.detail = role, state, epoch, metrics or {}, detail
        self.received: list[Message] = []
        self.on: dict[type[Message], Callable[[Any, Say], None]] = {
            Hello: self.welcome,
            StatusRequest: self._status,
            Ping: lambda message, say: say(Pong()),
        }
        rundir = RunDir(run_dir)
        (rundir.path / f"{role}.lock").write_text(f"{os.getpid()}\n")
        self._changed = threading.Condition()
        self._is_stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = wire.router(self._context, rundir.socket(role))
        self._path = rundir.socket(role)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, leave_socket_file: bool = False) -> None:
        self._is_stopping.set()
        self._thread.join(WAIT_S)
        if not leave_socket_file:
            self._path.unlink(missing_ok=True)

    def die(self) -> None:
        """Vanish as after kill -9; from within a handler."""
        self._is_stopping.set()

    def wait_for(self, kind: type[M], n: int = 1) -> M:
        """Return the n-th message of a kind, waiting for it."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while True:
                found = [m for m in self.received if isinstance(m, kind)]
                if len(found) >= n:
                    return found[n - 1]
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no {kind.__name__} within {WAIT_S} s; got {self.received}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._between_messages()
            if not self._router.poll(5):
                continue
            peer, *frames = self._router.recv_multipart()
            message = wire.decode(frames)
            with self._changed:
                self.received.append(message)
                self._changed.notify_all()
            handler = self.on.get(type(message))
            if handler is not None:
                handler(message, functools.partial(self._say, peer))
        self._router.close(linger=0)
        self._context.term()

    def _between_messages(self) -> None:
        """For peers that speak without being asked; in the fake's thread, a few hundred times a second."""

    def _say(self, peer: bytes, reply: Message | list[bytes]) -> None:
        try:
            self._router.send_multipart([peer, *(reply if isinstance(reply, list) else wire.encode(reply))])
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:  # the client has left
                raise

    def welcome(self, message: Hello, say: Say) -> None:
        say(Welcome(self.role, os.getpid(), PROTOCOL, self.state, self.epoch))

    def _status(self, message: StatusRequest, say: Say) -> None:
        say(Status(self.role, os.getpid(), self.state, self.detail, 3725.0, 1_200_000_000, self.metrics))


class FakeCompute(FakeDaemon):
    """A compute daemon that only listens; the test says with `tell`, step by step, what it answers the front daemon."""

    def __init__(self, run_dir: Path, **kwargs: Any) -> None:
        self._outbox: queue.SimpleQueue[Message | list[bytes]] = queue.SimpleQueue()
        self._front: Say | None = None
        super().__init__(run_dir, "compute", **kwargs)
        self.on[Hello] = self._greet

    def tell(self, *messages: Message | list[bytes]) -> None:
        """Send to the peer that said Hello last; from any thread."""
        for message in messages:
            self._outbox.put(message)

    def _greet(self, message: Hello, say: Say) -> None:
        self._front = say
        self.welcome(message, say)

    def _between_messages(self) -> None:
        while self._front is not None and not self._outbox.empty():
            self._front(self._outbox.get())


class FakeFront(FakeDaemon):
    """Answers a Chat with `pieces`, remembers sessions, and ends an answer that is cancelled."""

    def __init__(self, run_dir: Path, pieces: tuple[str, ...] = ("Par", "is", "."), **kwargs: Any) -> None:
        self.pieces = pieces
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        super().__init__(run_dir, "front", **kwargs)
        self.on |= {
            Chat: self.chat,
            Cancel: lambda message, say: say(ChatDone(message.request_id, "cancelled", USAGE, 5)),
            SessionRequest: lambda message, say: say(
                Session(message.request_id, message.session_id, self.sessions.get(message.session_id, []))
            ),
            CloseSession: self._close_session,
        }

    def chat(self, message: Chat, say: Say) -> None:
        say(Progress(message.request_id, 3, 7))
        self.say_pieces(message, say)
        say(ChatDone(message.request_id, "stop", USAGE, message.sampling.seed or 5))
        if message.session_id is not None:
            answer = {"role": "assistant", "content": "".join(self.pieces)}
            self.sessions.setdefault(message.session_id, []).extend([*message.messages, answer])

    def say_pieces(self, message: Chat, say: Say) -> None:
        """Send the pieces and leave the answer open."""
        index = 0
        for piece in self.pieces:
            say(Text(message.request_id, index, piece))
            index += len(piece)

    def _close_session(self, message: CloseSession, say: Say) -> None:
        self.sessions.pop(message.session_id, None)
        say(Session(message.request_id, message.session_id, []))
