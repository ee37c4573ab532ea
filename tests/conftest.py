"""What all tiers share: stores, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.models_random import ALIGNED, edit_config, write_qwen3_moe

# No test is timed by hypothesis: machines that run tests are shared. pytest-timeout ends what hangs.
settings.register_profile("sparkle", deadline=None)
settings.load_profile("sparkle")

SHIPPED = Path(__file__).resolve().parents[1] / "models" / "sparkle-46m"


@pytest.fixture(scope="session")
def shipped_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the shipped model. Made by a child process: tests that share it need not import mlx."""
    store = tmp_path_factory.mktemp("shipped") / "shipped.store"
    subprocess.run([sys.executable, "-m", "sparkled.compute.prepare", str(SHIPPED), str(store)], check=True)
    return store


@pytest.fixture(scope="session")
def random_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny stores of random experts: "aligned" is read straight into its slots, "odd" goes through staging."""
    folder = tmp_path_factory.mktemp("random")
    sources = {
        "aligned": write_qwen3_moe(folder / "aligned", **ALIGNED),
        "odd": write_qwen3_moe(folder / "odd"),
    }
    prepare = [sys.executable, "-m", "sparkled.compute.prepare"]
    stores = {name: folder / f"{name}.store" for name in sources}
    running = [subprocess.Popen([*prepare, str(sources[name]), str(store)]) for name, store in stores.items()]
    assert [child.wait() for child in running] == [0, 0]
    return stores


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two layers of 16 random experts, 2 per token; a token takes a few milliseconds, the context is short.

    Ends of sequence are 0 by generation_config, 1 by config and 2 by the tokenizer; greedy decoding meets none.
    """
    folder = tmp_path_factory.mktemp("tiny")
    source, store = write_qwen3_moe(folder / "hf", experts=16), folder / "tiny.store"
    edit_config(source, eos_token_id=1, max_position_embeddings=1024)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    subprocess.run([sys.executable, "-m", "sparkled.compute.prepare", str(source), str(store)], check=True)
    return store
