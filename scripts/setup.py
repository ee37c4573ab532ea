"""Make a virtual environment ready to run Sparkle; scripts/start, test and check call this before anything else.

Owns the folder of the environment and two files in it: a stamp that says what was installed, and a marker that stands
there while something is. Reads the machine's facts, pyproject.toml and the C++ sources. Uses the standard library only.
Never touches anything outside the environment, but for the shipped model's store, which it has made where it is absent.

An environment with the marker is half-made (Ctrl-C, power cut) and is made anew; one whose stamp is out of date is
updated; one that is current costs a fraction of a second.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAMP = "sparkle-installed.json"
MARKER = "sparkle-unfinished"
LOG = "sparkle-install.log"
CHECKPOINT = ROOT / "models" / "sparkle-46m"
STORE = ROOT / "models" / "sparkle-46m.store"

MIN_GLIBC = (2, 35)  # the wheels of MLX are manylinux_2_35
MIN_MACOS = (14, 0)  # and macosx_14_0_arm64
MIN_MEMORY_BYTES = 2 * 10**9
MIN_DISK_BYTES = 3 * 10**9  # environment, pip's build environment and caches, build tree, store
MIN_SHM_BYTES = 64 * 10**6  # a container's default is 64 MiB, which holds the shipped model's pool
CXX20_PROBE = """
#include <atomic>
#include <span>
int main() { std::atomic<long> n{0}; return static_cast<int>(n.load() + static_cast<long>(std::span<int>().size())); }
"""


class SetupError(Exception):
    """The text is what the user reads: what is wrong, and what to do."""


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What setting up depends on. `cxx_error`: why C++20 can't be compiled, None if it can."""

    system: str
    arch: str
    is_64bit: bool
    glibc: tuple[int, ...]
    macos: tuple[int, ...]
    python: str
    has_venv: bool
    has_headers: bool
    cxx_error: str | None
    free_disk_bytes: int


def look_at_machine() -> Machine:
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        is_64bit=sys.maxsize > 2**32,
        glibc=_version(platform.libc_ver()[1]) if platform.libc_ver()[0] == "glibc" else (),
        macos=_version(platform.mac_ver()[0]),
        python=platform.python_version(),
        has_venv=find_spec("venv") is not None and find_spec("ensurepip") is not None,
        has_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        cxx_error=compiler_error(os.environ),
        free_disk_bytes=shutil.disk_usage(ROOT).free,
    )


def problems(m: Machine) -> list[str]:
    """Return what stands in the way of an installation, each with its remedy; nothing if all is well."""
    if wrong_platform := _platform_problem(m):
        return [wrong_platform]  # no package that one could install would help
    minor = ".".join(m.python.split(".")[:2])
    found = []
    if not m.has_venv:
        found.append(
            f"Python {m.python} lacks venv or ensurepip. Debian, Ubuntu: apt install python{minor}-venv; others: "
            "install a Python that is whole (Fedora: dnf install python3; macOS: brew install python@3.13)."
        )
    if not m.has_headers:
        found.append(
            f"Python {m.python} has no headers (Python.h), which the C++ core is compiled against. Debian, Ubuntu: apt "
            f"install python{minor}-dev; Fedora: dnf install python3-devel; macOS: brew install python@3.13."
        )
    if m.cxx_error is not None:
        found.append(
            f"No compiler for C++20: {m.cxx_error}. Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
            "macOS: xcode-select --install. To take another compiler, set CXX. (Tested with GCC 12.)"
        )
    if m.free_disk_bytes < MIN_DISK_BYTES:
        found.append(
            f"Too little room on the disk of {ROOT}: {m.free_disk_bytes / 1e9:.1f} GB are free, "
            f"{MIN_DISK_BYTES / 1e9:.0f} GB are needed for packages, the build and the model."
        )
    return found


def _platform_problem(m: Machine) -> str | None:
    here = f"This is {m.system} on {m.arch}"
    if m.system not in ("Linux", "Darwin"):
        return f"{here}. Sparkle runs on Linux and macOS; on Windows, use WSL 2."
    if not m.is_64bit or (m.system == "Linux" and m.arch not in ("x86_64", "aarch64")):
        return f"{here}, Python {'64' if m.is_64bit else '32'} bit. MLX has wheels for 64-bit x86_64 and aarch64 only."
    if m.system == "Linux" and m.glibc < MIN_GLIBC:
        have = "no glibc" if not m.glibc else "glibc " + ".".join(map(str, m.glibc))
        return (
            f"{here} with {have}. MLX's wheels need glibc {MIN_GLIBC[0]}.{MIN_GLIBC[1]} or later: "
            "Debian 12, Ubuntu 22.04, Fedora 36, RHEL 10, or newer."
        )
    if m.system == "Darwin" and m.arch != "arm64":
        return (
            f"{here}. MLX needs Apple silicon; on an Apple silicon Mac this Python runs under Rosetta: install a "
            "native one (brew install python@3.13, with Homebrew in /opt/homebrew)."
        )
    if m.system == "Darwin" and m.macos < MIN_MACOS:
        return f"This is macOS {'.'.join(map(str, m.macos))}. MLX's wheels need macOS 14 or later."
    return None


