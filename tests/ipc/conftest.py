"""What tests of real daemons share."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle import manifest, store
from sparkle.manifest import FileSum
from sparkled.front.tokenizer import Tokenizer
from tests.daemons import DaemonProcess, Peer, spawn
from tests.fakes import FakeCompute
from tests.ipc.fronts import EPOCHS, SHIPPED_MODEL


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A run directory whose path is short enough for sockets, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def store_dir() -> Iterator[Path]:
    """A sound store that has the shipped tokenizer and no weights: the front daemon needs none."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder:
        path = Path(folder) / "tiny.store"
        path.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(SHIPPED_MODEL / name, path)
        (path / store.RESIDENT).write_bytes((2).to_bytes(8, "little") + b"{}")
        files = {p.name: FileSum(p.stat().st_size, store.checksum(p.read_bytes())) for p in path.iterdir()}
        (path / manifest.MANIFEST).write_text(json.dumps(manifest.to_json([], [], {}, files, {})))
        yield path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def front(store_dir: Path) -> Iterator[DaemonProcess]:
    """One front daemon for most tests; each brings its own compute daemon, a new incarnation for the front daemon."""
    with (
        tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as run_dir,
        spawn("front", Path(run_dir), {"SPARKLE_MODEL": str(store_dir)}) as daemon,
    ):
        yield daemon


@pytest.fixture
def compute(front: DaemonProcess) -> Iterator[FakeCompute]:
    with FakeCompute(front.run_dir.path, epoch=next(EPOCHS)) as fake:
        front.wait_for_state("ready", n_busy=0)
        yield fake
    front.wait_for_state("starting")  # so that the next test's "ready" is that of its own compute daemon


@pytest.fixture
def client(front: DaemonProcess) -> Iterator[Peer]:
    peer = front.peer()
    yield peer
    peer.close()
