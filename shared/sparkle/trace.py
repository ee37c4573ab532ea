"""What clients used, event by event: the material that policies learn from and are judged by, and its file.

A trace file is MAGIC, a version, and one zlib stream: the header's length and JSON, then records of little-endian words
of 16 bits. A step record says whose tokens the events after it are of:

    0xFFFF, step (2 words), stream, rows, token (2 words)
    layer, n, microseconds since the event before (2 words), n times expert | 1 << 15 if it was resident

Owns the type of an event and the format. Never decides anything. The writer hands over all it has at every flush, so
that a file whose writer was killed can be read up to there; the reader takes bytes of any origin, and needs no more
memory than MAX_BYTES and a bit.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

from sparkle.errors import ConfigError, StorageError

MAGIC = b"SPKTRACE"
VERSION = 1
# Of records, before compression. Five hours of 10 tok/s through 48 layers with 10 experts each; to read more at once
# would take long, and several files can be replayed as one.
MAX_BYTES = 512 << 20
MAX_HEADER_BYTES = 4 << 20  # ten times that of 48 layers with 512 experts, all of them resident
FLUSH_BYTES = 64 << 10  # a few seconds' events; costs 1 ms
MAX_LAYER = 0xFFFE
MAX_EXPERTS = 1 << 15

_STEP_MARK = 0xFFFF  # where the layer stands in an event's record
_HIT = 1 << 15
_START = struct.Struct("<8sI")
_LENGTH = struct.Struct("<I")
_MARK = struct.Struct("<H")
_STEP = struct.Struct("<HIHHI")
_EVENT = struct.Struct("<HHI")
_READ_BYTES = 64 << 10


class Origin(NamedTuple):
    """Where a use comes from; the fields are those of Event."""

    step: int
    stream: int = 0
    rows: int = 1
    token: int = 0

    def words(self) -> tuple[int, int, int, int]:
        """The fields, cut to what the event ring has room for."""
        return self.step % 2**32, self.stream % 2**16, min(self.rows, 2**16 - 1), self.token


class Event(NamedTuple):
    """One step's use of one layer, as the client wrote it to its event ring before it computed anything.

    step: number of the forward pass, counted by the client. time_us: monotonic clock, low 32 bits. stream: whose tokens
    they are, so that those of several conversations can be told apart. rows: tokens in the step. token: id of the last
    row. experts: distinct ids that the layer's router chose, over all rows; is_hit says which were resident.
    """

    step: int
    time_us: int
    stream: int
    rows: int
    token: int
    layer: int
    experts: list[int]
    is_hit: list[bool]


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """A layer of the store: its index there, its experts, how many a token uses, and the index of its layout class."""

    index: int
    n_experts: int
    top_k: int
    layout: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What was recorded, and from which pool. started_at: Unix time.

    record_bytes, n_slots: per layout class; the latter when recording began, as is `resident`: the (layer, expert) that
    had a slot, in the order in which they would have been evicted.
    """

    model: str
    fingerprint: str
    started_at: float
    layers: tuple[TraceLayer, ...]
    record_bytes: tuple[int, ...]
    n_slots: tuple[int, ...]
    policy: str
    resident: tuple[tuple[int, int], ...] = ()
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Trace:
    """A file that was read. is_truncated: its writer did not close it; events of its last seconds may be missing."""

    path: Path
    header: TraceHeader
    events: Sequence[Event]
    is_truncated: bool


