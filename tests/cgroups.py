"""A real memory limit for tests: a control group of their own, with processes in it.

    with memory_group() as group:
        group.add(daemon.process.pid)
        group.set_limit(600 << 20)
        ...
        assert group.oom_kills() == 0

Version 1 or 2, whichever has the memory controller. Skips the test, with the reason, where no group may be made: that
takes root, or for version 2 a delegated subtree (`systemd-run --user --scope -p Delegate=yes`).
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
END_S = 5.0


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    path: Path
    is_v2: bool

    def add(self, pid: int) -> None:
        """Move a process in. What it allocates from now on counts here; what it has already counts where it was."""
        self._write("cgroup.procs", pid)

    def set_limit(self, n_bytes: int) -> None:
        """Set the limit, without a way out through swap."""
        if self.is_v2:
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            self._write("memory.max", n_bytes)
        else:
            self._write("memory.swappiness", 0)
            self._write("memory.limit_in_bytes", n_bytes)

    def used(self) -> int:
        """Bytes in use, without the page cache that the kernel takes back before it kills."""
        stat = self._table("memory.stat")
        prefix = "" if self.is_v2 else "total_"
        used = int((self.path / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")).read_text())
        return used - stat[f"{prefix}inactive_file"] - stat[f"{prefix}active_file"]

    def oom_kills(self) -> int:
        return self._table("memory.events" if self.is_v2 else "memory.oom_control")["oom_kill"]

    def processes(self) -> list[int]:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def _table(self, name: str) -> dict[str, int]:
        return {key: int(n) for key, n in (line.split() for line in (self.path / name).read_text().splitlines())}

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group; at the end, end what still runs in it and remove it."""
    group = _make()
    try:
        yield group
    finally:
        end = time.monotonic() + END_S
        while (left := group.processes()) and time.monotonic() < end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # the kernel takes a moment to let them go; there is no message to wait for
        group.path.rmdir()


def _make() -> MemoryGroup:
    name = f"sparkle-test-{os.getpid()}-{secrets.token_hex(2)}"
    parents = _parents()
    if not parents:
        pytest.skip("no control groups with a memory controller are mounted under /sys/fs/cgroup")
    refused = []
    for parent, is_v2 in parents:
        path = parent / name
        try:
            path.mkdir()
        except OSError as e:
            refused.append(str(e))
            continue
        if (path / ("memory.max" if is_v2 else "memory.limit_in_bytes")).exists():
            return MemoryGroup(path, is_v2)
        path.rmdir()
        refused.append(f"{parent} does not hand the memory controller down")
    pytest.skip(f"may not make a control group with a memory limit: {'; '.join(refused)}")


def _parents() -> list[tuple[Path, bool]]:
    """Where a group might be made: version 1's root; of version 2, our own group and those above it."""
    found = [(ROOT / "memory", False)] if (ROOT / "memory" / "memory.limit_in_bytes").exists() else []
    if (ROOT / "cgroup.controllers").exists():
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = ROOT / own.strip("/")
        found += [(p, True) for p in (group, *group.parents) if p.is_relative_to(ROOT)]
    return found
