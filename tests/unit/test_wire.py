"""The codec: every message there and back, golden bytes for each, and nothing but ProtocolError for anything else.

After a deliberate change of the protocol: python -m tests.unit.test_wire writes the golden files anew.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import types
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkle import wire
from sparkle.errors import Overloaded, ProtocolError
from sparkle.messages import (
    KINDS,
    Accepted,
    AttachPool,
    Cancel,
    CancelFetch,
    Chat,
    ChatDone,
    CloseSession,
    DetachPool,
    Error,
    ExpertsReady,
    FetchExperts,
    Finished,
    Generate,
    Hello,
    HintExperts,
    Message,
    PinExperts,
    Ping,
    PinState,
    Pong,
    PoolAttached,
    PoolState,
    Progress,
    ResizePool,
    Sampling,
    Session,
    SessionRequest,
    StartTrace,
    Status,
    StatusRequest,
    StopTrace,
    Text,
    Tokens,
    TraceState,
    Usage,
    Welcome,
)

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HISTORY = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "首都？ 👩‍🚀"}]
SAMPLES: list[Message] = [
    Accepted("r1", 17, 2),
    AttachPool("compute-1", 4712, [0, 1, 47]),
    HintExperts("compute-1", 13, [511, 7], "router"),
    PinExperts("r1", 3, [0, 511], False),
    PinState("r1", 20, 900, 16, 3),
    ResizePool("r1", "12GB"),
    PoolState("r1", 12_000_000_000, 3592, "memory became short on the way"),
    StartTrace("r1", "/tmp/chat.trace"),
    StopTrace("r1"),
    TraceState("r1", "/tmp/chat.trace", True, 4800, 123456),
    Cancel("r1"),
    CancelFetch("f1"),
    Chat("r1", HISTORY, "s1", [{"type": "function", "function": {"name": "f"}}], 64, Sampling(0.7, seed=5), ["\n\n"]),
    ChatDone("r1", "stop", Usage(12, 3, 4, 350.5, 12.25), 17),
    CloseSession("r1", "s1"),
    DetachPool("compute-1"),
    Error("overloaded", "the queue is full", True, "r1"),
    ExpertsReady("f1", [7, 0, 511]),
    FetchExperts("f1", "compute-1", 0, 3, [5, 130, 511], 4096, 30000),
    Finished("r1", "length", Usage(12, 3)),
    Generate("r1", [1, 2, 151935], 64, Sampling(0.0, 0.9, 20, 0.05, 1.1, 0.5, 0.25, {"7": -100.0}, 3), [2], [9], "s1"),
    Hello("compute", 4712, 1, "abc123"),
    Ping(),
    Pong(),
    PoolAttached("compute-1", "/spk-0123abcd-ctl", 0, 1_700_000_000_000_000_000),
    Progress("r1", 512, 2048, 1),
    Sampling(0.7, 0.95, 40, 0.0, 1.05, 0.0, 0.0, {"13": 1.5}, 2**62),
    Session("r1", "s1", HISTORY, True),
    SessionRequest("r1", "s1"),
    Status("prefetch", 4711, "ready", "serving", 3725.5, 1 << 34, {"misses": 12, "io_engine": "io_uring", "x": None}),
    StatusRequest(),
    Text("r1", 3, "巴黎 👩‍🚀"),
    Tokens("r1", 0, [9707, 0]),
    Usage(12, 3, 4, 350.5, 12.25),
    Welcome("front", 4713, 1, "ready", 1_700_000_000_000_000_000, None),
]


def golden_of(message: Message) -> dict[str, Any]:
    magic, kind, body = wire.encode(message)
    return {
        "magic": magic.decode(),
        "kind": kind.decode(),
        "body": msgpack.unpackb(body),
        "body_msgpack_hex": body.hex(),
    }


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda m: type(m).__name__)
def test_golden(sample: Message) -> None:
    """Bytes that older peers send and expect. A difference is a change of the protocol: see the module's docstring."""
    golden = json.loads((GOLDEN / f"{type(sample).__name__}.json").read_text(encoding="utf-8"))
    assert golden_of(sample) == golden
    frames = [golden["magic"].encode(), golden["kind"].encode(), bytes.fromhex(golden["body_msgpack_hex"])]
    assert wire.decode(frames) == sample


