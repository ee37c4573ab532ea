"""The safetensors header: a strict reader and a deterministic writer.

A file is `u64 length, JSON header, data`. Owns the rules by which such a file is accepted: every tensor known by type,
its bytes where its shape says, no hole and no overlap, and a file exactly as long as the header promises. Readers that
are lenient here turn a half-copied file into garbage weights. Never reads tensor data.

Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkle.errors import StorageError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
MAX_DIMS = 32
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header. `begin` and `end` count from the start of the data, not of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in file order; `data_offset` is where the data begins in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_offset: int
    file_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return math.prod(shape) * DTYPE_BYTES[dtype]


def encode(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], align_bytes: int = 8
) -> bytes:
    """Return length and header of a file that holds `tensors` (name, dtype, shape) one after the other.

    The result is a multiple of `align_bytes` long (the format allows trailing spaces), so that is where data begins.
    Equal arguments give equal bytes: readers may compare a file's header with the one it should have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + tensor_bytes(dtype, shape)
        if name in entries:
            raise ValueError(f"tensor {name} given twice")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align_bytes)
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> Header:
    """Return the header of the safetensors file at `path`, or raise a StorageError that names file and fault."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _broken(path, f"it is {file_bytes} bytes long, too short for a header")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise _broken(path, f"its header claims {length} bytes; the format allows {MAX_HEADER_BYTES}")
            if 8 + length > file_bytes:
                raise _broken(path, f"it ends inside its header: {8 + length - file_bytes} bytes are missing")
            text = file.read(length)
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}") from None
    return _parse(text, file_bytes, path)


def _parse(text: bytes, file_bytes: int, path: Path) -> Header:
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as e:
        raise _broken(path, f"its header is not valid JSON ({e})") from None
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "__metadata__ is not a map from text to text")
    infos = {name: _tensor(name, entry, path) for name, entry in entries.items()}
    tensors = dict(sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, info in tensors.items():
        if info.begin != end:
            fault = "overlaps the tensor before it" if info.begin < end else "leaves a hole before it"
            raise _broken(path, f"tensor {name} {fault} (begins at {info.begin}, expected {end})")
        end = info.end
    data_offset = 8 + len(text)
    if data_offset + end != file_bytes:
        missing = data_offset + end - file_bytes
        fault = f"{missing} bytes are missing at its end" if missing > 0 else f"{-missing} bytes too many at its end"
        raise _broken(path, fault)
    return Header(tensors, metadata, data_offset, file_bytes)


def _tensor(name: str, entry: Any, path: Path) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"tensor {name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken(path, f"tensor {name} has dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}; need whole numbers >= 0")
    if offsets[1] - offsets[0] != tensor_bytes(dtype, shape):
        given = f"{offsets[1] - offsets[0]} bytes"
        raise _broken(path, f"tensor {name}: {dtype} {shape} needs {tensor_bytes(dtype, shape)} bytes, has {given}")
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: Any) -> bool:
    """Bounded too, so that a hostile header can't make us multiply numbers of a million digits."""
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _broken(path: Path, fault: str) -> StorageError:
    return StorageError(f"{path} is not a sound safetensors file: {fault}. Copy or download it again.")
