"""The client that the README shows, of ZeroMQ and msgpack alone, does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkle.messages import PROTOCOL, Chat, Error, Hello
from tests.fakes import FakeFront

pytestmark = pytest.mark.ipc

ROOT = Path(__file__).resolve().parents[2]


def readme_client() -> str:
    """Return the first Python block with ZeroMQ in it."""
    for name in ("README.md", "README.raw_client.md"):
        path = ROOT / name
        blocks = re.findall(
            r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8") if path.exists() else "", re.M | re.S
        )
        for block in blocks:
            if "zmq" in block:
                return str(block)
    raise AssertionError("README.md shows no client made of ZeroMQ alone")


def run(run_dir: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "SPARKLE_RUN_DIR": str(run_dir)}
    return subprocess.run(
        [sys.executable, "-c", readme_client()], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_prints_the_answer(tmp_path: Path) -> None:
    with FakeFront(tmp_path, pieces=("Par", "is 巴黎", ".")) as front:
        done = run(tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Paris 巴黎.", "")
        assert front.wait_for(Hello).protocol == PROTOCOL
        assert front.wait_for(Chat).messages[0]["role"] == "user"


def test_it_reports_errors(tmp_path: Path) -> None:
    with FakeFront(tmp_path) as front:
        front.on[Chat] = lambda message, say: say(Error("overloaded", "the queue is full", True, message.request_id))
        done = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the queue is full\n")


def test_it_uses_none_of_our_code() -> None:
    assert "import sparkle" not in readme_client()
    assert len(readme_client().splitlines()) < 30
