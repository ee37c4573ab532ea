"""`sparkle-ctl trace`: record which experts are used, look at recordings, and judge eviction policies by them.

Owns the commands. The prefetch daemon records; the rest only reads trace files, and needs no daemon.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sparkle import config
from sparkle.cli.ctl import run_dir_option
from sparkle.errors import SparkleError

if TYPE_CHECKING:
    from rich.console import Console

    from sparkle.messages import Message

    Answer = TypeVar("Answer", bound=Message)

CAPACITIES = "12.5%,25%,50%"
PLOTTED_CAPACITIES = "6.25%,12.5%,18.75%,25%,37.5%,50%,75%"  # three points make no curve

files_argument = click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")


@click.group()
def trace() -> None:
    """Record which experts are used, and judge eviction policies by that.

    A trace has the ids of the tokens that were generated: whoever can read it can read the answers. Its file can be
    read by its owner only.
    """


@trace.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@run_dir_option
@click.pass_context
def start(ctx: click.Context, file: Path | None) -> None:
    """Record into FILE, a new one; default: MODEL-DATE-TIME.trace in the current folder."""
    from sparkle._requests import new_id
    from sparkle.messages import StartTrace, Status, StatusRequest, TraceState

    if file is None:
        model = _ask(ctx, StatusRequest(), Status).metrics.get("model_name")
        name = re.sub(r"[^\w.-]", "_", str(model or "model"))
        file = Path(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.trace")
    state = _ask(ctx, StartTrace(new_id(), str(file.absolute())), TraceState)
    click.echo(f"{state.path}: recording; it ends with: sparkle-ctl trace stop")


@trace.command()
@run_dir_option
@click.pass_context
def stop(ctx: click.Context) -> None:
    """End the recording."""
    from sparkle._requests import new_id
    from sparkle.cli.trace_view import count_steps
    from sparkle.messages import StopTrace, TraceState
    from sparkle.progress import size
    from sparkle.trace import read_trace

    state = _ask(ctx, StopTrace(new_id()), TraceState)
    try:
        counted = count_steps(read_trace(Path(state.path)).events)
        tokens = f"{counted.n_tokens:,} tokens"
    except SparkleError as e:
        tokens = f"but: {e}"
    click.echo(f"{state.path}: {state.n_events:,} events, {size(state.n_bytes)}, {tokens}")


@trace.command()
@files_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(files: Sequence[Path], as_json: bool) -> None:
    """Show what is in trace FILEs: tokens, experts, and how concentrated their use is."""
    from sparkle.cli.trace_view import facts_of, screen
    from sparkle.trace import read_trace

    facts = []
    with _progress() as say:
        for file in files:
            say(f"reading {file}")
            facts.append(facts_of(read_trace(file)))
    if as_json:
        click.echo(json.dumps({"traces": facts}, indent=2))
        return
    for i, x in enumerate(facts):
        _console().print(*(["\n"] if i else []), screen(x), sep="")


def _parse_capacities(text: str) -> list[float]:
    found = [re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", part) for part in text.split(",")]
    shares = [float(m[1]) / 100 for m in found if m]
    if len(shares) < len(found) or not all(0 < share <= 1 for share in shares):
        raise click.BadParameter(f"{text!r}: expected percentages of the experts, such as {CAPACITIES}")
    return sorted(set(shares))


def _capacities(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[float] | None:
    return None if text is None else _parse_capacities(text)


def _policies(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[str]:
    from sparkle.policy import POLICIES

    names = list(POLICIES) if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in POLICIES]:
        raise click.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(POLICIES)}, with commas between")
    return list(dict.fromkeys(names))


@trace.command()
@files_argument
@click.option(
    "--capacity",
    "capacities",
    callback=_capacities,
    metavar="SHARES",
    help=f"Sizes of the pool, in shares of the experts; default {CAPACITIES}, and more for a plot.",
)
@click.option("--policy", "policies", callback=_policies, metavar="NAMES", help="Eviction policies; default: all.")
@click.option(
    "--warm",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A trace that each policy runs over first, and is not scored on; without it the pool is empty at first.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw miss rates by size: .svg, .png or .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    files: Sequence[Path],
    capacities: list[float] | None,
    policies: list[str],
    warm: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Score eviction policies on trace FILEs, one after the other with the pool kept, beside the best there can be.

    That is Belady's policy, which knows the future; with bypass, it may also read an expert without keeping it. R_B is
    what a policy reads over what Belady's reads; the gap is what it saves of the misses that LRU has beyond Belady's.
    """
    from sparkle.cli.trace_replay import facts_of, screen
    from sparkle.trace import read_trace

    if plot is not None:
        from sparkle.cli.trace_plot import check_plot, draw

        check_plot(plot)
    if capacities is None:
        capacities = _parse_capacities(CAPACITIES if plot is None else PLOTTED_CAPACITIES)
    with _progress() as say:
        say("reading the traces")
        traces, before = [read_trace(file) for file in files], [read_trace(file) for file in [warm] if file]
        facts = facts_of(traces, before, policies, capacities, say)
    if plot is not None:
        draw(plot, facts)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _console().print(screen(facts))


# --- daemon and terminal --------------------------------------------------------------------------------------------


def _ask(ctx: click.Context, message: Message, answer: type[Answer]) -> Answer:
    from sparkle.cli._ask import ask
    from sparkle.rundir import RunDir

    rundir = RunDir(config.load(ctx.obj).run_dir)
    return ask(rundir, "prefetch", message, config.HELLO_DEADLINE_S, answer)


def _console(**options: Any) -> Console:
    from rich.console import Console

    from sparkle.cli.status_view import WIDTH

    console = Console(highlight=False, **options)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Say on a terminal's stderr what is being done; elsewhere nothing."""
    console = _console(stderr=True)
    with console.status("") as status:
        yield status.update