def running_problems(memory_bytes: int, shm_bytes: int | None) -> list[str]:
    """Return what would keep the daemons from running now. shm_bytes: size of /dev/shm; None where it isn't used."""
    found = []
    if memory_bytes < MIN_MEMORY_BYTES:
        found.append(
            f"Too little memory: {memory_bytes / 1e9:.1f} GB are available, {MIN_MEMORY_BYTES / 1e9:.0f} GB needed. "
            "Close other programs, or raise the container's limit."
        )
    if shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        size = f"has {shm_bytes / 1e6:.0f} MB" if shm_bytes else "is absent, or may not be written"
        found.append(
            f"Shared memory (/dev/shm) {size}; the expert pool lives there and needs {MIN_SHM_BYTES / 1e6:.0f} MB at "
            "least. Enlarge it: mount -o remount,size=1G /dev/shm; for a container: --shm-size=1g."
        )
    return found


def available_memory() -> int:
    """Return the bytes that programs may still take: what the system says, within this container's limit."""
    try:
        text = Path("/proc/meminfo").read_text()
        available = int(re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS: what it has
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # a container sees its own group here: cgroup v2, v1
        try:
            limit = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        available = min(available, int(limit)) if limit.isdigit() else available
    return available


def shm_size() -> int | None:
    if sys.platform != "linux":
        return None
    try:
        info = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return info.f_blocks * info.f_frsize if os.access("/dev/shm", os.W_OK) else 0


def compiler_error(environ: Mapping[str, str]) -> str | None:
    """Return why a small C++20 program can't be compiled and linked with the compiler that CMake will take."""
    named = shlex.split(environ.get("CXX", ""))
    names = [named] if named else [["c++"], ["g++"], ["clang++"]]
    command = next((n for n in names if shutil.which(n[0], path=environ.get("PATH"))), None)
    if command is None:
        return "found none of " + ", ".join(n[0] for n in names)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(CXX20_PROBE)
        probe = [*command, "-std=c++20", source.name, "-o", "probe"]
        ran = subprocess.run(probe, cwd=folder, env=environ, capture_output=True, text=True, errors="replace")
    if ran.returncode == 0:
        return None
    reason = next((line for line in ran.stderr.splitlines() if "error" in line), f"exit code {ran.returncode}")
    return f"{shlex.join(command)} fails ({reason.strip()})"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


# --- the environment ------------------------------------------------------------------------------------------------


def set_up(venv: Path, with_dev: bool) -> None:
    """Make `venv` current. Raises SetupError; what is half-made then is made anew by the next run."""
    stamp = _read_stamp(venv)
    wanted = {"core": core_fingerprint()} | ({"dev": str(dev_requirements())} if with_dev else {})
    if stamp is not None and wanted.items() <= stamp.items():
        return
    if found := problems(look_at_machine()):
        raise SetupError("\n\n".join(found))
    if stamp is None:
        _make(venv)
        stamp = {}
    for part, packages in (("core", ["--editable", str(ROOT)]), ("dev", dev_requirements())):
        if part in wanted and stamp.get(part) != wanted[part]:
            (venv / MARKER).touch()
            try:
                _install(venv, part, packages)
            except SetupError:
                if stamp:  # it was whole, and pip changes nothing before everything is built
                    (venv / MARKER).unlink()
                raise
            stamp |= {part: wanted[part], "path": str(venv)}
            (venv / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
            (venv / MARKER).unlink()


def _read_stamp(venv: Path) -> dict[str, str] | None:
    """Return what is installed in `venv`; None if it must be made anew.

    That is so if it is absent, half-made, was moved (its scripts name their old place), or lost its Python. One that
    somebody else made has no stamp; it is used if it works.
    """
    if (venv / MARKER).exists() or not _works(venv):
        return None
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        return None
    return stamp if isinstance(stamp, dict) and stamp.get("path") == str(venv) else None


def _works(venv: Path) -> bool:
    probe = "import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"
    try:
        return subprocess.run([venv / "bin/python", "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def _make(venv: Path) -> None:
    again = " anew, for it is not whole or was moved," if venv.exists() else ""
    print(f"Setting up {_shown(venv)}{again} with Python {platform.python_version()}.", flush=True)
    if venv.is_symlink() or (venv.exists() and not venv.is_dir()):
        raise SetupError(f"{venv} is not a folder; move it away.")
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True, exist_ok=True)
    (venv / MARKER).touch()
    # The base interpreter, not sys.executable: that may be the Python of the environment just removed.
    python = getattr(sys, "_base_executable", sys.executable)
    made = subprocess.run([python, "-m", "venv", venv], capture_output=True, text=True, errors="replace")
    if made.returncode != 0:
        raise SetupError(f"{python} -m venv {venv} failed:\n{_tail(made.stdout + made.stderr)}")


def core_fingerprint() -> str:
    """Return a digest of all that the installed package depends on: its requirements and the C++ sources."""
    project = _pyproject()
    del project["project"]["optional-dependencies"]
    parts = [project["build-system"], project["project"], project["tool"]["scikit-build"]]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for path in [ROOT / "native" / "CMakeLists.txt", *sorted((ROOT / "native" / "src").iterdir())]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def dev_requirements() -> list[str]:
    requirements: list[str] = _pyproject()["project"]["optional-dependencies"]["dev"]
    return requirements


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# --- pip ------------------------------------------------------------------------------------------------------------


def _install(venv: Path, part: str, packages: list[str]) -> None:
    """Run pip with its output in a log; in a terminal, its last line is shown."""
    what = {"core": "Installing packages and compiling the C++ core", "dev": "Installing the development tools"}[part]
    print(f"{what}; log: {_shown(venv / LOG)}", flush=True)
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off", *packages]
    environ = os.environ | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    began = time.monotonic()
    with (
        (venv / LOG).open("wb") as log,
        subprocess.Popen(command, env=environ, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT) as pip,
    ):
        try:
            for line in pip.stdout or ():
                log.write(line)
                _show_now(line.decode(errors="replace").rstrip())
        except KeyboardInterrupt:
            pip.communicate()  # it got the signal too; it must leave the environment alone before the lock is released
            raise
    _show_now("")
    if pip.returncode != 0:
        text = (venv / LOG).read_text(errors="replace")
        raise SetupError(f"{pip_hint(text)}\nThe last lines of {_shown(venv / LOG)}:\n{_tail(text)}")
    print(f"Done in {time.monotonic() - began:.0f} s.", flush=True)


def _show_now(line: str) -> None:
    """In a terminal, put `line` in place of the one shown before."""
    if sys.stdout.isatty():
        print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)


def pip_hint(log: str) -> str:
    """Return what a failed pip run most likely means, and what to do."""
    if "No space left on device" in log:
        return (
            "The disk is full, or the one for temporary files is: make room, or set TMPDIR to a folder with 2 GB free."
        )
    if re.search(r"ninja: build stopped|CMake Error|CMake (build|configuration) failed", log):
        return "The C++ core does not compile here. Please report this with the log."
    if re.search(r"Retrying \(|Connection|ProxyError|SSLError|timed out|Temporary failure|\b40[137]\b", log):
        return (
            "The package registry can't be reached; installing needs it once. Offline: connect and run this again. "
            "Behind a proxy: set HTTPS_PROXY. With a mirror of your own: pip config set global.index-url URL."
        )
    if "No matching distribution found" in log:
        return "Your package index lacks a package, or has no build of it for this Python and machine."
    return "pip could not install Sparkle."


def _tail(text: str, n_lines: int = 12) -> str:
    """Return the last lines, and before them the compiler's first errors if those come earlier."""
    lines = text.strip().splitlines()
    errors = [line for line in lines[:-n_lines] if ": error: " in line][:3]
    return "\n".join("  " + line.strip() for line in [*errors, *lines[-n_lines:]])


# --- the shipped model ----------------------------------------------------------------------------------------------


def prepare_model(venv: Path) -> None:
    """Make the shipped model's store, unless it is newer than the checkpoint, or another store is to be served."""
    if "SPARKLE_MODEL" in os.environ or not is_older(STORE / "sparkle.json", CHECKPOINT):
        return
    ran = subprocess.run([venv / "bin/sparkle-ctl", "models", "prepare", CHECKPOINT, STORE], cwd=ROOT)
    if ran.returncode != 0:
        raise SetupError(f"The shipped model could not be prepared: see above (exit code {ran.returncode}).")
    os.utime(STORE / "sparkle.json")  # if it was there already: a checkout can touch files without changing them


def is_older(path: Path, folder: Path) -> bool:
    """True if `path` is absent or older than a file of `folder`."""
    try:
        made = path.stat().st_mtime
    except FileNotFoundError:
        return True
    return any(file.stat().st_mtime > made for file in folder.iterdir())


# --- main -----------------------------------------------------------------------------------------------------------


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _take_turn() -> None:
    """Lock the checkout's folder until this process ends: two set-ups at once would undo each other's work."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another set-up is under way here; waiting for it.", flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment ready to run Sparkle.")
    parser.add_argument("--venv", default=".venv", help="the environment's folder (default: .venv)")
    parser.add_argument("--dev", action="store_true", help="with the tools for tests and checks")
    parser.add_argument("--model", action="store_true", help="make the shipped model's expert store too")
    options = parser.parse_args()
    venv = ROOT / options.venv
    try:
        if found := running_problems(available_memory(), shm_size()):
            raise SetupError("\n\n".join(found))
        _take_turn()
        set_up(venv, options.dev)
        if options.model:
            prepare_model(venv)
    except SetupError as e:
        print(f"\n{e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the next run begins where this is needed.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
