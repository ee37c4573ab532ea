"""scripts/dequantise.py: the checkpoint it writes holds exactly the weights that MLX computes with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from scripts.dequantise import dequantise, zero_centred
from sparkle.errors import ConfigError, StorageError
from sparkled.compute.families import Request
from sparkled.compute.prepare import prepare
from tests.conftest import SHIPPED
from tests.mlx_sources import convert, mixed_bits
from tests.models_random import edit_config, write_qwen3_next

pytestmark = pytest.mark.parity

Tensors = dict[str, mx.array]


def _load(*paths: Path) -> Tensors:
    tensors: Tensors = {}
    for path in paths:
        loaded: Tensors = mx.load(str(path))  # type: ignore[assignment]  # a dict, for safetensors
        tensors |= loaded
    return tensors


def _same(a: mx.array, b: mx.array) -> bool:
    """Equal bit for bit, dtype included."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b).item())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, dequantised."""
    out = tmp_path_factory.mktemp("dequantised") / "hf"
    dequantise(SHIPPED, out)
    return out


def test_weights_are_those_of_mx_dequantize(plain: Path) -> None:
    table = json.loads((SHIPPED / "config.json").read_text())["quantization"]
    packed = _load(SHIPPED / "model.safetensors", SHIPPED / "mtp.safetensors")
    written = _load(*plain.glob("*.safetensors"))
    quantised = [key.removesuffix(".scales") for key in packed if key.endswith(".scales")]
    assert len(quantised) > 100
    for path in quantised:
        spec = table | table.get(path, {})
        weight, scales, biases = (packed[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
        expected = mx.dequantize(weight, scales, biases, spec["group_size"], spec["bits"])
        if ".switch_mlp." in path:
            name = path.replace("switch_mlp", "experts.{}") + ".weight"
            assert all(_same(written[name.format(i)], expert) for i, expert in enumerate(expected)), path
        else:
            assert _same(written[f"{path}.weight"], expected), path


def test_mlx_lm_reads_back_the_same_model(plain: Path) -> None:
    """mlx-lm itself stacks the experts and adds one to the norms: every parameter comes out bit for bit."""
    resident, _ = load_model(SHIPPED)
    expected = dict(tree_flatten(dequantize_model(resident).parameters()))
    found = dict(tree_flatten(load_model(plain)[0].parameters()))
    assert found.keys() == expected.keys()
    assert [key for key in expected if not _same(found[key], expected[key])] == []


def test_mtp_norms_round_trip(plain: Path) -> None:
    shipped, written = _load(SHIPPED / "mtp.safetensors"), _load(*plain.glob("*.safetensors"))
    norms = [key for key in shipped if "norm" in key]
    assert len(norms) == 7
    assert [key for key in norms if not _same(written[key] + 1.0, shipped[key])] == []
    assert all(abs(written[key].astype(mx.float32).mean().item()) < 1 for key in norms)  # zero-centred, one taken off


def test_an_8_bit_store_can_be_made_of_it(plain: Path, tmp_path: Path) -> None:
    store = prepare(plain, tmp_path / "store", Request(bits="8"), lambda _line: None)
    assert {quant.bits for layout in store.classes for quant in layout.quant.values()} == {8}
    assert store.mtp_bytes > 0


def test_bits_come_from_the_table(tmp_path: Path) -> None:
    """Layers of different bits and groups, as a mixed recipe makes them, each by its own entry."""
    source = write_qwen3_next(tmp_path / "hf", mtp=False)
    mixed = convert(source, tmp_path / "mlx", quantize=True, quant_predicate=mixed_bits)
    dequantise(mixed, tmp_path / "plain")
    expected = dict(tree_flatten(dequantize_model(load_model(mixed)[0]).parameters()))
    found = dict(tree_flatten(load_model(tmp_path / "plain")[0].parameters()))
    assert [key for key in expected if not _same(found[key], expected[key].astype(found[key].dtype))] == []


def test_a_wrong_table_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(SHIPPED, broken)
    config = json.loads((broken / "config.json").read_text())
    del config["quantization"]["model.layers.3.mlp.gate"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(StorageError, match=r"model\.layers\.3\.mlp\.gate\.weight.*4 bits"):
        dequantise(broken, tmp_path / "out")


def test_what_is_not_quantised_is_refused(tmp_path: Path) -> None:
    source = write_qwen3_next(tmp_path / "hf")
    with pytest.raises(ConfigError, match="no quantization table"):
        dequantise(source, tmp_path / "out")
    edit_config(source, model_type="qwen3_moe")
    with pytest.raises(ConfigError, match="qwen3_moe"):
        dequantise(source, tmp_path / "out")


def test_any_norm_round_trips() -> None:
    """What bfloat16 checkpoints hold stays bfloat16, finer values are kept in float32, anything else is refused."""
    rng = np.random.default_rng(0)
    plain = mx.array(np.concatenate([rng.uniform(0.5, 4, 4096), np.arange(256) / 256])).astype(mx.bfloat16)
    fine = mx.array(rng.uniform(0.5, 4, 4096)).astype(mx.float16)
    for norm, dtype in ((plain, mx.bfloat16), (fine, mx.float32)):
        written = zero_centred("norm", norm)
        assert written.dtype == dtype
        assert _same((written + 1.0).astype(norm.dtype), norm)
    with pytest.raises(StorageError, match="never zero-centred"):
        zero_centred("norm", mx.array([1e-30], dtype=mx.bfloat16))
