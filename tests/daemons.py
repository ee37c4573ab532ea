"""Real daemons as processes, for tests: start one, talk to it, wait for its state, end it and see that nothing is left.

    with spawn("front", run_dir, {"SPARKLE_MODEL": str(store)}) as front:
        front.wait_for_state("ready")
        peer = front.peer()
        peer.send(Chat("1", messages))
        done = peer.wait_for(ChatDone)

Leaving the block sends SIGTERM and asserts an orderly end; after a failed test the process is killed. What a daemon
wrote to stderr is part of every failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from sparkle import wire
from sparkle.messages import Message, Status, StatusRequest
from sparkle.rundir import RunDir

M = TypeVar("M", bound=Message)
WAIT_S = 30.0  # two busy cores import a machine-learning library slowly
STOP_S = 4.0  # from SIGTERM to exit (CONTRIBUTING.md, section 6)
POLL_S = 0.02


class Peer:
    """One connection to a daemon. `received`: all that has come so far, in order."""

    def __init__(self, socket_path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = wire.dealer(self._context, socket_path)
        self.received: list[Message] = []

    def send(self, message: Message | list[bytes]) -> None:
        """Send a message, or raw frames."""
        self._socket.send_multipart(message if isinstance(message, list) else wire.encode(message))

    def receive(self, timeout_s: float = WAIT_S) -> Message:
        if not self._socket.poll(int(timeout_s * 1000)):
            raise AssertionError(f"no message within {timeout_s} s; last were {self.received[-5:]}")
        message = wire.decode(self._socket.recv_multipart())
        self.received.append(message)
        return message

    def wait_for(self, kind: type[M], timeout_s: float = WAIT_S) -> M:
        """Receive until a message of a kind comes, and return it."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class DaemonProcess:
    """A running daemon. Made by `spawn`."""

    def __init__(self, role: str, run_dir: Path, command: list[str], environ: Mapping[str, str]) -> None:
        self.role = role
        self.run_dir = RunDir(run_dir)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self.process = subprocess.Popen(command, env=dict(environ), cwd=run_dir, stderr=self._stderr)
        self._peers: list[Peer] = []
        self._status_peer = self.peer()

    def peer(self) -> Peer:
        """Return a new connection, closed with the daemon at the latest."""
        self._peers.append(Peer(self.run_dir.socket(self.role)))
        return self._peers[-1]

    def status(self, timeout_s: float = WAIT_S) -> Status:
        """Ask for the status; fails at once if the process has ended."""
        self._status_peer.send(StatusRequest())
        deadline = time.monotonic() + timeout_s
        while not self._status_peer._socket.poll(int(POLL_S * 1000)):
            if (code := self.process.poll()) is not None:
                raise AssertionError(f"the {self.role} daemon ended with exit code {code}\n{self.stderr()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the {self.role} daemon gave no status within {timeout_s} s\n{self.stderr()}")
        return self._status_peer.wait_for(Status)

    def wait_for_state(self, state: str, timeout_s: float = WAIT_S, **metrics: Any) -> Status:
        """Return the status once it shows `state`, and `metrics` where given."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status(timeout_s)
            if status.state == state and all(status.metrics[k] == v for k, v in metrics.items()):
                return status
            if time.monotonic() > deadline:
                raise AssertionError(f"not {state} {metrics} within {timeout_s} s, but {status}\n{self.stderr()}")
            self._status_peer._socket.poll(int(POLL_S * 1000))

    def wait_for_exit(self, timeout_s: float = WAIT_S) -> int:
        """Return the exit code of a daemon that ends by itself."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the {self.role} daemon still runs after {timeout_s} s\n{self.stderr()}") from None

    def terminate(self) -> None:
        """Send SIGTERM; assert an exit with code 0 in time, and that neither socket nor lock are left."""
        self.process.send_signal(signal.SIGTERM)
        code = self.wait_for_exit(STOP_S)
        assert code == 0, f"the {self.role} daemon ended with exit code {code}\n{self.stderr()}"
        left = sorted(p.name for p in self.run_dir.path.iterdir() if p.name.startswith(f"{self.role}."))
        assert not left, f"the {self.role} daemon left {left} behind\n{self.stderr()}"

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def stderr(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")  # the child's offset stays where it is

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self.process.poll() is None and exc is None:
                self.terminate()
            elif exc is not None:
                exc.add_note(f"stderr of the {self.role} daemon:\n{self.stderr()}")
        finally:
            if self.process.poll() is None:
                self.kill()
            for peer in self._peers:
                peer.close()
            self._stderr.close()


def spawn(
    role: str, run_dir: Path, env: Mapping[str, str] | None = None, deadlines: Mapping[str, float] | None = None
) -> DaemonProcess:
    """Start `python -m sparkled.<role>` with its own run directory and none of the caller's settings.

    env: further SPARKLE_* variables. deadlines: constants of sparkle.config to shorten, so that a test sees them pass.
    """
    RunDir(run_dir)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPARKLE_")}
    command = [sys.executable, "-m", f"sparkled.{role}"]
    if deadlines:
        shortened = "".join(f"config.{name} = {value!r}; " for name, value in deadlines.items())
        run = f"runpy.run_module('sparkled.{role}', run_name='__main__')"
        command = [sys.executable, "-c", f"import runpy; from sparkle import config; {shortened}{run}"]
    own = {"SPARKLE_RUN_DIR": str(run_dir), "SPARKLE_STATE_DIR": str(run_dir / "state")}
    return DaemonProcess(role, run_dir, command, {**inherited, **own, **(env or {})})
