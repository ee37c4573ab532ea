"""Trace files: what is written is read, whenever the writer dies, and no bytes can fool or exhaust the reader."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkle import trace
from sparkle.errors import ConfigError, StorageError
from sparkle.trace import Event, Trace, TraceHeader, TraceLayer, TraceWriter, read_trace

pytestmark = pytest.mark.unit

HEADER = TraceHeader(
    model="tiny",
    fingerprint="0123456789abcdef" * 4,
    started_at=1_750_000_000.25,
    layers=(TraceLayer(0, 8, 2, 0), TraceLayer(1, 8, 2, 0), TraceLayer(7, 512, 4, 1)),
    record_bytes=(4096, 8192),
    n_slots=(6, 100),
    policy="lru",
    resident=((0, 3), (7, 511), (1, 0)),
)
WIDTHS = {x.index: x.n_experts for x in HEADER.layers}
FILE = struct.Struct("<8sI")
# hypothesis warns of a folder that examples share; each writes its file anew
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


def event(layer: int = 0, experts: tuple[int, ...] = (1, 5), step: int = 0, **fields: Any) -> Event:
    values: dict[str, Any] = {"time_us": 1000 * step + layer, "stream": 1, "rows": 1, "token": 17} | fields
    return Event(step=step, layer=layer, experts=list(experts), is_hit=[e % 2 == 0 for e in experts], **values)


def token(step: int) -> list[Event]:
    return [
        event(0, (1, 5), step),
        event(1, (step % 8, (step + 3) % 8), step),
        event(7, (511, 0, step % 99, 300), step),
    ]


@st.composite
def events(draw: st.DrawFn) -> Event:
    layer = draw(st.sampled_from(list(WIDTHS)))
    experts = draw(st.lists(st.integers(0, WIDTHS[layer] - 1), min_size=1, max_size=8, unique=True))
    words, halves = st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
    is_hit = draw(st.lists(st.booleans(), min_size=len(experts), max_size=len(experts)))
    step, time_us, token_id = draw(words), draw(words), draw(words)
    return Event(step, time_us, draw(halves), draw(halves), token_id, layer, experts, is_hit)


def write(path: Path, found: list[Event], header: TraceHeader = HEADER) -> Path:
    path.unlink(missing_ok=True)
    writer = TraceWriter(path, header)
    for x in found:
        writer.write(x)
    writer.close()
    return path


def pack(path: Path, content: bytes, version: int = trace.VERSION) -> Path:
    """Write a file whose stream has any content."""
    path.write_bytes(FILE.pack(trace.MAGIC, version) + zlib.compress(content))
    return path


def content_of(path: Path) -> bytes:
    return zlib.decompress(path.read_bytes()[FILE.size :])


def refusal(path: Path) -> str:
    with pytest.raises(StorageError) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    return str(error.value)


# --- what is written is read ----------------------------------------------------------------------------------------


@same_folder
@given(st.lists(events()))
def test_what_is_written_is_read(tmp_path: Path, written: list[Event]) -> None:
    path = write(tmp_path / "x.trace", written)
    found = read_trace(path)
    assert found.header == HEADER
    assert list(found.events) == written
    assert not found.is_truncated and found.path == path


def test_events_are_a_sequence(tmp_path: Path) -> None:
    written = [x for step in range(5) for x in token(step)]
    found = read_trace(write(tmp_path / "x.trace", written)).events
    assert len(found) == 15
    assert found[4] == written[4] and found[-1] == written[-1]
    assert found[3:9:2] == written[3:9:2]
    with pytest.raises(IndexError):
        found[15]


def test_a_recording_without_events_is_a_trace(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "x.trace", [event(experts=())]))  # who uses nothing is not written down
    assert len(found.events) == 0 and not found.is_truncated


def test_counters_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    writer = TraceWriter(path, HEADER)
    assert writer.n_bytes == path.stat().st_size > 0
    for step in range(100):
        for x in token(step):
            writer.write(x)
    assert writer.n_events == 300
    writer.close()
    assert writer.n_bytes == path.stat().st_size
    writer.close()  # harmless


def test_an_event_costs_ten_bytes_and_two_per_expert(tmp_path: Path) -> None:
    layers = tuple(TraceLayer(i, 512, 10, 0) for i in range(48))
    header = dataclasses.replace(HEADER, layers=layers, resident=())
    written = [event(layer, tuple(range(layer, layer + 10)), step) for step in range(20) for layer in range(48)]
    n_bytes = [len(content_of(write(tmp_path / "x.trace", x, header))) for x in (written, [])]
    assert (n_bytes[0] - n_bytes[1]) / len(written) <= 10 + 2 * 10


def test_names_that_could_command_a_terminal_are_made_harmless(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, model="a\x1b[2J\nb" + "c" * 300)
    model = read_trace(write(tmp_path / "x.trace", [], header)).header.model
    assert model.startswith("a?[2J?bc") and len(model) == 255


def test_a_model_beyond_the_format_cannot_be_recorded(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, layers=(TraceLayer(0, 2**15 + 1, 1, 0),), resident=())
    with pytest.raises(ConfigError, match=r"x\.trace: this model cannot be recorded"):
        TraceWriter(tmp_path / "x.trace", header)
    assert not (tmp_path / "x.trace").exists()


# --- whatever happens to the writer ---------------------------------------------------------------------------------


def test_what_was_flushed_is_read_while_it_is_still_written(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    assert read_trace(writer.path).is_truncated
    for step in range(10):
        for x in token(step):
            writer.write(x)
        if step == 7:
            writer.flush()
    found = read_trace(writer.path)
    assert list(found.events) == [x for step in range(8) for x in token(step)]
    assert found.is_truncated


def test_a_long_recording_reaches_the_file_by_itself(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    n_written = 0
    while not read_trace(writer.path).events:
        assert n_written * 10 < 2 * trace.FLUSH_BYTES
        for _ in range(1000):
            writer.write(event())
        n_written += 1000


def test_a_file_that_ends_anywhere_has_the_events_before(tmp_path: Path) -> None:
    written = [x for step in range(6) for x in token(step)]
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    n_header_bytes = writer.n_bytes
    for i, x in enumerate(written):
        writer.write(x)
        if i % 5 == 4:
            writer.flush()
    writer.close()
    whole, lengths = writer.path.read_bytes(), set()
    for n_bytes in range(len(whole)):
        writer.path.write_bytes(whole[:n_bytes])
        try:
            found = read_trace(writer.path)
        except StorageError:
            assert n_bytes < n_header_bytes
            continue
        assert found.is_truncated
        assert list(found.events) == written[: len(found.events)]
        lengths.add(len(found.events))
    assert {0, 5, 10, 15, len(written)} <= lengths


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path, link = tmp_path / "x.trace", tmp_path / "link.trace"
    path.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(ConfigError, match=rf"{taken.name} exists; name a file that does not"):
            TraceWriter(taken, HEADER)
    assert path.read_text() == "mine" and not (tmp_path / "elsewhere").exists()


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    assert write(tmp_path / "x.trace", []).stat().st_mode & 0o077 == 0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none/x\.trace: cannot be created: No such file"):
        TraceWriter(tmp_path / "none" / "x.trace", HEADER)


def fill_disk(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let the disk take so many bytes more, a few at a time."""
    real, left = os.write, [n_bytes]

    def write_some(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = real(fd, data[: min(7, left[0])])
        left[0] -= n
        return n

    monkeypatch.setattr(os, "write", write_some)


def test_a_full_disk_ends_the_trace_and_what_it_took_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    writer.write(event(step=1))
    writer.flush()
    fill_disk(monkeypatch, 5)
    writer.write(event(step=2))
    with pytest.raises(StorageError, match=r"x\.trace: cannot be written: No space left on device\. Make room"):
        writer.flush()
    writer.close()  # the descriptor has gone already: nothing more is said
    writer.write(event(step=3))
    with pytest.raises(StorageError, match="has ended"):
        writer.flush()
    found = read_trace(writer.path)
    assert found.is_truncated and list(found.events) == [event(step=1)]
    assert writer.n_bytes == writer.path.stat().st_size


def test_a_disk_that_takes_a_bit_at_a_time_gets_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, 1 << 20)
    assert list(read_trace(write(tmp_path / "x.trace", token(3))).events) == token(3)


