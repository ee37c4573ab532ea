"""Record reads: both engines, direct and buffered, in place and staged; and a disk that misbehaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sparkle._native import PAGE_BYTES, Reader

pytestmark = pytest.mark.unit

BLOCK = 4096
FILE_BYTES = 40 * BLOCK + 1000  # the last record ends within a block
DEPTH = 3
RECORD_BYTES = 8 * BLOCK
ROOT = Path(__file__).resolve().parents[2]
Bytes = npt.NDArray[np.uint8]
Engine = Callable[[int, int, int], Reader]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "records"
    path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
    return path


@pytest.fixture(params=["threads", "uring"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "threads":
        return Reader.with_threads
    try:
        Reader.with_uring(1, 1, BLOCK)
    except OSError as e:
        pytest.skip(f"the kernel refuses io_uring: {e}")
    return Reader.with_uring


@pytest.fixture(params=["buffered", "direct"])
def fd(request: pytest.FixtureRequest, file: Path) -> Iterator[int]:
    is_direct = request.param == "direct"
    try:
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    except OSError as e:
        pytest.skip(f"no direct reads in {file.parent}: {e}")
    yield fd
    os.close(fd)


class Reads:
    """A reader over one file, with memory of its own to read into."""

    def __init__(self, engine: Engine, fd: int, depth: int = DEPTH) -> None:
        self.fd = fd
        self.is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.reader = engine(depth, BLOCK if self.is_direct else 1, RECORD_BYTES)
        self._raw = np.zeros((depth + 1) * 4 * RECORD_BYTES + PAGE_BYTES, np.uint8)
        start = -self._raw.ctypes.data % PAGE_BYTES
        self.memory = self._raw[start:]

    def submit(self, tag: int, offset: int, sizes: Sequence[int], at: int = 0, gap: int = 0) -> list[Bytes]:
        """Start a read into memory from byte `at`, with `gap` bytes between the pieces; return the pieces' memory."""
        views: list[Bytes] = []
        for size in sizes:
            views.append(self.memory[at : at + size])
            at += size + gap
        spans = [(view.ctypes.data, len(view)) for view in views]
        self.reader.submit(tag, self.fd, offset, spans, self.is_direct)
        return views

    def wait(self, n: int = 1) -> dict[int, tuple[int, int]]:
        """(error, retries) of the next `n` reads that end, by tag."""
        ended: dict[int, tuple[int, int]] = {}
        while len(ended) < n:
            ready, _, _ = select.select([self.reader.event_fd], [], [], 10.0)
            assert ready, "a read does not end"
            ended.update({tag: (error, retries) for tag, error, _, retries in self.reader.reap()})
        return ended

    def read(self, offset: int, sizes: Sequence[int], at: int = 0, gap: int = 0) -> bytes:
        """Read one record that must succeed."""
        views = self.submit(1, offset, sizes, at, gap)
        assert self.wait() == {1: (0, 0)}
        return b"".join(view.tobytes() for view in views)


@pytest.fixture
def reads(engine: Engine, fd: int) -> Reads:
    return Reads(engine, fd)


# --- what arrives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "sizes", "at", "gap"),
    [
        (0, [BLOCK], 0, 0),
        (3 * BLOCK, [2 * BLOCK, BLOCK, BLOCK], 0, 5 * BLOCK),  # aligned pieces go straight to their places
        (3 * BLOCK, [1000, 24, 3000], 0, 0),  # lengths that are no blocks: staged
        (5 * BLOCK, [BLOCK, BLOCK], 8, 0),  # addresses that are not aligned: staged
        (0, [1], 17, 0),
        (0, [BLOCK] * 8, 0, BLOCK),
        (2 * BLOCK, [BLOCK // 4] * 40, 0, 64),  # more pieces than the ring takes one by one
        (BLOCK, [64] * 17, 0, 64),
        (40 * BLOCK, [600, 400], 0, 0),  # the file's end, within a block
    ],
)
def test_bytes_arrive_where_they_belong(
    reads: Reads, file: Path, offset: int, sizes: list[int], at: int, gap: int
) -> None:
    used = np.zeros(len(reads.memory), bool)
    place = at
    for size in sizes:
        used[place : place + size] = True
        place += size + gap
    assert reads.read(offset, sizes, at, gap) == file.read_bytes()[offset : offset + sum(sizes)]
    assert not reads.memory[~used].any()  # and nowhere else


def test_many_reads_at_once(reads: Reads, file: Path) -> None:
    content, rng = file.read_bytes(), np.random.default_rng(1)
    pending: dict[int, tuple[int, list[Bytes]]] = {}
    free, n_done = list(range(DEPTH)), 0
    for tag in range(60):
        slot = free.pop()
        offset = int(rng.integers(0, 36)) * BLOCK
        sizes = [BLOCK, BLOCK] if rng.integers(2) else [1234, 56, 7]
        pending[tag << 8 | slot] = offset, reads.submit(tag << 8 | slot, offset, sizes, at=slot * RECORD_BYTES)
        while pending and (not free or tag == 59):
            for ended, result in reads.wait().items():
                offset, views = pending.pop(ended)
                got = b"".join(v.tobytes() for v in views)
                assert (result, got) == ((0, 0), content[offset : offset + len(got)])
                free.append(ended & 0xFF)
                n_done += 1
    assert n_done == 60


def test_registered_memory_changes_nothing_but_the_name(reads: Reads, file: Path) -> None:
    is_registered = reads.reader.register_memory([(reads.memory.ctypes.data, len(reads.memory))])
    assert ("registered" in reads.reader.name) == is_registered
    assert reads.read(BLOCK, [BLOCK, BLOCK], gap=BLOCK) == file.read_bytes()[BLOCK : 3 * BLOCK]


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "sizes"),
    [
        (40 * BLOCK, [600, 401]),  # one byte too many
        (40 * BLOCK, [BLOCK]),
        (38 * BLOCK, [BLOCK, BLOCK, BLOCK]),
        (50 * BLOCK, [BLOCK]),
        (1 << 40, [100]),
    ],
)
def test_a_record_beyond_the_end_is_no_data(reads: Reads, offset: int, sizes: list[int]) -> None:
    reads.submit(9, offset, sizes)
    assert reads.wait() == {9: (errno.ENODATA, 0)}
    assert reads.read(0, [BLOCK])  # the reader goes on


