"""The client's side of the protocol, without sockets: what both clients share.

Owns the state of the requests under way: what to send, what has arrived, when to give up. Reads frames and the time
that it is given. Never touches a socket and never waits, so that the blocking and the asyncio client are only pumps.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from sparkle import config, wire
from sparkle.errors import BadRequest, PeerError, ProtocolError, SparkleError, from_code
from sparkle.messages import (
    Cancel,
    Chat,
    ChatDone,
    CloseSession,
    Error,
    Hello,
    Message,
    Progress,
    Sampling,
    Session,
    SessionRequest,
    Text,
    Usage,
    Welcome,
)

REMEDY = "start the daemons with: honcho start"
PUMP_S = 0.1  # the longest a client waits on its socket before it looks at deadlines and cancellations

Prompt = str | Sequence[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """Keywords of `ask` and `stream`; the names from `temperature` on are the fields of `Sampling`."""

    max_tokens: int | None
    stop: Sequence[str]
    tools: Sequence[Mapping[str, Any]] | None
    on_progress: Callable[[Progress], None] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `reason` is "stop", "length" or "cancelled"; `seed` asked for again gives the same answer."""

    text: str
    reason: str
    usage: Usage
    seed: int

    def __str__(self) -> str:
        return self.text


class Request:
    """One request: the message that opens it, what has arrived for it, and how it ended."""

    def __init__(
        self, message: Chat | SessionRequest | CloseSession, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.message = message
        self.reply: Reply | None = None
        self.session: Session | None = None
        self.error: SparkleError | None = None
        self.is_abandoned = False  # nobody will read what still arrives
        self.wants_cancel = False  # set from any thread; `Requests.due` sends it
        self.is_cancel_sent = False
        self.heard_at = 0.0
        self.probed_at = 0.0
        self._on_progress = on_progress
        self._arrived: deque[str | Progress] = deque()
        self._text: list[str] = []
        self._n_chars = 0

    @property
    def is_done(self) -> bool:
        return self.reply is not None or self.session is not None or self.error is not None

    @property
    def has_news(self) -> bool:
        return bool(self._arrived) or self.is_done

    def take(self) -> str | None:
        """Return the next piece of the answer, or None if there is none yet or it has ended.

        Progress is reported from here, in the reader's own thread and task. Raises the error that ended the request.
        """
        while self._arrived:
            event = self._arrived.popleft()
            if isinstance(event, str):
                return event
            if self._on_progress is not None:
                self._on_progress(event)
        if self.error is not None:
            raise self.error
        return None

    def abandon(self) -> None:
        self.is_abandoned = self.wants_cancel = True
        self._arrived.clear()

    def receive(self, message: Message) -> None:
        match message:
            case Text():
                if message.index != self._n_chars:
                    raise ProtocolError(
                        f"a piece of the answer is missing: expected character {self._n_chars}, got {message.index}"
                    )
                self._n_chars += len(message.delta)
                self._text.append(message.delta)
                self._keep(message.delta)
            case Progress():
                self._keep(message)
            case ChatDone():
                self.reply = Reply("".join(self._text), message.reason, message.usage, message.seed)
            case Session():
                self.session = message
            case Error():
                self.error = from_code(message.code, message.message)

    def _keep(self, event: str | Progress) -> None:
        if not self.is_abandoned and event != "":
            self._arrived.append(event)


def chat_request(prompt: Prompt, system: str | None, session_id: str | None, **options: Unpack[Options]) -> Request:
    """Return the request for an answer to `prompt`: a text, or messages as chat templates take them."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(Options.__annotations__)}")
    sampling: dict[str, Any] = {f.name: options.get(f.name) for f in dataclasses.fields(Sampling)}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    tools = options.get("tools")
    chat = Chat(
        request_id=new_id(),
        messages=messages,
        session_id=session_id,
        tools=None if tools is None else [dict(t) for t in tools],
        max_tokens=options.get("max_tokens"),
        sampling=Sampling(**sampling),
        stop=list(options.get("stop") or ()),
    )
    return Request(chat, options.get("on_progress"))


def with_system(request: Request, system: str, history: Session) -> None:
    """Put the system text before a chat's messages if its session is new.

    Raises BadRequest if the session began with another.
    """
    if not history.messages:
        if not isinstance(request.message, Chat):
            raise TypeError("only a Chat has messages")
        messages = [{"role": "system", "content": system}, *request.message.messages]
        request.message = dataclasses.replace(request.message, messages=messages)
        return
    first = history.messages[0]
    if first.get("role") != "system" or first.get("content") != system:
        raise BadRequest(
            f"session '{history.session_id}' already began with another system text; reset it, or leave `system` out"
        )


def new_id() -> str:
    return os.urandom(8).hex()


class Requests:
    """All requests of one client over one connection to the front daemon.

    peer_is_there: True if a process listens at the daemon's socket; where: the socket, for error texts.
    """

    def __init__(self, peer_is_there: Callable[[], bool], where: str) -> None:
        self.welcome: Welcome | None = None
        self._peer_is_there = peer_is_there
        self._where = where
        self._open: dict[str, Request] = {}
        self._outbox: list[Message] = []
        self._greet_by: float | None = None  # deadline of the Welcome that is awaited
        self._refusal: SparkleError | None = None

    def hello(self, now: float) -> Message:
        """Return the Hello that starts every request.

        Its Welcome proves the daemon alive, and shows by its epoch whether it was restarted: then what was under way
        is lost.
        """
        if not self._peer_is_there():
            raise PeerError(f"the front daemon is not running (nobody listens at {self._where}); {REMEDY}")
        self._greet_by = now + config.HELLO_DEADLINE_S
        self._refusal = None
        return Hello("client", os.getpid())

    def is_greeted(self, now: float) -> bool:
        """True once the Welcome has come. Raises the daemon's refusal, or PeerError at the deadline."""
        if self._refusal is not None:
            raise self._refusal
        if self._greet_by is not None and now > self._greet_by:
            raise PeerError(
                f"the front daemon at {self._where} has not answered for {config.HELLO_DEADLINE_S:g} s; "
                "see: sparkle-ctl status"
            )
        return self._greet_by is None

    def open(self, request: Request, now: float) -> Message:
        """Register the request and return its message."""
        request.heard_at = request.probed_at = now
        self._open[request.message.request_id] = request
        return request.message

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Take in one message. Frames that are none end everything under way: nothing after them can be trusted."""
        try:
            message = wire.decode(frames)
        except ProtocolError as e:
            self._refuse(e)
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Error) and message.request_id is None:
            self._refuse(from_code(message.code, message.message))
        request = self._open.get(getattr(message, "request_id", None) or "")
        if request is None:
            return  # it is about a request that was given up
        request.heard_at = now
        try:
            request.receive(message)
        except ProtocolError as e:
            self._give_up(request, e)
        if request.is_done:
            self._open.pop(request.message.request_id, None)

    def due(self, now: float) -> list[Message]:
        """Return the messages that are due: cancellations, and a Hello where a request has been silent for a while.

        Gives up requests that have been silent too long, or whose daemon has gone.
        """
        for request in list(self._open.values()):
            if request.wants_cancel and not request.is_cancel_sent:
                self._cancel(request)
            if now - request.heard_at > config.REQUEST_SILENCE_S:
                silence = f"has said nothing about the request for {config.REQUEST_SILENCE_S:g} s"
                self._give_up(request, PeerError(f"the front daemon {silence}; see: sparkle-ctl status"))
            elif now - max(request.heard_at, request.probed_at) > config.LIVENESS_S:
                request.probed_at = now
                if self._peer_is_there():
                    self._outbox.append(Hello("client", os.getpid()))
                else:
                    self._give_up(request, PeerError(f"the front daemon has gone; {REMEDY}, and ask again"))
        outbox, self._outbox = self._outbox, []
        return outbox

    def last_words(self) -> list[Message]:
        """Return the cancellations of all that is under way: the client is about to close."""
        for request in self._open.values():
            self._cancel(request)
        return self._outbox

    def _cancel(self, request: Request) -> None:
        if isinstance(request.message, Chat) and not request.is_cancel_sent:
            request.is_cancel_sent = True
            self._outbox.append(Cancel(request.message.request_id))

    def _give_up(self, request: Request, error: SparkleError) -> None:
        request.error = error
        self._open.pop(request.message.request_id, None)
        self._cancel(request)

    def _welcome(self, message: Welcome) -> None:
        if self.welcome is not None and self.welcome.epoch != message.epoch:
            for request in list(self._open.values()):
                self._give_up(request, PeerError("the front daemon was restarted and the answer is lost; ask again"))
        self.welcome = message
        self._greet_by = None

    def _refuse(self, error: SparkleError) -> None:
        self._refusal = error
        for request in list(self._open.values()):
            self._give_up(request, error)


def frames_of(message: Message) -> list[bytes]:
    """Encode a message made from a caller's values. Raises BadRequest for what cannot travel."""
    try:
        return wire.encode(message)
    except (TypeError, ValueError, OverflowError) as e:  # not JSON-like, half a surrogate pair, too large an integer
        raise BadRequest(f"the request cannot be sent: {e}") from None
