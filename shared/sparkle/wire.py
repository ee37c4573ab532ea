"""Frames and messages: `[b"SPK1", kind, msgpack map]` over ZeroMQ ipc.

Owns the codec and how sockets are made (limits, linger, high-water marks). Reads bytes of any origin: whatever arrives,
the outcome is a valid message or a ProtocolError, never another exception. Never pickles, never blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from sparkle.errors import ProtocolError, SparkleError
from sparkle.messages import KINDS, Error, Message

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MAGIC = b"SPK1"
MAX_BODY_BYTES = 16 << 20  # a 1M-token prompt as msgpack ints is 5 MB
MAX_NESTING = 32  # msgpack itself allows 512; chat messages with tools need fewer than ten
SEND_HWM = 4096  # messages queued for one slow peer before its stream is given up
LINGER_MS = 500  # what was said last (Finished, Error) may still leave; shutdown has 4 s in all


def encode(message: Message) -> list[bytes]:
    """Return the three frames of a message."""
    body = msgpack.packb(_plain(message), use_bin_type=True)
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return [MAGIC, type(message).__name__.encode(), body]


def decode(frames: Sequence[bytes]) -> Message:
    """Return the message in `frames`. Raises ProtocolError for anything that is not one."""
    if len(frames) != 3 or frames[0] != MAGIC:
        raise ProtocolError(
            f"expected frames [{MAGIC!r}, kind, body], got {len(frames)} frames; is this a Sparkle peer?"
        )
    cls = KINDS.get(frames[1].decode("ascii", "replace"))
    if cls is None:
        raise ProtocolError(f"unknown message kind {frames[1][:40]!r}; peer and daemon may be of different versions")
    if len(frames[2]) > MAX_BODY_BYTES:
        raise ProtocolError(f"{cls.__name__} of {len(frames[2])} bytes exceeds the limit of {MAX_BODY_BYTES}")
    try:
        body = msgpack.unpackb(frames[2], raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as e:  # TypeError: a map as a map's key
        raise ProtocolError(f"{cls.__name__}: body is not msgpack: {e}") from None
    return _build(cls, body, cls.__name__)


def request_id_of(frames: Sequence[bytes]) -> str | None:
    """Best effort: the request_id in a body that could not be decoded, so that its Error can name it."""
    try:
        body = msgpack.unpackb(frames[2], raw=False, strict_map_key=False)
        request_id = body.get("request_id")
    except (IndexError, ValueError, TypeError, AttributeError, msgpack.UnpackException, RecursionError):
        return None
    return request_id if isinstance(request_id, str) else None


def error_of(exc: SparkleError, request_id: str | None = None) -> Error:
    """Return the Error message that stands for an exception."""
    return Error(code=exc.code, message=str(exc), retryable=exc.retryable, request_id=request_id)


def router(context: Context, path: Path) -> Socket:
    """Bind a ROUTER at `path`. Sends to vanished or hopelessly slow peers raise instead of dropping in silence."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _limit(socket)
    socket.bind(f"ipc://{path}")
    return socket


def dealer(context: Context, path: Path) -> Socket:
    """Connect a DEALER to the daemon at `path`; it reconnects by itself, at most 1 s after the daemon is back."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IMMEDIATE, 0)
    _limit(socket)
    socket.connect(f"ipc://{path}")
    return socket


def _limit(socket: Socket) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, SEND_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


@functools.cache
def _fields(cls: type[Message]) -> tuple[tuple[str, Any, bool], ...]:
    """(name, annotation, is_required) of each field; annotations are resolved once per class."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return tuple(
        (f.name, hints[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(cls)
    )


def _build(cls: type[Message], body: Any, where: str) -> Message:
    if not isinstance(body, dict):
        raise ProtocolError(f"{where}: expected a map, got {type(body).__name__}")
    values: dict[str, Any] = {}
    for name, hint, is_required in _fields(cls):  # type: ignore[arg-type]  # mypy: a slots dataclass as a type is hashable
        if name in body:
            values[name] = _check(body[name], hint, f"{where}.{name}")
        elif is_required:
            raise ProtocolError(f"{where}: field '{name}' is missing")
    return cls(**values)  # unknown fields are ignored: a newer peer may send them


def _check(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as `hint` wants it, or raise ProtocolError. A bool is not an int; NaN is not a number."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _check_open(value, where, MAX_NESTING)
    if origin is types.UnionType:
        if value is None and types.NoneType in args:
            return None
        return _check(value, next(a for a in args if a is not types.NoneType), where)
    if origin is list:
        _expect(isinstance(value, list), value, "a list", where)
        if args[0] is int:  # token ids: the one long list, checked without a call per item
            _expect(all(type(v) is int and -(2**63) <= v < 2**63 for v in value), value, "a list of integers", where)
            return value
        return [_check(v, args[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(
            isinstance(value, dict) and all(isinstance(k, str) for k in value), value, "a map with text keys", where
        )
        return {k: _check(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Message):
        return _build(hint, value, where)
    return _scalar(value, hint, where)


def _scalar(value: Any, hint: Any, where: str) -> Any:
    checks: dict[Any, tuple[str, Callable[[Any], bool]]] = {
        str: ("text", lambda v: isinstance(v, str)),
        bool: ("true or false", lambda v: isinstance(v, bool)),
        int: ("an integer", lambda v: type(v) is int and -(2**63) <= v < 2**63),
        float: ("a finite number", lambda v: type(v) in (int, float) and math.isfinite(v)),
    }
    what, is_ok = checks[hint]
    _expect(is_ok(value), value, what, where)
    return float(value) if hint is float else value


def _check_open(value: Any, where: str, depth: int) -> Any:
    """JSON-like values only (what chat templates and telemetry take), of bounded depth."""
    if depth == 0:
        raise ProtocolError(f"{where}: nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        _expect(all(isinstance(k, str) for k in value), value, "a map with text keys", where)
        return {k: _check_open(v, f"{where}.{k}", depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_check_open(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
    _expect(value is None or isinstance(value, str | bool | int | float), value, "JSON-like data", where)
    return value


def _expect(is_ok: bool, value: Any, what: str, where: str) -> None:
    if not is_ok:
        # reprlib, because str() of a list nested a thousand times, which msgpack allows, is a RecursionError
        raise ProtocolError(f"{where}: expected {what}, got {reprlib.repr(value)[:60]}")