def test_a_bad_descriptor_is_an_error_of_that_read(reads: Reads) -> None:
    fd, reads.fd = reads.fd, 999_999
    reads.submit(9, 0, [BLOCK])
    assert reads.wait() == {9: (errno.EBADF, 0)}
    reads.fd = fd
    assert reads.read(0, [BLOCK])


def test_no_more_reads_than_the_depth(reads: Reads) -> None:
    for tag in range(DEPTH):
        reads.submit(tag, 0, [BLOCK], at=tag * BLOCK)
    with pytest.raises(RuntimeError, match="depth"):
        reads.submit(DEPTH, 0, [BLOCK], at=DEPTH * BLOCK)
    assert reads.wait(DEPTH) == dict.fromkeys(range(DEPTH), (0, 0))  # the refused one is forgotten
    assert reads.read(0, [BLOCK])


def test_a_reader_that_goes_waits_for_its_reads(engine: Engine, fd: int, file: Path) -> None:
    reads = Reads(engine, fd)
    views = reads.submit(1, 0, [4 * BLOCK, 4 * BLOCK])
    del reads.reader
    assert b"".join(v.tobytes() for v in views) in (file.read_bytes()[: 8 * BLOCK], bytes(8 * BLOCK))  # or never begun


# --- a disk that misbehaves -------------------------------------------------------------------------------------------

FAULTS = {  # (error, retries, are the bytes right) of four records: buffered and direct, aligned and not
    "short": [[0, 0, True]] * 4,
    "eintr": [[0, 0, True]] * 4,
    "eio:2": [[0, 2, True], [0, 0, True], [0, 0, True], [0, 0, True]],  # heals within the retries of one read
    "eio:3": [[errno.EIO, 2, False], [0, 0, True], [0, 0, True], [0, 0, True]],
    "eio": [[errno.EIO, 2, False]] * 4,
}


def read_under(fault: str, path: Path) -> list[list[object]]:
    """Read four records while the preloaded library has a fault."""
    os.environ["FAULTY_PREAD"] = fault
    results: list[list[object]] = []
    for flags in (0, os.O_DIRECT):
        for sizes in ([3 * BLOCK, 4 * BLOCK, BLOCK], [5000, 6000, 7000, 8000]):
            fd = os.open(path, os.O_RDONLY | flags)
            reads = Reads(Reader.with_threads, fd)
            views = reads.submit(1, BLOCK, sizes)
            [(error, retries)] = reads.wait().values()
            os.close(fd)
            got = b"".join(view.tobytes() for view in views)
            results.append([error, retries, got == path.read_bytes()[BLOCK : BLOCK + len(got)]])
    return results


CHILD = """
import json, sys
from pathlib import Path
from tests.unit.test_reader import FAULTS, read_under
print(json.dumps({fault: read_under(fault, Path(sys.argv[1])) for fault in FAULTS}))
"""


@pytest.fixture(scope="module")
def under_faults(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[object]]]:
    """What `read_under` returns for each fault, in a process into which the library is preloaded."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C++ compiler and LD_PRELOAD")
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as e:
        pytest.skip(f"no direct reads in {file.parent}: {e}")
    library = tmp_path_factory.mktemp("faults") / "faulty_pread.so"
    source = ROOT / "native" / "tests" / "faulty_pread.cpp"
    subprocess.run([compiler, "-std=c++20", "-O0", "-shared", "-fPIC", source, "-o", library], check=True)
    command, environ = [sys.executable, "-c", CHILD, str(file)], {**os.environ, "LD_PRELOAD": str(library)}
    child = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    results: dict[str, list[list[object]]] = json.loads(child.stdout)
    return results


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_disk(under_faults: dict[str, list[list[object]]], fault: str) -> None:
    assert under_faults[fault] == FAULTS[fault]
