"""The keeper: the thin parent of one daemon, itself a line of the Procfile.

honcho ends everything when one of its processes exits; the keeper lives on when its daemon crashes and starts it again
with back-off. Owns one child process. Sends it the signals that it gets itself. Never restarts a daemon that ended with
a reason (a SparkleError's exit code: a wrong setting or a damaged store does not heal), never outlives its own parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from sparkle import config
from sparkle.errors import ConfigError, PeerError, PoolError, ProtocolError, SparkleError, StorageError

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
STABLE_S = 30.0  # a daemon that lived this long starts again from the first back-off
POLL_S = 0.1
FINAL = {e.exit_code for e in (ConfigError, StorageError, ProtocolError, PoolError, PeerError)} | {0, 2}


def keep(role: str) -> int:
    """Run `python -m sparkled.<role>` until it ends for good; return its exit code."""
    keeper = _Keeper(role)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, keeper.on_signal)
    return keeper.run()


class _Keeper:
    def __init__(self, role: str) -> None:
        self._role = role
        self._parents = _parents_up_to_honcho()
        self._stop_at: float | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        n_failures = 0
        while True:
            started_at = time.monotonic()
            self._child = subprocess.Popen([sys.executable, "-m", f"sparkled.{self._role}"])
            code = self._wait(self._child)
            if self._stop_at is not None or code in FINAL:
                return max(code, 0)
            n_failures = 0 if time.monotonic() - started_at > STABLE_S else n_failures + 1
            delay_s = BACKOFF_S[min(n_failures, len(BACKOFF_S) - 1)]
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            print(f"{self._role:<8} WARNING ended ({how}); starts again in {delay_s} s", file=sys.stderr, flush=True)
            if not self._sleep(delay_s):
                return 0

    def on_signal(self, signum: int, _frame: object) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic() + config.SHUTDOWN_S
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                self._watch(child)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        if self._stop_at is None and self._is_orphan():
            self.on_signal(signal.SIGTERM, None)
        if self._stop_at is not None and time.monotonic() > self._stop_at:
            child.kill()  # it had its time; honcho would kill us next and leave it behind

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parents[0].pid or not all(map(_is_alive, self._parents))

    def _sleep(self, delay_s: float) -> bool:
        end = time.monotonic() + delay_s
        while time.monotonic() < end:
            if self._stop_at is not None or self._is_orphan():
                return False
            time.sleep(POLL_S)
        return True


def _parents_up_to_honcho() -> list[psutil.Process]:
    """The processes that this one must not outlive: its parent, and all up to honcho where honcho started it.

    honcho puts a process of its own and a shell between itself and us; when it is killed, these live on.
    """
    parents = psutil.Process().parents()
    last = max((i for i, p in enumerate(parents) if any("honcho" in part for part in _command(p)[:2])), default=0)
    return parents[: last + 1]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # another user's, or gone meanwhile
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _main(role: str) -> int:
    if len(sys.argv) > 1:
        print(f"sparkle-{role}: takes no arguments; settings are SPARKLE_* variables or sparkle.toml", file=sys.stderr)
        return 2
    try:
        return keep(role)
    except SparkleError as e:
        print(f"{role}: {e}", file=sys.stderr)
        return e.exit_code


def prefetch() -> int:
    return _main("prefetch")


def compute() -> int:
    return _main("compute")


def front() -> int:
    return _main("front")
