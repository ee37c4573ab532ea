"""`sparkle-ctl trace`: what it asks of the daemon, and what it makes of recordings."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sparkle import config
from sparkle.cli import ctl, trace_plot
from sparkle.errors import ConfigError, PeerError, PoolError, ProtocolError, StorageError
from sparkle.messages import Error, Message, Pong, StartTrace, StopTrace, TraceState
from sparkle.policy import POLICIES
from sparkle.trace import Event, TraceHeader, TraceLayer, TraceWriter
from tests.fakes import FakeDaemon, Say

pytestmark = pytest.mark.unit

HEADER = TraceHeader("tiny", "0123456789abcdef" * 4, 1.75e9, (TraceLayer(0, 8, 2, 0),), (1000,), (4,), "lru")
TWO_CLASSES = dataclasses.replace(
    HEADER,
    layers=(TraceLayer(0, 8, 2, 0), TraceLayer(1, 4, 1, 1), TraceLayer(2, 4, 1, 1)),
    record_bytes=(1000, 10),
    n_slots=(4, 2),
)


def run(*args: str | Path) -> Any:
    result = CliRunner().invoke(ctl.command, ["trace", *map(str, args)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def run_json(*args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json").stdout)
    return found


def event(step: int, experts: list[int], **fields: Any) -> Event:
    values: dict[str, Any] = {"time_us": 100_000 * step, "stream": 0, "rows": 1, "token": 5, "layer": 0}
    return Event(step=step, experts=experts, is_hit=[e < 2 for e in experts], **(values | fields))


def tokens(*experts: list[int]) -> list[Event]:
    return [event(step, used) for step, used in enumerate(experts)]


def write(path: Path, events: list[Event], header: TraceHeader = HEADER) -> Path:
    writer = TraceWriter(path, header)
    for x in events:
        writer.write(x)
    writer.close()
    return path


# --- start and stop -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as path:  # short enough for a socket
        monkeypatch.setenv("SPARKLE_RUN_DIR", path)
        monkeypatch.chdir(tmp_path)
        yield Path(path)


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[FakeDaemon]:
    def start(message: StartTrace, say: Say) -> None:
        say(TraceState(message.request_id, message.path, True, 0, 90))

    with FakeDaemon(run_dir, "prefetch", metrics={"model_name": "my model/8bit"}) as fake:
        fake.on[StartTrace] = start
        yield fake


def answer(daemon: FakeDaemon, kind: type[Message], reply: Message) -> None:
    daemon.on[kind] = lambda message, say: say(reply)


def test_a_name_is_made_of_the_running_model_and_the_time(daemon: FakeDaemon, tmp_path: Path) -> None:
    output = run("start").stdout
    path = Path(daemon.wait_for(StartTrace).path)
    assert path.parent == tmp_path
    assert path.match("my_model_8bit-????????-??????.trace")
    assert output == f"{path}: recording; it ends with: sparkle-ctl trace stop\n"


def test_the_daemon_gets_an_absolute_path(daemon: FakeDaemon, tmp_path: Path) -> None:
    run("start", "sub/mine.trace")
    assert daemon.wait_for(StartTrace).path == str(tmp_path / "sub" / "mine.trace")


def test_what_the_daemon_refuses_is_said(daemon: FakeDaemon) -> None:
    answer(daemon, StartTrace, Error("storage", "x: cannot be created"))
    with pytest.raises(StorageError, match="cannot be created"):
        run("start", "x")


def test_stop_says_what_was_recorded(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = write(tmp_path / "x.trace", tokens([0, 1], [2, 3]))
    answer(daemon, StopTrace, TraceState("1", str(path), False, 2, 1234))
    assert run("stop").stdout == f"{path}: 2 events, 1.2 kB, 2 tokens\n"
    path.unlink()
    assert "No such file" in run("stop").stdout


def test_without_a_daemon_it_is_told_at_once() -> None:
    with pytest.raises(PeerError, match=r"prefetch daemon is not running .* honcho start"):
        run("stop")


def test_a_daemon_that_is_silent_is_given_up(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HELLO_DEADLINE_S", 0.1)
    with pytest.raises(PeerError, match=r"has not answered for 0\.1 s"):
        run("stop")


def test_a_daemon_that_ends_is_noticed(daemon: FakeDaemon) -> None:
    daemon.on[StopTrace] = lambda message, say: daemon.die()
    with pytest.raises(PeerError, match="ended without an answer"):
        run("stop")


def test_an_answer_of_another_kind_is_refused(daemon: FakeDaemon) -> None:
    answer(daemon, StopTrace, Pong())
    with pytest.raises(ProtocolError, match="StopTrace with Pong instead of TraceState"):
        run("stop")


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_counts(tmp_path: Path) -> None:
    prompt = event(0, [0, 1, 2, 3, 4], rows=5, time_us=2**32 - 100_000)  # the clock starts anew
    decoded = [
        event(1, [0, 1], time_us=0),
        event(2, [0, 5], time_us=2_000_000),
        event(1, [0, 1], stream=3, time_us=1_900_000),  # of another client, drained a bit later
    ]
    (found,) = run_json("show", write(tmp_path / "x.trace", [prompt, *decoded]))["traces"]
    assert {key: found[key] for key in ("model", "policy", "n_slots", "events", "streams", "is_truncated")} == {
        "model": "tiny",
        "policy": "lru",
        "n_slots": [4],
        "events": 4,
        "streams": 2,
        "is_truncated": False,
    }
    assert (found["tokens"], found["decoded_tokens"], found["prefilled_tokens"], found["prefill_steps"]) == (8, 3, 5, 1)
    assert found["duration_s"] == 2.0
    assert (found["uses"], found["hits"], found["experts"], found["experts_used"]) == (11, 7, 8, 6)
    assert found["layers"] == [{"layer": 0, "experts": 8, "used": 6}]
    assert found["coverage"] == [
        {"experts_frac": 0.1, "uses_frac": pytest.approx(4 / 11, abs=1e-4)},
        {"experts_frac": 0.25, "uses_frac": pytest.approx(7 / 11, abs=1e-4)},
        {"experts_frac": 0.5, "uses_frac": pytest.approx(9 / 11, abs=1e-4)},
    ]
    assert found["working_sets"] == [{"tokens": 1, "experts": 2.0, "bytes": 2000}]
    assert found["repeats_frac"] == 0.5  # of the second token's two, one; the other stream has nothing before


def test_show_counts_a_token_once_though_it_goes_through_layers_in_parts(tmp_path: Path) -> None:
    step = [
        event(0, [0, 1], rows=9),
        event(0, [2, 3], rows=9),
        event(0, [0], rows=9, layer=1),
        event(1, [0], layer=2),
        event(2, [0], layer=2),
    ]
    (found,) = run_json("show", write(tmp_path / "x.trace", step, TWO_CLASSES))["traces"]
    assert (found["tokens"], found["prefill_steps"]) == (9, 1)


def test_working_sets_are_of_tokens_in_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.trace", [event(i, [i % 4, 4 + i % 2], rows=1) for i in range(17)])
    (found,) = run_json("show", path)["traces"]
    assert found["working_sets"] == [
        {"tokens": 1, "experts": 2.0, "bytes": 2000},
        {"tokens": 8, "experts": 6.0, "bytes": 6000},
    ]


def test_the_screen_fits_and_says_what_is_cut_off(tmp_path: Path) -> None:
    layers = tuple(TraceLayer(i, 512, 10, 0) for i in range(94))
    header = dataclasses.replace(HEADER, model="m" * 60, layers=layers, record_bytes=(3_000_000,))
    writer = TraceWriter(tmp_path / ("x" * 100 + ".trace"), header)
    for step in range(600):
        writer.write(event(step, [(step * e) % 512 for e in range(1, 11)], layer=step % 94))
    writer.flush()
    output = run("show", writer.path).stdout
    assert "cut off" in output and "512 tokens" in output
    assert max(map(len, output.splitlines())) <= 80
    assert len(output.splitlines()) <= 24
    assert run("show", write(tmp_path / "y.trace", [])).exit_code == 0  # an empty one too


# --- replay ---------------------------------------------------------------------------------------------------------

# Three pairs in turn through a pool of two pairs: LRU finds nothing, Belady keeps one pair of two.
CYCLE = [[0, 1], [2, 3], [4, 5]] * 4


def scores(found: dict[str, Any], index: int = 0) -> dict[str, dict[str, Any]]:
    return {x["policy"]: x for x in found["sizes"][index]["scores"]}


def test_replay_scores_against_the_optimum(tmp_path: Path) -> None:
    found = run_json("replay", write(tmp_path / "x.trace", tokens(*CYCLE)), "--capacity", "50%")
    assert (found["tokens"], found["uses"], found["experts"], found["sizes"][0]["n_slots"]) == (12, 24, 8, 4)
    by_policy = scores(found)
    assert list(by_policy) == [*POLICIES, "belady", "belady+bypass"]
    n_best = by_policy["belady"]["misses"]
    assert by_policy["lru"]["misses"] == 24 and n_best < 18
    assert by_policy["lru"] == {
        "policy": "lru",
        "misses": 24,
        "bytes": 24000,
        "misses_per_token": 2.0,
        "miss_frac": 1.0,
        "bytes_per_token": 2000,
        "r_b": pytest.approx(24 / n_best, abs=1e-4),
        "gap_recovered_frac": 0.0,
    }
    assert (by_policy["belady"]["r_b"], by_policy["belady"]["gap_recovered_frac"]) == (1.0, 1.0)
    assert by_policy["belady+bypass"]["misses"] <= n_best
    for x in by_policy.values():
        assert x["misses"] >= by_policy["belady+bypass"]["misses"]


def test_files_are_scored_one_after_the_other_with_the_pool_kept(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, tokens([0, 1], [2, 3])) for name in ("a.trace", "b.trace"))
    found = run_json("replay", one, two, "--capacity", "50")
    assert (found["tokens"], found["uses"]) == (4, 8)
    assert {x["misses"] for x in scores(found).values()} == {4}
    assert scores(found)["lru"]["gap_recovered_frac"] is None  # there is no gap


def test_what_warms_the_pool_is_not_scored(tmp_path: Path) -> None:
    before = write(tmp_path / "a.trace", tokens([6, 7], [0, 1], [2, 3]))
    path = write(tmp_path / "b.trace", tokens([0, 1], [2, 3], [4, 5]))
    found = run_json("replay", path, "--warm", before, "--capacity", "50%", "--policy", "lru")
    assert (found["tokens"], found["uses"], found["warmed_with"]) == (3, 6, [str(before)])
    assert {name: x["misses"] for name, x in scores(found).items()} == {"lru": 2, "belady": 2, "belady+bypass": 2}
    found = run_json("replay", before, "--warm", before, "--capacity", "100%", "--policy", "lru")
    assert {x["misses"] for x in scores(found).values()} == {0}
    assert scores(found)["lru"]["r_b"] is None


def test_no_policy_beats_the_optimum_after_warming(tmp_path: Path) -> None:
    before = write(tmp_path / "a.trace", tokens(*[[(3 * i) % 8, (5 * i + 1) % 8] for i in range(1, 40)]))
    path = write(tmp_path / "b.trace", tokens(*[[(i * i) % 8, (i * i + 1) % 8] for i in range(40)]))
    for size in run_json("replay", path, "--warm", before, "--capacity", "25,37.5,50,75")["sizes"]:
        misses = {x["policy"]: x["misses"] for x in size["scores"]}
        assert min(misses[name] for name in POLICIES) >= misses["belady"] >= misses["belady+bypass"]


def test_classes_have_pools_of_their_own_and_count_by_bytes(tmp_path: Path) -> None:
    events = [event(i, [i % 4, 4 + i % 4]) for i in range(8)] + [event(i, [i % 2], layer=1) for i in range(8)]
    found = run_json("replay", write(tmp_path / "x.trace", events, TWO_CLASSES), "--capacity", "50%")
    assert found["experts"] == 12  # layer 2 was not used
    assert found["sizes"][0]["n_slots"] == 4 + 2
    assert scores(found)["lru"]["misses"] == 16 + 2
    assert scores(found)["lru"]["bytes"] == 16 * 1000 + 2 * 10


def test_a_pool_that_cannot_hold_a_step_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x.trace", tokens([0, 1, 2], [3, 4, 5]))
    found = run_json("replay", path, "--capacity", "12.5%,50%")
    assert [bool(size["scores"]) for size in found["sizes"]] == [False, True]
    assert "more experts at once" in run("replay", path, "--capacity", "12.5%,50%").stdout
    with pytest.raises(PoolError, match="uses 3 experts at once"):
        run("replay", path, "--capacity", "12.5%,25%")


def test_traces_of_different_stores_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.trace", tokens([0, 1]))
    other = dataclasses.replace(HEADER, model="other", fingerprint="f" * 64)
    two = write(tmp_path / "b.trace", tokens([0, 1]), other)
    for args in ([one, two], [one, "--warm", two]):
        with pytest.raises(ConfigError, match=r"b\.trace is of another store than .*a\.trace: other"):
            run("replay", *args)


def test_a_trace_without_events_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no events were recorded"):
        run("replay", write(tmp_path / "x.trace", []))


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--capacity", "12.5%,x", "expected percentages"),
        ("--capacity", "0%", "expected percentages"),
        ("--capacity", "101%", "expected percentages"),
        ("--policy", "lru,mine", "mine: expected some of lru"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, option: str, value: str, fault: str) -> None:
    path = write(tmp_path / "x.trace", tokens([0, 1]))
    result = CliRunner().invoke(ctl.command, ["trace", "replay", str(path), option, value])
    assert result.exit_code == 2 and fault in result.stderr


def test_the_table_fits_and_names_every_policy(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "x.trace", HEADER)
    for x in tokens(*CYCLE):
        writer.write(x)
    writer.flush()
    output = run("replay", writer.path, "--capacity", "50%,75%").stdout
    assert max(map(len, output.splitlines())) <= 80
    names = [line[:22].rstrip() for line in output.splitlines()]
    assert all(names.count(name) == 2 for name in [*POLICIES, "belady", "belady with bypass"])
    assert "cut off" in output


# --- plot -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path, plot = write(tmp_path / "x.trace", tokens(*CYCLE)), tmp_path / f"plot{suffix}"
    run("replay", path, "--plot", plot)
    data = plot.read_bytes()
    assert data.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        text = data.decode()
        assert all(f">{name}<" in text for name in POLICIES)
        assert "miss rate (% of uses)" in text and "experts in the pool (% of 8)" in text and "tiny" in text


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"plot\.gif: a plot's name ends in one of \.svg"):
        run("replay", "absent.trace", "--plot", "plot.gif")
    monkeypatch.setattr(trace_plot, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sparkle-moe\[plot\]'"):
        run("replay", "absent.trace", "--plot", "plot.svg")


def test_a_plot_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "x.trace", tokens(*CYCLE))
    with pytest.raises(StorageError, match=r"none/plot\.svg: cannot be written"):
        run("replay", path, "--plot", "none/plot.svg")
