"""`prepare`: a store holds exactly what mlx-lm would compute with, however the source is laid out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

from sparkle import safetensors_header
from sparkle.errors import ConfigError, SparkleError, StorageError
from sparkle.store import Quant, Store, verify
from sparkled.compute import prepare as prepare_module
from sparkled.compute import store_writer
from sparkled.compute.families import Request
from sparkled.compute.prepare import prepare
from tests.mlx_sources import convert
from tests.models_random import ALIGNED, edit_config, write_qwen3_moe, write_qwen3_next, write_tensors

pytestmark = pytest.mark.parity

NO_MTP = Request(with_mtp=False)
MLX = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "U8": mx.uint8}


def _load(path: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(path)))  # type: ignore[arg-type]  # a dict, for a safetensors file


def _quiet(line: str) -> None:
    pass


def _make(src: Path, dst: Path, request: Request = Request()) -> Store:  # noqa: B008  Request is frozen
    return prepare(src, dst, request, _quiet)


def _bytes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _record(store: Store, layer: int, expert: int) -> dict[str, mx.array]:
    """Return the pieces of an expert, read the way the prefetch daemon does: by offsets."""
    layout, path = store.layout_of(layer), store.path / store.layers[layer].file
    with path.open("rb") as file:
        file.seek(store.record_offset(layer, expert))
        raw = file.read(layout.record_bytes)
    return {
        piece.name: mx.array(np.frombuffer(raw, np.uint8, piece.nbytes, piece.offset))
        .view(MLX[piece.dtype])
        .reshape(piece.shape)
        for piece in layout.pieces
    }


def _assemble(store: Store, model: Any, path: Path, kind: str) -> Any:
    """Fill `model` from a store and nothing else: resident weights from `path`, experts from records."""
    switches = {layer.module: layer for layer in store.layers if layer.kind == kind}
    quants = dict(store.resident_quant)
    for module, layer in switches.items():
        quants |= {f"{module}.{p}": quant for p, quant in store.classes[layer.layout].quant.items()}

    def params(name: str, module: Any) -> Any:
        quant = quants.get(name)
        return quant and {"bits": quant.bits, "group_size": quant.group_size, "mode": quant.mode}

    nn.quantize(model, class_predicate=params)
    weights = _load(path)
    for module, layer in switches.items():
        records = [_record(store, layer.index, e) for e in range(layer.n_experts)]
        for piece in records[0]:
            weights[f"{module}.{piece}"] = mx.stack([record[piece] for record in records])
    model.load_weights(list(weights.items()), strict=True)
    return model


def _logits(model: Any) -> mx.array:
    model.set_dtype(mx.float32)
    return model(mx.array([list(range(9, 60))]))  # type: ignore[no-any-return]


def _same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item())


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Next checkpoint with an MTP head, in two shards."""
    return write_qwen3_next(tmp_path_factory.mktemp("src") / "hf")


@pytest.fixture(scope="module")
def prepared(hf: Path) -> Store:
    return _make(hf, hf.parent / "hf.store")


SOURCES: list[tuple[Callable[..., Path], dict[str, Any], int, int]] = [
    (write_qwen3_next, {"mtp": False}, 8, 64),
    (write_qwen3_next, {"mtp": False, "dtype": "f16", "shards": 1}, 4, 32),
    (write_qwen3_next, {"mtp": False, "dtype": "f32", "tie": True}, 6, 64),
    (write_qwen3_next, {"mtp": False, **ALIGNED}, 8, 64),
    (write_qwen3_moe, {}, 8, 64),
    (write_qwen3_moe, {"dtype": "f32", "tie": True, "shards": 3, "experts": 5}, 3, 64),
    (write_qwen3_moe, {"hidden": 128}, 4, 128),  # down_proj has 64 in-features: it stays unquantised
]