def test_every_kind_has_a_golden_file_and_every_file_a_kind() -> None:
    assert {type(m).__name__ for m in SAMPLES} == set(KINDS)
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(KINDS)


INT64 = st.integers(-(2**63), 2**63 - 1)
OPEN = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    bool: st.booleans(),
    int: INT64,
    float: st.floats(allow_nan=False, allow_infinity=False),
    types.NoneType: st.none(),
    Any: OPEN,
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    args = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType:
            return st.one_of(*(values_of(a) for a in args))
        case origin if origin is list:
            return st.lists(values_of(args[0]), max_size=4)
        case origin if origin is dict:
            return st.dictionaries(st.text(), values_of(args[1]), max_size=4)
    return SCALARS[hint] if hint in SCALARS else messages_of(hint)


def messages_of(cls: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", KINDS.values(), ids=lambda cls: cls.__name__)
def test_round_trip(cls: type[Message]) -> None:
    @settings(max_examples=30, deadline=None, database=None)
    @given(messages_of(cls))
    def check(message: Message) -> None:
        assert wire.decode(wire.encode(message)) == message

    check()


# --- bytes of any origin --------------------------------------------------------------------------------------------

ANY_BODY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["request_id", "messages", "sampling", "usage", "ids"]) | st.text(), inner)
    ),
    max_leaves=10,
)
KIND_FRAMES = st.sampled_from([k.encode() for k in KINDS]) | st.binary(max_size=20)
FRAMES = st.one_of(
    st.lists(st.binary(max_size=40), max_size=5),
    st.tuples(st.just(wire.MAGIC), KIND_FRAMES, st.binary(max_size=60)).map(list),
    st.tuples(st.just(wire.MAGIC), KIND_FRAMES, ANY_BODY.map(msgpack.packb)).map(list),
)


def decode_or_refuse(frames: list[bytes]) -> None:
    try:
        message = wire.decode(frames)
    except ProtocolError as e:
        assert len(str(e)) < 1000
        str(e).encode()  # the text can be sent back
    else:
        assert wire.decode(wire.encode(message)) == message
    request_id = wire.request_id_of(frames)
    assert request_id is None or isinstance(request_id, str)


@settings(max_examples=500, deadline=None, database=None)
@given(FRAMES)
def test_nothing_but_protocol_error(frames: list[bytes]) -> None:
    decode_or_refuse(frames)


