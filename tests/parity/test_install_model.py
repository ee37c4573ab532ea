"""scripts/install_model.py: a model is replaced by a better one whole, or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from scripts import install_model
from scripts.dequantise import dequantise
from sparkle.errors import ConfigError, StorageError
from tests.conftest import SHIPPED
from tests.models_random import write_qwen3_next

pytestmark = pytest.mark.parity

NAME = "model"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as a Hugging Face checkpoint, without the sampling defaults."""
    out = tmp_path_factory.mktemp("source") / "hf"
    dequantise(SHIPPED, out)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.9}))
    return out


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder that holds an older model."""
    monkeypatch.setattr(install_model, "MODELS", tmp_path)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "NOTICE").write_text("sources")
    (tmp_path / NAME / "stale.txt").write_text("of the model before")
    return tmp_path


def _install(source: Path, *options: str) -> Result:
    return CliRunner().invoke(install_model.main, [str(source), "--name", NAME, *options])


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _weight(tensors: dict[str, mx.array], path: str) -> mx.array:
    weight, scales, biases = (tensors[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
    return mx.dequantize(weight, scales, biases, group_size=64, bits=8).astype(mx.float32)


def test_it_replaces_the_model(source: Path, models: Path) -> None:
    result = _install(source)
    assert result.exit_code == 0, result.output
    assert "Paris" in result.output
    installed = models / NAME
    assert [path.name for path in models.iterdir()] == [NAME]  # nothing is left of the building
    assert {path.name for path in installed.iterdir()} == {
        "NOTICE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "mtp.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (installed / "tokenizer.json").read_bytes() == (SHIPPED / "tokenizer.json").read_bytes()
    generation = json.loads((installed / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"]) == (
        0.9,
        20,
    )  # the source's word counts, the rest is filled in


def test_the_shipped_mtp_module_comes_out_again(source: Path, tmp_path: Path) -> None:
    """8-bit weights, dequantised and quantised again, keep their values; norms are shifted once, not twice."""
    config = json.loads((source / "config.json").read_text())
    install_model.write_mtp(source, tmp_path, config, bits=8)
    made, shipped = (dict(mx.load(str(folder / "mtp.safetensors"))) for folder in (tmp_path, SHIPPED))  # type: ignore[arg-type]
    assert made.keys() == shipped.keys()
    norms = [key for key in shipped if "norm" in key]
    assert len(norms) == 7
    assert all(mx.array_equal(made[key], shipped[key]).item() for key in norms)
    for key in (key.removesuffix(".scales") for key in shipped if key.endswith(".scales")):
        a, b = (_weight(tensors, key) for tensors in (made, shipped))
        assert mx.linalg.norm(a - b) <= 0.03 * mx.linalg.norm(b), key


def test_control_text_can_be_encoded_as_text() -> None:
    """Every control token is flagged special in tokenizer.json, so `split_special_tokens` reaches all of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    for text in ("<tool_call>", "</think>", "<|im_end|>"):
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert len(ids) > 1
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1


def test_a_model_that_talks_nonsense_is_not_installed(models: Path, tmp_path: Path) -> None:
    before = _bytes(models / NAME)
    result = _install(write_qwen3_next(tmp_path / "random", vocab=320))
    assert result.exit_code == StorageError.exit_code
    assert "the model answers" in result.output
    assert _bytes(models / NAME) == before
    assert not (models / f".{NAME}.new").exists()


def test_a_model_that_is_too_large_is_not_installed(source: Path, models: Path) -> None:
    before = _bytes(models / NAME)
    result = _install(source, "--bits", "8")
    assert result.exit_code == ConfigError.exit_code
    assert "lower --bits" in result.output
    assert _bytes(models / NAME) == before


def test_an_incomplete_checkpoint_is_refused(models: Path, tmp_path: Path) -> None:
    broken = write_qwen3_next(tmp_path / "random", shards=2)
    missing = sorted(broken.glob("model*.safetensors"))[-1]
    missing.unlink()
    result = _install(broken)
    assert result.exit_code == StorageError.exit_code
    assert missing.name in result.output


@pytest.mark.parametrize("name", ["../elsewhere", ".hidden", "a/b", ""])
def test_a_name_is_a_plain_folder_name(source: Path, models: Path, name: str) -> None:
    result = CliRunner().invoke(install_model.main, [str(source), "--name", name])
    assert result.exit_code == 2
    assert "plain folder name" in result.output
