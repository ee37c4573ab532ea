"""What all tiers share: the shipped model as a store, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[1] / "models" / "sparkle-46m"


@pytest.fixture(scope="session")
def shipped_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the shipped model. Made by a child process: tests that share it need not import mlx."""
    store = tmp_path_factory.mktemp("shipped") / "shipped.store"
    subprocess.run([sys.executable, "-m", "sparkled.compute.prepare", str(SHIPPED), str(store)], check=True)
    return store
