"""The front daemon's service: requests of clients on one side, the compute daemon on the other.

Owns the answers under way, by client and request id. An answer ends in exactly one way: `_finish` (ChatDone) or `_fail`
(Error), whichever comes first. It outlives a restart of compute: it is sent again with the tokens it has, and goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import Any

from sparkle import config, wire
from sparkle.errors import BadRequest, Cancelled, Overloaded, PeerError, SparkleError, from_code
from sparkle.lifecycle import Daemon, State
from sparkle.messages import (
    Accepted,
    Cancel,
    Chat,
    ChatDone,
    CloseSession,
    Error,
    Finished,
    Message,
    Progress,
    Session,
    SessionRequest,
    Text,
    Tokens,
    Usage,
)
from sparkle.store import Store
from sparkled.front import template, validate
from sparkled.front.answer import Answer
from sparkled.front.link import ABSENT, ComputeLink
from sparkled.front.sessions import Sessions
from sparkled.front.template import ChatTemplate
from sparkled.front.tokenizer import Tokenizer
from sparkled.front.worker import Worker

log = logging.getLogger(__name__)

TICK_S = 0.1
HEARTBEAT_S = 1.0  # a client hears of its answer at least this often, even while compute is away
CLIENT_S = 60.0  # a client counts for this long after its last message
JOIN_S = 2.0  # a shutdown waits this long for the worker's job; SHUTDOWN_S bounds the whole


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    store: Store
    tokenizer: Tokenizer
    template: ChatTemplate


class FrontDaemon(Daemon):
    """See the package's docstring."""

    role = "front"

    def __init__(self, settings: config.Settings) -> None:
        super().__init__(settings)
        self._model: _Model | None = None
        self._link = ComputeLink(self, self._on_compute, self._on_link_change)
        self._sessions = Sessions(settings.max_sessions)
        self._answers: dict[tuple[bytes, str], Answer] = {}
        self._by_wire_id: dict[str, Answer] = {}
        self._n_sent = 0
        self._heard: dict[bytes, float] = {}
        self._counters = dict.fromkeys(
            ("chats", "chats_finished", "chats_failed", "chats_cancelled", "bad_messages"), 0
        )
        self._worker = Worker(self.wake)

    def start(self) -> None:
        self.become(State.STARTING, "loading the tokenizer")
        self._worker.submit(functools.partial(_load, self.settings), self._on_loaded)
        self.every(TICK_S, self._tick)

    def metrics(self) -> dict[str, Any]:
        return {
            "n_clients": len(self._heard),
            "n_sessions": len(self._sessions),
            "n_busy": len(self._answers),
            **self._counters,
            "compute_state": self._link.state,
        }

    def on_wake(self) -> None:
        self._worker.deliver()

    def model_fingerprint(self) -> str | None:
        return self._model.store.fingerprint if self._model is not None else None

    def stop(self) -> None:
        for answer in list(self._answers.values()):
            self._abandon(answer, Cancelled("the front daemon was shut down; ask again when it is back"))
        self._link.close()
        self._worker.close(JOIN_S)

    # --- clients ---------------------------------------------------------------------------------------------------

    def on_chat(self, peer: bytes, message: Chat) -> None:
        if self._model is None or self.state is not State.READY:
            raise PeerError(f"the front daemon is not ready: {self.detail}; try again in a moment")
        if (peer, message.request_id) in self._answers:
            raise BadRequest(f"request_id: {message.request_id[:60]!r} is being answered already; use a new one")
        validate.check(message)
        messages = template.clean(message.messages)
        limit = self.settings.max_active + self.settings.max_queue
        if len(self._answers) >= limit:
            raise Overloaded(f"{limit} requests are under way (max_active + max_queue); try again later")
        if message.session_id is not None:
            messages = template.clean(self._sessions.begin(message.session_id)) + messages
        answer = Answer(peer, message, self._model.tokenizer.token_bytes)
        self._answers[answer.key] = answer
        self._counters["chats"] += 1
        job = functools.partial(self._model.template.encode, messages, message.tools)
        self._worker.submit(job, functools.partial(self._on_encoded, answer))

    def on_cancel(self, peer: bytes, message: Cancel) -> None:
        answer = self._answers.get((peer, message.request_id))
        if answer is not None:  # else the end of the answer crossed this message
            self._cancel(answer)

    def on_session_request(self, peer: bytes, message: SessionRequest) -> None:
        messages, is_busy = self._sessions.history(message.session_id)
        self.reply(peer, Session(message.request_id, message.session_id, messages, is_busy))

    def on_close_session(self, peer: bytes, message: CloseSession) -> None:
        self._sessions.close(message.session_id)
        self.reply(peer, Session(message.request_id, message.session_id, []))

    def on_peer_lost(self, peer: bytes) -> None:
        for answer in [a for a in self._answers.values() if a.peer == peer and not a.is_orphan]:
            log.info("client_lost peer=%s request=%r", peer.hex(), answer.chat.request_id)
            answer.is_orphan = True
            self._cancel(answer)

    def reply(self, peer: bytes, message: Message) -> bool:
        if isinstance(message, Error) and message.code == "protocol":
            self._counters["bad_messages"] += 1
        return super().reply(peer, message)

    def _dispatch(self, peer: bytes, frames: list[bytes]) -> None:
        self._heard[peer] = time.monotonic()
        super()._dispatch(peer, frames)

    # --- model and compute -----------------------------------------------------------------------------------------

    def _on_loaded(self, result: _Model | SparkleError) -> None:
        if isinstance(result, SparkleError):
            self.fail(result)
            return
        self._model = result
        log.info("loaded model=%s fingerprint=%s", result.store.name, result.store.fingerprint[:12])
        self._link.start(result.store.fingerprint)
        self._on_link_change()

    def _on_link_change(self) -> None:
        """Follow compute's state; send what a new incarnation of it has not got."""
        if self._model is None or self.state not in (State.STARTING, State.READY):
            return
        if not self._link.is_ready:
            self.become(State.STARTING, f"waiting: {self._link.describe()}")
            return
        self.become(State.READY, f"serving {self._model.store.name}")
        for answer in list(self._answers.values()):
            if answer.prompt_ids and answer.ending is None and answer.incarnation != self._link.incarnation:
                self._send(answer)

    def _on_encoded(self, answer: Answer, result: list[int] | SparkleError) -> None:
        if not self._is_open(answer):
            return  # cancelled meanwhile
        if isinstance(result, SparkleError):
            self._fail(answer, result)
            return
        answer.prompt_ids = result
        if self._link.is_ready:
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        """Start the answer with compute, or take it up again where it was."""
        if self._model is None:
            raise RuntimeError("sent before the model was loaded")
        self._by_wire_id.pop(answer.wire_id, None)
        self._n_sent += 1
        message = answer.generate(f"front-{self._n_sent}", self._link.incarnation, self._model.tokenizer.end_ids)
        log.debug(
            "generate request=%r id=%s prompt_tokens=%d resume_tokens=%d",
            *(answer.chat.request_id, message.request_id, len(message.token_ids), len(message.resume_tokens)),
        )
        try:
            self._link.send(message)
        except SparkleError as e:
            self._fail(answer, e)
            return
        self._by_wire_id[answer.wire_id] = answer

    def _on_compute(self, message: Message) -> None:
        answer = self._by_wire_id.get(getattr(message, "request_id", None) or "")
        if answer is None:
            if isinstance(message, Accepted | Progress | Tokens):  # it works for an answer that has ended here
                self._send_cancel(message.request_id)
            return
        answer.heard_at = time.monotonic()
        if isinstance(message, Finished):
            self._finish(answer, message.reason, message.usage)
        elif isinstance(message, Error) and answer.ending is None:
            self._fail(answer, from_code(message.code, message.message))
        elif isinstance(message, Error):
            self._finish(answer, answer.ending or "", None)
        elif answer.ending is None:
            self._relay(answer, message)

    def _relay(self, answer: Answer, message: Message) -> None:
        if isinstance(message, Accepted):
            if (accepted := answer.accept(message)) is not None:
                self._tell(answer, accepted)
        elif isinstance(message, Progress):
            self._tell(answer, answer.advance(message))
        elif isinstance(message, Tokens):
            try:
                index, text = answer.n_chars, answer.take(message)
            except PeerError as e:
                self._abandon(answer, e)
                return
            if answer.ending is not None:  # a stop string
                self._send_cancel(answer.wire_id)
            if text:
                self._tell(answer, Text(answer.chat.request_id, index, text))

    # --- ends of an answer -----------------------------------------------------------------------------------------

    def _cancel(self, answer: Answer) -> None:
        """End the answer because its client wants it to, or has gone; at once if compute cannot answer."""
        if answer.ending is None:
            answer.ending = "cancelled"
            self._counters["chats_cancelled"] += 1
            if answer.wire_id:
                self._send_cancel(answer.wire_id)
        self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        """Finish an answer that only waits for compute's Finished, if that will not come."""
        if answer.ending is not None and not (self._is_with_compute(answer) and self._link.is_answering):
            self._finish(answer, answer.ending, None)

    def _is_with_compute(self, answer: Answer) -> bool:
        """True if the answer was sent to the compute daemon that is there now."""
        return answer.incarnation == self._link.incarnation and self._link.state != ABSENT

    def _finish(self, answer: Answer, reason: str, usage: Usage | None) -> None:
        if not self._forget(answer):
            return
        index, rest = answer.n_chars, answer.flush()
        if rest:
            self._tell(answer, Text(answer.chat.request_id, index, rest))
        if answer.chat.session_id is not None:
            self._sessions.end(answer.chat.session_id, answer.turn())
        if answer.is_orphan:  # gone, or its stream has a hole: it must not take this for a whole answer
            self._close_with(answer, Cancelled("the client did not read fast enough and its stream was given up"))
            return
        self._counters["chats_finished"] += 1
        done = ChatDone(answer.chat.request_id, answer.ending or reason, answer.usage(usage), answer.seed or 0)
        self.reply(answer.peer, done)

    def _fail(self, answer: Answer, error: SparkleError) -> None:
        if not self._forget(answer):
            return
        log.warning("chat_failed request=%r code=%s", answer.chat.request_id, error.code)
        if answer.chat.session_id is not None:
            self._sessions.end(answer.chat.session_id)
        self._close_with(answer, error)

    def _abandon(self, answer: Answer, error: SparkleError) -> None:
        """Fail an answer that compute may still be working on."""
        if answer.wire_id:
            self._send_cancel(answer.wire_id)
        self._fail(answer, error)

    def _is_open(self, answer: Answer) -> bool:
        return self._answers.get(answer.key) is answer  # and not a later one whose client took the same id again

    def _forget(self, answer: Answer) -> bool:
        """Return False if the answer has ended already."""
        if not self._is_open(answer):
            return False
        self._by_wire_id.pop(answer.wire_id, None)
        del self._answers[answer.key]
        return True

    def _close_with(self, answer: Answer, error: SparkleError) -> None:
        self._counters["chats_failed"] += 1
        self.reply(answer.peer, wire.error_of(error, answer.chat.request_id))

    def _tell(self, answer: Answer, message: Message) -> None:
        answer.told_at = time.monotonic()
        if not answer.is_orphan and not self.reply(answer.peer, message):
            answer.is_orphan = True  # `on_peer_lost` has seen to the client's other answers

    def _send_cancel(self, wire_id: str) -> None:
        if not self._link.is_answering:
            return  # what it was working on is lost, or will be asked about by its next message
        try:
            self._link.send(Cancel(wire_id))
        except PeerError as e:
            log.warning("cancel_lost id=%s %s", wire_id, e)

    # --- time ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        self._link.tick()
        self._give_up_start(now)
        for answer in list(self._answers.values()):
            self._settle(answer)
            if self._is_open(answer):
                self._check_deadline(answer, now)
            if self._is_open(answer) and now - answer.told_at > HEARTBEAT_S:
                self._tell(answer, answer.progress)
        for peer in [p for p, heard_at in self._heard.items() if now - heard_at > CLIENT_S]:
            del self._heard[peer]

    def _check_deadline(self, answer: Answer, now: float) -> None:
        if not answer.prompt_ids:
            return
        is_with_compute = self._is_with_compute(answer)
        if is_with_compute and now - answer.heard_at > config.REQUEST_SILENCE_S:
            if answer.ending is not None:
                self._finish(answer, answer.ending, None)
                return
            silence = f"has said nothing about the request for {config.REQUEST_SILENCE_S:g} s"
            self._abandon(answer, PeerError(f"the compute daemon {silence}; see: sparkle-ctl status"))
        elif not is_with_compute and now - self._link.down_since > config.START_DEADLINE_S:
            gone = f"{self._link.describe()} and has not come back for {config.START_DEADLINE_S:g} s"
            self._fail(answer, PeerError(f"{gone}; see: sparkle-ctl status"))

    def _give_up_start(self, now: float) -> None:
        is_loaded, has_met = self._model is not None, self._link.incarnation > 0
        if is_loaded and not has_met and now - self._link.down_since > config.START_DEADLINE_S:
            awaited = f"no compute daemon has answered at {self.rundir.socket('compute')}"
            raise PeerError(f"{awaited} for {config.START_DEADLINE_S:g} s; start it with: honcho start")


def _load(settings: config.Settings) -> _Model:
    """Open the store and load its tokenizer. Runs in the worker's thread."""
    store = Store.open(settings.resolved_model())
    tokenizer = Tokenizer.load(store.path)
    return _Model(store, tokenizer, ChatTemplate(tokenizer))
