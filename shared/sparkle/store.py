"""The expert store: a folder that holds one model, its experts as records that can be read alone.

    sparkle.json                     the manifest: layout classes, layers, checksums, sizes, quantisation, source
    experts/layer_000.safetensors    one file per MoE layer, MTP layers after the last; one *record* per expert
    resident.safetensors             what every token needs; mtp.safetensors: the drafter without its experts
    config.json, tokenizer files     as mlx-lm and transformers read them

A record is the pieces of one expert (gate, up and down x weight, scales, ...) one after the other without gaps. It
starts on a multiple of ALIGN_BYTES, so that O_DIRECT and Apple's 16 KiB pages can take it in one read; explicit pad
tensors fill the rest, so that every file stays plain safetensors and any reader can check it. Layers whose experts look
alike share a *layout class*; nothing assumes which pieces a class has.

Owns the opening and checking of a store. Reads the manifest, headers and, in `verify`, every byte. Never writes: a
store is written once, by `sparkled.compute.prepare`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from sparkle import manifest
from sparkle.errors import StorageError
from sparkle.manifest import (
    ALIGN_BYTES,
    MANIFEST,
    REDO,
    ExpertLayer,
    FileSum,
    LayoutClass,
    Manifest,
    Piece,
    Quant,
)
from sparkle.progress import Progress

__all__ = ["ALIGN_BYTES", "ExpertLayer", "FileSum", "LayoutClass", "Piece", "Quant", "Store", "verify", "verify_file"]

CONFIG = "config.json"
RESIDENT = "resident.safetensors"
MTP = "mtp.safetensors"
READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Store:
    """An opened store. `resident_quant`: every quantised resident module (mtp.* too) and its Quant.

    files: every file but the manifest and the expert files. source: what it was prepared from, and with which settings.
    """

    path: Path
    fingerprint: str
    classes: tuple[LayoutClass, ...]
    layers: tuple[ExpertLayer, ...]
    config: dict[str, Any]
    resident_quant: Mapping[str, Quant]
    files: Mapping[str, FileSum]
    source: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Return the store at `path`, checked but for the bytes of its tensors.

        Raises StorageError if the manifest is not sound, a file is absent or not as long as promised, or the header of
        an expert file is not the one that its layout class gives.
        """
        root = Path(path)
        m = manifest.parse(_read_manifest(root))
        for name in (CONFIG, RESIDENT):
            if name not in m.files:
                raise manifest.unsound(f"files lacks {name}")
        for name, promised in m.files.items():
            _check_size(root / name, promised.nbytes)
        for layer in m.layers:
            _check_expert_file(root / layer.file, layer, m)
        config = _read_json(root / CONFIG)
        return cls(root, m.fingerprint, m.classes, m.layers, config, m.resident_quant, m.files, m.source)

    @property
    def name(self) -> str:
        """What users call the model: the name of its folder."""
        return self.path.resolve().name

    @property
    def resident_path(self) -> Path:
        return self.path / RESIDENT

    @property
    def mtp_path(self) -> Path | None:
        return self.path / MTP if MTP in self.files else None

    @property
    def mtp_bytes(self) -> int:
        return self.files[MTP].nbytes if MTP in self.files else 0

    @property
    def resident_bytes(self) -> int:
        """All that stays in memory: resident.safetensors and, where there is one, mtp.safetensors."""
        return self.files[RESIDENT].nbytes + self.mtp_bytes

    def layout_of(self, layer: int) -> LayoutClass:
        return self.classes[self.layers[layer].layout]

    def record_offset(self, layer: int, expert: int) -> int:
        """Return where the record of `expert` starts in the layer's file."""
        at = self.layers[layer]
        if not 0 <= expert < at.n_experts:
            raise IndexError(f"layer {layer} has experts 0 to {at.n_experts - 1}, not {expert}")
        return at.data_offset + expert * self.classes[at.layout].stride_bytes

    def expert_bytes(self) -> int:
        """Return the bytes of all records, main and MTP layers, pad excluded."""
        return sum(layer.n_experts * self.classes[layer.layout].record_bytes for layer in self.layers)


def expert_file(index: int) -> str:
    return f"experts/layer_{index:03d}.safetensors"