def test_a_file_without_its_header_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, 20)
    with pytest.raises(StorageError, match="No space left"):
        TraceWriter(tmp_path / "x.trace", HEADER)
    assert not (tmp_path / "x.trace").exists()


def test_a_full_trace_says_so_and_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 1000)
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    with pytest.raises(StorageError, match="this one is full"):
        for step in range(100):
            writer.write(event(step=step))
    found = read_trace(writer.path)
    assert not found.is_truncated and len(found.events) == writer.n_events > 30


# --- bytes of any origin --------------------------------------------------------------------------------------------


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    assert "No such file" in refusal(path)
    assert "directory" in refusal(tmp_path)
    for data in (b"", b"SPKTRACE", b"{}" * 100):
        path.write_bytes(data)
        assert "is not a trace" in refusal(path)
    assert f"version {trace.VERSION + 1}" in refusal(pack(path, b"", trace.VERSION + 1))
    path.write_bytes(FILE.pack(trace.MAGIC, trace.VERSION) + b"no zlib stream")
    assert "damaged" in refusal(path)


def test_damage_and_what_follows_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.trace", token(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert "follows its end" in refusal(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "damaged" in refusal(path)


HEAD = struct.pack("<HIHHI", 0xFFFF, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        (struct.pack("<HHIH", 0, 1, 0, 3), "of no step"),
        (HEAD + struct.pack("<HHIH", 2, 1, 0, 3), "of layer 2"),
        (HEAD + struct.pack("<HHI", 0, 0, 0), "with 0 experts"),
        (HEAD + struct.pack("<HHIH", 1, 1, 0, 8), "layer 1 has not"),
        (HEAD + struct.pack("<HHIH", 1, 1, 0, 8 | 1 << 15), "layer 1 has not"),
        (HEAD + struct.pack("<HHIHH", 1, 3, 0, 1, 2), "cut off"),
        (HEAD + struct.pack("<HHIH", 1, 1, 0, 7) + HEAD[:-1], "cut off"),
    ],
)
def test_records_that_cannot_be_are_refused(tmp_path: Path, records: bytes, fault: str) -> None:
    content = content_of(write(tmp_path / "x.trace", []))
    assert fault in refusal(pack(tmp_path / "x.trace", content + records))


