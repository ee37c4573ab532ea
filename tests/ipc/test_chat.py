"""The `sparkle` command in pipes and in a terminal (a pty), against a scripted front daemon."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle.messages import Cancel, Chat, CloseSession, Error, Progress
from tests.fakes import FakeFront, Say

pytestmark = pytest.mark.ipc

SPARKLE = [sys.executable, "-c", "import sys; from sparkle.cli.chat import main; sys.exit(main())"]
WAIT_S = 20.0
PROMPT = "\x1b[?2004h"  # the line editor turns bracketed paste on when it takes keys


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("SPARKLE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture
def front(tmp_path: Path, environ: dict[str, str]) -> Iterator[FakeFront]:
    with FakeFront(tmp_path / "run", pieces=("Par", "is 巴黎", " 👩‍🚀")) as fake:
        yield fake


def sparkle(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*SPARKLE, *args], input=stdin, capture_output=True, timeout=WAIT_S, check=False)


# --- in a pipe ------------------------------------------------------------------------------------------------------


def test_one_question(front: FakeFront) -> None:
    done = sparkle("What", "is it?", "-n", "5", "--temperature", "0", "--seed", "7", "--system", "brief")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "Paris 巴黎 👩‍🚀\n", b"")
    chat = front.wait_for(Chat)
    assert [m["content"] for m in chat.messages] == ["brief", "What is it?"]
    assert (chat.max_tokens, chat.sampling.temperature, chat.sampling.seed) == (5, 0.0, 7)


def test_question_from_standard_input(front: FakeFront) -> None:
    assert sparkle(stdin="首都？\n".encode()).returncode == 0
    assert front.wait_for(Chat).messages[-1]["content"] == "首都？"


def test_question_and_standard_input_are_joined(front: FakeFront) -> None:
    assert sparkle("Summarise:", stdin=b"a\nb\n").returncode == 0
    assert front.wait_for(Chat).messages[-1]["content"] == "Summarise:\n\na\nb"


def test_stats_go_to_stderr(front: FakeFront) -> None:
    done = sparkle("q", "--stats")
    assert done.stdout.decode() == "Paris 巴黎 👩‍🚀\n"
    assert done.stderr.decode() == "3 tokens at 40.0 tok/s, first after 12 ms, prompt 7 (2 kept), seed 5, stop\n"


def test_a_named_session_goes_on(front: FakeFront) -> None:
    assert sparkle("one", "--session", "s1", "--system", "brief").returncode == 0
    assert sparkle("two", "--session", "s1", "--system", "brief").returncode == 0
    assert [m["role"] for m in front.sessions["s1"]] == ["system", "user", "assistant", "user", "assistant"]


def test_nothing_to_ask(front: FakeFront) -> None:
    done = sparkle()
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"nothing to ask" in done.stderr


def test_input_that_is_no_text(front: FakeFront) -> None:
    done = sparkle("q", stdin=b"\xff\xfe")
    assert (done.returncode, done.stdout) == (65, b"")
    assert done.stderr.startswith(b"sparkle: standard input is not UTF-8")


def test_no_daemon(environ: dict[str, str]) -> None:
    done = sparkle("q")
    assert (done.returncode, done.stdout) == (69, b"")
    assert done.stderr.startswith(b"sparkle: the front daemon is not running")
    assert done.stderr.endswith(b"honcho start\n")


def test_an_error_in_the_middle(front: FakeFront) -> None:
    def fail(message: Chat, say: Say) -> None:
        front.say_pieces(message, say)
        say(Error("unplaced_expert", "layer 3 expert 5", True, message.request_id))

    front.on[Chat] = fail
    done = sparkle("q")
    assert (done.returncode, done.stderr) == (75, b"sparkle: layer 3 expert 5\n")
    assert done.stdout.decode() == "Paris 巴黎 👩‍🚀\n"


def test_a_reader_that_leaves(front: FakeFront) -> None:
    """The process ends without a traceback, and the answer is cancelled."""
    front.on[Chat] = front.say_pieces
    with subprocess.Popen([*SPARKLE, "q"], stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        front.wait_for(Cancel)
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 1


# --- in a terminal --------------------------------------------------------------------------------------------------


# A new process takes the pty as its controlling terminal, so that Ctrl-C there becomes a signal.
IN_TERMINAL = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + SPARKLE[2]


class Terminal:
    """`sparkle` in a pty."""

    def __init__(self, *args: str, environ: dict[str, str]) -> None:
        self._fd, inside = pty.openpty()
        command = [sys.executable, "-c", IN_TERMINAL, *args]
        self._process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environ, start_new_session=True
        )
        os.close(inside)
        self.seen = ""
        self._mark = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` appears after what was expected last; return all between."""
        deadline = time.monotonic() + WAIT_S
        while (at := self.seen.find(text, self._mark)) < 0:
            left_s = deadline - time.monotonic()
            if left_s < 0 or not select.select([self._fd], [], [], left_s)[0]:
                raise AssertionError(f"no {text!r} in {self.seen[self._mark :]!r}")
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        between = self.seen[self._mark : at]
        self._mark = at + len(text)
        return between

    def exit_code(self) -> int:
        try:
            while os.read(self._fd, 65536):
                continue
        except OSError:  # the process has closed its side
            os.close(self._fd)
        return self._process.wait(WAIT_S)


