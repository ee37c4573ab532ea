"""Conversations kept by id, so that a client sends only what is new.

Owns the histories: bounded in number, the one unused for longest is forgotten first, never one that is being answered.
A session belongs to no client: any may continue it, one answer at a time. Histories hold messages as clients sent them,
which keeps them sendable; what a chat template wants is made from them anew for each prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkle.errors import Overloaded, SessionError

ChatMessage = dict[str, Any]


@dataclass(slots=True)
class _Session:
    messages: list[ChatMessage] = field(default_factory=list)
    is_busy: bool = False


class Sessions:
    """All sessions of the daemon, least recently used first."""

    def __init__(self, max_sessions: int) -> None:
        self._max = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, session_id: str) -> list[ChatMessage]:
        """Mark the session busy, creating it if absent, and return its history.

        Raises SessionError if an answer is being generated there, Overloaded if every place is taken by such a session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            self._make_room()
            session = self._sessions[session_id] = _Session()
        if session.is_busy:
            raise SessionError(f"session {session_id!r} is being answered; wait for that answer's end, or cancel it")
        session.is_busy = True
        self._sessions.move_to_end(session_id)
        return list(session.messages)

    def end(self, session_id: str, turn: Sequence[ChatMessage] = ()) -> None:
        """Mark the session free and append `turn`: what was asked, and the answer. Without one, all is as before."""
        session = self._sessions[session_id]  # INVARIANT: a busy session is neither forgotten nor closed
        session.is_busy = False
        session.messages.extend(turn)
        if not session.messages:
            del self._sessions[session_id]

    def history(self, session_id: str) -> tuple[list[ChatMessage], bool]:
        """Return the messages so far and whether the session is busy; empty and False if it is unknown."""
        session = self._sessions.get(session_id)
        if session is None:
            return [], False
        self._sessions.move_to_end(session_id)
        return list(session.messages), session.is_busy

    def close(self, session_id: str) -> None:
        """Forget the session. Raises SessionError if it is being answered."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.is_busy:
            raise SessionError(f"session {session_id!r} is being answered; cancel that answer before closing it")
        del self._sessions[session_id]

    def _make_room(self) -> None:
        if len(self._sessions) < self._max:
            return
        oldest = next((key for key, session in self._sessions.items() if not session.is_busy), None)
        if oldest is None:
            raise Overloaded(f"all {self._max} sessions are being answered; try again later, or raise max_sessions")
        del self._sessions[oldest]
