"""Make an expert store of a checkpoint: `python -m sparkled.compute.prepare SRC DST`, or `sparkle-ctl models prepare`.

Owns the folder DST.partial, which becomes DST when every byte has been written, synced, read back and compared; a run
that fails removes it, one that is killed leaves it to the next. Reads the checkpoint. Sends nothing; progress goes to
stderr. Never changes SRC or an existing DST. All MLX work happens in the main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx_lm.utils import save_config

from sparkle import manifest
from sparkle.cli import _exit
from sparkle.cli.models import prepare_options
from sparkle.errors import ConfigError, StorageError
from sparkle.manifest import MANIFEST, ExpertLayer, FileSum, LayoutClass, Quant
from sparkle.progress import Meter, size
from sparkle.store import CONFIG, MTP, RESIDENT, Store, expert_file, verify
from sparkled.compute.conversion import Plan, SwitchPlan
from sparkled.compute.families import Request, plan_model, plan_mtp
from sparkled.compute.sources import Checkpoint, Tensors
from sparkled.compute.store_writer import (
    expert_file_bytes,
    resident_bytes,
    sync_folder,
    write_layer,
    write_resident,
    write_small,
)

BUFFER_POOL_BYTES = 256 << 20  # freed buffers that MLX may keep on a GPU
MARKER = ".unfinished"  # tells our DST.partial from a folder that happens to have that name
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
COPIED = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class _Layer:
    switch: SwitchPlan
    tensors: Tensors
    kind: str
    layout: int


@dataclass(frozen=True, slots=True)
class _Job:
    """All that will be written, known before the first byte is."""

    main: Plan
    mtp: Plan | None
    norm_shift: str
    classes: tuple[LayoutClass, ...]
    layers: tuple[_Layer, ...]
    copied: tuple[Path, ...]
    source: Mapping[str, Any]

    @property
    def expert_bytes(self) -> int:
        return sum(expert_file_bytes(self.classes[x.layout], x.switch.n_experts) for x in self.layers)

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.main.resident) + (resident_bytes(self.mtp.resident) if self.mtp else 0)


def prepare(src: Path, dst: Path, request: Request, say: Callable[[str], None]) -> Store:
    """Return the store DST, made of checkpoint SRC unless it was before. `say` gets lines for the user."""
    mx.set_cache_limit(BUFFER_POOL_BYTES)
    checkpoint = Checkpoint.open(src)
    for path in checkpoint.unlisted:
        say(f"warning: {path} is not in the checkpoint's index and is left out")
    job = _job(checkpoint, request)
    if dst.exists():
        store = _existing(dst, job.source)
        say(f"{dst} was made of this source with these settings already; nothing to do")
        return store
    try:
        with _partial_folder(dst) as folder:
            _check_space(folder, job)
            _write(folder, job)
            with Meter("verifying") as meter:
                verify(Store.open(folder), meter)
            (folder / MARKER).unlink()
            sync_folder(folder)
            folder.rename(dst)
            sync_folder(dst.parent)
    except OSError as e:
        raise StorageError(f"{e.filename or dst}: {e.strerror or e}; nothing was left at {dst}") from e
    store = Store.open(dst)
    n_records = sum(layer.n_experts for layer in store.layers)
    say(f"{dst}: {n_records} expert records, {size(store.expert_bytes())}; {size(store.resident_bytes)} stay resident")
    return store


def _job(checkpoint: Checkpoint, request: Request) -> _Job:
    src = checkpoint.path
    if not any((src / name).is_file() for name in TOKENIZERS):
        raise StorageError(f"{src} has no tokenizer ({' or '.join(TOKENIZERS)}); the download is incomplete")
    model, main = plan_model(checkpoint, request)
    mtp, norm_shift = plan_mtp(checkpoint, request, model, main.config) or (None, "none")
    classes: list[LayoutClass] = []
    layers: list[_Layer] = []
    for kind, plan in (("main", main), ("mtp", mtp)) if mtp else (("main", main),):
        for switch in plan.switches:
            layout = _class_of(switch, classes)
            if layout not in classes:
                classes.append(layout)
            layers.append(_Layer(switch, plan.tensors, kind, classes.index(layout)))
    source = {
        "fingerprint": checkpoint.fingerprint(),
        "quantised_to": _quant_json(main.quant),
        "mtp": {"quantised_to": _quant_json(mtp.quant)} if mtp else None,
    }
    copied = tuple(src / name for name in COPIED if (src / name).is_file())
    return _Job(main, mtp, norm_shift, tuple(classes), tuple(layers), copied, source)


def _quant_json(quant: Quant | None) -> dict[str, Any] | None:
    return {"bits": quant.bits, "group_size": quant.group_size, "mode": quant.mode} if quant else None


def _class_of(switch: SwitchPlan, known: list[LayoutClass]) -> LayoutClass:
    """Return the class of this layer's records: a known one if the pieces are alike, else one with a new name."""
    outputs = [output for conversion in switch.conversions for output in conversion.outputs]
    pieces = [(output.name[len(switch.module) + 1 :], output.dtype, output.shape) for output in outputs]
    forms = {f"q{q.bits}" if q.mode == "affine" else q.mode for q in switch.quant.values()}
    name = "+".join(sorted(forms)) or outputs[0].dtype.lower()
    layout = manifest.layout_class(name, pieces, switch.quant)
    for other in known:
        if (other.pieces, other.quant) == (layout.pieces, layout.quant):
            return other
    n_alike = sum(other.name.split("-")[0] == name for other in known)
    return manifest.layout_class(f"{name}-{n_alike + 1}" if n_alike else name, pieces, switch.quant)


