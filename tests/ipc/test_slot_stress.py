"""Slot protocol, event ring and readers under sanitizers, as threads and as processes that get killed."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.ipc

NATIVE = Path(__file__).resolve().parents[2] / "native"
STRESS = ("tests/slot_stress.cpp", "src/mapping.cpp")
READER = ("tests/reader_test.cpp", "src/reader.cpp")
THREAD, ADDRESS = "thread", "address,undefined"
PROGRAMS = {(STRESS, THREAD), (STRESS, ADDRESS), (READER, THREAD), (READER, ADDRESS)}
RUN_S = 60
Programs = dict[tuple[tuple[str, ...], str], Path]  # by sources and sanitizers


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Each program built with each set of sanitizers."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("stress")
    for sanitizer in (THREAD, ADDRESS):
        _skip_without(sanitizer, compiler, folder)

    def build(sources: tuple[str, ...], sanitizer: str) -> Path:
        program = folder / f"{Path(sources[0]).stem}-{sanitizer.partition(',')[0]}"
        flags = ["-std=c++20", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        subprocess.run([compiler, *flags, *sources, "-o", program], cwd=NATIVE, check=True, timeout=RUN_S)
        return program

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROGRAMS, pool.map(lambda p: build(*p), PROGRAMS), strict=True))


def _skip_without(sanitizer: str, compiler: str, folder: Path) -> None:
    """Skip if the compiler, or this kernel, can't run even an empty program with it."""
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n")
    built = subprocess.run([compiler, f"-fsanitize={sanitizer}", source, "-o", program], capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"{compiler} has no -fsanitize={sanitizer}: {built.stderr.strip()[-200:]}")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=RUN_S)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run here: {ran.stderr.strip()[-200:]}")


def _run(program: Path, *arguments: str) -> None:
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=RUN_S)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "Sanitizer" not in ran.stderr, ran.stderr[-4000:]


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
@pytest.mark.parametrize(("what", "count"), [("threads", 20_000), ("ring", 100_000)])
def test_threads(programs: Programs, sanitizer: str, what: str, count: int) -> None:
    _run(programs[STRESS, sanitizer], what, str(count))


def test_processes_that_are_killed(programs: Programs) -> None:
    _run(programs[STRESS, ADDRESS], "processes", "60")


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_readers(programs: Programs, sanitizer: str, tmp_path: Path) -> None:
    _run(programs[READER, sanitizer], str(tmp_path / "records"))


def test_the_stress_finds_an_evictor_that_ignores_the_mask(programs: Programs, tmp_path: Path) -> None:
    """Without step E2 the same program must fail: else it would prove nothing of the protocol."""
    broken = shutil.copytree(NATIVE, tmp_path / "native")
    header = broken / "src" / "slots.h"
    text = header.read_text()
    assert text.count("if (slot.mask.load() != 0) {") == 1
    header.write_text(text.replace("if (slot.mask.load() != 0) {", "if (false) {"))
    program = tmp_path / "broken"
    subprocess.run(["g++", "-std=c++20", "-O0", "-pthread", *STRESS, "-o", program], cwd=broken, check=True)
    ran = subprocess.run([program, "processes", "60"], capture_output=True, text=True, timeout=RUN_S)
    assert ran.returncode == 1
    assert "wrong bytes" in ran.stderr
