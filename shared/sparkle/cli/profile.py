"""`sparkle-ctl profile`: show, carry and combine the recorded usage of experts.

Owns the commands and the look of `show`. Reads and writes files of sparkle.profile; talks to no daemon, but leaves a
model's recorded usage alone while a prefetch daemon of the run directory lives, which would write over any change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkle import config
from sparkle.cli.ctl import run_dir_option
from sparkle.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparkle.config import Settings
    from sparkle.profile import UsageProfile

COVERED = (0.1, 0.25, 0.5)  # shares of the experts whose share of the uses is shown
SHOWN = 5  # hottest experts on the screen
LISTED = 100  # and in JSON
BAR_WIDTH = 36

model_option = click.option("--model", metavar="STORE", help="Expert store of the model; default: the settings'.")
file_argument = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def profile() -> None:
    """Show, carry and combine the recorded usage of experts.

    The prefetch daemon records which experts are used, and fills the pool from that when it starts: hottest first.
    """


@profile.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@model_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def show(ctx: click.Context, file: Path | None, model: str | None, as_json: bool) -> None:
    """Show the recorded usage of a model, or FILE."""
    from sparkle.profile import load

    found = load(file) if file is not None else _recorded(_settings(ctx, model))
    if as_json:
        click.echo(json.dumps(_facts(found), indent=2))
        return
    from rich.console import Console

    from sparkle.cli.status_view import WIDTH

    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(_screen(found))


@profile.command()
@file_argument
@model_option
@click.pass_context
def export(ctx: click.Context, file: Path, model: str | None) -> None:
    """Copy the recorded usage of a model to FILE."""
    found = _recorded(_settings(ctx, model))
    _refuse_existing(file)
    found.save(file, found.saved_at)
    click.echo(f"{file}: usage of {found.model}, {found.n_tokens:,} tokens")


@profile.command("import")
@file_argument
@click.option(
    "--merge/--replace", "is_merge", default=True, help="Add it to what is recorded (default), or forget that."
)
@model_option
@run_dir_option
@click.pass_context
def import_command(ctx: click.Context, file: Path, is_merge: bool, model: str | None) -> None:
    """Take the usage in FILE over, for the daemon's next start.

    It is added to what is recorded, by the tokens that each has seen; those long ago count less. The prefetch daemon
    must not run meanwhile.
    """
    from sparkle.profile import UsageProfile, load, profile_path
    from sparkle.store import Store

    settings = _settings(ctx, model)
    _refuse_running(settings)
    store = Store.open(settings.resolved_model())
    combined = UsageProfile.for_store(store)
    combined.merge(load(file))
    path = profile_path(settings.state_dir, store.fingerprint)
    was_there = is_merge and combined.restore(path)
    combined.save(path)
    done = "added to what was recorded" if was_there else "taken over"
    click.echo(f"{file}: {done} for {combined.model}, {combined.n_tokens:,} tokens in all")


@profile.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="New file to write.")
def merge(files: Sequence[Path], output: Path) -> None:
    """Add up the usage in FILEs of one model.

    Each counts by the tokens that it has seen; those long ago count less.
    """
    from sparkle.profile import UsageProfile, load

    first = load(files[0])
    combined = UsageProfile(first.fingerprint, first.model, first.layers)
    for found in (first, *map(load, files[1:])):
        combined.merge(found)
    _refuse_existing(output)
    combined.save(output)
    click.echo(f"{output}: usage of {combined.model}, {combined.n_tokens:,} tokens of {len(files)} files")


@profile.command()
@model_option
@run_dir_option
@click.pass_context
def reset(ctx: click.Context, model: str | None) -> None:
    """Forget the recorded usage of a model.

    The prefetch daemon must not run meanwhile.
    """
    from sparkle.profile import profile_path
    from sparkle.store import Store

    settings = _settings(ctx, model)
    _refuse_running(settings)
    path = profile_path(settings.state_dir, Store.open(settings.resolved_model()).fingerprint)
    try:
        path.unlink()
    except FileNotFoundError:
        click.echo(f"{path}: nothing was recorded")
    except OSError as e:
        raise StorageError(f"{path}: cannot be removed: {e.strerror or e}. Remove it yourself") from None
    else:
        click.echo(f"{path}: removed")


# --- files ----------------------------------------------------------------------------------------------------------


def _settings(ctx: click.Context, model: str | None) -> Settings:
    return config.load({**(ctx.obj or {}), "model": model})


def _recorded(settings: Settings) -> UsageProfile:
    """Return what is recorded for the settings' model."""
    from sparkle.profile import UsageProfile, profile_path
    from sparkle.store import Store

    store = Store.open(settings.resolved_model())
    found = UsageProfile.for_store(store)
    path = profile_path(settings.state_dir, store.fingerprint)
    if not found.restore(path):
        raise StorageError(
            f"{path}: no usage of {found.model} is recorded; the prefetch daemon does that while it is used"
        )
    found.origin = str(path)
    return found


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} exists; name a file that does not, or remove it first")


