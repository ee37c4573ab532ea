"""The expert store: opening, offsets, checksums, and refusal of everything that is not what was prepared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from sparkle import manifest, safetensors_header
from sparkle.cli.models import models
from sparkle.errors import StorageError
from sparkle.manifest import ALIGN_BYTES, ExpertLayer, FileSum, Quant, expert_header, layout_class
from sparkle.progress import Meter, size
from sparkle.store import Store, checksum, expert_file, verify

pytestmark = pytest.mark.unit

N_EXPERTS = 3
Q8 = Quant(8, 64, "affine")
# Two classes that share nothing but the format: six quantised pieces, and three plain ones without padding.
QUANTISED = layout_class(
    "q8",
    [
        ("gate_proj.weight", "U32", (16, 16)),
        ("gate_proj.scales", "F32", (16, 1)),
        ("gate_proj.biases", "F32", (16, 1)),
        ("down_proj.weight", "U32", (64, 4)),
        ("down_proj.scales", "F32", (64, 1)),
        ("down_proj.bias", "F32", (64,)),
    ],
    {"gate_proj": Q8, "down_proj": Q8},
)
PLAIN = layout_class("f32", [("gate_proj.weight", "F32", (64, 32)), ("down_proj.weight", "F32", (32, 64))], {})
CLASSES = (QUANTISED, PLAIN)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of two main layers and an MTP layer, written by hand."""
    random, root = np.random.default_rng(0), tmp_path / "model.store"
    (root / "experts").mkdir(parents=True)
    layers = []
    for index, (kind, layout) in enumerate((("main", 0), ("main", 1), ("mtp", 0))):
        form = CLASSES[layout]
        header, pad = expert_header(form, N_EXPERTS), bytes(form.stride_bytes - form.record_bytes)
        records = [random.bytes(form.record_bytes) for _ in range(N_EXPERTS)]
        (root / expert_file(index)).write_bytes(header + b"".join(record + pad for record in records))
        sums = tuple(map(checksum, records))
        module = f"model.layers.{index}.mlp.switch_mlp"
        layers.append(
            ExpertLayer(index, module, kind, layout, N_EXPERTS, 2, expert_file(index), len(header), sums),
        )
    resident = safetensors_header.encode([("norm.weight", "F32", (4,))], {}) + bytes(16)
    contents = {"resident.safetensors": resident, "mtp.safetensors": resident, "config.json": b'{"model_type": "x"}'}
    for name, data in contents.items():
        (root / name).write_bytes(data)
    files = {name: FileSum(len(data), checksum(data)) for name, data in contents.items()}
    _write_manifest(root, manifest.to_json(CLASSES, layers, {"lm_head": Q8}, files, {"fingerprint": "of the source"}))
    return Store.open(root)


def _write_manifest(root: Path, content: dict[str, Any]) -> None:
    (root / "sparkle.json").write_text(json.dumps({**content, "fingerprint": manifest.fingerprint_of(content)}))


def _ignore(done_bytes: int, total_bytes: int) -> None:
    pass


def _refusal(store: Store, action: Callable[[Path], object] = Store.open) -> str:
    with pytest.raises(StorageError) as error:
        action(store.path)
    return str(error.value)


def test_open_returns_what_was_written(store: Store) -> None:
    assert store.classes == CLASSES and store.name == "model.store" and store.config == {"model_type": "x"}
    assert [(x.kind, x.layout, x.n_experts, x.top_k) for x in store.layers] == [
        ("main", 0, N_EXPERTS, 2),
        ("main", 1, N_EXPERTS, 2),
        ("mtp", 0, N_EXPERTS, 2),
    ]
    assert store.resident_quant == {"lm_head": Q8} and store.layout_of(1) == PLAIN
    assert store.mtp_path == store.path / "mtp.safetensors" and store.resident_bytes == 2 * store.mtp_bytes > 0
    assert store.expert_bytes() == N_EXPERTS * (2 * QUANTISED.record_bytes + PLAIN.record_bytes)


