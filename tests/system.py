"""The whole pipeline for tests: three real daemons over one run directory.

with pipeline(store, pool="25%") as system:
    with sparkle.Client(system.run_dir) as client: ...
    system.compute.status()
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.daemons import DaemonProcess, spawn


@dataclass(frozen=True, slots=True)
class System:
    run_dir: Path
    prefetch: DaemonProcess
    compute: DaemonProcess
    front: DaemonProcess


@contextmanager
def pipeline(store: Path, pool: str = "", **env: str) -> Iterator[System]:
    """Start all daemons and wait until each is ready. At the end they must stop in order and leave nothing behind."""
    settings = {"SPARKLE_MODEL": str(store), "SPARKLE_POOL": pool, **env}
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder, ExitStack() as stack:
        run_dir = Path(folder)
        daemons = {
            role: stack.enter_context(spawn(role, run_dir, settings)) for role in ("prefetch", "compute", "front")
        }
        for daemon in daemons.values():
            daemon.wait_for_state("ready")
        yield System(run_dir, **daemons)
