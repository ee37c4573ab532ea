"""What tests of real daemons share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder:
        yield Path(folder)
