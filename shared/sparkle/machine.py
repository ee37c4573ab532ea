"""What this machine offers: memory, within the limits that really hold for this process.

Reads /proc and /sys/fs/cgroup. Never counts the page cache as used.
"""

from __future__ import annotations

from pathlib import Path

import psutil


def memory_limit(root: Path = Path("/"), ram_bytes: int | None = None) -> tuple[int, str]:
    """Bytes that this process may use, and the reason: RAM, or the smallest cgroup limit on the way up.

    A container's limit binds although the machine has more; `max` and v1's huge default mean "no limit". `root` and
    `ram_bytes` let a test stand in for the machine.
    """
    limit, reason = (psutil.virtual_memory().total if ram_bytes is None else ram_bytes), "RAM"
    for path in _limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # this level sets no limit, or the file system is not mounted here
        if text.isdigit() and int(text) < limit:
            limit, reason = int(text), f"cgroup limit {path}"
    return limit, reason


def _limit_files(root: Path) -> list[Path]:
    files = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        for level in (group, *group.parents):
            files.append(level / name)
            if level == base:
                break
    return files