def test_the_header_is_checked(tmp_path: Path) -> None:
    content = content_of(write(tmp_path / "x.trace", []))
    good = json.loads(content[4:])
    layer = [0, 8, 2, 0]
    changes: list[dict[str, Any]] = [
        {"model": None},
        {"model": "a\x1bb"},
        {"fingerprint": "xyz"},
        {"started_at": float("nan")},
        {"started_at": True},
        {"policy": ["lru"]},
        {"layers": []},
        {"layers": None},
        {"layers": [layer, layer]},
        {"layers": [[0, 8, 2]]},
        {"layers": [[0, 8, 9, 0]]},
        {"layers": [[0, 8, 0, 0]]},
        {"layers": [[0, 8, 2, 2]]},
        {"layers": [[65535, 8, 2, 0]]},
        {"layers": [[0, 2**15 + 1, 2, 0]]},
        {"layers": [[0, 8.0, 2, 0]]},
        {"n_slots": [1]},
        {"n_slots": [-1, 1]},
        {"record_bytes": None},
        {"record_bytes": [True, 1]},
        {"resident": [[0, 8]]},
        {"resident": [[2, 0]]},
        {"resident": [[0, 1], [0, 1]]},
        {"resident": {"a": 1}},
    ]
    for change in changes:
        text = json.dumps(good | change).encode()
        assert "its header" in refusal(pack(tmp_path / "x.trace", struct.pack("<I", len(text)) + text)), change
    for text in (b"[]", b"{", b"[" * 100_000, b"9" * 5000, b"\xff", b""):
        assert "damaged" in refusal(pack(tmp_path / "x.trace", struct.pack("<I", len(text)) + text))
    assert "header has more" in refusal(pack(tmp_path / "x.trace", struct.pack("<I", 2**32 - 1)))
    assert "inside its header" in refusal(pack(tmp_path / "x.trace", struct.pack("<I", 50) + b"{}"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    path = tmp_path_factory.mktemp("whole") / "x.trace"
    yield write(path, [x for step in range(4) for x in token(step)]).read_bytes()


def read_if_sound(path: Path) -> Trace | None:
    try:
        found = read_trace(path)
    except StorageError:
        return None
    for x in found.events:
        assert x.experts and max(x.experts) < WIDTHS.get(x.layer, 2**15)
    return found


edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)


@same_folder
@given(edits, st.integers(0, 2**16), st.booleans())
def test_no_bytes_raise_anything_else(
    tmp_path: Path, whole: bytes, changes: list[tuple[int, int]], n_bytes: int, is_inside: bool
) -> None:
    """Damage the file, or what its stream holds: the checksum of the latter is then right."""
    data = bytearray(zlib.decompress(whole[FILE.size :]) if is_inside else whole)
    for at, value in changes:
        data[at % len(data)] = value
    del data[max(1, n_bytes % (2 * len(data))) :]
    path = tmp_path / "x.trace"
    if is_inside:
        read_if_sound(pack(path, bytes(data)))
    else:
        path.write_bytes(data)
        read_if_sound(path)


@same_folder
@given(st.binary(max_size=400))
def test_records_of_any_bytes_are_events_or_refused(tmp_path: Path, whole: bytes, records: bytes) -> None:
    content = zlib.decompress(whole[FILE.size :])
    n_header_bytes = 4 + int.from_bytes(content[:4], "little")
    read_if_sound(pack(tmp_path / "x.trace", content[:n_header_bytes] + HEAD + records))


def test_a_small_file_cannot_become_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = content_of(write(tmp_path / "x.trace", []))
    pack(tmp_path / "x.trace", content + HEAD + struct.pack("<HHIH", 0, 1, 0, 3) * 2_000_000)
    assert (tmp_path / "x.trace").stat().st_size < 100_000
    monkeypatch.setattr(trace, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(trace, "MAX_HEADER_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        assert "more than 1 MiB" in refusal(tmp_path / "x.trace")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
