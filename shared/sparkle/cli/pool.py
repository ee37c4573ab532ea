"""`sparkle-ctl pool`, `pin` and `unpin`: change the pool of a running prefetch daemon.

Owns the commands and their words. The daemon decides what fits. A crash of it ends pins, not the pool and its size;
after an orderly end the settings count again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from sparkle import config
from sparkle.cli.ctl import run_dir_option
from sparkle.errors import ConfigError

if TYPE_CHECKING:
    from sparkle.rundir import RunDir

MAX_EXPERTS = 1 << 16  # of one layer; far above any model's, it keeps a mistyped range from filling memory

layer_argument = click.argument("layer", type=click.IntRange(min=0))
experts_argument = click.argument("experts", nargs=-1, required=True, metavar="EXPERT...")


@click.group()
def pool() -> None:
    """Change the pool of experts."""


@pool.command()
@click.argument("size")
@run_dir_option
@click.pass_context
def resize(ctx: click.Context, size: str) -> None:
    """Make the pool SIZE large: 24GB, 512MiB, or a share of the experts such as 25%.

    Requests go on meanwhile. The size holds until the daemon is stopped, also over
    its crashes; SPARKLE_POOL makes it last.
    """
    from sparkle._requests import new_id
    from sparkle.cli._ask import ask
    from sparkle.cli.status_view import format_bytes
    from sparkle.messages import PoolState, ResizePool

    try:
        config.pool_text(size.strip())
    except ValueError as e:
        raise ConfigError(f"a pool of {size!r}: expected {e}") from None
    # the daemon answers by the first deadline, done or not
    deadline_s = config.RESIZE_DEADLINE_S + config.HELLO_DEADLINE_S
    state = ask(_rundir(ctx), "prefetch", ResizePool(new_id(), size), deadline_s, PoolState)
    click.echo(f"pool: {format_bytes(state.pool_bytes)}, {state.n_slots:,} slots")
    if state.detail:
        click.echo(f"note: {state.detail}")


@click.command()
@layer_argument
@experts_argument
@run_dir_option
@click.pass_context
def pin(ctx: click.Context, layer: int, experts: Sequence[str]) -> None:
    """Keep experts of LAYER in the pool, whatever its policy says.

    An EXPERT is its number or a range of numbers: sparkle-ctl pin 3 0 5 16-31. Experts that are not in the pool are
    read. If not all may be pinned, the first of them are. Pins hold until the daemon ends.
    """
    _set_pinned(ctx, layer, experts, True)


@click.command()
@layer_argument
@experts_argument
@run_dir_option
@click.pass_context
def unpin(ctx: click.Context, layer: int, experts: Sequence[str]) -> None:
    """Leave experts of LAYER to the pool's policy again.

    An EXPERT is its number or a range of numbers: sparkle-ctl unpin 3 0 5 16-31.
    """
    _set_pinned(ctx, layer, experts, False)


def _set_pinned(ctx: click.Context, layer: int, texts: Sequence[str], is_pinned: bool) -> None:
    from sparkle._requests import new_id
    from sparkle.cli._ask import ask
    from sparkle.messages import PinExperts, PinState

    message = PinExperts(new_id(), layer, _experts(texts), is_pinned)
    state = ask(_rundir(ctx), "prefetch", message, config.HELLO_DEADLINE_S, PinState)
    n_asked, n_pinned, n_absent = len(message.experts), state.n_asked_pinned, state.n_asked_absent
    if is_pinned:
        waiting = f", {n_absent:,} of these still to be read" if n_absent else ", all in the pool"
        click.echo(f"pinned: {n_pinned:,} of the {n_asked:,} asked for{waiting if n_pinned else ''}")
    click.echo(f"in all: {state.n_pinned:,} of at most {state.n_pinnable:,} experts")
    if is_pinned and n_pinned < n_asked:
        click.echo(f"note: no more may be pinned, {n_asked - n_pinned:,} are not; enlarge the pool or unpin others")


def _experts(texts: Sequence[str]) -> list[int]:
    """Return each expert once, in the order given. Raises ConfigError for what is neither number nor range."""
    found: dict[int, None] = {}
    for text in texts:
        m = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
        first, last = (int(m[1]), int(m[2] or m[1])) if m else (0, -1)
        if not first <= last < MAX_EXPERTS:
            raise ConfigError(f"expert {text!r}: expected a number such as 5 or a range such as 16-31")
        found.update(dict.fromkeys(range(first, last + 1)))
    return list(found)


def _rundir(ctx: click.Context) -> RunDir:
    from sparkle.rundir import RunDir

    return RunDir(config.load(ctx.obj).run_dir)