class TraceWriter:
    """Appends events to a new file. n_events: written so far; n_bytes: of the file, as of the last flush.

    Raises ConfigError if there is something at `path`, StorageError if the disk refuses: the trace has then ended.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self.n_events = 0
        self.n_bytes = 0
        self._n_record_bytes = 0
        self._origin: tuple[int, ...] = ()
        self._time_us = 0
        try:
            text = json.dumps(_to_json(header), separators=(",", ":"), allow_nan=False).encode()
        except ValueError as e:
            raise ConfigError(f"{path}: this model cannot be recorded: {e}") from None
        self._pending = bytearray(_LENGTH.pack(len(text)) + text)
        self._zlib = zlib.compressobj(level=1)
        try:
            # For the owner alone: whoever has the tokens' ids can read the answers.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists; name a file that does not, or remove it first") from None
        except OSError as e:
            raise StorageError(f"{path}: cannot be created: {e.strerror or e}. Choose another folder") from None
        try:
            self._put(_START.pack(MAGIC, VERSION))
            self.flush()
        except StorageError:
            path.unlink(missing_ok=True)  # of no use, and its name would be taken
            raise

    def write(self, event: Event) -> None:
        """Add an event whose layer and experts the header has; one without experts is left out."""
        n = len(event.experts)
        if not n:
            return
        if self._n_record_bytes > MAX_BYTES - _STEP.size - _EVENT.size - 2 * n:
            self.close()
            raise StorageError(f"{self.path}: a trace holds {MAX_BYTES >> 20} MiB of events, and this one is full")
        before = len(self._pending)
        if (origin := (event.step, event.stream, event.rows, event.token)) != self._origin:
            self._pending += _STEP.pack(_STEP_MARK, *origin)
            self._origin = origin
        self._pending += _EVENT.pack(event.layer, n, (event.time_us - self._time_us) & 0xFFFFFFFF)
        words = [e | _HIT if is_hit else e for e, is_hit in zip(event.experts, event.is_hit, strict=True)]
        self._pending += struct.pack(f"<{n}H", *words)
        self._time_us = event.time_us
        self.n_events += 1
        self._n_record_bytes += len(self._pending) - before
        if len(self._pending) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all events over to the system: they then outlive this process."""
        if self._pending:
            self._put(self._zlib.compress(self._pending) + self._zlib.flush(zlib.Z_SYNC_FLUSH))
            self._pending.clear()

    def close(self) -> None:
        """Write what is left; harmless when closed."""
        if self._fd < 0:
            return
        self._put(self._zlib.compress(self._pending) + self._zlib.flush())
        self._pending.clear()
        os.close(self._fd)
        self._fd = -1

    def _put(self, data: bytes) -> None:
        if self._fd < 0:
            raise StorageError(f"{self.path}: the trace has ended; start another")
        try:
            while data:
                n = os.write(self._fd, data)
                self.n_bytes += n
                data = data[n:]
        except OSError as e:
            os.close(self._fd)
            self._fd = -1
            remedy = "Make room" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose another folder"
            raise StorageError(f"{self.path}: cannot be written: {e.strerror or e}. {remedy}") from None


def read_trace(path: Path) -> Trace:
    """Return the trace in a file, checked whole. Raises StorageError for anything else."""
    data, is_whole = _inflate(path)
    try:
        start = _LENGTH.size + _header_bytes(data)
        header = _parse(json.loads(data[_LENGTH.size : start]))
        events, end = _scan(data, start, {x.index: x.n_experts for x in header.layers})
        if is_whole and end < len(data):
            raise ValueError("its last event is cut off")
    except (ValueError, RecursionError) as e:
        raise _unsound(path, str(e)) from None
    return Trace(path, header, events, not is_whole)


class _Events(Sequence[Event]):
    """Events as they are in the file, each made when it is asked for: as objects, all would take 15 times the memory.

    at, steps: where in `data` an event's record and that of its step begin.
    """

    def __init__(self, data: bytearray, at: array[int], steps: array[int], times_us: array[int]) -> None:
        self._data, self._at, self._steps, self._times_us = data, at, steps, times_us

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [
                self._make(*x) for x in zip(self._at[index], self._steps[index], self._times_us[index], strict=True)
            ]
        return self._make(self._at[index], self._steps[index], self._times_us[index])

    def __iter__(self) -> Iterator[Event]:
        return map(self._make, self._at, self._steps, self._times_us)

    def _make(self, at: int, step_at: int, time_us: int) -> Event:
        _, step, stream, rows, token = _STEP.unpack_from(self._data, step_at)
        layer, n, _ = _EVENT.unpack_from(self._data, at)
        words = struct.unpack_from(f"<{n}H", self._data, at + _EVENT.size)
        experts, is_hit = [w & ~_HIT for w in words], [w >= _HIT for w in words]
        return Event(step, time_us, stream, rows, token, layer, experts, is_hit)


# --- the file -------------------------------------------------------------------------------------------------------


def _inflate(path: Path) -> tuple[bytearray, bool]:
    """Return what the zlib stream of a file holds, and whether it is whole."""
    data, inflater = bytearray(), zlib.decompressobj()
    try:
        with path.open("rb") as file:
            _check_start(path, file.read(_START.size))
            while not inflater.eof and (chunk := file.read(_READ_BYTES)):
                while chunk and not inflater.eof:
                    data += inflater.decompress(chunk, MAX_BYTES + MAX_HEADER_BYTES + 1 - len(data))
                    if len(data) > MAX_BYTES + MAX_HEADER_BYTES:
                        raise _unsound(path, f"it holds more than {MAX_BYTES >> 20} MiB")
                    chunk = inflater.unconsumed_tail
            if inflater.unused_data or (inflater.eof and file.read(1)):
                raise _unsound(path, "something follows its end")
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}") from None
    except zlib.error as e:
        raise _unsound(path, str(e)) from None
    return data, inflater.eof


