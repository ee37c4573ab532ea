"""How much memory is left: the level that binds, the cache that counts as free, files that are missing or damaged.

The limit alone (`memory_limit`) is tested in test_budget.py.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkle import machine
from sparkle.machine import MemoryReading, MemoryWatch, memory_reading

pytestmark = pytest.mark.unit

MB = 10**6
RAM = 9000 * 1024
MEMINFO = "MemTotal:        9000 kB\nMemFree:          100 kB\nMemAvailable:    5000 kB\nHugePages_Total:   0\n"
PRESSURE = "some avg10={:.2f} avg60=50.00 avg300=0.00 total=12345\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"
V1_SELF = "9:name=systemd:/\n4:memory:/docker/ab\n0::/\n"


def make(root: Path, cgroup: str, files: dict[str, str], meminfo: str = MEMINFO) -> Path:
    """A fake machine of 9000 kB, 5000 of them available, and its control groups."""
    files = {"proc/self/cgroup": cgroup, "proc/meminfo": meminfo, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: str, used: int, stat: str = "anon 7\n", **more: str) -> dict[str, str]:
    files = {"max": limit, "current": f"{used}\n", "stat": stat, **more}
    return {f"sys/fs/cgroup/{group}memory.{name}": text for name, text in files.items()}


def v1(group: str, limit: str, used: int, stat: str = "cache 7\n") -> dict[str, str]:
    files = {"limit_in_bytes": limit, "usage_in_bytes": f"{used}\n", "stat": stat}
    return {f"sys/fs/cgroup/memory/{group}memory.{name}": text for name, text in files.items()}


# --- which limit binds ------------------------------------------------------------------------------------------------


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    reading = memory_reading(make(tmp_path, "0::/\n", {}))
    assert reading == MemoryReading(RAM, 5000 * 1024, 0.0, "RAM")


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "available", "where"),
    [
        ("0::/a/b\n", v2("a/b/", "3000000\n", 2_000_000), 3 * MB, 1 * MB, "a/b/memory.max"),
        ("0::/\n", v2("", "3000000\n", 2_000_000), 3 * MB, 1 * MB, "cgroup/memory.max"),  # a container is its own root
        ("0::/a/b\n", v2("a/", "3000000\n", 2_500_000), 3 * MB, MB // 2, "a/memory.max"),  # the group is not mounted
        ("0::/a/b\n", v2("a/b/", "max\n", 2_000_000), RAM, 5000 * 1024, "RAM"),
        ("0::/a/b\n", v2("a/b/", "99999999999\n", 8 * MB), RAM, 5000 * 1024, "RAM"),
        ("0::/a/b\n", v2("a/b/", "3000000", 1) | v2("a/", "2000000", 1_500_000), 2 * MB, MB // 2, "a/memory.max"),
        ("0::/a/b\n", v2("a/b/", "2000000", 1) | v2("a/", "3000000", 2_900_000), 3 * MB, MB // 10, "a/memory.max"),
        ("0::/a\n", v2("a/", "max", 2 * MB, high="2500000\n"), 2_500_000, MB // 2, "a/memory.high"),
        ("0::/a\n", v2("a/", "4000000", 3 * MB, high="2500000\n"), 2_500_000, -MB // 2, "a/memory.high"),
        ("0::/a\n", v2("a/", "3000000", 2 * MB, high="max\n"), 3 * MB, 1 * MB, "a/memory.max"),
        ("0::/a\n", v2("a/", "8000000", 1 * MB), RAM, 5000 * 1024, "RAM"),  # 7 MB to the limit, but the machine has 5
        (V1_SELF, v1("docker/ab/", "3000000\n", 2_000_000), 3 * MB, 1 * MB, "ab/memory.limit_in_bytes"),
        (V1_SELF, v1("docker/ab/", "9223372036854771712\n", 2_000_000), RAM, 5000 * 1024, "RAM"),
        (V1_SELF, v1("", "3000000\n", 2_000_000), 3 * MB, 1 * MB, "memory/memory.limit_in_bytes"),
        (V1_SELF, v1("docker/", "3000000\n", 2_900_000), 3 * MB, MB // 10, "docker/memory.limit_in_bytes"),
        (V1_SELF, v1("docker/ab/", "4000000", 1) | v2("", "2000000", 1_800_000), 2 * MB, MB // 5, "cgroup/memory.max"),
    ],
)
def test_the_level_with_the_least_left_binds(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int, available: int, where: str
) -> None:
    reading = memory_reading(make(tmp_path, cgroup, files))
    assert (reading.limit_bytes, reading.available_bytes) == (limit, available)
    assert reading.where.endswith(where)


def test_the_file_cache_is_free_and_shared_memory_is_not(tmp_path: Path) -> None:
    stat = "anon 100000\nfile 1900000\nshmem 1000000\ninactive_file 600000\nactive_file 300000\n"
    reading = memory_reading(make(tmp_path, "0::/a\n", v2("a/", "3000000", 2 * MB, stat)))
    assert reading.available_bytes == 1_900_000


def test_v1_names_what_subgroups_have_apart(tmp_path: Path) -> None:
    stat = "cache 1900000\nshmem 1000000\ninactive_file 11\nactive_file 13\ntotal_cache 1900000\n"
    stat += "total_shmem 1000000\ntotal_inactive_file 600000\ntotal_active_file 300000\n"
    reading = memory_reading(make(tmp_path, V1_SELF, v1("docker/ab/", "3000000", 2 * MB, stat)))
    assert reading.available_bytes == 1_900_000


def test_what_changes_is_seen(tmp_path: Path) -> None:
    watch = MemoryWatch(make(tmp_path, "0::/a\n", v2("a/", "3000000", 2 * MB)))
    assert watch.read().available_bytes == 1 * MB
    make(tmp_path, "0::/a\n", v2("a/", "3000000", 2_800_000))
    assert watch.read().available_bytes == MB // 5
    make(tmp_path, "0::/b\n", v2("b/", "2000000", 1_900_000))  # moved to another group
    assert watch.read().available_bytes == MB // 10


# --- pressure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "parent", "whole", "expected"),
    [
        (0.0, None, None, 0.0),
        (12.34, None, None, 0.1234),
        (12.34, 40.0, 90.0, 0.4),  # the machine's own figure counts only where the groups have none
        (None, 40.0, 90.0, 0.4),
        (None, None, 90.0, 0.9),
        (None, None, None, 0.0),
        (100.0, None, None, 1.0),
    ],
)
def test_pressure_is_the_worst_of_our_groups(
    tmp_path: Path, group: float | None, parent: float | None, whole: float | None, expected: float
) -> None:
    places = {"sys/fs/cgroup/a/b": group, "sys/fs/cgroup/a": parent}
    files = {f"{at}/memory.pressure": PRESSURE.format(value) for at, value in places.items() if value is not None}
    if whole is not None:
        files["proc/pressure/memory"] = PRESSURE.format(whole)
    assert memory_reading(make(tmp_path, "0::/a/b\n", files)).pressure_frac == pytest.approx(expected)


def test_v1_groups_have_no_pressure_of_their_own(tmp_path: Path) -> None:
    files = {"proc/pressure/memory": PRESSURE.format(25.0)}
    assert memory_reading(make(tmp_path, "4:memory:/docker/ab\n", files)).pressure_frac == 0.25


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "available"),
    [
        ("memory.max", "lots\n", 5000 * 1024),
        ("memory.max", "", 5000 * 1024),
        ("memory.max", "-5\n", 5000 * 1024),
        ("memory.max", "9" * 400, 5000 * 1024),
        ("memory.current", "many\n", 5000 * 1024),
        ("memory.stat", "inactive_file\nactive_file lots\n", 1 * MB),  # the limit is known: without cache, less is left
        ("memory.pressure", "some avg10=much\n", 1_500_000),
    ],
)
def test_a_damaged_file_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str, available: int
) -> None:
    files = v2("a/", "3000000", 2 * MB, "inactive_file 500000\n", pressure=PRESSURE.format(0))
    watch = MemoryWatch(make(tmp_path, "0::/a\n", files | {f"sys/fs/cgroup/a/{name}": text}))
    with caplog.at_level(logging.WARNING):
        readings = [watch.read() for _ in range(3)]
    assert {r.available_bytes for r in readings} == {available}
    [record] = caplog.records
    assert "memory_file_ignored" in record.getMessage() and f"a/{name}" in record.getMessage()


def test_missing_files_are_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("memory.current", "memory.stat", "memory.max"):
        root = make(tmp_path / name, "0::/a\n", v2("a/", "3000000", 2 * MB))
        (root / "sys/fs/cgroup/a" / name).unlink()
        memory_reading(root)
    (root / "proc/self/cgroup").unlink()
    assert memory_reading(root).where == "RAM"
    assert not caplog.records


def test_a_machine_that_tells_nothing_is_asked_through_psutil(tmp_path: Path) -> None:
    for root in (tmp_path, make(tmp_path / "old", "0::/\n", {}, "MemTotal: 9000 kB\nMemFree: 100 kB\n")):
        reading = memory_reading(root)
        assert 100 * MB < reading.available_bytes <= reading.limit_bytes
        assert reading.where == "RAM"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_no_text_breaks_the_reading(tmp_path: Path, data: st.DataObject) -> None:
    anything = st.one_of(
        st.text(max_size=40),
        st.sampled_from(["max", "7", "x 7", "some avg10=1.00 ", ":::", "0::/a", "4:memory:/a/../b"]),
    )
    names = ("max", "high", "current", "stat", "pressure")
    files = {f"sys/fs/cgroup/a/memory.{name}": data.draw(anything) for name in names}
    files |= {"proc/pressure/memory": data.draw(anything)}
    cgroup = data.draw(st.one_of(anything, st.just("0::/a\n")))
    reading = memory_reading(make(tmp_path, cgroup, files, data.draw(anything)))
    assert 0.0 <= reading.pressure_frac <= 1.0
    assert reading.available_bytes <= reading.limit_bytes


# --- the machine that this runs on ------------------------------------------------------------------------------------


def test_this_machine_can_be_read_often() -> None:
    watch = MemoryWatch()
    began = time.process_time()
    readings = [watch.read() for _ in range(50)]
    assert (time.process_time() - began) / 50 < 0.004, "four times a second: well below 2 % of a core"
    assert all(0 < r.available_bytes <= r.limit_bytes and 0.0 <= r.pressure_frac <= 1.0 for r in readings)


@pytest.mark.skipif(sys.platform != "darwin", reason="a call of macOS")
def test_macos_tells_its_pressure() -> None:
    assert machine._darwin_pressure() in machine.DARWIN_PRESSURE.values()
