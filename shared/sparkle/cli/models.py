"""`sparkle-ctl models`: prepare a checkpoint as an expert store, verify a store, show what is in one.

Reads stores. `prepare` needs mlx and is a program of its own; everything else here starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sparkle.progress import Meter, size
from sparkle.store import LayoutClass, Quant, Store, verify

Command = TypeVar("Command", bound=Callable[..., Any])
BITS = click.Choice(["2", "3", "4", "5", "6", "8", "none"])


def prepare_options(command: Command) -> Command:
    """Add the arguments of `prepare`, which sparkle-ctl and the program that does the work share."""
    for option in (
        click.option(
            "--mtp/--no-mtp", "with_mtp", default=True, help="Include the drafter (MTP head), if there is one."
        ),
        click.option("--mtp-bits", type=BITS, help="Bits of the drafter; default 8."),
        click.option("--group-size", type=click.Choice(["32", "64", "128"]), help="Weights per scale; default 64."),
        click.option("--bits", type=BITS, help="Bits per weight; default 8. A quantised source keeps its own."),
        click.argument("dst", type=click.Path(path_type=Path)),
        click.argument("src", type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


@click.group()
def models() -> None:
    """Prepare, verify and inspect expert stores."""


@models.command()
@prepare_options
def prepare(**options: Any) -> None:
    """Make an expert store DST of the checkpoint in folder SRC (Hugging Face or MLX layout).

    Needs a few hundred megabytes of memory whatever the model, and disk space for the store, which is checked first.
    """
    command = [sys.executable, "-P", "-m", "sparkled.compute.prepare", str(options["src"]), str(options["dst"])]
    for name in ("bits", "group_size", "mtp_bits"):
        if options[name] is not None:
            command += ["--" + name.replace("_", "-"), options[name]]
    if not options["with_mtp"]:
        command.append("--no-mtp")
    os.execv(sys.executable, command)  # takes this process over: its signals and exit code need no relaying


@models.command("verify")
@click.argument("store", type=click.Path(path_type=Path))
def verify_command(store: Path) -> None:
    """Read every byte of STORE from the disk and compare it with its checksums."""
    opened = Store.open(store)
    with Meter("verifying") as meter:
        verify(opened, meter)
    n_records = sum(layer.n_experts for layer in opened.layers)
    click.echo(f"{store}: sound. {n_records} expert records and {len(opened.files)} files are as they were prepared.")


@models.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(store: Path, as_json: bool) -> None:
    """Show layers, record layouts and sizes of STORE."""
    facts = _facts(Store.open(store))
    click.echo(json.dumps(facts, indent=2) if as_json else _table(facts))


def _facts(store: Store) -> dict[str, Any]:
    layers = [
        {
            "kind": kind,
            "layers": len(group),
            "experts": sorted({layer.n_experts for layer in group}),
            "top_k": sorted({layer.top_k for layer in group}),
        }
        for kind in ("main", "mtp")
        if (group := [layer for layer in store.layers if layer.kind == kind])
    ]
    return {
        "name": store.name,
        "type": store.config.get("model_type"),
        "fingerprint": store.fingerprint,
        "layers": layers,
        "classes": [_class_facts(store, index) for index in range(len(store.classes))],
        "resident_bytes": store.resident_bytes - store.mtp_bytes,
        "mtp_bytes": store.mtp_bytes,
        "expert_bytes": store.expert_bytes(),
        "prepared_from": dict(store.source),
    }


def _class_facts(store: Store, index: int) -> dict[str, Any]:
    layout: LayoutClass = store.classes[index]
    return {
        "name": layout.name,
        "layers": sum(layer.layout == index for layer in store.layers),
        "record_bytes": layout.record_bytes,
        "stride_bytes": layout.stride_bytes,
        "pieces": [
            {
                "name": piece.name,
                "dtype": piece.dtype,
                "shape": list(piece.shape),
                "bytes": piece.nbytes,
                "quant": _quant_text(layout.quant.get(piece.name.split(".")[0])),
            }
            for piece in layout.pieces
        ],
    }


def _quant_text(quant: Quant | None) -> str:
    return f"{quant.bits} bit, groups of {quant.group_size}, {quant.mode}" if quant else "not quantised"


def _table(facts: dict[str, Any]) -> str:
    rows = [("name", facts["name"]), ("type", facts["type"]), ("fingerprint", facts["fingerprint"])]
    for group in facts["layers"]:
        experts, top_k = (" or ".join(map(str, group[key])) for key in ("experts", "top_k"))
        rows.append((f"{group['kind']} layers", f"{group['layers']} with {experts} experts, {top_k} per token"))
    rows += [
        ("resident", size(facts["resident_bytes"])),
        ("mtp", f"{size(facts['mtp_bytes'])} and its experts" if facts["mtp_bytes"] else "none"),
        ("experts", size(facts["expert_bytes"])),
    ]
    lines = [f"{key:<12} {value}" for key, value in rows]
    for layout in facts["classes"]:
        pad_bytes = layout["stride_bytes"] - layout["record_bytes"]
        record = f"{layout['record_bytes']} bytes a record and {pad_bytes} of padding"
        lines += ["", f"class {layout['name']}: {layout['layers']} layers, {record}"]
        for piece in layout["pieces"]:
            shape = "x".join(map(str, piece["shape"]))
            lines.append(
                f"  {piece['name']:<18} {piece['dtype']:<5} {shape:<12} {piece['bytes']:>10}  {piece['quant']}"
            )
    return "\n".join(lines)
