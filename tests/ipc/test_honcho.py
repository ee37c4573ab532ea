"""`honcho start`, as a user runs it: the Procfile, the keepers, Ctrl-C, and a compute daemon killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

import sparkle
from sparkle.messages import Status, StatusRequest
from sparkle.rundir import RunDir
from tests.daemons import Peer

pytestmark = [pytest.mark.ipc, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("prefetch", "compute", "front")
START_S = 60.0
STOP_S = 4.0  # honcho kills at 5
STORY = "Tell me a story about a cat."


class Honcho:
    """`honcho start` in a process group of its own, like a terminal's foreground job."""

    def __init__(self, run_dir: Path, env: dict[str, str]) -> None:
        self.run_dir = RunDir(run_dir)
        self.log = run_dir / "log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPARKLE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "honcho"), "start"],
                cwd=ROOT,
                env={**inherited, **env, "SPARKLE_RUN_DIR": str(run_dir), "PATH": path},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self, role: str) -> Status | None:
        """The status of a daemon; None if it does not answer just now."""
        peer = Peer(self.run_dir.socket(role))
        try:
            peer.send(StatusRequest())
            return peer.wait_for(Status, 0.5)
        except (AssertionError, zmq.ZMQError):
            return None
        finally:
            peer.close()

    def wait_until_ready(self) -> dict[str, Status]:
        found: dict[str, Status] = {}

        def is_ready() -> bool:
            assert self.process.poll() is None, f"honcho ended\n{self.log.read_text()}"
            for role in ROLES:
                if (status := self.status(role)) is not None:
                    found[role] = status
            return len(found) == len(ROLES) and all(s.state == "ready" for s in found.values())

        wait_until(is_ready, START_S, lambda: f"not ready: {found}\n{self.log.read_text()}")
        return found

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def wait_until(is_true: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, why()
        time.sleep(0.02)  # polling another program's state: there is no message to wait for


@contextmanager
def honcho(store: Path, **env: str) -> Iterator[Honcho]:
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder:
        running = Honcho(Path(folder), {"SPARKLE_MODEL": str(store), **env})
        try:
            yield running
        finally:
            if running.process.poll() is None:
                for process in running.family():
                    process.kill()
                running.process.kill()
            running.process.wait()


def survivors(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after `timeout_s`; a zombie has ended, whether or not someone has taken note."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def left_behind(run_dir: RunDir) -> list[str]:
    files = [str(p) for p in run_dir.path.rglob("*") if p.is_file() or p.is_socket()]
    return [f for f in files if not f.endswith("/log")] + [
        str(p) for p in Path("/dev/shm").glob(run_dir.shm_prefix.strip("/") + "*")
    ]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stops_within_four_seconds_and_leaves_nothing(signum: signal.Signals, shipped_store: Path) -> None:
    with honcho(shipped_store, SPARKLE_POOL="25%") as running:
        running.wait_until_ready()
        family = running.family()
        assert len(family) >= 2 * len(ROLES), "a keeper and a daemon each"
        assert any(f.startswith("/dev/shm") for f in left_behind(running.run_dir)), "the pool is in shared memory"
        if signum is signal.SIGINT:
            os.killpg(running.process.pid, signum)  # Ctrl-C reaches the whole foreground group
        else:
            running.process.send_signal(signum)
        running.process.wait(STOP_S)
        assert not survivors(family, 0.2), running.log.read_text()
        assert left_behind(running.run_dir) == []


def test_killed_compute_comes_back_and_answers_the_same(shipped_store: Path) -> None:
    with honcho(shipped_store, SPARKLE_POOL="50%", SPARKLE_BACKGROUND_FILL="off") as running:
        before = running.wait_until_ready()
        with sparkle.Client(running.run_dir.path) as client:
            whole = client.ask(STORY, temperature=0.0, max_tokens=60)
            warm = running.status("prefetch")
            assert warm is not None and warm.metrics["slots_used"] > 100

            stream = client.stream(STORY, temperature=0.0, max_tokens=60)
            pieces = [next(stream), next(stream)]
            os.kill(before["compute"].pid, signal.SIGKILL)
            pieces += list(stream)
            assert "".join(pieces) == whole, "a stream under way goes on as if nothing had happened"

            after = running.wait_until_ready()
            assert after["compute"].pid != before["compute"].pid
            assert after["prefetch"].pid == before["prefetch"].pid
            assert after["prefetch"].metrics["slots_used"] >= warm.metrics["slots_used"], "the pool is still warm"
            wait_until(
                lambda: (
                    _metrics(running, "prefetch")["n_clients"] == 1 and _metrics(running, "prefetch")["slots_held"] == 0
                ),
                5.0,
                lambda: f"the dead client's slots are still held: {running.status('prefetch')}",
            )
            assert client.ask(STORY, temperature=0.0, max_tokens=60) == whole


def _metrics(running: Honcho, role: str) -> dict[str, Any]:
    status = running.status(role)
    assert status is not None, f"{role} does not answer\n{running.log.read_text()}"
    return status.metrics


def test_daemons_do_not_outlive_a_killed_honcho(shipped_store: Path) -> None:
    with honcho(shipped_store) as running:
        running.wait_until_ready()
        family = running.family()
        ours = [p for p in family if "sparkle" in " ".join(p.cmdline()) and "honcho" not in " ".join(p.cmdline())]
        running.process.kill()
        assert len(ours) >= 2 * len(ROLES)
        assert not survivors(ours, STOP_S + 1.0), running.log.read_text()  # they look at their parents twice a second
        assert left_behind(running.run_dir) == []


def test_a_start_that_cannot_succeed_says_why_and_ends(tmp_path: Path) -> None:
    with honcho(tmp_path / "absent.store") as running:
        assert running.process.wait(START_S) != 0
        log = running.log.read_text()
        assert "absent.store" in log and "sparkle-ctl models prepare" in log
        assert left_behind(running.run_dir) == []
