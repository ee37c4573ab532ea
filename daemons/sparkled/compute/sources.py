"""Checkpoints as they are downloaded: which tensors there are, in which file, and reads of parts of them.

Owns the view of a source folder: a Hugging Face checkpoint (one file, or shards and their index) or an MLX one, and
the loose `mtp.safetensors` that may lie beside the latter. Reads headers at once and tensor bytes on demand, a few rows
at a time, so that memory doesn't grow with the model. Never trusts the index: what it names must be there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from sparkle import safetensors_header
from sparkle.errors import StorageError
from sparkle.safetensors_header import Header, TensorInfo

INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 512  # of every tensor, in the fingerprint: fine-tunes of one model share names, shapes and sizes

# How the bytes of a dtype become an MLX array; NumPy has no bfloat16. Others (fp8 checkpoints) are refused by name.
_NUMPY: Mapping[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32, "U8": np.uint8}
MLX_DTYPE: Mapping[str, mx.Dtype] = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U32": mx.uint32,
    "U8": mx.uint8,
}


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors by name, each with the file in `folder` that holds it."""

    folder: Path
    files: Mapping[Path, Header]
    where: Mapping[str, Path]

    @classmethod
    def of(cls, folder: Path, paths: Iterable[Path]) -> Tensors:
        """Return the tensors of the safetensors files `paths`; a name in two files is refused."""
        files = {path: safetensors_header.read(path) for path in paths}
        where: dict[str, Path] = {}
        for path, header in files.items():
            for name, info in header.tensors.items():
                if name in where:
                    raise StorageError(f"tensor {name} is in {where[name]} and in {path}: remove the stale file")
                if info.dtype not in _NUMPY:
                    known = ", ".join(_NUMPY)
                    raise StorageError(f"{path}: tensor {name} has dtype {info.dtype}; prepare reads {known}")
                where[name] = path
        return cls(folder, files, where)

    def info(self, name: str) -> TensorInfo:
        return self.files[self.where[name]].tensors[name]

    def lazy(self, names: Iterable[str]) -> dict[str, mx.array]:
        """Return arrays that read their bytes when they are evaluated."""
        result: dict[str, mx.array] = {}
        wanted = set(names)
        for path in self.files:
            held = [name for name in wanted if self.where[name] == path]
            if held:
                loaded: Any = mx.load(str(path))
                result.update((name, loaded[name]) for name in held)
        return result

    def read(self, name: str, row: int | None = None) -> mx.array:
        """Return tensor `name`, or one row of it without the first axis, read now."""
        if row is not None:
            return self.rows(name, row, row + 1)[0]
        return self.rows(name, 0, self.info(name).shape[0])

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Return rows [begin, end) along the first axis of tensor `name`, read now."""
        info, path = self.info(name), self.where[name]
        row_bytes = info.nbytes // info.shape[0]
        offset = self.files[path].data_offset + info.begin + begin * row_bytes
        raw = _read_at(path, offset, (end - begin) * row_bytes, name)
        values = np.frombuffer(raw, _NUMPY[info.dtype]).reshape(end - begin, *info.shape[1:])
        return mx.array(values).view(MLX_DTYPE[info.dtype])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A source folder. `loose_mtp`: tensors of a mtp.safetensors that the index does not name, or None."""

    path: Path
    config_text: bytes
    tensors: Tensors
    loose_mtp: Tensors | None
    unlisted: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in folder `path`; raise StorageError if a file is absent, torn or not understood."""
        if not path.is_dir():
            raise StorageError(f"{path}: no such folder; give the folder of a downloaded checkpoint")
        try:
            config_text = (path / "config.json").read_bytes()
        except OSError as e:
            raise StorageError(f"{path / 'config.json'}: {e.strerror or e}; is {path} a checkpoint?") from None
        weight_map = _weight_map(path)
        shards = [path / file for file in sorted(set(weight_map.values()))] or sorted(path.glob("model*.safetensors"))
        if not shards:
            raise StorageError(f"{path} holds no model*.safetensors: nothing to prepare; download the checkpoint again")
        tensors = Tensors.of(path, shards)
        for name, file in weight_map.items():
            if tensors.where.get(name) != path / file:
                raise StorageError(f"{path / file} lacks tensor {name}, which {INDEX} places there; download it again")
        loose = path / "mtp.safetensors"
        loose_mtp = Tensors.of(path, [loose]) if loose.exists() and loose not in shards else None
        unlisted = tuple(p for p in sorted(path.glob("model*.safetensors")) if p not in shards)
        return cls(path, config_text, tensors, loose_mtp, unlisted)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the configuration, all headers and the first bytes of every tensor.

        It tells checkpoints apart without reading them whole; it is no proof that two are equal byte for byte.
        """
        digest = hashlib.sha256(self.config_text)
        for tensors in (self.tensors, self.loose_mtp):
            for path, header in sorted(tensors.files.items()) if tensors else ():
                digest.update(f"{path.name} {header.file_bytes}\n".encode())
                with path.open("rb") as file:
                    digest.update(file.read(header.data_offset))
                    for info in header.tensors.values():
                        offset = header.data_offset + info.begin
                        digest.update(os.pread(file.fileno(), min(SAMPLE_BYTES, info.nbytes), offset))
        return digest.hexdigest()


def _weight_map(path: Path) -> dict[str, str]:
    """Return the index's map from tensor to file, every file of which exists; empty if there is no index."""
    index = path / INDEX
    if not index.exists():
        return {}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
        outside = [file for file in files if file != Path(file).name]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
        raise StorageError(f"{index} is not a sound index ({type(e).__name__}: {e}); download it again") from None
    if outside or not files:
        raise StorageError(f"{index} names no files, or files outside its folder: {', '.join(outside)}")
    if missing := [file for file in files if not (path / file).is_file()]:
        what = f"{len(missing)} of {len(files)} files that {INDEX} names are missing"
        raise StorageError(f"{path}: the download is incomplete: {what}: {', '.join(missing)}")
    return dict(weight_map)


def _read_at(path: Path, offset: int, n_bytes: int, name: str) -> bytearray:
    buffer = bytearray(n_bytes)
    view, filled = memoryview(buffer), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while filled < n_bytes:
                count = file.readinto(view[filled:])
                if not count:
                    raise StorageError(f"{path}: tensor {name} ends {n_bytes - filled} bytes too early")
                filled += count
    except OSError as e:
        raise StorageError(f"{path}: tensor {name} cannot be read: {e.strerror or e}") from None
    return buffer