def _refuse_running(settings: Settings) -> None:
    from sparkle.rundir import RunDir, is_listening

    rundir = RunDir(settings.run_dir)
    if is_listening(rundir.socket("prefetch")):
        raise ConfigError(
            f"a prefetch daemon runs in {rundir.path} and would write over this at its next save; stop it first, and "
            "start it again afterwards"
        )


# --- show -----------------------------------------------------------------------------------------------------------


def _facts(found: UsageProfile) -> dict[str, Any]:
    return {
        "model": found.model,
        "fingerprint": found.fingerprint,
        "file": found.origin,
        "saved_at": found.saved_at,
        "age_s": round(max(0.0, time.time() - found.saved_at), 1),
        "tokens": found.n_tokens,
        "recent_tokens": round(found.recent_tokens, 1),
        "half_life": found.half_life,
        "layers": len(found.layers),
        "experts": sum(x.n_experts for x in found.layers),
        "experts_used": len(found.hottest()),
        "coverage": [{"experts_frac": frac, "uses_frac": round(found.coverage(frac), 4)} for frac in COVERED],
        "hottest": [
            {"layer": layer, "expert": expert, "share": round(found.share((layer, expert)), 6)}
            for layer, expert in found.hottest(LISTED)
        ],
    }


def _screen(found: UsageProfile) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from sparkle.cli.status_view import DOT, format_count, format_duration

    facts = _facts(found)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=9, style="dim", no_wrap=True)
    table.add_column(width=14, style="bold", overflow="fold")
    table.add_column(overflow="fold")
    table.add_row(
        "tokens",
        f"{format_count(facts['tokens'])} seen",
        f"{format_count(facts['recent_tokens'])} count now{DOT}half-life {format_count(facts['half_life'])} tokens",
    )
    table.add_row("saved", f"{format_duration(facts['age_s'])} ago", facts["file"])
    n_used, n_experts = facts["experts_used"], facts["experts"]
    table.add_row(
        "experts",
        f"{format_count(n_used)} used",
        f"{100 * n_used / max(1, n_experts):.1f} % of {format_count(n_experts)} in {facts['layers']} layers",
    )
    for i, (frac, covered) in enumerate((x["experts_frac"], x["uses_frac"]) for x in facts["coverage"]):
        filled = round(BAR_WIDTH * covered)
        bar = Text.assemble(
            ("▓" * filled, "cyan"), ("·" * (BAR_WIDTH - filled), "dim"), f" {100 * covered:.1f} % of uses"
        )
        table.add_row("hottest" if i == 0 else "", f"{100 * frac:.0f} %", bar)
    for i, x in enumerate(facts["hottest"][:SHOWN]):
        where = f"layer {x['layer']}, expert {x['expert']}"
        table.add_row("top" if i == 0 else "", f"{100 * x['share']:.1f} %", f"of tokens use {where}")
    return Group(Text.assemble(("Usage      ", "bold"), (found.model, "cyan")), Text(), table)
