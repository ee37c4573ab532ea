"""`sparkle.Client`: ask a running Sparkle, from plain blocking code.

    with sparkle.Client() as client:
        print(client.ask("What is the capital of France?"))
        for piece in client.stream("Tell me a story", max_tokens=200):
            print(piece, end="", flush=True)

Owns one connection to the front daemon. Sends Hello, Chat, Cancel and session requests. Every wait ends at a deadline
of sparkle.config with an error of sparkle.errors. Belongs to one thread; others may call `Stream.cancel` only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import zmq

from sparkle import config, wire
from sparkle._requests import (
    PUMP_S,
    Options,
    Prompt,
    Reply,
    Request,
    Requests,
    chat_request,
    frames_of,
    new_id,
    with_system,
)
from sparkle.messages import CloseSession, Message, Progress, Session, SessionRequest
from sparkle.rundir import RunDir, is_listening

__all__ = ["ChatSession", "Client", "Progress", "Reply", "Stream"]


class Client:
    """A connection to the front daemon of the instance in `run_dir` (default: the settings').

    Raises PeerError if no daemon runs there, or none answers within config.HELLO_DEADLINE_S.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        settings = config.load({"run_dir": None if run_dir is None else str(run_dir)})
        path = RunDir(settings.run_dir).socket("front")
        self._requests = Requests(lambda: is_listening(path), str(path))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = wire.dealer(self._context, path)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> str:
        """State of the front daemon when it last answered: "starting", "ready", "draining" or "failed"."""
        return self._requests.welcome.state if self._requests.welcome else "unknown"

    def ask(self, prompt: Prompt, *, system: str | None = None, **options: Unpack[Options]) -> str:
        """Return the whole answer."""
        return self.stream(prompt, system=system, **options).read().text

    def stream(self, prompt: Prompt, *, system: str | None = None, **options: Unpack[Options]) -> Stream:
        """Return an iterator over the pieces of the answer; the request is sent when the first is asked for."""
        return Stream(self, chat_request(prompt, system, None, **options))

    def session(self, session_id: str | None = None, *, system: str | None = None) -> ChatSession:
        """Return a conversation whose history the front daemon keeps; without an id, a new one.

        system: opens the history if it is new; asking raises BadRequest if it already began with another.
        """
        return ChatSession(self, session_id or new_id(), system)

    def close(self) -> None:
        """Cancel what is under way and disconnect; takes at most wire.LINGER_MS."""
        if not self._socket.closed:
            self._send(*self._requests.last_words())
            self._socket.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- for Stream and ChatSession ---------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        frames = frames_of(request.message)  # a request that cannot travel fails before anything is sent
        self._greet()
        self._requests.open(request, time.monotonic())
        self._socket.send_multipart(frames)

    def _pump(self) -> None:
        """Take in what arrives within PUMP_S, and send what is due."""
        if self._socket.poll(int(PUMP_S * 1000)):
            self._requests.receive(self._socket.recv_multipart(), time.monotonic())
        self._send(*self._requests.due(time.monotonic()))

    def _send(self, *messages: Message) -> None:
        for message in messages:
            self._socket.send_multipart(frames_of(message))

    def _greet(self) -> None:
        self._send(self._requests.hello(time.monotonic()))
        while not self._requests.is_greeted(time.monotonic()):
            self._pump()

    def _call(self, message: SessionRequest | CloseSession) -> Session:
        request = Request(message)
        self._open(request)
        while request.session is None:
            self._pump()
            request.take()  # raises the error if it ended with one
        return request.session


class Stream:
    """The pieces of one answer. Iterate once; leaving the loop early cancels the answer."""

    def __init__(self, client: Client, request: Request, session: ChatSession | None = None) -> None:
        self._client = client
        self._request = request
        self._session = session
        self._is_open = False

    def __iter__(self) -> Iterator[str]:
        # A generator, and not `return self`: it is closed when a loop over it is left, which ends the answer too.
        try:
            while (piece := next(self, None)) is not None:
                yield piece
        finally:
            self.close()

    def __next__(self) -> str:
        if not self._is_open:
            self._start()
        while (piece := self._request.take()) is None:
            if self._request.is_done:
                raise StopIteration
            self._client._pump()
        return piece

    @property
    def reply(self) -> Reply:
        """The whole answer, once the stream has ended."""
        if self._request.reply is None:
            raise RuntimeError("the answer has not ended: read the stream to its end first")
        return self._request.reply

    def read(self) -> Reply:
        """Wait for the end and return the whole answer."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """Ask for the end; the stream still yields what arrives until then. From any thread or signal handler."""
        self._request.wants_cancel = True

    def close(self) -> None:
        """Cancel at once and drop what still arrives. Without effect after the end."""
        if self._is_open and not self._request.is_done:
            self._request.abandon()
            self._client._send(*self._client._requests.due(time.monotonic()))
        self._is_open = True  # a stream that was closed before its start never starts

    def _start(self) -> None:
        self._is_open = True
        if self._session is not None:
            self._session._before(self._request)
        self._client._open(self._request)


class ChatSession:
    """One conversation; its history lives in the front daemon under `session_id`."""

    def __init__(self, client: Client, session_id: str, system: str | None) -> None:
        self._client = client
        self.session_id = session_id
        self.system = system
        self._latest: Request | None = None

    def ask(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        """Return the whole answer, with its usage and seed."""
        return self.stream(prompt, **options).read()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return an iterator over the pieces of the answer. A session answers one prompt after the other."""
        return Stream(self._client, chat_request(prompt, None, self.session_id, **options), self)

    def history(self) -> list[dict[str, Any]]:
        """Return the messages so far."""
        return self._client._call(SessionRequest(new_id(), self.session_id)).messages

    def reset(self) -> None:
        """Forget the conversation."""
        self._wait_for_latest()
        self._client._call(CloseSession(new_id(), self.session_id))

    def _before(self, request: Request) -> None:
        self._wait_for_latest()
        if self.system is not None:
            history = self._client._call(SessionRequest(new_id(), self.session_id))
            with_system(request, self.system, history)
        self._latest = request

    def _wait_for_latest(self) -> None:
        """A cancelled answer takes a step to end, and until then the session is busy."""
        while self._latest is not None and not self._latest.is_done:
            self._client._pump()
