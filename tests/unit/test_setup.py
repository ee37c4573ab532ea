"""What setting up says of a machine that lacks something, and when it does nothing."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from scripts import setup

pytestmark = pytest.mark.unit

GOOD = setup.Machine(
    system="Linux",
    arch="x86_64",
    is_64bit=True,
    glibc=(2, 36),
    macos=(),
    python="3.12.4",
    has_venv=True,
    has_headers=True,
    cxx_error=None,
    free_disk_bytes=10 * 10**9,
)
MAC = dataclasses.replace(GOOD, system="Darwin", arch="arm64", glibc=(), macos=(14, 5))


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert setup.problems(GOOD) == []
    assert setup.problems(MAC) == []
    assert setup.running_problems(setup.MIN_MEMORY_BYTES, setup.MIN_SHM_BYTES) == []
    assert setup.running_problems(setup.MIN_MEMORY_BYTES, None) == []


@pytest.mark.parametrize(
    ("machine", "change", "says"),
    [
        (GOOD, {"has_venv": False}, "apt install python3.12-venv"),
        (GOOD, {"has_headers": False}, "apt install python3.12-dev; Fedora: dnf install python3-devel; macOS: brew"),
        (GOOD, {"cxx_error": "found none of c++"}, "found none of c++. Debian, Ubuntu: apt install g++"),
        (GOOD, {"free_disk_bytes": 2_940_000_000}, "2.9 GB are free, 3 GB are needed"),
        (GOOD, {"glibc": (2, 31)}, "with glibc 2.31. MLX's wheels need glibc 2.35"),
        (GOOD, {"glibc": ()}, "with no glibc"),
        (GOOD, {"arch": "armv7l"}, "64-bit x86_64 and aarch64 only"),
        (GOOD, {"is_64bit": False}, "Python 32 bit"),
        (GOOD, {"system": "Windows"}, "use WSL 2"),
        (MAC, {"macos": (13, 6)}, "macOS 13.6. MLX's wheels need macOS 14"),
        (MAC, {"arch": "x86_64"}, "Apple silicon"),
    ],
)
def test_what_is_lacking_is_named_with_its_remedy(machine: setup.Machine, change: dict[str, object], says: str) -> None:
    (problem,) = setup.problems(dataclasses.replace(machine, **change))  # type: ignore[arg-type]
    assert says in problem
    assert "\n" not in problem


def test_everything_that_packages_can_cure_is_named_at_once() -> None:
    found = setup.problems(dataclasses.replace(GOOD, has_venv=False, has_headers=False, cxx_error="x"))
    assert len(found) == 3


def test_on_a_wrong_platform_nothing_else_is_said() -> None:
    assert len(setup.problems(dataclasses.replace(GOOD, glibc=(2, 31), has_headers=False))) == 1


@pytest.mark.parametrize(
    ("memory_bytes", "shm_bytes", "says"),
    [
        (1_940_000_000, None, "1.9 GB are available, 2 GB needed"),
        (8_000_000_000, 0, "is absent"),
        (8_000_000_000, 33_554_432, "has 34 MB; the expert pool lives there and needs 64 MB"),
    ],
)
def test_too_little_memory(memory_bytes: int, shm_bytes: int | None, says: str) -> None:
    (problem,) = setup.running_problems(memory_bytes, shm_bytes)
    assert says in problem


def test_a_containers_default_shared_memory_is_enough() -> None:
    assert setup.running_problems(setup.MIN_MEMORY_BYTES, 64 << 20) == []


def test_this_machine_is_read() -> None:
    machine = setup.look_at_machine()
    assert machine.free_disk_bytes > 0
    assert setup.available_memory() > 0
    assert (setup.shm_size() is None) == (machine.system != "Linux")


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'", "can't be reached"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "HTTPS_PROXY"),
        ("ERROR: HTTP error 403 while getting X", "can't be reached"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "TMPDIR"),
        ("WARNING: Retrying (once)\nninja: build stopped: subcommand failed.", "does not compile"),
        ("ERROR: No matching distribution found for mlx==0.32.4", "lacks a package"),
        ("ERROR: something else", "could not install"),
    ],
)
def test_a_failed_pip_run_is_explained(log: str, says: str) -> None:
    assert says in setup.pip_hint(log)


def test_a_missing_compiler_is_seen(tmp_path: Path) -> None:
    assert setup.compiler_error({"PATH": str(tmp_path)}) == "found none of c++, g++, clang++"


def test_a_compiler_that_is_too_old_is_seen(tmp_path: Path) -> None:
    old = tmp_path / "c++"
    old.write_text("#!/bin/sh\necho \"cc1plus: error: unrecognized command line option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    error = setup.compiler_error({"PATH": f"{tmp_path}:{os.defpath}"})
    assert error == "c++ fails (cc1plus: error: unrecognized command line option '-std=c++20')"


def test_the_compiler_of_cxx_is_the_one_that_counts(tmp_path: Path) -> None:
    assert setup.compiler_error({"PATH": str(tmp_path), "CXX": "my-c++ -m64"}) == "found none of my-c++"


def test_a_store_is_made_again_only_after_its_checkpoint_changed(tmp_path: Path) -> None:
    checkpoint, manifest = tmp_path / "checkpoint", tmp_path / "sparkle.json"
    checkpoint.mkdir()
    (checkpoint / "config.json").touch()
    assert setup.is_older(manifest, checkpoint)
    manifest.touch()
    assert not setup.is_older(manifest, checkpoint)
    later = manifest.stat().st_mtime + 1
    os.utime(checkpoint / "config.json", (later, later))
    assert setup.is_older(manifest, checkpoint)


def test_what_is_installed_is_known_by_its_requirements_and_sources() -> None:
    assert setup.core_fingerprint() == setup.core_fingerprint()
    assert any(r.startswith("pytest") for r in setup.dev_requirements())