def checksum(data: bytes | bytearray | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def verify(store: Store, progress: Progress) -> None:
    """Read every byte of the store from the disk and compare checksums.

    progress: called with (bytes done, bytes in all). Raises StorageError for the first file or record that differs; it
    names layer, expert and file.
    """
    total = sum(f.nbytes for f in store.files.values())
    total += sum(x.n_experts * store.classes[x.layout].stride_bytes for x in store.layers)
    done = 0
    for name, promised in store.files.items():
        with _open_uncached(store.path / name) as file:
            verify_file(store, name, file, lambda n, before=done: progress(before + n, total))  # type: ignore[misc]
        done += promised.nbytes
    for layer in store.layers:
        path, layout = store.path / layer.file, store.classes[layer.layout]
        with _open_uncached(path) as file:
            file.seek(layer.data_offset)
            records = _steps(file, layer.n_experts * layout.stride_bytes, layout.stride_bytes)
            for expert, record in enumerate(records):
                if checksum(record[: layout.record_bytes]) != layer.checksums[expert]:
                    where = f"layer {layer.index} ({layer.module}), expert {expert}"
                    at = store.record_offset(layer.index, expert)
                    raise StorageError(f"{path}: {where}: the record at byte {at} is not as prepared (XXH3). {REDO}")
                progress(done := done + len(record), total)


def verify_file(store: Store, name: str, file: FileIO, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Read one of the store's files whole, from an open `file`. Raises StorageError if its checksum differs.

    on_bytes: called with the bytes read so far.
    """
    digest, done = xxhash.xxh3_64(), 0
    for chunk in _steps(file, store.files[name].nbytes, READ_BYTES):
        digest.update(chunk)
        on_bytes(done := done + len(chunk))
    if digest.intdigest() != store.files[name].checksum:
        raise StorageError(f"{store.path / name}: its bytes are not those that were prepared (XXH3 differs). {REDO}")


def _open_uncached(path: Path) -> FileIO:
    """Open for reading so that bytes come from the disk: a check of the page cache would prove nothing."""
    try:
        file = path.open("rb", buffering=0)
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}. {REDO}") from None
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif no_cache := getattr(fcntl, "F_NOCACHE", None):
        fcntl.fcntl(file.fileno(), no_cache, 1)
    return file


def _steps(file: FileIO, n_bytes: int, step_bytes: int) -> Iterator[memoryview]:
    """Yield the next `n_bytes` in steps, the last may be shorter; each view is valid until the next."""
    buffer = memoryview(bytearray(min(step_bytes, n_bytes)))
    while n_bytes:
        step = buffer[: min(step_bytes, n_bytes)]
        filled = 0
        while filled < len(step):
            try:
                count = file.readinto(step[filled:])
            except OSError as e:
                raise StorageError(f"{file.name!s}: read failed at byte {file.tell()}: {e.strerror or e}") from None
            if not count:
                raise StorageError(f"{file.name!s} ends {n_bytes - filled} bytes too early. {REDO}")
            filled += count
        yield step
        n_bytes -= len(step)


def _check_size(path: Path, promised_bytes: int) -> None:
    try:
        surplus = path.stat().st_size - promised_bytes
    except OSError as e:
        raise StorageError(f"{path}: the store promises this file, but: {e.strerror or e}. {REDO}") from None
    if surplus:
        fault = f"{surplus} bytes too many" if surplus > 0 else f"{-surplus} bytes are missing"
        raise StorageError(f"{path}: {fault} (the store promises {promised_bytes}). {REDO}")


def _check_expert_file(path: Path, layer: ExpertLayer, m: Manifest) -> None:
    layout, header = m.classes[layer.layout], m.headers[layer.layout, layer.n_experts]
    _check_size(path, len(header) + layer.n_experts * layout.stride_bytes)
    try:
        with path.open("rb") as file:
            found = file.read(len(header))
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}. {REDO}") from None
    if found != header:
        raise StorageError(f"{path}: its header is not that of layer {layer.index}, class {layout.name}. {REDO}")


def _read_manifest(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise StorageError(f"{root}: no such folder. A store is made with: sparkle-ctl models prepare SRC {root}")
    if not (root / MANIFEST).exists():
        what = "a checkpoint, not an expert store" if (root / CONFIG).exists() else "not an expert store"
        remedy = f"Make one with: sparkle-ctl models prepare {root if (root / CONFIG).exists() else 'SRC'} DST"
        raise StorageError(f"{root} is {what}: it has no {MANIFEST}. {remedy}")
    return _read_json(root / MANIFEST)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}. {REDO}") from None
    except (ValueError, RecursionError) as e:
        raise StorageError(f"{path} is not valid JSON: {e}. {REDO}") from None
    if not isinstance(value, dict):
        raise StorageError(f"{path} is not a JSON object. {REDO}")
    return value
