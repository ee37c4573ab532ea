"""Sessions: histories, one answer at a time, and which is forgotten."""

from __future__ import annotations

import pytest

from sparkle.errors import Overloaded, SessionError
from sparkled.front.sessions import ChatMessage, Sessions

pytestmark = pytest.mark.unit

ASK: ChatMessage = {"role": "user", "content": "hi"}
TELL: ChatMessage = {"role": "assistant", "content": "hello"}


def test_a_session_remembers_its_turns() -> None:
    sessions = Sessions(4)
    assert sessions.begin("a") == []
    sessions.end("a", [ASK, TELL])
    assert sessions.begin("a") == [ASK, TELL]
    sessions.end("a", [ASK, TELL])
    assert sessions.history("a") == ([ASK, TELL, ASK, TELL], False)


def test_sessions_do_not_mix() -> None:
    sessions = Sessions(4)
    for name in "ab":
        sessions.begin(name)
    sessions.end("a", [{"role": "user", "content": "secret of a"}])
    sessions.end("b", [{"role": "user", "content": "secret of b"}])
    assert sessions.history("a")[0][0]["content"] == "secret of a"
    assert sessions.history("b")[0][0]["content"] == "secret of b"


def test_a_busy_session_takes_no_second_request() -> None:
    sessions = Sessions(4)
    sessions.begin("a")
    assert sessions.history("a") == ([], True)
    with pytest.raises(SessionError, match="'a' is being answered"):
        sessions.begin("a")
    with pytest.raises(SessionError, match="cancel that answer"):
        sessions.close("a")
    sessions.end("a", [ASK])
    assert sessions.begin("a") == [ASK]


def test_a_failed_turn_leaves_no_trace() -> None:
    sessions = Sessions(4)
    sessions.begin("a")
    sessions.end("a")
    assert len(sessions) == 0
    sessions.begin("a")
    sessions.end("a", [ASK, TELL])
    sessions.begin("a")
    sessions.end("a")
    assert sessions.history("a") == ([ASK, TELL], False)


def test_the_one_unused_for_longest_is_forgotten() -> None:
    sessions = Sessions(2)
    for name in ("a", "b"):
        sessions.begin(name)
        sessions.end(name, [ASK])
    sessions.history("a")  # reading is use
    sessions.begin("c")
    sessions.end("c", [ASK])
    assert len(sessions) == 2
    assert sessions.history("b") == ([], False)
    assert sessions.history("a")[0] == [ASK]


def test_a_busy_session_is_never_forgotten() -> None:
    sessions = Sessions(2)
    sessions.begin("a")
    sessions.begin("b")
    with pytest.raises(Overloaded, match="all 2 sessions"):
        sessions.begin("c")
    sessions.end("b", [ASK])
    sessions.begin("c")
    sessions.end("a", [ASK])
    assert sessions.history("a") == ([ASK], False)
    assert sessions.history("b") == ([], False)


def test_closing_forgets() -> None:
    sessions = Sessions(2)
    sessions.begin("a")
    sessions.end("a", [ASK])
    sessions.close("a")
    sessions.close("never seen")
    assert sessions.history("a") == ([], False)
    assert len(sessions) == 0


def test_what_is_handed_out_is_a_copy() -> None:
    sessions = Sessions(2)
    sessions.begin("a").append(TELL)
    sessions.end("a", [ASK])
    sessions.history("a")[0].append(TELL)
    assert sessions.history("a")[0] == [ASK]