@pytest.mark.parametrize(("write", "sizes", "bits", "group_size"), SOURCES)
def test_store_is_what_convert_would_write(
    tmp_path: Path, write: Callable[..., Path], sizes: dict[str, Any], bits: int, group_size: int
) -> None:
    src = write(tmp_path / "hf", **sizes)
    mlx = convert(src, tmp_path / "mlx", quantize=True, q_bits=bits, q_group_size=group_size)
    direct = _make(src, tmp_path / "direct", Request(str(bits), group_size))
    indirect = _make(mlx, tmp_path / "indirect")
    different = {k for k, v in _bytes(direct.path).items() if _bytes(indirect.path)[k] != v}
    assert different == {"sparkle.json"}  # which says what each was made of
    assert direct.fingerprint == indirect.fingerprint and direct.source != indirect.source

    resident, _ = mlx_lm.utils.load_model(mlx)
    stacked = dict(tree_flatten(resident.parameters()))
    for layer in direct.layers:
        for expert in range(layer.n_experts):
            for name, piece in _record(direct, layer.index, expert).items():
                assert _same(piece, stacked[f"{layer.module}.{name}"][expert])
    empty, _ = _empty_model(direct)
    streamed = _assemble(direct, empty, direct.resident_path, "main")
    assert mx.array_equal(_logits(streamed), _logits(resident))


def _empty_model(store: Store) -> tuple[Any, Any]:
    model_class, args_class = mlx_lm.utils._get_classes(store.config)
    args = args_class.from_dict(store.config)
    return model_class(args), args


def test_unquantised_stays_so_from_either_layout(tmp_path: Path) -> None:
    src = write_qwen3_next(tmp_path / "hf", mtp=False)
    mlx = convert(src, tmp_path / "mlx")
    a, b = (_make(path, tmp_path / f"{path.name}.store", Request("none")) for path in (src, mlx))
    assert a.fingerprint == b.fingerprint and not a.resident_quant and not a.classes[0].quant
    assert [piece.dtype for piece in a.classes[0].pieces] == ["BF16"] * 3
    assert _make(mlx, tmp_path / "q8").fingerprint == _make(src, tmp_path / "q8.too").fingerprint


def test_mixed_bits_give_one_class_each(tmp_path: Path) -> None:
    def recipe(path: str, module: Any) -> bool | dict[str, Any]:
        six = {"group_size": 32, "bits": 6, "mode": "affine"}
        return six if "layers.1.mlp.switch_mlp" in path or path.endswith("layers.2.mlp.switch_mlp.down_proj") else True

    src = write_qwen3_next(tmp_path / "hf", mtp=False)
    mlx = convert(src, tmp_path / "mlx", quantize=True, q_bits=4, q_group_size=64, quant_predicate=recipe)
    store = _make(mlx, tmp_path / "store")
    assert [layout.name for layout in store.classes] == ["q4", "q6", "q4+q6"]
    assert [layer.layout for layer in store.layers] == [0, 1, 2, 0]
    assert store.classes[2].quant["down_proj"] == Quant(6, 32, "affine")
    streamed = _assemble(store, _empty_model(store)[0], store.resident_path, "main")
    assert mx.array_equal(_logits(streamed), _logits(mlx_lm.utils.load_model(mlx)[0]))


def test_a_mode_without_biases(tmp_path: Path) -> None:
    mlx = convert(write_qwen3_moe(tmp_path / "hf"), tmp_path / "mlx", quantize=True, q_mode="mxfp4")
    store = _make(mlx, tmp_path / "store")
    assert [(p.name, p.dtype) for p in store.classes[0].pieces][:2] == [
        ("gate_proj.weight", "U32"),
        ("gate_proj.scales", "U8"),
    ]
    assert len(store.classes[0].pieces) == 6 and store.classes[0].quant["up_proj"] == Quant(4, 32, "mxfp4")
    streamed = _assemble(store, _empty_model(store)[0], store.resident_path, "main")
    assert mx.array_equal(_logits(streamed), _logits(mlx_lm.utils.load_model(mlx)[0]))