def test_a_conversation(front: FakeFront, environ: dict[str, str]) -> None:
    terminal = Terminal("--system", "brief", environ=environ)
    terminal.expect("/help lists the commands")
    terminal.expect(PROMPT)
    terminal.type("Hello 世界\r")
    terminal.expect("Paris 巴黎 👩‍🚀\r\n")
    terminal.type("/stats\r")
    terminal.expect("3 tokens at 40.0 tok/s")
    terminal.type("/help\r")
    terminal.expect("/system TEXT")
    terminal.type("/nope\r")
    terminal.expect("No command /nope")
    terminal.type("/etc/hosts is what?\r")
    terminal.expect("Paris 巴黎 👩‍🚀\r\n")
    first, second = front.wait_for(Chat), front.wait_for(Chat, 2)
    assert [m["content"] for m in first.messages] == ["brief", "Hello 世界"]
    assert [m["content"] for m in second.messages] == ["/etc/hosts is what?"]
    assert first.session_id == second.session_id
    terminal.type("/system be kind\r")
    terminal.expect("new conversation")
    terminal.type("Hi\r")
    assert [m["content"] for m in front.wait_for(Chat, 3).messages] == ["be kind", "Hi"]
    terminal.type("/quit\r")
    assert terminal.exit_code() == 0
    assert front.wait_for(CloseSession, 2).session_id == first.session_id  # by /system, and by leaving
    assert "Hello 世界" in (Path(environ["XDG_STATE_HOME"]) / "sparkle" / "history").read_text(encoding="utf-8")


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(front: FakeFront, environ: dict[str, str]) -> None:
    def answer_slowly(message: Chat, say: Say) -> None:
        say(Progress(message.request_id, 512, 2048))
        front.say_pieces(message, say)
        say(Progress(message.request_id, 2048, 2048))  # a sign of life that must not reach the screen

    front.on[Chat] = answer_slowly
    terminal = Terminal(environ=environ)
    terminal.expect(PROMPT)
    terminal.type("q\r")
    terminal.expect("reading the prompt: 512 of 2048 tokens")
    terminal.expect("Paris 巴黎 👩‍🚀")
    terminal.type("\x03")
    assert "reading" not in terminal.expect("[cancelled]")
    terminal.expect(PROMPT)
    terminal.type("half a line\x03")
    terminal.expect(PROMPT)
    front.on[Chat] = front.chat
    terminal.type("again\r")
    terminal.expect("Paris 巴黎 👩‍🚀\r\n")
    assert front.wait_for(Chat, 2).messages[-1]["content"] == "again"
    terminal.expect(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_a_second_ctrl_c_leaves_an_answer_that_does_not_end(front: FakeFront, environ: dict[str, str]) -> None:
    front.on[Chat] = front.say_pieces
    del front.on[Cancel]
    terminal = Terminal("--session", "s1", environ=environ)
    terminal.expect(PROMPT)
    terminal.type("q\r")
    terminal.expect("Paris")
    terminal.type("\x03")
    front.wait_for(Cancel)
    terminal.type("\x03")
    terminal.expect("[left]")
    terminal.expect(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(front: FakeFront, environ: dict[str, str]) -> None:
    front.pieces = ("\x1b[2J", "\x07safe\r")
    terminal = Terminal("q", environ=environ)
    terminal.expect("\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}safe\N{REPLACEMENT CHARACTER}\r\n")
    assert terminal.exit_code() == 0


def test_errors_leave_the_chat_open(front: FakeFront, environ: dict[str, str]) -> None:
    front.on[Chat] = lambda message, say: say(Error("overloaded", "the queue is full", True, message.request_id))
    terminal = Terminal(environ=environ)
    terminal.expect(PROMPT)
    terminal.type("q\r")
    terminal.expect("sparkle: the queue is full")
    terminal.expect(PROMPT)
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
