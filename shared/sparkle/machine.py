"""What this machine offers: memory, within the limits that really hold for this process, and how much of it is left.

Reads /proc and /sys/fs/cgroup; on macOS asks the kernel. Never counts the page cache as used, nor shared memory as
something that the system could take back: that is the pool.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

DARWIN_PRESSURE = {1: 0.0, 2: 0.25, 4: 1.0}  # kern.memorystatus_vm_pressure_level: normal, warning, critical


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


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory at one moment. `limit_bytes`, `available_bytes` and `where` belong to the limit that binds first."""

    limit_bytes: int
    available_bytes: int  # to allocate; the page cache counts; negative where a limit is exceeded (`memory.high`)
    pressure_frac: float  # share of the last 10 s in which some task waited for memory
    where: str


def memory_reading(root: Path = Path("/")) -> MemoryReading:
    """Read once. Who reads again and again keeps a MemoryWatch, which complains only once about a file."""
    return MemoryWatch(root).read()


class MemoryWatch:
    """Reads how much memory is left; cheap enough (0.3 ms) for four times a second.

    A file that is missing or says nothing sensible is passed over, with one warning if it exists: the other levels and
    the machine itself still count.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._warned: set[Path] = set()

    def read(self) -> MemoryReading:
        ram, available = self._machine()
        levels = [(available, ram, "RAM")]
        limit_files = _limit_files(self._root)  # anew each time: a process can be moved to another group
        for path in limit_files:
            if (level := self._level(path, ram)) is not None:
                levels.append(level)
        available, limit, where = min(levels)
        return MemoryReading(limit, available, self._pressure(limit_files), where)

    def _machine(self) -> tuple[int, int]:
        """Total and available bytes of the whole machine."""
        path = self._root / "proc/meminfo"
        table = self._table(path)
        if "MemTotal:" in table and "MemAvailable:" in table:
            return table["MemTotal:"] * 1024, table["MemAvailable:"] * 1024
        memory = psutil.virtual_memory()
        return memory.total, memory.available

    def _level(self, limit_file: Path, ram: int) -> tuple[int, int, str] | None:
        """(available, limit, name) of one control group; None if it sets no limit below the machine's memory."""
        group = limit_file.parent
        is_v2 = limit_file.name == "memory.max"
        # Above `high` the kernel kills nobody, but slows down every allocation: for us that is a limit too.
        files = [limit_file, group / "memory.high"] if is_v2 else [limit_file]
        limits = [(n, path) for path in files if (n := self._number(path)) is not None]
        limit, binding = min(limits, default=(ram, limit_file))
        if limit >= ram:
            return None
        used = self._number(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if used is None:
            return None
        # The file cache only: v1's `cache` and v2's `file` include shared memory. v1 names sums over subgroups total_*.
        stat, prefix = self._table(group / "memory.stat"), "" if is_v2 else "total_"
        reclaimable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        return limit - max(0, used - reclaimable), limit, f"cgroup limit {binding}"

    def _pressure(self, limit_files: list[Path]) -> float:
        """The worst of our own groups, v2 only; else that of the whole machine."""
        groups = [path.parent / "memory.pressure" for path in limit_files if path.name == "memory.max"]
        found = [value for path in groups if (value := self._stalled(path)) is not None]
        if found:
            return max(found)
        machine = self._stalled(self._root / "proc/pressure/memory")
        return _darwin_pressure() if machine is None and sys.platform == "darwin" else machine or 0.0

    def _stalled(self, path: Path) -> float | None:
        text = self._text(path)
        if text is None:
            return None
        match = re.search(r"^some avg10=(\d+(?:\.\d+)?) ", text, re.MULTILINE)
        if match is None:
            self._warn(path, text)
            return None
        return min(1.0, float(match[1]) / 100)

    def _number(self, path: Path) -> int | None:
        """The number in a file; None if the file is missing, or says `max`."""
        text = self._text(path)
        if text is None or text.strip() == "max":
            return None
        if not re.fullmatch(r"\d{1,20}\s*", text, re.ASCII):
            self._warn(path, text)
            return None
        return int(text)

    def _table(self, path: Path) -> dict[str, int]:
        """Lines of a name and a number, perhaps a unit; others are left out."""
        text = self._text(path)
        if text is None:
            return {}
        rows = dict(re.findall(r"^(\S+)[ \t]+(\d{1,20})\b", text, re.MULTILINE | re.ASCII))
        if not rows:
            self._warn(path, text)
        return {name: int(n) for name, n in rows.items()}

    def _text(self, path: Path) -> str | None:
        try:
            return path.read_text(encoding="ascii", errors="replace")
        except OSError:
            return None  # no such level, not this version, not mounted, or switched off (pressure: EOPNOTSUPP)

    def _warn(self, path: Path, text: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning("memory_file_ignored path=%s text=%r", path, text[:60])


def _darwin_pressure() -> float:
    """The kernel's own verdict on macOS, which has no share of time lost. Written from the headers, not yet run."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    sysctlbyname = ctypes.CDLL(None).sysctlbyname
    if sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return 0.0
    return DARWIN_PRESSURE.get(level.value, 0.0)


def _limit_files(root: Path) -> list[Path]:
    files = []
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []  # not Linux
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path:
            continue  # not a line of this file's format
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