def test_stock_readers_take_every_file(prepared: Store) -> None:
    for path in sorted(prepared.path.rglob("*.safetensors")):
        loaded = _load(path)
        with safe_open(path, "np") as file:
            assert set(file.keys()) == set(loaded)
    for layer in prepared.layers:
        loaded = _load(prepared.path / layer.file)
        for expert in range(layer.n_experts):
            for name, piece in _record(prepared, layer.index, expert).items():
                assert _same(piece, loaded[f"e{expert:04d}.{name}"])


SHIFTED = (
    "mtp.norm",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.layers.0.input_layernorm",
    "mtp.layers.0.post_attention_layernorm",
    "mtp.layers.0.self_attn.q_norm",
    "mtp.layers.0.self_attn.k_norm",
)


def _raw_mtp(hf: Path) -> dict[str, mx.array]:
    loaded = [_load(path) for path in hf.glob("*.safetensors")]
    return {name: value for tensors in loaded for name, value in tensors.items() if name.startswith("mtp.")}


def test_mtp_norms_of_a_raw_head_are_shifted_once(hf: Path, prepared: Store) -> None:
    assert prepared.mtp_path is not None
    raw, made = _raw_mtp(hf), _load(prepared.mtp_path)
    assert {name.removesuffix(".weight") for name, value in raw.items() if value.ndim == 1} == set(SHIFTED)
    for name in SHIFTED:
        assert _same(made[f"{name}.weight"], raw[f"{name}.weight"] + 1.0)
    expected = mx.quantize(raw["mtp.fc.weight"], 64, 8)
    for part, value in zip(("weight", "scales", "biases"), expected, strict=True):
        assert _same(made[f"mtp.fc.{part}"], value)
    assert safetensors_header.read(prepared.mtp_path).metadata == {"format": "mlx", "norm_shift": "+1"}
    assert prepared.resident_quant["mtp.layers.0.mlp.gate"] == Quant(8, 64, "affine")
    assert [(x.module, x.kind) for x in prepared.layers][-1] == ("mtp.layers.0.mlp.switch_mlp", "mtp")
    assert not any("experts" in name or "switch_mlp" in name for name in made)


def test_mtp_head_has_bits_of_its_own(hf: Path, tmp_path: Path) -> None:
    store = _make(hf, tmp_path / "store", Request("4", mtp_bits="8"))
    assert [layout.name for layout in store.classes] == ["q4", "q8"]
    assert [layer.layout for layer in store.layers] == [0, 0, 0, 0, 1]
    assert store.resident_quant["mtp.fc"].bits == 8 and store.resident_quant["lm_head"].bits == 4
    assert (
        store.resident_quant["mtp.layers.0.mlp.gate"].bits == store.resident_quant["model.layers.0.mlp.gate"].bits == 8
    )


def test_a_converted_head_beside_an_mlx_checkpoint_is_kept(hf: Path, prepared: Store, tmp_path: Path) -> None:
    """As mlx_lm would lay it out: experts stacked, norms shifted already, quantised, in a file of its own."""
    mlx = convert(hf, tmp_path / "mlx", quantize=True, q_bits=8, q_group_size=64)
    raw = _raw_mtp(hf)
    head: dict[str, mx.array] = {f"{name}.weight": raw.pop(f"{name}.weight") + 1.0 for name in SHIFTED}
    for p in ("gate_proj", "up_proj", "down_proj"):
        experts = [raw.pop(f"mtp.layers.0.mlp.experts.{e}.{p}.weight") for e in range(8)]
        raw[f"mtp.layers.0.mlp.switch_mlp.{p}.weight"] = mx.stack(experts)
    for name, value in raw.items():
        parts = zip(("weight", "scales", "biases"), mx.quantize(value, 64, 8), strict=True)
        head |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in parts}
    metadata = {"format": "mlx", "bits": "8", "group_size": "64"}
    mx.save_safetensors(str(mlx / "mtp.safetensors"), head, metadata=metadata)

    store = _make(mlx, tmp_path / "store")
    assert store.mtp_path is not None and prepared.mtp_path is not None
    assert safetensors_header.read(store.mtp_path).metadata == {"format": "mlx", "norm_shift": "none"}
    kept, shifted = _load(store.mtp_path), _load(prepared.mtp_path)
    assert set(kept) == set(shifted) and all(_same(kept[name], shifted[name]) for name in kept)
    assert store.layers == prepared.layers and store.resident_quant == prepared.resident_quant
    with pytest.raises(ConfigError, match="--mtp-bits"):
        _make(mlx, tmp_path / "other", Request(mtp_bits="4"))


