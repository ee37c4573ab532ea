"""`sparkle-ctl status` and `config`, against scripted daemons: what each state of the machine looks like."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sparkle import config, telemetry
from sparkle.cli import ctl
from sparkle.cli.status import ROLES
from sparkle.messages import Error, Pong, StatusRequest
from tests.fakes import FakeDaemon

pytestmark = pytest.mark.ipc

Up = Callable[..., FakeDaemon]
METRICS: dict[str, dict[str, Any]] = {
    "prefetch": {
        **{name: 3 for role, name in telemetry.METRICS if role == "prefetch" and name != "is_recording"},
        "model_name": "qwen3-next-80b-a3b",
        "pool_bytes": 24_000_000_000,
        "pool_target_bytes": 24_000_000_000,
        "experts_bytes": 96_000_000_000,
        "n_slots": 100,
        "n_experts": 400,
        "slots_used": 80,
        "slots_pinned": 20,
        "slots_side": 10,
        "slots_loading": 10,
        "hits_resident": 900,
        "hits_in_flight": 30,
        "hits_late": 20,
        "misses": 50,
        "bytes_read": 30_000_000_000,
        "read_busy_s": 10.0,
        "unplaced_experts": 0,
        "records_quarantined": 0,
        "fetches_failed": 0,
        "io_engine": "io_uring, registered buffers",
        "direct_io": "on",
        "policy": "lru",
        "tokens": 1_000,
        "judged_tokens": 200,
        "judged_bytes_read": 6_000_000_000,
        "judged_bytes_belady": 4_000_000_000,
        "judged_decode_s": 10.0,
        "judged_stall_s": 4.0,
        "disk_bytes_per_s": 3_000_000_000,
        "prefetch_active": "off",
        "prefetch_reason": "off: router not worth it (+1.2% ± 0.8% time per token against off, 12 pairs)",
        "predicted_bytes": {
            "fill": {"issued": 9e9, "used": 8e9, "late": 0, "wasted": 0},
            "token": {"issued": 5e9, "used": 0, "late": 0, "wasted": 5e9},
            "router": {"issued": 2e9, "used": 1e9, "late": 3e8, "wasted": 7e8},
        },
        "memory_available_bytes": 20_000_000_000,
        "memory_pressure_frac": 0.0,
        "governor_reason": "full size: 20.0 GB of 64.0 GB available (machine)",
        "profile_tokens": 12_345,
    },
    "compute": {"device": "cpu float32", "decode_tps": 12.34, "ttft_p50_ms": 350.0, "unplaced_experts": 0},
    "front": {"n_clients": 2, "n_sessions": 3, "n_busy": 1, "chats": 17},
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKLE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "run"


@pytest.fixture
def up(run_dir: Path) -> Iterator[Up]:
    """Start fake daemons."""
    with ExitStack() as stack:

        def start(role: str, **kwargs: Any) -> FakeDaemon:
            kwargs.setdefault("metrics", METRICS[role])
            return stack.enter_context(FakeDaemon(run_dir, role, **kwargs))

        yield start


def ask(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(ctl.command, ["status", *args], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


def row(screen: str, label: str) -> str:
    return next(line for line in screen.splitlines() if line.startswith(label + " "))


def test_all_ready(up: Up) -> None:
    for role in ROLES:
        up(role)
    code, screen = ask()
    assert code == 0
    assert "all ready" in screen
    assert re.search(rf"prefetch +● ready +pid {os.getpid()} +up 1 h 2 min +1.2 GB *\n", screen)
    assert "24.0 GB         25.0 % of the experts · 3 regions" in row(screen, "size")
    assert "95.0 %" in row(screen, "hits") and "900 resident · 30 in flight · 20 late" in row(screen, "hits")
    assert "50" in row(screen, "misses") and "3 regretted within 8 tokens · 3 evictions" in row(screen, "misses")
    assert "3.0 GB/s" in row(screen, "reads") and "30.0 GB · p50 3.00 ms" in row(screen, "reads")
    assert "io_uring, registered buffers · direct I/O on" in screen
    assert "12.3 tok/s" in row(screen, "speed") and "first token 350 ms" in row(screen, "speed")
    assert "3 sessions · 1 busy" in row(screen, "clients")
    assert "20.0 GB left    full size: 20.0 GB of 64.0 GB available (machine)" in row(screen, "memory")
    assert "12,345" in row(screen, "profile")
    assert "trouble" not in screen
    assert "asked for" not in screen and "trace" not in screen


def pool_screen(up: Up, **metrics: Any) -> str:
    up("prefetch", metrics={**METRICS["prefetch"], **metrics})
    return ask()[1]


def test_decoding_is_judged_by_the_optimum_and_by_its_waiting(up: Up) -> None:
    """10 s for 200 tokens, of these 4 s waiting; the optimum's 4 GB take 1.3 s, so 6 s of computing is the bound."""
    screen = pool_screen(up)
    assert "1.50 x          the bytes that the optimum reads · η 60.0 %" in row(screen, "R_B")
    assert "20 ms           40.0 % of 50 ms per token · last 200 decoded" in row(screen, "stall")