def test_pieces_follow_each_other_and_records_are_aligned(store: Store) -> None:
    for layout in store.classes:
        ends = [0, *(piece.offset + piece.nbytes for piece in layout.pieces)]
        assert [piece.offset for piece in layout.pieces] == ends[:-1] and layout.record_bytes == ends[-1]
        assert layout.stride_bytes % ALIGN_BYTES == 0 and 0 <= layout.stride_bytes - layout.record_bytes < ALIGN_BYTES
    for layer in store.layers:
        assert all(store.record_offset(layer.index, e) % ALIGN_BYTES == 0 for e in range(layer.n_experts))


def test_record_offsets_point_at_what_a_stock_reader_finds(store: Store) -> None:
    for layer in store.layers:
        raw, loaded = (store.path / layer.file).read_bytes(), load_file(store.path / layer.file)
        for expert in range(layer.n_experts):
            start = store.record_offset(layer.index, expert)
            for piece in store.layout_of(layer.index).pieces:
                array = loaded[f"e{expert:04d}.{piece.name}"]
                assert array.shape == piece.shape
                assert raw[start + piece.offset : start + piece.offset + piece.nbytes] == array.tobytes()


@pytest.mark.parametrize("expert", [-1, N_EXPERTS])
def test_no_offset_for_an_expert_that_is_not_there(store: Store, expert: int) -> None:
    with pytest.raises(IndexError, match=f"experts 0 to {N_EXPERTS - 1}"):
        store.record_offset(0, expert)


def test_verify_reads_every_byte_once(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    verify(store, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_verify_names_layer_expert_and_file_of_a_changed_record(store: Store, layer: int) -> None:
    path = store.path / store.layers[layer].file
    raw = bytearray(path.read_bytes())
    raw[store.record_offset(layer, 1) + store.layout_of(layer).record_bytes - 1] ^= 1
    path.write_bytes(raw)
    text = _refusal(store, lambda root: verify(Store.open(root), _ignore))
    assert f"layer {layer} " in text and "expert 1:" in text and str(path) in text


@pytest.mark.parametrize("name", ["resident.safetensors", "mtp.safetensors", "config.json"])
def test_verify_names_a_changed_file(store: Store, name: str) -> None:
    raw = bytearray((store.path / name).read_bytes())
    raw[-3] ^= 1
    (store.path / name).write_bytes(raw)
    assert str(store.path / name) in _refusal(store, lambda root: verify(store, _ignore))


FILES = [expert_file(0), expert_file(2), "resident.safetensors", "mtp.safetensors", "config.json"]


@pytest.mark.parametrize("name", FILES)
def test_open_refuses_a_truncated_longer_or_missing_file(store: Store, name: str) -> None:
    path = store.path / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-7])
    assert str(path) in (text := _refusal(store)) and "7 bytes are missing" in text
    path.write_bytes(raw + b"x")
    assert str(path) in (text := _refusal(store)) and "1 bytes too many" in text
    path.unlink()
    assert str(path) in (text := _refusal(store)) and "prepare" in text


def test_a_file_that_shrinks_after_opening_fails_verify(store: Store) -> None:
    path = store.path / expert_file(1)
    path.write_bytes(path.read_bytes()[:-5])
    assert "ends 5 bytes too early" in _refusal(store, lambda root: verify(store, _ignore))


def test_open_refuses_an_expert_file_of_another_class(store: Store) -> None:
    path = store.path / expert_file(0)
    path.write_bytes(path.read_bytes().replace(b"gate_proj", b"gate_porj"))
    assert str(path) in (text := _refusal(store)) and "header" in text


def test_open_says_what_a_folder_is_instead(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such folder"):
        Store.open(tmp_path / "none")
    with pytest.raises(StorageError, match=r"not an expert store.*models prepare SRC"):
        Store.open(tmp_path)
    (store.path / "sparkle.json").unlink()
    with pytest.raises(StorageError, match=r"a checkpoint.*models prepare"):
        Store.open(store.path)


def test_an_edited_manifest_is_refused(store: Store) -> None:
    path = store.path / "sparkle.json"
    path.write_text(path.read_text().replace('"top_k": 2', '"top_k": 1'))
    assert "fingerprint" in _refusal(store)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "sparkle-store"}'])
