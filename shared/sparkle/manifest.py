"""What `sparkle.json` says of an expert store: types, their JSON form, and the fingerprint.

Owns the vocabulary of the store (piece, layout class, expert layer) and the strict parse of a manifest, whose bytes may
come from anywhere. Reads no file; `sparkle.store` does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

from sparkle import safetensors_header
from sparkle.errors import StorageError
from sparkle.safetensors_header import DTYPE_BYTES, tensor_bytes

ALIGN_BYTES = 16384
FORMAT = "sparkle-store"
VERSION = 1
MANIFEST = "sparkle.json"
KINDS = ("main", "mtp")
REDO = "Copy the store again, or make it again with: sparkle-ctl models prepare"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quant:
    """Parameters of MLX quantisation: `mx.quantize(w, group_size, bits, mode=mode)`."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of one expert. `name` is its path below the switch module; `offset` counts from the record's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayoutClass:
    """The form of a record. `quant` maps a projection ("gate_proj") to its Quant; absent = not quantised."""

    name: str
    pieces: tuple[Piece, ...]
    quant: Mapping[str, Quant]

    @property
    def record_bytes(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    @property
    def stride_bytes(self) -> int:
        """Distance of two records: record_bytes, padded to a multiple of ALIGN_BYTES."""
        return -(-self.record_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one MoE layer. `index` is its place in Store.layers and the `layer` of every message.

    module: path of the SwitchGLU that the records replace. layout: index into Store.classes. data_offset: where record
    0 starts in `file`. checksums: XXH3-64 of each record, pad excluded.
    """

    index: int
    module: str
    kind: str
    layout: int
    n_experts: int
    top_k: int
    file: str
    data_offset: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileSum:
    """Promised size and XXH3-64 of a whole file."""

    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest. `headers`: what each expert file must begin with, by (layout, n_experts)."""

    fingerprint: str
    classes: tuple[LayoutClass, ...]
    layers: tuple[ExpertLayer, ...]
    resident_quant: Mapping[str, Quant]
    files: Mapping[str, FileSum]
    source: Mapping[str, Any]
    headers: Mapping[tuple[int, int], bytes]


def layout_class(
    name: str, pieces: Iterable[tuple[str, str, tuple[int, ...]]], quant: Mapping[str, Quant]
) -> LayoutClass:
    """Return the class of records that hold `pieces` (name, dtype, shape) in this order."""
    placed: list[Piece] = []
    offset = 0
    for piece, dtype, shape in pieces:
        placed.append(Piece(piece, dtype, shape, offset, tensor_bytes(dtype, shape)))
        offset += placed[-1].nbytes
    return LayoutClass(name, tuple(placed), quant)


def expert_header(layout: LayoutClass, n_experts: int) -> bytes:
    """Return the header of a layer's expert file; its length is the file offset of record 0.

    It depends on nothing but its arguments, so that opening a store compares bytes instead of parsing every header.
    """

    def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
        pad_bytes = layout.stride_bytes - layout.record_bytes
        for e in range(n_experts):
            yield from ((f"e{e:04d}.{piece.name}", piece.dtype, piece.shape) for piece in layout.pieces)
            if pad_bytes:
                yield f"e{e:04d}.pad", "U8", (pad_bytes,)

    return safetensors_header.encode(tensors(), {"format": "mlx"}, ALIGN_BYTES)


def fingerprint_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what the JSON form says of the store's content; where that came from is left out."""
    content = {key: value for key, value in manifest.items() if key not in ("fingerprint", "source")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_json(
    classes: Iterable[LayoutClass],
    layers: Iterable[ExpertLayer],
    resident_quant: Mapping[str, Quant],
    files: Mapping[str, FileSum],
    source: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON form, fingerprint included. Offsets follow from shapes and are not repeated in it."""

    def quants(of: Mapping[str, Quant]) -> dict[str, Any]:
        return {k: {"bits": q.bits, "group_size": q.group_size, "mode": q.mode} for k, q in of.items()}

    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "classes": [
            {
                "name": c.name,
                "record_bytes": c.record_bytes,
                "pieces": [{"name": p.name, "dtype": p.dtype, "shape": list(p.shape)} for p in c.pieces],
                "quant": quants(c.quant),
            }
            for c in classes
        ],
        "layers": [
            {
                "module": x.module,
                "kind": x.kind,
                "class": x.layout,
                "top_k": x.top_k,
                "file": x.file,
                "xxh3": [f"{c:016x}" for c in x.checksums],
            }
            for x in layers
        ],
        "files": {name: {"bytes": f.nbytes, "xxh3": f"{f.checksum:016x}"} for name, f in sorted(files.items())},
        "resident_quant": quants(resident_quant),
        "source": dict(source),
    }
    return {"fingerprint": fingerprint_of(content), **content}


def parse(value: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a JSON form, or raise a StorageError that names what is wrong with it."""
    if value.get("format") != FORMAT:
        raise unsound(f"format is {value.get('format')!r}, not {FORMAT!r}")
    if value.get("version") != VERSION:
        found = value.get("version")
        raise StorageError(f"{MANIFEST} has version {found!r}; this Sparkle reads {VERSION}. Prepare the model again")
    fingerprint = _get(value, "fingerprint", str, MANIFEST)
    if fingerprint != fingerprint_of(value):
        raise unsound("its fingerprint is not that of its content, so it was edited or damaged")
    classes = tuple(_class(c, f"class {i}") for i, c in enumerate(_get(value, "classes", list, MANIFEST)))
    headers: dict[tuple[int, int], bytes] = {}
    entries = _get(value, "layers", list, MANIFEST)
    return Manifest(
        fingerprint=fingerprint,
        classes=classes,
        layers=tuple(_layer(entry, index, classes, headers) for index, entry in enumerate(entries)),
        resident_quant=_quants(_get(value, "resident_quant", dict, MANIFEST), "resident_quant"),
        files={name: _file(name, entry) for name, entry in _get(value, "files", dict, MANIFEST).items()},
        source=_get(value, "source", dict, MANIFEST),
        headers=headers,
    )


def _class(entry: Any, where: str) -> LayoutClass:
    pieces: list[tuple[str, str, tuple[int, ...]]] = []
    for piece in _get(entry, "pieces", list, where):
        name, dtype = _get(piece, "name", str, where), _get(piece, "dtype", str, where)
        shape = _get(piece, "shape", list, where)
        if dtype not in DTYPE_BYTES or not all(type(n) is int and 0 < n < 2**31 for n in shape):
            raise unsound(f"{where}, piece {name}: {dtype} {shape}")
        pieces.append((name, dtype, tuple(shape)))
    if not pieces or len({name for name, _, _ in pieces}) != len(pieces):
        raise unsound(f"{where} has no pieces, or two of one name")
    layout = layout_class(_get(entry, "name", str, where), pieces, _quants(_get(entry, "quant", dict, where), where))
    if _get(entry, "record_bytes", int, where) != layout.record_bytes:
        raise unsound(f"{where}: record_bytes is {entry['record_bytes']}, its pieces have {layout.record_bytes}")
    return layout


def _layer(
    entry: Any, index: int, classes: tuple[LayoutClass, ...], headers: dict[tuple[int, int], bytes]
) -> ExpertLayer:
    where = f"layer {index}"
    kind, layout = _get(entry, "kind", str, where), _get(entry, "class", int, where)
    top_k = _get(entry, "top_k", int, where)
    checksums = tuple(_hex(text, where) for text in _get(entry, "xxh3", list, where))
    if kind not in KINDS or not 0 <= layout < len(classes) or not 1 <= top_k <= len(checksums):
        raise unsound(f"{where}: kind {kind!r}, class {layout}, top_k {top_k} of {len(checksums)} experts")
    key = (layout, len(checksums))
    if key not in headers:
        headers[key] = expert_header(classes[layout], len(checksums))
    return ExpertLayer(
        index=index,
        module=_get(entry, "module", str, where),
        kind=kind,
        layout=layout,
        n_experts=len(checksums),
        top_k=top_k,
        file=_relative(_get(entry, "file", str, where)),
        data_offset=len(headers[key]),
        checksums=checksums,
    )


def _quants(entries: Mapping[str, Any], where: str) -> dict[str, Quant]:
    return {
        name: Quant(_get(q, "bits", int, where), _get(q, "group_size", int, where), _get(q, "mode", str, where))
        for name, q in entries.items()
    }


def _file(name: str, entry: Any) -> FileSum:
    return FileSum(_get(entry, "bytes", int, _relative(name)), _hex(_get(entry, "xxh3", str, name), name))


def _get(entry: Any, key: str, kind: type[T], where: str) -> T:
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) is not kind:  # exact: a bool is no int here
        raise unsound(f"{where}: {key} is {value!r:.80}, expected {kind.__name__}")
    return value


def _hex(text: Any, where: str) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
        raise unsound(f"{where}: checksum {text!r:.80} is not 16 hexadecimal digits")
    return int(text, 16)


def _relative(name: str) -> str:
    """Return `name`, which must stay inside the store."""
    if not name or "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise unsound(f"file name {name!r} leaves the store")
    return name


def unsound(fault: str) -> StorageError:
    return StorageError(f"{MANIFEST} is not a sound manifest: {fault}. {REDO}")
