"""Every message that travels between Sparkle's processes, grouped by receiver; nothing else.

A message is a frozen dataclass; its class name is its kind on the wire. `sparkle.wire` turns it into frames and back
and checks every field against its annotation. Adding a field with a default is compatible; any other change bumps
`PROTOCOL`. Requests are verbs, replies and events are facts. Bulk bytes never travel in messages.

`request_id` is chosen by whoever sends the request, unique per sender; every reply carries it back. Every `Chat` and
`Generate` ends in exactly one `ChatDone`/`Finished` or `Error`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages."""


# --- any daemon -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message of a peer. `model` is the store fingerprint the sender expects, or None if it does not care."""

    role: str
    pid: int
    protocol: int = PROTOCOL
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answer to Hello. `state` is one of sparkle.lifecycle.State; `epoch` changes whenever the daemon starts again."""

    role: str
    pid: int
    protocol: int
    state: str
    epoch: int
    model: str | None = None


@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    """Ask any daemon how it is; answered in every state."""


@dataclass(frozen=True, slots=True)
class Status(Message):
    """`metrics` holds the values declared in sparkle.telemetry; `detail` is one human line (reason of a state)."""

    role: str
    pid: int
    state: str
    detail: str
    uptime_s: float
    rss_bytes: int
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Keep-alive of a quiet peer; any traffic counts as life."""


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answer to Ping."""


@dataclass(frozen=True, slots=True)
class Error(Message):
    """End of a request that could not be served, or the reply to an unknown or malformed message.

    `code` is that of a class in sparkle.errors; `request_id` is None if the message named none.
    """

    code: str
    message: str
    retryable: bool = False
    request_id: str | None = None


# --- prefetch daemon --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttachPool(Message):
    """Become a pool client. `incarnation` names the lock file in the run directory that the sender holds locked.

    `layers` are the store layers that this client will ask for: only those are filled in the background.
    """

    incarnation: str
    pid: int
    layers: list[int]


@dataclass(frozen=True, slots=True)
class PoolAttached(Message):
    """`segment` is the shared-memory name of the pool's control segment, `bit` the client's bit in slot masks and its
    event ring, `epoch` the prefetch daemon's epoch."""

    incarnation: str
    segment: str
    bit: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DetachPool(Message):
    """The client has closed its mappings; its bit and ring may be given to another."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class FetchExperts(Message):
    """Place the whole set `experts` of store layer `layer`, and grant each slot to the client `bit`.

    `ring_position`: words the client had written to its event ring; prefetch drains to it before choosing victims.
    Sending it again with the same request_id (after a reconnect) is harmless. `deadline_ms` from receipt.
    """

    request_id: str
    incarnation: str
    bit: int
    layer: int
    experts: list[int]
    ring_position: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class ExpertsReady(Message):
    """All experts of a FetchExperts are in `slots` (same order), each marked as in use by the client."""

    request_id: str
    slots: list[int]


@dataclass(frozen=True, slots=True)
class CancelFetch(Message):
    """The client no longer waits. A grant that crosses this message is released by the client when it arrives."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HintExperts(Message):
    """Advice, never answered: the client expects to need `experts` of `layer` soon, the likeliest first.

    `predictor` names who says so; what comes of it is counted under that name.
    """

    incarnation: str
    layer: int
    experts: list[int]
    predictor: str


@dataclass(frozen=True, slots=True)
class PinExperts(Message):
    """Keep `experts` of `layer` in the pool whatever happens, or (`is_pinned` false) no longer; gives PinState."""

    request_id: str
    layer: int
    experts: list[int]
    is_pinned: bool = True


@dataclass(frozen=True, slots=True)
class PinState(Message):
    """Experts pinned now, and how many may be: the rest must hold a step's experts and the reads under way.

    Of the experts asked about, `n_asked_pinned` are pinned now; `n_asked_absent` of these have yet to be read.
    """

    request_id: str
    n_pinned: int
    n_pinnable: int
    n_asked_pinned: int = 0
    n_asked_absent: int = 0


@dataclass(frozen=True, slots=True)
class ResizePool(Message):
    """Make the pool `size` large: bytes as settings take them, or a share such as 50%; answered by PoolState."""

    request_id: str
    size: str


@dataclass(frozen=True, slots=True)
class PoolState(Message):
    """What the pool is now, in bytes and slots of all layout classes; `detail` says what was clamped, if anything."""

    request_id: str
    pool_bytes: int
    n_slots: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StartTrace(Message):
    """Record routing to a new file at `path`, absolute; answered by TraceState."""

    request_id: str
    path: str


@dataclass(frozen=True, slots=True)
class StopTrace(Message):
    """End the recording; answered by TraceState."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TraceState(Message):
    """The recording under way, or the one just ended."""

    request_id: str
    path: str
    is_recording: bool
    n_events: int
    n_bytes: int


# --- compute daemon ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling(Message):
    """How tokens are chosen; None means the model's generation_config, and where that is silent the neutral value.

    temperature 0 is greedy. Filters run in this order: penalties, logit_bias, temperature, top_k, top_p, min_p.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generate(Message):
    """Continue `token_ids`. `resume_tokens` are output tokens already delivered: they are replayed, not sent again, and
    count as output for `max_tokens`, penalties and the index. `max_tokens` None = up to the context's end."""

    request_id: str
    token_ids: list[int]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: list[int] = field(default_factory=list)
    resume_tokens: list[int] = field(default_factory=list)
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The request is queued; `seed` is the one in force, drawn if none came; queue_position 0 = running."""

    request_id: str
    seed: int
    queue_position: int


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """At least one a second while a prompt is prefilled or a request waits: `done` of `total` prompt tokens."""

    request_id: str
    done: int
    total: int
    queue_position: int = 0


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Output tokens; `index` is the place of ids[0] in the output (0 is the first output token)."""

    request_id: str
    index: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Usage(Message):
    """Counts and times of one request; output_tokens counts what was returned, stop tokens excluded."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    decode_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """reason: "stop" (a stop id), "length" (max_tokens or context) or "cancelled"."""

    request_id: str
    reason: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """End a request (Chat or Generate) within one step; it still ends with ChatDone or Finished."""

    request_id: str


# --- front daemon -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chat(Message):
    """Answer a conversation. Messages are maps with `role` and `content` as chat templates take them.

    With `session_id`, `messages` are appended to that session's history (created if absent) and the answer joins it;
    without, they are the whole conversation. `stop` are strings that end the answer and are not part of it.
    """

    request_id: str
    messages: list[dict[str, Any]]
    session_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Text(Message):
    """A piece of the answer; `index` is the number of answer characters sent before it. Never splits a character."""

    request_id: str
    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ChatDone(Message):
    """reason as in Finished; usage as counted by compute; `seed` replays the answer."""

    request_id: str
    reason: str
    usage: Usage
    seed: int


@dataclass(frozen=True, slots=True)
class SessionRequest(Message):
    """Ask for a session's history."""

    request_id: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Session(Message):
    """A session's messages so far; empty if it is unknown. `is_busy`: an answer is being generated."""

    request_id: str
    session_id: str
    messages: list[dict[str, Any]]
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class CloseSession(Message):
    """Forget a session; answered with Session (empty)."""

    request_id: str
    session_id: str


def _leaves(cls: type[Message]) -> list[type[Message]]:
    return [leaf for sub in cls.__subclasses__() for leaf in [sub, *_leaves(sub)]]


KINDS: dict[str, type[Message]] = {cls.__name__: cls for cls in _leaves(Message)}