def _existing(dst: Path, source: Mapping[str, Any]) -> Store:
    """Return the store at `dst` if it is the one that was asked for; refuse to touch anything else."""
    if not (dst / MANIFEST).exists():
        raise ConfigError(f"{dst} exists and is not an expert store; choose another DST")
    try:
        store = Store.open(dst)
    except StorageError as e:
        raise StorageError(f"{e}. To make it again, remove {dst} first") from None
    if store.source != source:
        what = "settings" if store.source.get("fingerprint") == source["fingerprint"] else "source"
        raise ConfigError(f"{dst} is a store made with another {what}; remove it first, or choose another DST")
    return store


@contextlib.contextmanager
def _partial_folder(dst: Path) -> Iterator[Path]:
    """Yield the empty folder DST.partial, locked against a second run; remove it if the work fails."""
    folder = dst.with_name(dst.name + ".partial")
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing {folder}; wait for it, or choose another DST") from None
        if not folder.exists() or not os.path.samestat(folder.stat(), os.fstat(handle)):
            raise ConfigError(f"another run has just finished with {folder}; try again")
        held = {path.name for path in folder.iterdir()}
        if held and not held & {MARKER, MANIFEST}:
            raise ConfigError(f"{folder} is in the way and is no unfinished store; move it, or choose another DST")
        _empty(folder)
        (folder / MARKER).touch()
        try:
            yield folder
        except BaseException:  # an interrupt too: tens of gigabytes must not stay behind
            _empty(folder)
            folder.rmdir()
            raise
    finally:
        os.close(handle)


def _empty(folder: Path) -> None:
    """Delete the folder's content, the marker last: if this is cut short, the next run still knows the folder."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_space(folder: Path, job: _Job) -> None:
    parts = {
        "experts": job.expert_bytes,
        "resident weights": job.resident_bytes,
        "other files": sum(path.stat().st_size for path in job.copied) + (1 << 20),
    }
    needed, free = sum(parts.values()), shutil.disk_usage(folder).free
    if needed > free:
        terms = " + ".join(f"{what} {size(n_bytes)}" for what, n_bytes in parts.items())
        lacking = f"{size(needed - free)} more than the {size(free)} that are free at {folder.parent}"
        raise ConfigError(f"the store needs {size(needed)} ({terms}): {lacking}. Make room, or choose another DST")


def _write(folder: Path, job: _Job) -> None:
    """Write all files, the manifest last."""
    (folder / "experts").mkdir()
    files: dict[str, FileSum] = {}
    layers: list[ExpertLayer] = []
    total, done = job.expert_bytes + job.resident_bytes, 0
    with Meter("preparing") as meter:

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            meter(done, total)

        main, mtp = job.main, job.mtp
        files[RESIDENT] = write_resident(folder / RESIDENT, main.tensors, main.resident, {"format": "mlx"}, advance)
        if mtp:
            metadata = {"format": "mlx", "norm_shift": job.norm_shift}
            files[MTP] = write_resident(folder / MTP, mtp.tensors, mtp.resident, metadata, advance)
        for index, x in enumerate(job.layers):
            file, layout, switch = expert_file(index), job.classes[x.layout], x.switch
            data_offset, checksums = write_layer(folder / file, x.tensors, switch, layout, advance)
            layers.append(
                ExpertLayer(
                    index, switch.module, x.kind, x.layout, switch.n_experts, switch.top_k, file, data_offset, checksums
                )
            )
    sync_folder(folder / "experts")
    files[CONFIG] = write_small(folder / CONFIG, _config_bytes(main.config))
    for path in job.copied:
        files[path.name] = write_small(folder / path.name, path.read_bytes())
    quant = {**main.resident_quant, **(mtp.resident_quant if mtp else {})}
    content = manifest.to_json(job.classes, layers, quant, files, job.source)
    write_small(folder / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")


def _config_bytes(config: dict[str, Any]) -> bytes:
    """Return config.json as `mlx_lm convert` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG
        save_config(dict(config), path)
        return path.read_bytes()


@click.command()
@prepare_options
def main(src: Path, dst: Path, with_mtp: bool, **asked: str | None) -> None:
    """Make an expert store DST of the checkpoint in folder SRC."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    group_size = asked["group_size"]
    request = Request(asked["bits"], int(group_size) if group_size else None, asked["mtp_bits"], with_mtp)
    prepare(src, dst, request, lambda line: click.echo(line, err=line.startswith("warning")))


if __name__ == "__main__":
    raise SystemExit(_exit.run(main, "sparkle-ctl models prepare"))