def _check_start(path: Path, start: bytes) -> None:
    if len(start) < _START.size or not start.startswith(MAGIC):
        raise StorageError(f"{path} is not a trace; traces are recorded with: sparkle-ctl trace start")
    version = _START.unpack(start)[1]
    if version != VERSION:
        raise StorageError(f"{path} is a trace of version {version}; this Sparkle reads {VERSION}: record it anew")


def _header_bytes(data: bytearray) -> int:
    n_bytes: int = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    if n_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
    if len(data) < _LENGTH.size + max(1, n_bytes):
        raise ValueError("it ends inside its header")
    return n_bytes


def _scan(data: bytearray, start: int, n_experts: Mapping[int, int]) -> tuple[_Events, int]:
    """Find and check all records; returns the end of the last that is whole."""
    at, steps, times_us = array("I"), array("I"), array("I")
    i, step_at, time_us = start, -1, 0
    while i + _EVENT.size <= len(data):
        layer, n, since_us = _EVENT.unpack_from(data, i)
        if layer == _STEP_MARK:
            if i + _STEP.size > len(data):
                break
            step_at = i
            i += _STEP.size
            continue
        end = i + _EVENT.size + 2 * n
        if layer not in n_experts or not n or step_at < 0:
            raise ValueError(f"event {len(at)} is of layer {layer} with {n} experts, or of no step")
        if end > len(data):
            break
        words = struct.unpack_from(f"<{n}H", data, i + _EVENT.size)
        if max(word & ~_HIT for word in words) >= n_experts[layer]:
            raise ValueError(f"event {len(at)} has an expert that layer {layer} has not")
        time_us = (time_us + since_us) & 0xFFFFFFFF
        at.append(i)
        steps.append(step_at)
        times_us.append(time_us)
        i = end
    return _Events(data, at, steps, times_us), i


def _unsound(path: Path, fault: str) -> StorageError:
    return StorageError(f"{path} is damaged or no trace: {fault}")


# --- the header -----------------------------------------------------------------------------------------------------


def _to_json(header: TraceHeader) -> dict[str, Any]:
    """Return the header's JSON form. Raises ValueError if it could not be read again."""
    value = {
        "model": _printable(header.model),
        "fingerprint": header.fingerprint,
        "started_at": round(header.started_at, 3),
        "policy": _printable(header.policy),
        "layers": [[x.index, x.n_experts, x.top_k, x.layout] for x in header.layers],
        "record_bytes": list(header.record_bytes),
        "n_slots": list(header.n_slots),
        "resident": [list(key) for key in header.resident],
    }
    _parse(value)
    return value


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:255]


def _parse(value: Any) -> TraceHeader:
    """Return the header of a JSON form. Raises ValueError."""
    if not isinstance(value, dict):
        _refuse("is not a JSON object")
    model, policy, fingerprint = (_text(value, name) for name in ("model", "policy", "fingerprint"))
    if not re.fullmatch("[0-9a-f]{16,128}", fingerprint):
        _refuse("has no fingerprint")
    started_at: Any = value.get("started_at")
    if type(started_at) not in (int, float) or not 0 <= started_at < 2**33:  # NaN is within no bounds
        _refuse("has no time")
    record_bytes = _rows([value.get("record_bytes")], None, "record_bytes")[0]
    n_slots = _rows([value.get("n_slots")], len(record_bytes), "n_slots")[0]
    layers = tuple(TraceLayer(*row) for row in _rows(value.get("layers"), 4, "layers"))
    widths = {x.index: x.n_experts for x in layers}
    if not layers or len(widths) < len(layers):
        _refuse("has no layers, or one twice")
    for x in layers:
        if x.index > MAX_LAYER or not 1 <= x.top_k <= x.n_experts <= MAX_EXPERTS or x.layout >= len(record_bytes):
            _refuse(f"has a layer that can't be: {x}")
    resident = tuple((layer, expert) for layer, expert in _rows(value.get("resident"), 2, "resident"))
    if len(set(resident)) < len(resident) or any(expert >= widths.get(layer, 0) for layer, expert in resident):
        _refuse("has an expert twice in the pool, or one that its layer has not")
    return TraceHeader(model, fingerprint, float(started_at), layers, record_bytes, n_slots, policy, resident)


def _text(value: dict[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or text != _printable(text):
        _refuse(f"{name} is not a name")
    return text


def _rows(value: Any, width: int | None, name: str) -> list[tuple[int, ...]]:
    """Check a list of rows of numbers, `width` in each."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        _refuse(f"{name} is not a list")
    for row in value:
        if len(row) != (width or len(row)) or not all(type(n) is int and 0 <= n < 2**53 for n in row):
            _refuse(f"{name} is not a list of as many numbers as there should be")
    return [tuple(row) for row in value]


def _refuse(fault: str) -> NoReturn:
    raise ValueError(f"its header {fault}")
