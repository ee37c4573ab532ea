"""The scripts on a machine that lacks something: real runs, in a copy of the few files that setting up needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ipc

ROOT = Path(__file__).resolve().parents[2]
NO_REGISTRY = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "1", "PIP_NO_INDEX": "0"}
NO_REGISTRY["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"  # the discard port: nobody listens


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a fresh checkout to the scripts."""
    root = tmp_path / "check out"
    for name in ("scripts", "native"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "train"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with what the scripts call, this Python as python3, and no compiler."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "head", "cat"):
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "python3").symlink_to(sys.executable)
    return folder


def run(script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "CXX") and not k.startswith("SPARKLE_")}
    return subprocess.run(
        [script],
        env=inherited | environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("name", ["start", "test", "check"])
def test_a_python_that_is_too_old(checkout: Path, tools: Path, name: str) -> None:
    (tools / "python3").unlink()
    (tools / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18\nexit 1\n')
    (tools / "python3").chmod(0o755)
    done = run(checkout / "scripts" / name, PATH=str(tools))
    assert done.returncode == 1
    assert "needs Python 3.11, 3.12, 3.13 or 3.14, and found none. python3 is Python 3.9.18." in done.stderr
    assert len(done.stderr.strip().split("\n\n")) == 1


def test_no_compiler(checkout: Path, tools: Path) -> None:
    done = run(checkout / "scripts" / "start", PATH=str(tools))
    assert done.returncode == 1
    assert "No compiler for C++20: found none of c++, g++, clang++. Debian, Ubuntu: apt install g++" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_registry_and_a_half_made_environment(checkout: Path) -> None:
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "sparkle-unfinished").touch()
    (venv / "bin" / "left-over").touch()
    done = run(checkout / "scripts" / "start", **NO_REGISTRY)
    assert done.returncode == 1
    assert "The package registry can't be reached" in done.stderr
    assert "Setting up .venv anew" in done.stdout
    assert not (venv / "bin" / "left-over").exists(), "what is half-made is made anew"
    assert (venv / "sparkle-unfinished").exists(), "and is not taken for whole afterwards"
