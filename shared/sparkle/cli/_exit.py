"""The edge of the command lines: every end of a command becomes one line on stderr and an exit code, here only."""

from __future__ import annotations

import io
import signal
import sys

import click

from sparkle.errors import SparkleError


def run(command: click.Command, name: str) -> int:
    """Run a command; return its exit code: 0, what it returned, or that of its error.

    A reader that has left (`sparkle … | head`) ends the process with 1 and without a word: click sees to that.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        result = command.main(prog_name=name, standalone_mode=False)
    except SparkleError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (KeyboardInterrupt, click.Abort):
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return result if isinstance(result, int) else 0
