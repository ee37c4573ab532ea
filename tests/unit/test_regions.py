"""Where the pool's bytes lie: alignment, names, sizes, the table, and what is refused."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence

import pytest

from sparkle import regions
from sparkle._native import PAGE_BYTES, Mapping
from sparkle.errors import ConfigError, PoolError
from sparkle.manifest import LayoutClass, layout_class
from sparkle.regions import Region, RegionSpec

pytestmark = pytest.mark.unit

PREFIX = "/spk-0123abcd"
ODD = layout_class("odd", [("a.weight", "U32", (3, 5)), ("a.scales", "BF16", (7,)), ("a.bias", "F32", (1,))], {})
EVEN = layout_class("even", [("a.weight", "U32", (128, 32)), ("a.scales", "BF16", (256,))], {})
LARGE = layout_class("large", [("a.weight", "U32", (1024, 1024))], {})


@pytest.fixture
def spec() -> Iterator[RegionSpec]:
    name = f"/spk-test-{os.getpid()}"
    yield RegionSpec(name, 0, 4, 3, regions.region_bytes(ODD, 3), 3)
    Mapping.unlink(name)


@pytest.mark.parametrize(("layout", "n_slots"), [(ODD, 1), (ODD, 7), (EVEN, 1), (EVEN, 5), (ODD, 10_000)])
def test_arrays_start_on_pages_and_do_not_overlap(layout: LayoutClass, n_slots: int) -> None:
    offsets = regions.piece_offsets(layout, n_slots)
    ends = [at + piece.nbytes * n_slots for at, piece in zip(offsets, layout.pieces, strict=True)]
    assert all(at % 16384 == 0 for at in offsets)
    assert offsets[0] == PAGE_BYTES  # the header page
    assert all(0 <= start - end < 16384 for start, end in zip(offsets[1:], ends, strict=False))
    n_bytes = regions.region_bytes(layout, n_slots)
    assert 0 <= n_bytes - ends[-1] < 16384
    assert n_bytes % 16384 == 0


@pytest.mark.parametrize(
    ("classes", "slots"),
    [
        ([ODD], [1]),
        ([ODD, EVEN, LARGE], [5, 3, 4000]),
        ([LARGE], [1024]),  # exactly one region's worth
        ([LARGE], [1025]),
        ([LARGE], [20_000]),  # more than the most regions of the usual size
        ([ODD, EVEN], [0, 2]),
    ],
)
def test_regions_cover_all_slots_in_order(classes: Sequence[LayoutClass], slots: Sequence[int]) -> None:
    specs = regions.plan(PREFIX, classes, slots)
    assert [s.first_slot for s in specs] == [sum(s.n_slots for s in specs[:i]) for i in range(len(specs))]
    for i, (layout, n) in enumerate(zip(classes, slots, strict=True)):
        mine = [s for s in specs if s.layout == i]
        assert sum(s.n_slots for s in mine) == n
        assert len(mine) == min(8, -(-n * layout.record_bytes // (4 << 30)))
        assert all(s.n_bytes == regions.region_bytes(layout, s.n_slots) for s in mine)
        assert max((s.n_slots for s in mine), default=0) - min((s.n_slots for s in mine), default=0) <= 1


def test_names_are_short_and_new_each_time() -> None:
    classes, slots = [LARGE] * 20, [9000] * 20
    first, second = regions.plan(PREFIX, classes, slots), regions.plan(PREFIX, classes, slots)
    names = [s.name for s in (*first, *second)] + [regions.control_name(PREFIX)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"/spk-[0-9a-f-]+[0-9a-f]|/spk-[0-9a-f]+-c", name) for name in names)
    assert max(len(name) for name in names) <= 30  # macOS allows 31 with the terminating zero


def test_the_table_survives_the_control_segment() -> None:
    specs = regions.plan(PREFIX, [ODD, EVEN], [5, 3])
    assert regions.from_json(regions.to_json(specs)) == specs
    assert len(regions.to_json(regions.plan(PREFIX, [LARGE] * 8, [9000] * 8))) < 8192  # the control header's room


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"name": "x"}]', '[{"name":"x","layout":0,"first":1}]', "null"])
def test_a_damaged_table_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(PoolError, match="restart the prefetch daemon"):
        regions.from_json(text)


def test_two_processes_see_the_same_slots(spec: RegionSpec) -> None:
    mine = Region.create(spec, ODD)
    theirs = Region.attach(spec, ODD)
    assert [p.shape for p in mine.pieces] == [(3, 60), (3, 14), (3, 4)]
    for i, piece in enumerate(mine.pieces):
        piece[2] = i + 1
    assert [int(p[2, -1]) for p in theirs.pieces] == [1, 2, 3]
    assert not any(p[:2].any() for p in theirs.pieces)


def test_spans_are_the_pieces_of_a_slot(spec: RegionSpec) -> None:
    region = Region.create(spec, ODD)
    slot = spec.first_slot + 1
    assert region.spans(slot) == [(p[1].ctypes.data, p.shape[1]) for p in region.pieces]
    assert region.backed(2) == [(p.ctypes.data, 2 * p.shape[1]) for p in region.pieces]
    assert all(address % 4096 == 0 for address, _ in region.backed(3))


def test_a_region_that_is_not_what_the_table_says_is_refused(spec: RegionSpec) -> None:
    with pytest.raises(PoolError, match="is gone"):
        Region.attach(spec, ODD)
    Region.create(spec, ODD)
    larger = RegionSpec(spec.name, 0, 4, 9000, regions.region_bytes(ODD, 9000), 9000)
    for wrong, layout in ((larger, ODD), (spec, EVEN)):
        with pytest.raises(PoolError, match="bytes, expected"):
            Region.attach(wrong, layout)
    Mapping.attach(spec.name).array()[0] = 0
    with pytest.raises(PoolError, match="not a region"):
        Region.attach(spec, ODD)


def test_full_shared_memory_is_a_config_error_with_a_remedy(spec: RegionSpec) -> None:
    shm = os.statvfs("/dev/shm")
    n_slots = shm.f_blocks * shm.f_frsize // LARGE.record_bytes + 1
    too_large = RegionSpec(spec.name, 0, 0, n_slots, regions.region_bytes(LARGE, n_slots), n_slots)
    with pytest.raises(ConfigError, match=r"make /dev/shm larger.*lower SPARKLE_MEMORY or SPARKLE_POOL") as caught:
        Region.create(too_large, LARGE).reserve(0, n_slots)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    Mapping.unlink(spec.name)
    fits = RegionSpec(spec.name, 0, 0, n_slots, too_large.n_bytes, 1)
    Region.create(fits, LARGE).reserve(0, 1)  # what is not in force needs no memory
