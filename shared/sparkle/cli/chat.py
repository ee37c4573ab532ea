"""`sparkle`: talk to a running Sparkle, in a terminal or in a pipe.

Owns the terminal: line editing, the progress line, Ctrl-C. Reads arguments, standard input and keys; sends what
sparkle.Client sends. stdout carries the answer and nothing else; everything about it goes to stderr.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from sparkle import __version__
from sparkle.cli._exit import run
from sparkle.errors import BadRequest, SparkleError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from sparkle._requests import Options
    from sparkle.client import ChatSession, Client, Progress, Reply, Stream

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "forget the conversation and begin anew with this system text",
    "/stats": "figures of the last answer",
    "/exit, /quit": "leave (so does Ctrl-D)",
}
# Of what a model may write, a terminal must not obey: escape sequences, backspaces, carriage returns.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("question", nargs=-1)
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), help="Longest answer in tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy; default: the model's own.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Same seed, same answer.")
@click.option("--system", help="System text that opens the conversation.")
@click.option("--session", "session_id", help="Name of a conversation to begin or to go on with.")
@click.option("--stats", is_flag=True, help="Show tokens and speed after each answer.")
@click.option("--run-dir", help="Run directory of the daemons; default: the settings'.")
@click.version_option(__version__, prog_name="sparkle")
def command(
    question: tuple[str, ...],
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    system: str | None,
    session_id: str | None,
    stats: bool,
    run_dir: str | None,
) -> None:
    """Ask QUESTION and print the answer; without one, chat.

    Standard input is read if it is not a terminal, and follows the question:

    \b
        sparkle "What is the capital of France?"
        sparkle "Summarise:" < notes.txt
        git diff | sparkle "Write a commit message for:"

    Exit codes: 0 answered, 2 usage, 65 the request cannot be served, 69 no daemon, 75 try again later, 130 Ctrl-C.
    """
    from sparkle.client import Client

    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    text = _question(question)
    if text is None and not _stdin_is_terminal():
        raise click.UsageError("nothing to ask: no question, and standard input is empty")
    with Client(run_dir) as client:
        if text is None:
            _Chat(client, session_id, system, options, stats).run()
            return
        waiting = _Waiting()
        options["on_progress"] = waiting.show
        if session_id is None:
            stream = client.stream(text, system=system, **options)
        else:
            stream = client.session(session_id, system=system).stream(text, **options)
        reply = _print_answer(stream, waiting)
        if stats:
            _note(_stats(reply))


def main() -> int:
    return run(command, "sparkle")


def _question(words: tuple[str, ...]) -> str | None:
    """Return the words and standard input, joined; None if there is neither."""
    parts = [" ".join(words)]
    if sys.stdin is not None and not _stdin_is_terminal():
        try:
            parts.append(sys.stdin.buffer.read().decode())
        except UnicodeDecodeError as e:
            raise BadRequest(f"standard input is not UTF-8 text: {e}") from None
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) or None


def _stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None if it was closed: sparkle "…" <&-


class _Waiting:
    """The line on stderr that shows how far a prompt has been read, on a terminal; it ends when the answer begins."""

    def __init__(self) -> None:
        self._is_shown = False
        self._is_over = not sys.stderr.isatty()

    def show(self, progress: Progress) -> None:
        if self._is_over:  # the daemon goes on to say that it lives, and the cursor stands in the answer's text
            return
        if progress.queue_position:
            text = f"waiting: {progress.queue_position} before you"
        elif progress.total:
            text = f"reading the prompt: {progress.done} of {progress.total} tokens"
        else:
            text = "reading the prompt"
        print(f"\r\x1b[K\x1b[2m{text}\x1b[0m", end="", file=sys.stderr, flush=True)
        self._is_shown = True

    def end(self) -> None:
        self._is_over = True
        if self._is_shown:
            self._is_shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_answer(stream: Stream, waiting: _Waiting) -> Reply:
    """Print the pieces as they come, and end with a line break."""
    is_terminal = sys.stdout.isatty()
    last = ""
    try:
        for piece in stream:
            waiting.end()
            last = CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece) if is_terminal else piece
            sys.stdout.write(last)
            sys.stdout.flush()
    finally:
        waiting.end()
        if not last.endswith("\n") and (last or is_terminal):
            sys.stdout.write("\n")
            sys.stdout.flush()
    return stream.reply


def _stats(reply: Reply) -> str:
    usage = reply.usage
    return (
        f"{usage.output_tokens} tokens at {usage.decode_tps:.1f} tok/s, first after {usage.ttft_ms:.0f} ms, "
        f"prompt {usage.prompt_tokens} ({usage.cached_tokens} kept), seed {reply.seed}, {reply.reason}"
    )


def _note(text: str) -> None:
    """Print a line that is not part of an answer."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)


