"""`sparkle.AsyncClient`: the client for asyncio programs; several answers may stream at once.

    async with sparkle.AsyncClient() as client:
        print(await client.ask("What is the capital of France?"))
        async for piece in client.stream("Tell me a story", max_tokens=200):
            print(piece, end="", flush=True)

Owns, sends and promises what `sparkle.client` does; the two differ only in how they wait. Belongs to one event loop.
There is no task behind it: whichever stream waits takes in the messages for all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import zmq.asyncio

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
from sparkle.messages import CloseSession, Message, Session, SessionRequest
from sparkle.rundir import RunDir, is_listening

__all__ = ["AsyncChatSession", "AsyncClient", "AsyncStream"]


class AsyncClient:
    """A connection to the front daemon of the instance in `run_dir` (default: the settings').

    Make it inside a running loop. Entering it, or the first request, raises PeerError if no daemon answers.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        settings = config.load({"run_dir": None if run_dir is None else str(run_dir)})
        path = RunDir(settings.run_dir).socket("front")
        self._requests = Requests(lambda: is_listening(path), str(path))
        self._context = zmq.asyncio.Context()
        # wire.dealer is annotated for blocking sockets; a context makes sockets of its own kind
        self._socket: zmq.asyncio.Socket = cast(Any, wire.dealer)(self._context, path)
        self._pumping = asyncio.Lock()

    async def ask(self, prompt: Prompt, *, system: str | None = None, **options: Unpack[Options]) -> str:
        """Return the whole answer."""
        return (await self.stream(prompt, system=system, **options).read()).text

    def stream(self, prompt: Prompt, *, system: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Return an iterator over the pieces of the answer; the request is sent when the first is asked for."""
        return AsyncStream(self, chat_request(prompt, system, None, **options))

    def session(self, session_id: str | None = None, *, system: str | None = None) -> AsyncChatSession:
        """Return a conversation whose history the front daemon keeps; as Client.session."""
        return AsyncChatSession(self, session_id or new_id(), system)

    async def close(self) -> None:
        """Cancel what is under way and disconnect."""
        if not self._socket.closed:
            await self._send(*self._requests.last_words())
            self._socket.close()
            self._context.term()

    async def __aenter__(self) -> Self:
        try:
            await self._greet()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # --- for AsyncStream and AsyncChatSession -----------------------------------------------------------------------

    async def _open(self, request: Request) -> None:
        frames = frames_of(request.message)  # a request that cannot travel fails before anything is sent
        await self._greet()
        self._requests.open(request, time.monotonic())
        await self._socket.send_multipart(frames)

    async def _pump(self, request: Request | None = None) -> None:
        """Take in what arrives within PUMP_S, and send what is due; but not if `request` has news already."""
        async with self._pumping:
            if request is not None and request.has_news:  # another stream took it in while this one waited its turn
                return
            if await self._socket.poll(int(PUMP_S * 1000)):
                self._requests.receive(await self._socket.recv_multipart(), time.monotonic())
            await self._send(*self._requests.due(time.monotonic()))

    async def _send(self, *messages: Message) -> None:
        for message in messages:
            await self._socket.send_multipart(frames_of(message))

    async def _greet(self) -> None:
        await self._send(self._requests.hello(time.monotonic()))
        while not self._requests.is_greeted(time.monotonic()):
            await self._pump()

    async def _call(self, message: SessionRequest | CloseSession) -> Session:
        request = Request(message)
        await self._open(request)
        while request.session is None:
            await self._pump(request)
            request.take()  # raises the error if it ended with one
        return request.session


class AsyncStream:
    """The pieces of one answer. Iterate once; leaving the loop early cancels the answer."""

    def __init__(self, client: AsyncClient, request: Request, session: AsyncChatSession | None = None) -> None:
        self._client = client
        self._request = request
        self._session = session
        self._is_open = False

    async def __aiter__(self) -> AsyncIterator[str]:
        # A generator, and not `return self`: it is closed when a loop over it is left, which ends the answer too.
        try:
            while True:
                try:
                    piece = await anext(self)
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            await self.close()

    async def __anext__(self) -> str:
        if not self._is_open:
            await self._start()
        while (piece := self._request.take()) is None:
            if self._request.is_done:
                raise StopAsyncIteration
            await self._client._pump(self._request)
        return piece

    @property
    def reply(self) -> Reply:
        """The whole answer, once the stream has ended."""
        if self._request.reply is None:
            raise RuntimeError("the answer has not ended: read the stream to its end first")
        return self._request.reply

    async def read(self) -> Reply:
        """Wait for the end and return the whole answer."""
        async for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """Ask for the end; the stream still yields what arrives until then."""
        self._request.wants_cancel = True

    async def close(self) -> None:
        """Cancel at once and drop what still arrives. Without effect after the end."""
        if self._is_open and not self._request.is_done:
            self._request.abandon()
            await self._client._send(*self._client._requests.due(time.monotonic()))
        self._is_open = True  # a stream that was closed before its start never starts

    async def _start(self) -> None:
        self._is_open = True
        if self._session is not None:
            await self._session._before(self._request)
        await self._client._open(self._request)


class AsyncChatSession:
    """One conversation; its history lives in the front daemon under `session_id`."""

    def __init__(self, client: AsyncClient, session_id: str, system: str | None) -> None:
        self._client = client
        self.session_id = session_id
        self.system = system
        self._latest: Request | None = None

    async def ask(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        """Return the whole answer, with its usage and seed."""
        return await self.stream(prompt, **options).read()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Return an iterator over the pieces of the answer. A session answers one prompt after the other."""
        return AsyncStream(self._client, chat_request(prompt, None, self.session_id, **options), self)

    async def history(self) -> list[dict[str, Any]]:
        """Return the messages so far."""
        return (await self._client._call(SessionRequest(new_id(), self.session_id))).messages

    async def reset(self) -> None:
        """Forget the conversation."""
        await self._wait_for_latest()
        await self._client._call(CloseSession(new_id(), self.session_id))

    async def _before(self, request: Request) -> None:
        await self._wait_for_latest()
        if self.system is not None:
            history = await self._client._call(SessionRequest(new_id(), self.session_id))
            with_system(request, self.system, history)
        self._latest = request

    async def _wait_for_latest(self) -> None:
        """A cancelled answer takes a step to end, and until then the session is busy."""
        while self._latest is not None and not self._latest.is_done:
            await self._client._pump(self._latest)
