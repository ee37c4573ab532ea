"""The strict safetensors header: what is written can be read by anyone, what is not sound is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sparkle.errors import StorageError
from sparkle.safetensors_header import DTYPE_BYTES, encode, read, tensor_bytes

pytestmark = pytest.mark.unit

TENSORS = [("a.weight", "F32", (2, 3)), ("a.scales", "U8", (5,)), ("b", "BF16", (2, 2))]


def _file(path: Path, header: Any, n_data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_data))
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(StorageError) as error:
        read(path)
    assert str(path) in str(error.value)
    return str(error.value)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
entries = st.dictionaries(
    names.filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from(list(DTYPE_BYTES)), shapes)
)


@given(entries, st.sampled_from([1, 8, 16384]))
def test_what_is_encoded_can_be_read(tmp_path_factory: pytest.TempPathFactory, tensors: Any, align: int) -> None:
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    listed = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    header = encode(listed, {"format": "mlx"}, align)
    path.write_bytes(header + bytes(sum(tensor_bytes(dtype, shape) for _, dtype, shape in listed)))
    found = read(path)
    assert len(header) % align == 0 and found.data_offset == len(header) and found.metadata == {"format": "mlx"}
    assert {name: (info.dtype, info.shape) for name, info in found.tensors.items()} == tensors


def test_stock_reader_takes_an_aligned_file(tmp_path: Path) -> None:
    path, values = tmp_path / "x.safetensors", np.arange(6, dtype=np.float32).reshape(2, 3)
    path.write_bytes(encode([("a", "F32", (2, 3)), ("pad", "U8", (3,))], {}, 16384) + values.tobytes() + bytes(3))
    loaded = load_file(path)
    assert (loaded["a"] == values).all() and loaded["pad"].shape == (3,)


def test_truncated_file_is_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    whole = encode(TENSORS, {}) + bytes(37)
    path.write_bytes(whole)
    assert list(read(path).tensors) == [name for name, _, _ in TENSORS]
    path.write_bytes(whole[:-8])
    assert "8 bytes are missing at its end" in _refusal(path)
    path.write_bytes(whole + b"xyz")
    assert "3 bytes too many" in _refusal(path)
    path.write_bytes(whole[:20])
    assert "ends inside its header" in _refusal(path)
    path.write_bytes(b"1234")
    assert "too short" in _refusal(path)


def test_absent_file_is_a_storage_error(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "none.safetensors")


def _one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "n_data", "fault"),
    [
        (b"{", 0, "not valid JSON"),
        (b"[]", 0, "not a JSON object"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a":1,"a":2}', 0, "occurs twice"),
        ({"__metadata__": {"n": 1}}, 0, "__metadata__"),
        ({"a": 1}, 0, "tensor a needs"),
        ({"a": _one() | {"more": 1}}, 8, "tensor a needs"),
        ({"a": _one(dtype="F4")}, 8, "dtype 'F4'"),
        ({"a": _one(dtype=["F32"])}, 8, "dtype ['F32']"),
        ({"a": _one(shape=[-1, -2])}, 8, "shape [-1, -2]"),
        ({"a": _one(shape=[True, 2])}, 8, "shape [True, 2]"),
        ({"a": _one(shape=[2.0])}, 8, "shape [2.0]"),
        ({"a": _one(shape=[2**63])}, 8, "whole numbers"),
        ({"a": _one(shape=[1] * 1000 + [2])}, 8, "whole numbers"),
        ({"a": _one(offsets=[0])}, 8, "data_offsets [0]"),
        ({"a": _one(offsets=[0, 4])}, 4, "needs 8 bytes, has 4"),
        ({"a": _one(offsets=[8, 0])}, 8, "needs 8 bytes, has -8"),
        ({"a": _one(offsets=[4, 12])}, 12, "hole"),
        ({"a": _one(), "b": _one(offsets=[4, 12])}, 12, "tensor b overlaps"),
    ],
)
def test_unsound_header_is_refused(tmp_path: Path, header: Any, n_data: int, fault: str) -> None:
    assert fault in _refusal(_file(tmp_path / "x.safetensors", header, n_data))


def test_length_beyond_the_formats_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    assert "the format allows" in _refusal(path)


def test_damaged_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    path, chance = tmp_path / "x.safetensors", random.Random(0)
    whole = encode(TENSORS, {"format": "mlx"}) + bytes(37)
    n_refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read(path)
        except StorageError:
            n_refused += 1
    assert n_refused > 100


def test_a_name_given_twice_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="twice"):
        encode([("a", "U8", (1,)), ("a", "U8", (1,))], {})
