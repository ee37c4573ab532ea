"""`sparkle-ctl`: look at a running Sparkle, its settings and its models.

Owns the commands and their options; what they do lives in a module of its own each, imported when the command runs, so
that `sparkle-ctl status` answers within a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import click

from sparkle import __version__, config
from sparkle.cli._exit import run

if TYPE_CHECKING:
    from rich.console import Console

    from sparkle.cli.status import DaemonStatus
    from sparkle.rundir import RunDir

NOT_READY = 3  # exit code of `status` unless every daemon is ready
MAX_WIDTH = 100  # longer lines are hard to read, however wide the terminal
LAZY_GROUPS = {
    "models": "sparkle.cli.models",
    "pin": "sparkle.cli.pool",
    "pool": "sparkle.cli.pool",
    "profile": "sparkle.cli.profile",
    "trace": "sparkle.cli.trace",
    "unpin": "sparkle.cli.pool",
}


class _LazyGroup(click.Group):
    """Imports the modules of LAZY_GROUPS only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY_GROUPS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in LAZY_GROUPS:
            command: click.Command = getattr(import_module(LAZY_GROUPS[cmd_name]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)


def _take_run_dir(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    """Keep the flag in the context; given twice, the one nearest to the command's end counts."""
    if value is not None:
        ctx.ensure_object(dict)["run_dir"] = value


run_dir_option = click.option(
    "--run-dir",
    callback=_take_run_dir,
    expose_value=False,
    help="Run directory of the daemons; default: the settings'.",
)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@run_dir_option
@click.version_option(__version__, prog_name="sparkle-ctl")
def command() -> None:
    """Look at a running Sparkle, its settings and its models."""


def main() -> int:
    return run(command, "sparkle-ctl")


@command.command()
@run_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the same in every version.")
@click.option(
    "--watch",
    "interval_s",
    type=click.FloatRange(min=0.2),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Show it again and again, every 2 seconds or as told, until Ctrl-C.",
)
@click.pass_context
def status(ctx: click.Context, as_json: bool, interval_s: float | None) -> int:
    """Show how the daemons are.

    Exit codes: 0 all three are ready, 3 one is not.
    """
    from sparkle.cli.status import all_ready, gather
    from sparkle.rundir import RunDir

    rundir = RunDir(_settings(ctx).run_dir)
    if interval_s is not None:
        _watch(rundir, interval_s, as_json)
    statuses = gather(rundir)
    _show(statuses, rundir, as_json)
    return 0 if all_ready(statuses) else NOT_READY


@command.command()
@run_dir_option
@click.pass_context
def metrics(ctx: click.Context) -> None:
    """Print the metrics of all daemons for Prometheus.

    A daemon that is down shows as sparkle_up 0; that is no error of this command.
    """
    from sparkle.cli.status import gather
    from sparkle.prometheus import prometheus
    from sparkle.rundir import RunDir

    click.echo(prometheus(gather(RunDir(_settings(ctx).run_dir))), nl=False)


@command.command(name="config")
@run_dir_option
@click.pass_context
def config_command(ctx: click.Context) -> None:
    """Show every setting, its value and where that came from."""
    from rich.padding import Padding
    from rich.text import Text

    settings = _settings(ctx)
    console = _console()
    for name in config.setting_names():
        origin = settings.origins[name]
        value = str(getattr(settings, name)) or '""'
        line = Text.assemble(
            (f"{name:<16} ", "cyan"), (value, "bold"), "  ", (origin, "dim" if origin == "default" else "yellow")
        )
        console.print(line, soft_wrap=True)  # a path that is broken in two cannot be copied
        console.print(Padding(Text(config.setting_doc(name), "dim"), (0, 0, 0, 17)))


def _settings(ctx: click.Context) -> config.Settings:
    return config.load(ctx.obj)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else 80
    return console


def _show(statuses: Mapping[str, DaemonStatus], rundir: RunDir, as_json: bool) -> None:
    if as_json:
        from sparkle.cli.status import as_json as to_json

        print(json.dumps(to_json(statuses)), flush=True)
    else:
        from sparkle.cli.status_view import screen

        _console().print(screen(statuses, rundir.path))


def _watch(rundir: RunDir, interval_s: float, as_json: bool) -> None:
    """Show the status until Ctrl-C: in place on a terminal, else one after the other."""
    from rich.live import Live

    from sparkle.cli.status import gather
    from sparkle.cli.status_view import screen

    try:
        if as_json or not sys.stdout.isatty():
            while True:
                _show(gather(rundir), rundir, as_json)
                time.sleep(interval_s)
        with Live(console=_console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(gather(rundir), rundir.path), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return
