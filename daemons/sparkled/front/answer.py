"""One answer under way, from an accepted Chat to its end.

Owns what has been generated (ids and text), what the client has been told, and how far the request got with compute.
Never sends: `service` does, with what this returns.
"""

from __future__ import annotations

import bisect
import dataclasses
import time

from sparkle.errors import PeerError
from sparkle.messages import Accepted, Chat, Generate, Progress, Tokens, Usage
from sparkled.front.detokenizer import Detokenizer, TokenBytes
from sparkled.front.sessions import ChatMessage
from sparkled.front.stops import StopStrings


class Answer:
    """State of one Chat. `ending`: the reason with which it will end, once Cancel has been sent for it."""

    def __init__(self, peer: bytes, chat: Chat, token_bytes: TokenBytes) -> None:
        now = time.monotonic()
        self.peer = peer
        self.chat = chat
        self.prompt_ids: list[int] = []  # empty until encoded
        self.output_ids: list[int] = []
        self.seed: int | None = chat.sampling.seed
        self.is_accepted = False
        self.ending: str | None = None
        self.is_orphan = False  # its client went away, or does not read
        self.wire_id = ""  # its id with compute; a new one each time that it is sent
        self.incarnation = 0  # of compute, which it was last sent to
        self.heard_at = now  # last message of compute about it
        self.told_at = now  # last message to the client about it
        self.n_chars = 0
        self._progress = Progress(chat.request_id, 0, 0)
        self._pieces: list[str] = []
        self._starts: list[int] = []  # per output token, the number of characters before it
        self._n_decoded = 0
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(chat.stop)

    @property
    def key(self) -> tuple[bytes, str]:
        return self.peer, self.chat.request_id

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def progress(self) -> Progress:
        return dataclasses.replace(self._progress, total=len(self.prompt_ids))

    def generate(self, wire_id: str, incarnation: int, stop_ids: tuple[int, ...]) -> Generate:
        """Return the message that starts the answer, or takes it up where it was, at compute's `incarnation`."""
        self.wire_id, self.incarnation = wire_id, incarnation
        self.heard_at = time.monotonic()
        return Generate(
            request_id=wire_id,
            token_ids=self.prompt_ids,
            max_tokens=self.chat.max_tokens,
            sampling=dataclasses.replace(self.chat.sampling, seed=self.seed),
            stop_ids=list(stop_ids),
            resume_tokens=list(self.output_ids),
            session_id=self.chat.session_id or "",
        )

    def accept(self, message: Accepted) -> Accepted | None:
        """Take in the seed; return what the client is told, which is nothing if it was accepted before a restart."""
        self.seed = message.seed
        if self.is_accepted:
            return None
        self.is_accepted = True
        return dataclasses.replace(message, request_id=self.chat.request_id)

    def advance(self, message: Progress) -> Progress:
        self._progress = dataclasses.replace(message, request_id=self.chat.request_id)
        return self._progress

    def take(self, message: Tokens) -> str:
        """Take in output tokens and return the text that they release; a stop string in it sets `ending`.

        Raises PeerError if tokens before these are missing.
        """
        n_known = len(self.output_ids) - message.index
        if n_known < 0:
            raise PeerError(f"tokens are missing: expected number {len(self.output_ids)}, got {message.index}")
        released = ""
        for token_id in message.ids[n_known:]:
            self.output_ids.append(token_id)
            self._starts.append(self._n_decoded)
            released += self._feed(self._detokenizer.add(token_id))
            if self._stops.is_hit:
                self.ending = "stop"
                break
        return self._release(released)

    def flush(self) -> str:
        """Return what was held back; nothing more is generated. The rest of a character may complete a stop string."""
        if self._stops.is_hit:
            return ""
        rest = self._feed(self._detokenizer.flush())
        if self._stops.is_hit:
            self.ending = "stop"
        return self._release(rest + self._stops.flush())

    def usage(self, counted: Usage | None) -> Usage:
        """Return the usage, counting the tokens whose text was returned. counted: by compute; None if it has gone."""
        n_output = len(self.output_ids)
        if self._stops.is_hit:
            n_output = bisect.bisect_left(self._starts, self.n_chars)
        counted = counted or Usage(prompt_tokens=len(self.prompt_ids), output_tokens=n_output)
        return dataclasses.replace(counted, output_tokens=n_output)

    def turn(self) -> list[ChatMessage]:
        """Return what joins the session: what was asked, and the answer as it was sent."""
        return [*self.chat.messages, {"role": "assistant", "content": self.text}]

    def _feed(self, text: str) -> str:
        self._n_decoded += len(text)
        return self._stops.feed(text)

    def _release(self, text: str) -> str:
        if text:
            self._pieces.append(text)
            self.n_chars += len(text)
        return text