def test_blocks_do_not_show_in_the_result(hf: Path, prepared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "BLOCK_BYTES", 1000)  # a few rows
    small = _make(hf, hf.parent / "small.store")
    assert _bytes(small.path) == _bytes(prepared.path)


def test_nested_rotary_settings_are_lifted(tmp_path: Path) -> None:
    src = write_qwen3_moe(tmp_path / "hf")
    edit_config(src, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert _make(src, tmp_path / "store").config["rope_theta"] == 5e5
    edit_config(src, rope_theta=1e4)
    with pytest.raises(ConfigError, match="rope_theta differs"):
        _make(src, tmp_path / "other")


# Refusals. Each edits a fresh checkpoint and names what the message must contain.


def _drop_tensor(src: Path, name: str) -> None:
    _edit_tensors(src, lambda tensors: tensors.pop(name) is None)


def _edit_tensors(src: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the checkpoint's only file with its tensors changed."""
    path = src / "model.safetensors"
    tensors = {name: np.array(value.astype(mx.float32)) for name, value in _load(path).items()}
    edit(tensors)
    write_tensors(path, tensors, "bf16", {"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def _truncate(src: Path) -> None:
    path = src / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8192)


def _lose_shard(src: Path) -> None:
    shutil.rmtree(src)
    write_qwen3_moe(src, shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()


def _stale_index(src: Path) -> None:
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))


def _index_outside(src: Path) -> None:
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


REFUSALS: dict[str, tuple[Callable[[Path], object], type[SparkleError], tuple[str, ...]]] = {
    "missing expert": (lambda s: _drop_tensor(s, EXPERT), StorageError, (EXPERT, "expert 5 of 8")),
    "missing first expert": (
        lambda s: _drop_tensor(s, EXPERT.replace(".5.", ".0.")),
        StorageError,
        (EXPERT.replace(".5.", ".0."),),
    ),
    "missing norm": (lambda s: _drop_tensor(s, "model.norm.weight"), StorageError, ("model.norm.weight",)),
    "missing head": (lambda s: _drop_tensor(s, "lm_head.weight"), StorageError, ("lm_head.weight",)),
    "misshapen expert": (
        lambda s: _edit_tensors(s, lambda t: t.update({EXPERT: t[EXPERT][:-1]})),
        StorageError,
        (EXPERT, "(63, 64)", "(64, 64)", "model.safetensors"),
    ),
    "misshapen router": (
        lambda s: _edit_tensors(s, lambda t: t.update({"model.layers.0.mlp.gate.weight": np.zeros((7, 64))})),
        StorageError,
        ("model.layers.0.mlp.gate.weight", "(7, 64)", "(8, 64)"),
    ),
    "unknown tensor": (
        lambda s: _edit_tensors(s, lambda t: t.update({"model.layers.0.extra": np.zeros((2,))})),
        StorageError,
        ("model.layers.0.extra", "no place"),
    ),
    "fused experts": (
        lambda s: _edit_tensors(
            s, lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": np.zeros((8, 128, 64))})
        ),
        StorageError,
        ("model.layers.0.mlp.experts.gate_up_proj",),
    ),
    "too many experts": (lambda s: edit_config(s, num_experts=4), StorageError, ("experts.7.", "4 experts")),
    "too few experts": (lambda s: edit_config(s, num_experts=10**9), StorageError, ("experts.8.", "expert 8 of")),
    "other layer count": (lambda s: edit_config(s, num_hidden_layers=10**9), StorageError, ("num_hidden_layers",)),
    "other width": (
        lambda s: edit_config(s, hidden_size=128),
        StorageError,
        ("embed_tokens", "(320, 64)", "(320, 128)"),
    ),
    "absurd width": (lambda s: edit_config(s, hidden_size=2**70), StorageError, ("config.json",)),
    "text for a number": (lambda s: edit_config(s, hidden_size="wide"), StorageError, ("config.json",)),
    "too many per token": (lambda s: edit_config(s, num_experts_per_tok=9), StorageError, ("9 of 8 experts",)),
    "key missing": (lambda s: edit_config(s, head_dim=None), StorageError, ("config.json", "head_dim")),
    "other family": (lambda s: edit_config(s, model_type="mixtral"), ConfigError, ("'mixtral'", "qwen3_next")),
    "foreign quantisation": (
        lambda s: edit_config(s, quantization_config={"quant_method": "fp8"}),
        ConfigError,
        ("'fp8'",),
    ),
    "quantised in name only": (
        lambda s: edit_config(s, quantization={"bits": 8}),
        StorageError,
        ("quantization", "group_size"),
    ),
    "damaged config": (lambda s: (s / "config.json").write_text("{"), StorageError, ("config.json",)),
    "no config": (lambda s: (s / "config.json").unlink(), StorageError, ("config.json",)),
    "no weights": (lambda s: (s / "model.safetensors").unlink(), StorageError, ("no model*.safetensors",)),
    "no tokenizer": (lambda s: (s / "tokenizer.json").unlink(), StorageError, ("tokenizer.json",)),
    "truncated file": (_truncate, StorageError, ("model.safetensors", "8192 bytes are missing")),
    "missing shard": (_lose_shard, StorageError, ("1 of 3 files", "model-00002-of-00003.safetensors")),
    "index names a ghost": (_stale_index, StorageError, ("ghost",)),
    "index leaves the folder": (_index_outside, StorageError, ("outside",)),
    "no folder": (shutil.rmtree, StorageError, ("no such folder",)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_broken_sources_are_refused_by_name_and_leave_nothing(tmp_path: Path, name: str) -> None:
    break_it, error, texts = REFUSALS[name]
    src = write_qwen3_moe(tmp_path / "src")
    break_it(src)
    with pytest.raises(error) as raised:
        _make(src, tmp_path / "dst")
    assert all(text in str(raised.value) for text in (*texts, str(src))), raised.value
    assert {path.name for path in tmp_path.iterdir()} <= {"src"}


def test_a_quantised_checkpoint_must_fit_its_own_description(tmp_path: Path) -> None:
    src = convert(write_qwen3_moe(tmp_path / "hf"), tmp_path / "mlx", quantize=True, q_bits=8, q_group_size=64)
    text = (src / "config.json").read_text()
    quantization = json.loads(text)["quantization"]
    wrong = {**quantization, "model.layers.0.self_attn.q_proj": {"bits": 4, "group_size": 64}}
    edit_config(src, quantization=wrong)
    with pytest.raises(StorageError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        _make(src, tmp_path / "dst")
    (src / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="--bits 4 can't change that"):
        _make(src, tmp_path / "dst", Request("4"))
    assert _make(src, tmp_path / "dst", Request("8", 64)).classes[0].quant["up_proj"] == Quant(8, 64, "affine")


def test_a_head_that_cannot_be_placed_is_refused_or_left_out(hf: Path, tmp_path: Path) -> None:
    mlx = convert(hf, tmp_path / "mlx", quantize=True, q_bits=8, q_group_size=64)
    write_tensors(mlx / "mtp.safetensors", {"mtp.fc.weight": np.zeros((64, 128), np.float32)}, "bf16", {})
    with pytest.raises(StorageError, match=r"lacks tensor mtp\."):
        _make(mlx, tmp_path / "dst")
    assert _make(mlx, tmp_path / "dst", NO_MTP).mtp_path is None
    shutil.copy(mlx / "mtp.safetensors", tmp_path)
    both = shutil.copytree(hf, tmp_path / "both")
    shutil.copy(tmp_path / "mtp.safetensors", both)
    with pytest.raises(StorageError, match="two MTP heads"):
        _make(both, tmp_path / "other")


# DST.


def test_a_store_that_is_there_already_is_kept(hf: Path, prepared: Store) -> None:
    said: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in prepared.path.rglob("*")}
    assert prepare(hf, prepared.path, Request(), said.append) == prepared
    assert "nothing to do" in said[0] and before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(ConfigError, match="another settings"):
        _make(hf, prepared.path, Request("4"))


def test_another_source_or_a_foreign_folder_is_not_touched(hf: Path, prepared: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another source"):
        _make(write_qwen3_next(tmp_path / "hf", seed=1), prepared.path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="not an expert store"):
        _make(hf, tmp_path / "mine")
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        _make(hf, tmp_path / "dst")
    assert (tmp_path / "dst.partial" / "thesis.txt").read_text() == "mine"


def test_a_damaged_store_is_named_not_replaced(hf: Path, tmp_path: Path) -> None:
    store = _make(hf, tmp_path / "dst")
    os.truncate(store.resident_path, 100)
    with pytest.raises(StorageError, match=r"bytes are missing.*remove .*dst first"):
        _make(hf, tmp_path / "dst")


def test_a_killed_run_ends_with_the_same_bytes_when_repeated(hf: Path, prepared: Store, tmp_path: Path) -> None:
    """Killed between two layers; the run itself does the killing, so that nothing depends on time."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from sparkled.compute import prepare as p; from sparkled.compute.families import Request\n"
        "write, seen = p.write_layer, []\n"
        "def dying(*args):\n"
        "    seen.append(1)\n"
        "    return write(*args) if len(seen) < 3 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "p.write_layer = dying\n"
        "p.prepare(Path(sys.argv[1]), Path(sys.argv[2]), Request(), print)\n"
    )
    dst = tmp_path / "dst"
    child = subprocess.run([sys.executable, "-c", script, str(hf), str(dst)], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL and not dst.exists()
    assert (tmp_path / "dst.partial" / "experts" / "layer_001.safetensors").exists()
    assert _bytes(_make(hf, dst).path) == _bytes(prepared.path)
    assert {path.name for path in tmp_path.iterdir()} == {"dst"}


def test_an_interrupted_run_removes_what_it_wrote(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "write_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _make(hf, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_refused_with_the_arithmetic(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"needs .* \(experts .* \+ resident weights .*\): .* 1\.0 MB that are free"):
        _make(hf, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_corrupts_is_noticed_before_the_store_gets_its_name(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store_writer.write_layer

    def corrupting(path: Path, *args: Any) -> Any:
        result = write(path, *args)
        raw = bytearray(path.read_bytes())
        raw[result[0] + 5] ^= 1
        path.write_bytes(raw)
        return result

    monkeypatch.setattr(prepare_module, "write_layer", corrupting)
    with pytest.raises(StorageError, match=r"layer 0 .*expert 0"):
        _make(hf, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_store(hf: Path, tmp_path: Path) -> None:
    with (
        prepare_module._partial_folder(tmp_path / "dst"),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        _make(hf, tmp_path / "dst")


def test_command_line(hf: Path, prepared: Store, tmp_path: Path) -> None:
    script = "import sys; from sparkle.cli import _exit, models; sys.exit(_exit.run(models.models, 'models'))"

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    dst = tmp_path / "dst"
    done = run("prepare", str(hf), str(dst), "--bits", "4", "--group-size", "32", "--mtp-bits", "none")
    assert done.returncode == 0 and "40 expert records" in done.stdout and done.stderr == ""
    store = Store.open(dst)
    assert store.classes[0].quant["up_proj"] == Quant(4, 32, "affine") and not store.classes[1].quant
    verify(store, lambda done, total: None)
    refused = run("prepare", str(tmp_path / "none"), str(dst))
    assert refused.returncode == StorageError.exit_code and refused.stderr.count("\n") == 1 and refused.stdout == ""
    assert run("prepare", str(hf), str(prepared.path), "--no-mtp").returncode == ConfigError.exit_code
