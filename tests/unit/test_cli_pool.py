"""`sparkle-ctl pool resize`, `pin`, `unpin` and `metrics`: what they send, and what they say about the answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sparkle import config
from sparkle.cli import ctl
from sparkle.cli._exit import run
from sparkle.errors import ConfigError, PeerError, ProtocolError
from sparkle.messages import Error, PinExperts, PinState, PoolState, ResizePool
from tests.fakes import FakeDaemon

pytestmark = pytest.mark.unit


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as path:  # short enough for a socket
        monkeypatch.setenv("SPARKLE_RUN_DIR", path)
        yield Path(path)


@pytest.fixture
def prefetch(run_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(run_dir, "prefetch", metrics={"misses": 3}) as daemon:
        daemon.on[ResizePool] = lambda m, say: say(PoolState(m.request_id, 12_000_000_000, 3592))
        daemon.on[PinExperts] = lambda m, say: say(PinState(m.request_id, 20, 900, len(m.experts)))
        yield daemon


def ctl_says(*args: str) -> str:
    result = CliRunner().invoke(ctl.command, args, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def refuse(code: str, text: str) -> Callable[[Any, Any], None]:
    return lambda m, say: say(Error(code, text, request_id=m.request_id))


@pytest.mark.parametrize("size", ["12GB", "512MiB", "25%"])
def test_resize(prefetch: FakeDaemon, size: str) -> None:
    assert ctl_says("pool", "resize", size) == "pool: 12.0 GB, 3,592 slots\n"
    assert prefetch.wait_for(ResizePool).size == size


def test_a_resize_that_was_not_done_in_full_says_why(prefetch: FakeDaemon) -> None:
    detail = "24.0 GB does not fit now: 3.0 GB left"
    prefetch.on[ResizePool] = lambda m, say: say(PoolState(m.request_id, 1000, 1, detail))
    assert ctl_says("pool", "resize", "24GB") == f"pool: 1.0 kB, 1 slots\nnote: {detail}\n"


@pytest.mark.parametrize("size", ["large", "-5GB", "0%", "101%", "12XB", "nan"])
def test_a_malformed_size_is_refused_before_anything_is_sent(prefetch: FakeDaemon, size: str) -> None:
    with pytest.raises(ConfigError, match=f"a pool of '{size}': expected"):
        ctl_says("pool", "resize", "--", size)
    assert prefetch.received == []


def test_a_size_that_the_daemon_refuses(prefetch: FakeDaemon) -> None:
    prefetch.on[ResizePool] = refuse("config", "a pool of 1.0 MB is too small while the daemons run")
    with pytest.raises(ConfigError, match="too small while the daemons run"):
        ctl_says("pool", "resize", "1MB")


def test_a_resize_waits_as_long_as_the_daemon_may_take(prefetch: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "RESIZE_DEADLINE_S", 0.1)
    monkeypatch.setattr(config, "HELLO_DEADLINE_S", 0.1)
    del prefetch.on[ResizePool]
    with pytest.raises(PeerError, match=r"has not answered for 0\.2 s"):
        ctl_says("pool", "resize", "12GB")


@pytest.mark.parametrize(
    ("texts", "experts"),
    [
        (["5"], [5]),
        (["3", "0", "17"], [3, 0, 17]),
        (["0-3"], [0, 1, 2, 3]),
        (["7", "2-4", "511"], [7, 2, 3, 4, 511]),
        (["4-4", "2-5", "4"], [4, 2, 3, 5]),  # each once, where it stood first
    ],
)
@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_pin_and_unpin(prefetch: FakeDaemon, command: str, texts: list[str], experts: list[int]) -> None:
    own = f"pinned: {len(experts)} of the {len(experts)} asked for, all in the pool\n" if command == "pin" else ""
    assert ctl_says(command, "3", *texts) == f"{own}in all: 20 of at most 900 experts\n"
    sent = prefetch.wait_for(PinExperts)
    assert (sent.layer, sent.experts, sent.is_pinned) == (3, experts, command == "pin")


def test_pins_that_have_yet_to_be_read_are_counted(prefetch: FakeDaemon) -> None:
    prefetch.on[PinExperts] = lambda m, say: say(PinState(m.request_id, 84, 900, 64, 12))
    said = "pinned: 64 of the 64 asked for, 12 of these still to be read\nin all: 84 of at most 900 experts\n"
    assert ctl_says("pin", "3", "0-63") == said


def test_pins_that_found_no_room_are_counted(prefetch: FakeDaemon) -> None:
    prefetch.on[PinExperts] = lambda m, say: say(PinState(m.request_id, 900, 900, 10, 0))
    text = ctl_says("pin", "3", "0-63")
    assert text.startswith("pinned: 10 of the 64 asked for, all in the pool\nin all: 900 of at most 900 experts\n")
    assert "note: no more may be pinned, 54 are not; enlarge the pool" in text
    assert "note" not in ctl_says("unpin", "3", "0-63")
    prefetch.on[PinExperts] = lambda m, say: say(PinState(m.request_id, 900, 900))
    assert ctl_says("pin", "3", "0-63").startswith("pinned: 0 of the 64 asked for\n")
    prefetch.on[PinExperts] = lambda m, say: say(PinState(m.request_id, 900, 900, 64, 0))
    assert "note" not in ctl_says("pin", "3", "0-63"), "the last that may be pinned are"


@pytest.mark.parametrize("text", ["five", "5-", "3-1", "1,2", "-1", "0-99999", "0-9999999999999", "²", ""])
def test_malformed_experts(prefetch: FakeDaemon, text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number such as 5 or a range such as 16-31"):
        ctl_says("pin", "3", "--", "1", text)
    assert prefetch.received == []


def test_a_layer_that_does_not_exist(prefetch: FakeDaemon) -> None:
    prefetch.on[PinExperts] = refuse("protocol", "PinExperts.layer 99: the store has 48 layers")
    with pytest.raises(ProtocolError, match="the store has 48 layers"):
        ctl_says("pin", "99", "0")


@pytest.mark.parametrize("args", [("pool", "resize", "12GB"), ("pin", "0", "1"), ("unpin", "0", "1")])
def test_no_daemon(run_dir: Path, args: tuple[str, ...]) -> None:
    with pytest.raises(PeerError, match="the prefetch daemon is not running"):
        ctl_says(*args)


@pytest.mark.parametrize(
    ("args", "answer", "exit_code"),
    [
        (["pool", "resize", "12XB"], None, 78),
        (["pool", "resize", "1MB"], Error("config", "too small"), 78),
        (["pin", "99", "0"], Error("protocol", "PinExperts.layer 99: the store has 48 layers"), 76),
        (["pin", "0", "0"], Error("peer", "the prefetch daemon is starting"), 69),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    prefetch: FakeDaemon,
    args: list[str],
    answer: Error | None,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if answer is not None:
        prefetch.on[ResizePool] = prefetch.on[PinExperts] = refuse(answer.code, answer.message)
    monkeypatch.setattr("sys.argv", ["sparkle-ctl", *args])
    assert run(ctl.command, "sparkle-ctl") == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparkle-ctl: ") and err.count("\n") == 1
    assert answer is None or answer.message in err


def test_metrics(prefetch: FakeDaemon) -> None:
    """Daemons that are down are no error."""
    text = ctl_says("metrics")
    assert 'sparkle_up{daemon="prefetch"} 1\n' in text
    assert 'sparkle_up{daemon="compute"} 0\n' in text
    assert "sparkle_prefetch_misses_total 3\n" in text
    prefetch.stop()
    assert 'sparkle_up{daemon="prefetch"} 0\n' in ctl_says("metrics")


def test_the_commands_are_listed() -> None:
    text = ctl_says("--help")
    for name in ("metrics", "pin", "pool", "unpin"):
        assert f"\n  {name} " in text