def test_a_damaged_manifest_is_refused(store: Store, text: str) -> None:
    (store.path / "sparkle.json").write_text(text)
    assert "sparkle.json" in _refusal(store)


def test_a_later_version_is_refused_by_number(store: Store) -> None:
    content = json.loads((store.path / "sparkle.json").read_text())
    _write_manifest(store.path, {**content, "version": 2})
    assert "version 2" in _refusal(store)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("layers", 0, "file"), "../outside"),
        (("layers", 0, "file"), "/etc/passwd"),
        (("layers", 0, "class"), 2),
        (("layers", 0, "class"), -1),
        (("layers", 0, "class"), True),
        (("layers", 0, "top_k"), N_EXPERTS + 1),
        (("layers", 0, "kind"), "other"),
        (("layers", 0, "xxh3"), []),
        (("layers", 0, "xxh3"), ["xyz"]),
        (("layers", 0), None),
        (("layers",), {}),
        (("classes", 0, "pieces"), []),
        (("classes", 0, "pieces", 0, "shape"), [0, 16]),
        (("classes", 0, "pieces", 0, "dtype"), "F99"),
        (("classes", 0, "pieces", 0, "name"), "gate_proj.scales"),
        (("classes", 0, "record_bytes"), 1),
        (("classes", 0, "quant", "gate_proj"), 8),
        (("files",), {}),
        (("files", "config.json", "bytes"), "1"),
        (("resident_quant", "lm_head", "bits"), None),
        (("source",), None),
    ],
)
def test_a_manifest_with_nonsense_in_it_is_refused(store: Store, where: tuple[Any, ...], value: Any) -> None:
    content = json.loads((store.path / "sparkle.json").read_text())
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    _write_manifest(store.path, content)
    assert "sparkle.json" in _refusal(store)


def test_the_fingerprint_is_of_the_content_not_of_its_origin(store: Store) -> None:
    content = json.loads((store.path / "sparkle.json").read_text())
    assert manifest.fingerprint_of({**content, "source": {"fingerprint": "other"}}) == store.fingerprint
    content["layers"][0]["xxh3"][0] = "0" * 16
    assert manifest.fingerprint_of(content) != store.fingerprint


def test_inspect_shows_layers_classes_and_sizes(store: Store) -> None:
    text = CliRunner().invoke(models, ["inspect", str(store.path)], catch_exceptions=False).output
    for fact in (
        store.fingerprint,
        f"2 with {N_EXPERTS} experts, 2 per token",
        "class q8",
        "class f32",
        "not quantised",
    ):
        assert fact in text
    facts = json.loads(CliRunner().invoke(models, ["inspect", "--json", str(store.path)]).output)
    assert facts["expert_bytes"] == store.expert_bytes() and [c["layers"] for c in facts["classes"]] == [2, 1]


def test_verify_command_ends_with_a_clear_line(store: Store) -> None:
    result = CliRunner().invoke(models, ["verify", str(store.path)], catch_exceptions=False)
    assert re.search(r"sound\. 9 expert records and 3 files", result.stdout)
    with pytest.raises(StorageError):
        CliRunner().invoke(models, ["verify", str(store.path / "none")], catch_exceptions=False)


class _Screen:
    def __init__(self, is_tty: bool) -> None:
        self.is_tty, self.writes = is_tty, list[str]()

    def isatty(self) -> bool:
        return self.is_tty

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("is_tty", "n_writes"), [(True, 50), (False, 2)])
def test_progress_is_drawn_now_and_then(is_tty: bool, n_writes: int) -> None:
    now, screen = [0.0], _Screen(is_tty)
    meter = Meter("reading", screen, clock=lambda: now[0])  # type: ignore[arg-type]
    for step in range(1, 1001):
        now[0] = step / 100
        meter(step * 10**6, 10**9)
    assert n_writes - 2 <= len(screen.writes) <= n_writes
    assert "100.0 MB/s" in screen.writes[-1] and all(("\n" in text) != is_tty for text in screen.writes)


@pytest.mark.parametrize(("n_bytes", "text"), [(0, "0 B"), (999, "999 B"), (64_100_000, "64.1 MB"), (2**43, "8.8 TB")])
def test_sizes_read_as_people_write_them(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text
