"""Memory behind a shared-memory object: reserved in part, given back, and seen so by every process that maps it."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle import _native
from sparkle._native import PAGE_BYTES, Mapping

pytestmark = pytest.mark.unit

NAME = f"/spk-test-mapping-{os.getpid()}"


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    Mapping.unlink(NAME)


needs_discard = pytest.mark.skipif(not _native.CAN_DISCARD, reason="this system gives shared memory back whole only")


def backed_by_the_system() -> int:
    """Bytes of the object that have memory behind them, asked of the file system."""
    return Path(f"/dev/shm{NAME}").stat().st_blocks * 512


@needs_discard
def test_a_sparse_object_takes_memory_only_where_reserved() -> None:
    mapping = Mapping.create_sparse(NAME, 16 * PAGE_BYTES)
    assert (mapping.n_bytes, mapping.backed_bytes, backed_by_the_system()) == (16 * PAGE_BYTES, 0, 0)
    mapping.reserve(4 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert mapping.backed_bytes == backed_by_the_system() == 2 * PAGE_BYTES
    mapping.array()[4 * PAGE_BYTES : 6 * PAGE_BYTES] = 1
    assert mapping.backed_bytes == 2 * PAGE_BYTES, "what was reserved is what is used"
    mapping.reserve(5 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert mapping.backed_bytes == 4 * PAGE_BYTES, "pages that were there are not taken twice"
    assert mapping.array()[4 * PAGE_BYTES : 6 * PAGE_BYTES].all(), "and keep their content"


@needs_discard
def test_a_whole_object_has_memory_from_the_start() -> None:
    assert Mapping.create(NAME, 3 * PAGE_BYTES).backed_bytes == backed_by_the_system() == 3 * PAGE_BYTES


@needs_discard
def test_discarded_memory_is_gone_for_everyone_and_can_be_had_again() -> None:
    mine = Mapping.create_sparse(NAME, 64 * PAGE_BYTES)
    mine.reserve(0, 64 * PAGE_BYTES)
    theirs = Mapping.attach(NAME)
    theirs.array()[:] = 7
    resident = rss_of_shared_memory()
    assert mine.discard(8 * PAGE_BYTES, 40 * PAGE_BYTES) == 40 * PAGE_BYTES
    assert mine.backed_bytes == theirs.backed_bytes == backed_by_the_system() == 24 * PAGE_BYTES
    assert resident - rss_of_shared_memory() == 40 * PAGE_BYTES, "no process keeps a copy"
    assert mine.discard(8 * PAGE_BYTES, 40 * PAGE_BYTES) == 0
    theirs.reserve(8 * PAGE_BYTES, 40 * PAGE_BYTES)  # whoever adopts an object has all of its owner's means
    assert mine.backed_bytes == 64 * PAGE_BYTES
    for array in (mine.array(), theirs.array()):
        assert not array[8 * PAGE_BYTES : 48 * PAGE_BYTES].any()
        assert array[: 8 * PAGE_BYTES].all() and array[48 * PAGE_BYTES :].all()


def rss_of_shared_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssShmem:")).split()[1]) * 1024


@needs_discard
def test_a_page_shared_with_a_neighbour_stays() -> None:
    page = os.sysconf("SC_PAGESIZE")
    mapping = Mapping.create(NAME, 4 * page)
    mapping.array()[:] = 7
    assert mapping.discard(1, 2 * page) == page
    assert mapping.discard(3 * page - 1, page) == 0
    assert mapping.discard(page, 0) == 0
    mapping.reserve(page - 1, 2)
    array = mapping.array()
    assert array[:page].all() and not array[page : 2 * page].any() and array[2 * page :].all()


@needs_discard
def test_reserving_more_than_there_is_fails_and_keeps_what_was_there() -> None:
    shm = os.statvfs("/dev/shm")
    whole = (shm.f_blocks + 1) * shm.f_frsize
    mapping = Mapping.create_sparse(NAME, whole)
    mapping.reserve(0, PAGE_BYTES)
    with pytest.raises(OSError, match="posix_fallocate") as caught:
        mapping.reserve(0, whole)
    assert caught.value.errno == errno.ENOSPC
    assert mapping.backed_bytes == PAGE_BYTES


def test_ranges_beyond_the_mapping_are_refused() -> None:
    mapping = Mapping.create(NAME, PAGE_BYTES)
    for call in (mapping.reserve, mapping.discard):
        for offset, n_bytes in ((PAGE_BYTES + 1, 0), (1, PAGE_BYTES), (0, 2**64 - 1), (2**64 - 1, 2)):
            with pytest.raises(IndexError):
                call(offset, n_bytes)
    assert mapping.backed_bytes == PAGE_BYTES


@pytest.mark.skipif(_native.CAN_DISCARD, reason="this system can")
def test_a_system_that_cannot_discard_says_so() -> None:
    with pytest.raises(OSError) as caught:
        Mapping.create(NAME, PAGE_BYTES).discard(0, PAGE_BYTES)
    assert caught.value.errno == errno.ENOTSUP


def test_a_mapping_gives_its_descriptor_back() -> None:
    gc.collect()  # what failed tests before left
    before = n_descriptors()
    mapping = Mapping.create(NAME, PAGE_BYTES)
    view = Mapping.attach(NAME).array()
    assert n_descriptors() == before + 2
    del mapping, view
    gc.collect()
    assert n_descriptors() == before
    for name in (NAME, "no/such/folder"):
        with pytest.raises(OSError):
            Mapping.create(name, PAGE_BYTES)
    assert n_descriptors() == before


def n_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))