@settings(max_examples=300, deadline=None, database=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_messages(sample: Message, data: st.DataObject) -> None:
    frames = wire.encode(sample)
    body = bytearray(frames[2])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse([frames[0], frames[1], bytes(body[: data.draw(st.integers(0, len(body)))])])


NESTED = b"\x81\xa4role"  # {"role": …


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # the one byte that msgpack does not use
        b"\x80\x80",  # something after the map
        b"\x81\x90\x01",  # a list as key
        NESTED + b"\x91" * 1000 + b"\xc0",
        NESTED + b"\x91" * 100_000 + b"\xc0",
        NESTED + b"\xdd\xff\xff\xff\xff",  # says that four thousand million items follow
        NESTED + b"\xd7\xff" + b"\xff" * 8,  # a timestamp out of range
        NESTED + b"\xa1\xff",  # not UTF-8
        pickle.dumps({"role": "compute", "pid": 1}),
    ],
    ids=lambda body: body[:12].hex(),
)
def test_hostile_bodies(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode([wire.MAGIC, b"Hello", body])
    decode_or_refuse([wire.MAGIC, b"Status", body])


def test_pickles_are_never_loaded() -> None:
    """A pickle that would act if it were loaded, in every place of the frames."""

    class Acts:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was loaded",))

    data = pickle.dumps(Acts())
    body = msgpack.packb({"request_id": data})
    for frames in ([data], [wire.MAGIC, data, data], [wire.MAGIC, b"Cancel", data], [wire.MAGIC, b"Cancel", body]):
        with pytest.raises(ProtocolError):
            wire.decode(frames)


def test_no_module_of_the_protocol_can_load_pickles() -> None:
    root = Path(__file__).resolve().parents[2]
    for path in [*(root / "shared").rglob("*.py"), *(root / "daemons").rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        for word in ("import pickle", "recv_pyobj", "send_pyobj", "import dill", "torch.load"):
            assert word not in source, f"{path} has {word!r}"


# --- limits and fields ----------------------------------------------------------------------------------------------


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = wire.encode(Text("r1", 0, "x" * 200))
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 100)
    with pytest.raises(ProtocolError, match="exceeds the limit of 100"):
        wire.decode(frames)
    with pytest.raises(ProtocolError, match="exceeds the limit of 100"):
        wire.encode(Text("r1", 0, "x" * 200))


def deep(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"role": "user", "content": value}


def test_nesting_is_bounded() -> None:
    chat = Chat("r1", [deep(wire.MAX_NESTING - 2)])
    assert wire.decode(wire.encode(chat)) == chat
    with pytest.raises(ProtocolError, match="nested deeper"):
        wire.decode(wire.encode(Chat("r1", [deep(wire.MAX_NESTING)])))


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        ("Cancel", {}, "'request_id' is missing"),
        ("Cancel", {"request_id": 5}, "expected text, got 5"),
        ("Progress", {"request_id": "r", "done": True, "total": 1}, r"Progress\.done: expected an integer"),
        ("Progress", {"request_id": "r", "done": 1.5, "total": 1}, r"Progress\.done: expected an integer"),
        ("Progress", {"request_id": "r", "done": 2**63, "total": 1}, r"Progress\.done: expected an integer"),
        ("Tokens", {"request_id": "r", "index": 0, "ids": [1, True]}, "list of integers"),
        ("Tokens", {"request_id": "r", "index": 0, "ids": "12"}, "expected a list"),
        ("Generate", {"request_id": "r", "token_ids": [], "sampling": {"temperature": float("nan")}}, "finite"),
        ("Generate", {"request_id": "r", "token_ids": [], "sampling": {"logit_bias": {1: 2.0}}}, "text keys"),
        ("Generate", {"request_id": "r", "token_ids": [], "sampling": []}, "expected a map"),
        ("Chat", {"request_id": "r", "messages": [{"content": b"raw"}]}, "JSON-like"),
        ("Chat", {"request_id": "r", "messages": "hello"}, "expected a list"),
        ("Chatter", {}, "unknown message kind"),
    ],
)
def test_wrong_fields_are_named(kind: str, body: dict[Any, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        wire.decode([wire.MAGIC, kind.encode(), msgpack.packb(body)])


def test_fields_of_newer_peers_are_ignored_and_defaults_fill_in() -> None:
    body = msgpack.packb({"role": "front", "pid": 1, "mood": "fine"})
    assert wire.decode([wire.MAGIC, b"Hello", body]) == Hello("front", 1)


def test_a_wrong_magic_says_so() -> None:
    with pytest.raises(ProtocolError, match="is this a Sparkle peer"):
        wire.decode([b"SPK0", b"Ping", b"\x80"])


def test_the_request_id_of_a_bad_message_is_found() -> None:
    body = msgpack.packb({"request_id": "r9", "messages": 5})
    assert wire.request_id_of([wire.MAGIC, b"Chat", body]) == "r9"
    assert wire.request_id_of([wire.MAGIC, b"Chat"]) is None
    assert wire.request_id_of([wire.MAGIC, b"Chat", msgpack.packb([1])]) is None


def test_error_of() -> None:
    assert wire.error_of(Overloaded("full"), "r1") == Error("overloaded", "full", True, "r1")


if __name__ == "__main__":
    for message in SAMPLES:
        path = GOLDEN / f"{type(message).__name__}.json"
        path.write_text(json.dumps(golden_of(message), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
