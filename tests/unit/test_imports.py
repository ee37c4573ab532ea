"""Who may import whom. It keeps `sparkle-ctl status` fast, daemons separate, and mlx in one process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
SHARED, DAEMONS = ROOT / "shared" / "sparkle", ROOT / "daemons" / "sparkled"
DAEMON_PACKAGES = [path.name for path in DAEMONS.iterdir() if (path / "__init__.py").exists()]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every module that a file imports, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def offenders(folder: Path, *forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name, line in imports_of(path)
        if any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


def test_there_is_something_to_check() -> None:
    assert len(list(SHARED.rglob("*.py"))) > 10
    assert {"compute", "front", "prefetch"} <= set(DAEMON_PACKAGES)


def test_shared_imports_no_daemon_no_mlx_and_no_transformers() -> None:
    assert offenders(SHARED, "sparkled", "mlx", "mlx_lm", "transformers") == []


@pytest.mark.parametrize("package", DAEMON_PACKAGES)
def test_a_daemon_imports_no_other_daemon(package: str) -> None:
    others = [f"sparkled.{other}" for other in DAEMON_PACKAGES if other != package]
    assert offenders(DAEMONS / package, *others) == []


@pytest.mark.parametrize("package", [p for p in DAEMON_PACKAGES if p != "compute"])
def test_only_compute_imports_mlx(package: str) -> None:
    assert offenders(DAEMONS / package, "mlx", "mlx_lm") == []


@pytest.mark.parametrize("package", [p for p in DAEMON_PACKAGES if p != "front"])
def test_only_front_imports_transformers(package: str) -> None:
    assert offenders(DAEMONS / package, "transformers", "tokenizers") == []


# --- what really gets loaded ----------------------------------------------------------------------------------------

HEAVY = ["mlx", "mlx_lm", "transformers", "tokenizers", "sparkled", "numpy", "psutil", "prompt_toolkit", "asyncio"]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    path = os.pathsep.join([str(SHARED.parent), str(DAEMONS.parent)])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("code", "also_heavy"),
    [
        ("import sparkle", ["zmq", "msgpack", "click", "rich"]),
        ("import sparkle; sparkle.Client", ["click", "rich"]),
        ("import sparkle.cli.chat", ["zmq", "rich"]),
        ("import sparkle.cli.ctl", ["zmq", "rich"]),
        ("import sparkle.cli.ctl, sparkle.cli.status, sparkle.cli.status_view", []),
    ],
)
def test_what_is_not_loaded(code: str, also_heavy: list[str]) -> None:
    assert loaded_by(code) & {*HEAVY, *also_heavy} == set()