def test_a_slow_disk_bounds_the_optimum(up: Up) -> None:
    assert "η 80.0 %" in row(pool_screen(up, disk_bytes_per_s=500_000_000), "R_B")


def test_no_ratio_without_a_judgement_or_an_optimum(up: Up) -> None:
    daemon = up("prefetch", metrics={**METRICS["prefetch"], "judged_bytes_belady": 0})
    assert re.search(r"R_B +– +the optimum reads nothing · η 60.0 %", row(ask()[1], "R_B"))
    untimed = {"judged_tokens": 0, "judged_decode_s": 0.0, "judged_stall_s": 0.0}
    daemon.metrics = {**METRICS["prefetch"], **untimed}
    screen = ask()[1]
    assert re.search(r"R_B +– +nothing judged yet", row(screen, "R_B"))
    assert "stall " not in screen


def test_what_prefetching_decided_and_what_came_of_it(up: Up) -> None:
    daemon = up("prefetch")
    screen = ask()[1]
    assert "off             router not worth it (+1.2% ± 0.8% time per token" in row(screen, "forecasts")
    assert "2.0 GB read     router: 1.0 GB used · 300 MB late · 700 MB wasted" in screen
    assert "fill" not in screen
    daemon.metrics = {**METRICS["prefetch"], "prefetch_active": "token", "prefetch_reason": "set to token"}
    screen = ask()[1]
    assert "token           set to token" in row(screen, "forecasts")
    assert "5.0 GB read     token: 0 B used · 0 B late · 5.0 GB wasted" in screen
    before = "off: token not worth it (+9.0% ± 0.8% time per token against off, 12 pairs)"
    why = f"trial of router against off, 3 of 4 to 12 pairs done; before: {before}"
    daemon.metrics |= {"prefetch_active": "off", "prefetch_reason": why}
    screen = ask()[1]
    assert "off             trial of router against off, 3 of 4 to 12 pairs done;" in row(screen, "forecasts")
    assert before in " ".join(screen.split())
    assert "2.0 GB read     router: 1.0 GB used" in screen, "who is on trial, not who was"


def test_a_pool_smaller_than_asked_for(up: Up) -> None:
    why = "short of memory: 1.0 GB of 64.0 GB available (control group /user.slice/user-1000.slice), 3.0 GB to be kept"
    screen = pool_screen(up, pool_target_bytes=30_000_000_000, governor_reason=why, memory_pressure_frac=0.12)
    assert re.search(r"\n +of 30.0 GB +asked for; memory says why", screen)
    assert "pressure 12 % · short of memory" in row(screen, "memory")
    assert why in " ".join(screen.split())


def test_a_recording_is_mentioned(up: Up) -> None:
    assert "recording       ends with: sparkle-ctl trace stop" in row(pool_screen(up, is_recording=1), "trace")


def test_an_idle_system_is_a_short_screen(up: Up) -> None:
    idle = {"model_name": "tiny", "pool_bytes": 4e6, "n_slots": 10, "n_experts": 40, "prefetch_active": "off"}
    up("prefetch", metrics={**idle, "prefetch_reason": "nothing tried yet", "predicted_bytes": {}, "tokens": 3})
    up("compute", metrics={"model_type": "qwen3_next", "device": "cpu"})
    up("front", metrics={"n_clients": 0})
    screen = ask()[1]
    labels = " ".join(" ".join(line[:10] for line in screen.splitlines()[6:]).split())
    assert labels == ("Pool size slots reads unplaced Compute requests tokens unplaced Front clients chats")
    assert "none yet" in row(screen, "reads")


def test_the_bar_is_to_scale(up: Up) -> None:
    up("prefetch")
    bar = row(ask()[1], "slots").split()[3]
    shares = {char: round(100 * bar.count(char) / len(bar)) for char in "█▓▒░·"}
    assert all(abs(share - want) <= 2 for share, want in zip(shares.values(), (20, 50, 10, 10, 10), strict=True))


def test_it_fits_80_columns_and_a_pipe_gets_no_colours(up: Up) -> None:
    for role in ROLES:
        up(role, detail="serving " + 30 * "long name ")
    screen = ask()[1]
    assert max(map(len, screen.splitlines())) <= 80
    assert "\x1b" not in screen


def test_nothing_runs(run_dir: Path) -> None:
    code, screen = ask()
    assert code == ctl.NOT_READY == 3
    assert screen.count("not running") == 3
    assert "honcho start" in screen


def test_starting(up: Up) -> None:
    why = "waiting for the compute daemon: it has been loading the model for 12 s and is at layer 30 of 48"
    up("prefetch")
    up("compute")
    up("front", state="starting", detail=why, metrics={})
    code, screen = ask()
    assert code == 3
    assert "2 of 3 ready" in screen
    assert why in " ".join(screen.split())


def test_an_unresponsive_daemon(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "STATUS_DEADLINE_S", 0.2)
    up("prefetch")
    del up("compute").on[StatusRequest]
    code, screen = ask()
    assert code == 3
    assert re.search(rf"compute +● unresponsive +pid {os.getpid()} +no answer within 0.2 s", screen)
    assert "● ready" in row(screen, "prefetch")