class _Chat:
    """The conversation in a terminal."""

    def __init__(
        self, client: Client, session_id: str | None, system: str | None, options: Options, stats: bool
    ) -> None:
        self._client = client
        self._is_named = session_id is not None
        self._chat: ChatSession = client.session(session_id, system=system)
        self._options = options
        self._shows_stats = stats
        self._last: Reply | None = None

    def run(self) -> None:
        """Take lines until the user leaves."""
        prompt = _prompt_session()
        _note(f"Sparkle {__version__}: /help lists the commands, Ctrl-D leaves.")
        state = self._client.state
        if state != "ready":
            _note(f"The front daemon is {state}; see: sparkle-ctl status")
        while True:
            try:
                line = prompt.prompt("> ").strip()
            except KeyboardInterrupt:  # the line is cleared
                continue
            except EOFError:
                break
            try:
                if not self._take(line):
                    break
            except SparkleError as e:
                print(f"sparkle: {e}", file=sys.stderr)
            except KeyboardInterrupt:  # of an answer, the second one: the daemon takes its time to end it
                _note("[left]")
        if not self._is_named:
            with contextlib.suppress(SparkleError):  # the daemon forgets it by itself, only later
                self._chat.reset()

    def _take(self, line: str) -> bool:
        """Act on a line; False if it means to leave. A first word such as /etc/hosts is no command."""
        word, _, rest = line.partition(" ")
        if not re.fullmatch(r"/[a-z]+", word):
            if line:
                self._answer(line)
            return True
        match word:
            case "/help":
                for usage, meaning in COMMANDS.items():
                    _note(f"  {usage:<14} {meaning}")
                _note("  Ctrl-C         ends an answer; at the prompt, clears the line")
            case "/reset":
                self._chat.reset()
                _note("The conversation is forgotten.")
            case "/system" if rest.strip():
                self._chat.reset()
                self._chat.system = rest.strip()
                _note("A new conversation begins with this system text.")
            case "/system":
                _note("/system needs a text.")
            case "/stats":
                _note(_stats(self._last) if self._last else "No answer yet.")
            case "/exit" | "/quit":
                return False
            case _:
                _note(f"No command {word}; /help lists them.")
        return True

    def _answer(self, line: str) -> None:
        waiting = _Waiting()
        options: Options = {**self._options, "on_progress": waiting.show}
        stream = self._chat.stream(line, **options)
        with _ctrl_c_cancels(stream):
            self._last = _print_answer(stream, waiting)
        if self._last.reason != "stop":
            _note(f"[{self._last.reason}]")
        if self._shows_stats:
            _note(_stats(self._last))


@contextlib.contextmanager
def _ctrl_c_cancels(stream: Stream) -> Iterator[None]:
    """Make the first Ctrl-C end the answer and a second one leave it."""
    n_signals = 0

    def on_sigint(_signum: int, _frame: object) -> None:
        nonlocal n_signals
        n_signals += 1
        if n_signals > 1:
            raise KeyboardInterrupt
        stream.cancel()

    previous = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _prompt_session() -> PromptSession[str]:
    """Return the line editor; its history is kept among the user's state files, or in memory if that cannot be."""
    import os
    from pathlib import Path

    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "sparkle" / "history"
    history: History
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(path)
    except OSError:
        history = InMemoryHistory()
    return PromptSession(history=history)
