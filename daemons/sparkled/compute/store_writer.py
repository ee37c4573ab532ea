"""Writes the files of an expert store: what a plan says, front to back, hashed on the way and synced to the disk.

Owns the files while they are written. Reads the checkpoint expert by expert and, of other tensors, BLOCK_BYTES at a
time, so that memory doesn't grow with the model. Never goes back in a file: its XXH3 is that of the bytes handed over,
against which `sparkle.store.verify` then compares the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import mlx.core as mx
import xxhash

from sparkle import safetensors_header
from sparkle.manifest import FileSum, LayoutClass, expert_header
from sparkle.safetensors_header import tensor_bytes
from sparkled.compute.conversion import Conversion, SwitchPlan
from sparkled.compute.sources import Tensors

BLOCK_BYTES = 64 << 20
Advance = Callable[[int], None]  # told how many bytes have just been written


class _File:
    """A file that is written once, front to back."""

    def __init__(self, path: Path, advance: Advance) -> None:
        self._file = path.open("xb")
        self._advance = advance
        self._digest = xxhash.xxh3_64()
        self._n_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._n_bytes += len(data)
        self._advance(len(data))

    def sum(self) -> FileSum:
        return FileSum(self._n_bytes, self._digest.intdigest())

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def resident_bytes(conversions: Sequence[Conversion]) -> int:
    outputs = [output for conversion in conversions for output in conversion.outputs]
    return sum(tensor_bytes(output.dtype, output.shape) for output in outputs)


def write_resident(
    path: Path, tensors: Tensors, conversions: Sequence[Conversion], metadata: Mapping[str, str], advance: Advance
) -> FileSum:
    """Write a safetensors file that holds all outputs of `conversions`, in their order."""
    outputs = [output for conversion in conversions for output in conversion.outputs]
    with _File(path, advance) as file:
        file.write(safetensors_header.encode(((o.name, o.dtype, o.shape) for o in outputs), metadata))
        for conversion in conversions:
            small: list[list[memoryview]] = [[] for _ in conversion.outputs[1:]]
            for block in _blocks(tensors, conversion):
                first, *rest = conversion.apply(block)
                file.write(first)
                for held, data in zip(small, rest, strict=True):  # scales and biases come after all of the weight
                    held.append(data)
            for held in small:
                for data in held:
                    file.write(data)
    return file.sum()


def _blocks(tensors: Tensors, conversion: Conversion) -> Iterator[mx.array]:
    """Yield the source in rows: casting and quantising work row by row, so the split doesn't show in the result."""
    if conversion.made is not None:
        yield conversion.made
        return
    name = conversion.parts[0].name
    info = tensors.info(name)
    n_rows = info.shape[0]
    step = max(1, BLOCK_BYTES * n_rows // max(1, info.nbytes))
    for begin in range(0, n_rows, step):
        yield tensors.rows(name, begin, min(begin + step, n_rows))


def expert_file_bytes(layout: LayoutClass, n_experts: int) -> int:
    return len(expert_header(layout, n_experts)) + n_experts * layout.stride_bytes


def write_layer(
    path: Path, tensors: Tensors, switch: SwitchPlan, layout: LayoutClass, advance: Advance
) -> tuple[int, tuple[int, ...]]:
    """Write the records of one layer; return the offset of record 0 and the checksum of each record."""
    header = expert_header(layout, switch.n_experts)
    pad = bytes(layout.stride_bytes - layout.record_bytes)
    checksums = []
    with _File(path, advance) as file:
        file.write(header)
        for expert in range(switch.n_experts):
            digest = xxhash.xxh3_64()
            for conversion in switch.conversions:
                part = conversion.parts[expert]
                for data in conversion.apply(tensors.read(part.name, part.row)):
                    file.write(data)
                    digest.update(data)
            file.write(pad)
            checksums.append(digest.intdigest())
    return len(header), tuple(checksums)


def write_small(path: Path, data: bytes) -> FileSum:
    with _File(path, lambda _: None) as file:
        file.write(data)
    return file.sum()


def sync_folder(path: Path) -> None:
    """Make the names in `path` durable: a synced file in a folder that was not may vanish with the power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