def test_a_daemon_that_died(up: Up, run_dir: Path) -> None:
    up("prefetch")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "compute.sock"))
    started = time.monotonic()
    screen = ask()[1]
    assert time.monotonic() - started < config.STATUS_DEADLINE_S
    assert re.search(r"compute +○ not running +it died", screen)


def test_unplaced_experts_are_loud(up: Up) -> None:
    up("prefetch", metrics={**METRICS["prefetch"], "unplaced_experts": 2, "fetches_failed": 1})
    screen = ask()[1]
    assert "their requests failed" in row(screen, "unplaced")
    assert "fetches failed: 1" in row(screen, "trouble")


@pytest.mark.parametrize("reply", [Error("internal", "I am lost"), Pong(), [b"junk"]])
def test_answers_that_are_no_status(up: Up, reply: Any) -> None:
    up("front").on[StatusRequest] = lambda message, say: say(reply)
    code, screen = ask()
    assert code == 3
    assert re.search(r"front +● unresponsive", screen)


def test_metrics_of_another_version(up: Up) -> None:
    """Names it does not know and values of other types must not break the screen."""
    daemon = up("prefetch", metrics={"n_slots": "many", "model_name": 5, "hits_resident": None, "from_the_future": [1]})
    up("compute", metrics={"decode_tps": 1e300, "output_tokens": -5, "stall_s": True, "n_active": float("nan")})
    up("front", metrics={"n_clients": float("inf")})
    screen = ask()[1]
    assert "Pool" in screen and "Compute" in screen and "Front" in screen
    predicted: list[Any] = [5, {"router": 5}, {"router": {"issued": "many"}}, {"router": {"used": [1]}}]
    for value in predicted:
        daemon.metrics = {"tokens": 99, "predicted_bytes": value, "judged_tokens": 1, "judged_decode_s": float("nan")}
        assert "Pool" in ask()[1]


def test_json(up: Up) -> None:
    up("prefetch")
    up("front", state="starting", detail="waiting")
    code, output = ask("--json")
    assert code == 3
    daemons = json.loads(output)["daemons"]
    assert list(daemons) == list(ROLES)
    assert all(list(d) == ["state", "pid", "uptime_s", "rss_bytes", "detail", "metrics"] for d in daemons.values())
    assert daemons["prefetch"] == {
        "state": "ready",
        "pid": os.getpid(),
        "uptime_s": 3725.0,
        "rss_bytes": 1_200_000_000,
        "detail": "serving a fake",
        "metrics": METRICS["prefetch"],
    }
    assert daemons["compute"]["state"] == "not_running"
    assert [daemons["compute"][key] for key in ("pid", "uptime_s", "rss_bytes", "metrics")] == [None, None, None, {}]


def test_the_run_dir_option_counts_wherever_it_stands(
    up: Up, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ROLES:
        up(role)
    monkeypatch.setenv("SPARKLE_RUN_DIR", str(tmp_path / "other"))
    runner = CliRunner()
    for args in (["--run-dir", str(run_dir), "status"], ["status", "--run-dir", str(run_dir)]):
        assert "all ready" in runner.invoke(ctl.command, args, standalone_mode=False).output
    assert "0 of 3 ready" in runner.invoke(ctl.command, ["status"], standalone_mode=False).output


# a shell's background jobs, CI's among them, ignore Ctrl-C, and so would their children
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
CTL = [sys.executable, "-c", f"{HEED}import sys; from sparkle.cli.ctl import main; sys.exit(main())"]


def test_the_command_takes_less_than_a_second(up: Up) -> None:
    for role in ROLES:
        up(role)
    times = []
    for _ in range(3):
        started = time.monotonic()
        assert subprocess.run([*CTL, "status"], capture_output=True, check=True).returncode == 0
        times.append(time.monotonic() - started)
    assert min(times) < 1


def test_errors_are_one_line_with_their_exit_code(run_dir: Path) -> None:
    done = subprocess.run([*CTL, "status", "--run-dir", "/" + "x" * 200], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("sparkle-ctl: run directory /xxx")
    assert done.stderr.count("\n") == 1


def test_watch_goes_on_until_ctrl_c(up: Up) -> None:
    for role in ROLES:
        up(role)
    with subprocess.Popen([*CTL, "status", "--json", "--watch", "0.2"], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert all(json.loads(line)["daemons"]["front"]["state"] == "ready" for line in [*lines, *rest.splitlines()])
    assert (process.returncode, errors) == (0, "")


def test_config_shows_every_setting_and_its_origin(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKLE_MAX_QUEUE", "7")
    result = CliRunner().invoke(ctl.command, ["config", "--run-dir", str(run_dir)], standalone_mode=False)
    shown = " ".join(result.output.split())
    assert f"run_dir {run_dir} flag --run-dir" in shown
    assert "max_queue 7 variable SPARKLE_MAX_QUEUE" in shown
    assert "max_active 4 default" in shown
    for name in config.setting_names():
        assert f"{name} " in shown
        assert " ".join(config.setting_doc(name).split()) in shown
