"""The frame that all daemons run in: states, one event loop, signals, Hello and Status.

    STARTING ──► READY ──► DRAINING ──► (exit 0)
        └──────────┴─────► FAILED ────► (exit with the error's code)

Owns a daemon's ROUTER socket, role lock and loop; the loop runs in the process's main thread and never blocks for
long, so a StatusRequest is answered in every state. A message `FetchExperts` is handled by the subclass's method
`on_fetch_experts(peer, message)`. Never leaves a socket or lock file behind on an orderly end, and ends itself when its
parent is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import socket as socketlib
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import psutil
import zmq

from sparkle import config, wire
from sparkle.errors import ConfigError, ProtocolError, SparkleError
from sparkle.messages import PROTOCOL, Error, Hello, Message, Ping, Pong, Status, StatusRequest, Welcome
from sparkle.rundir import RunDir, clear_stale_socket, lock_role

log = logging.getLogger(__name__)

TICK_S = 0.05  # the longest the loop sleeps: timers, parent watch and signals are seen within it
PARENT_CHECK_S = 0.5


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_TRANSITIONS = {
    State.STARTING: {State.READY, State.DRAINING, State.FAILED},
    State.READY: {State.STARTING, State.DRAINING, State.FAILED},
    State.DRAINING: {State.FAILED},
    State.FAILED: set(),
}


class Daemon:
    """Base of the daemons. Subclasses set `role`, handle messages in `on_<kind>`, and override the hooks below."""

    role = ""

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings
        self.rundir = RunDir(settings.run_dir)
        self.state = State.STARTING
        self.detail = "starting"
        self.epoch = time.time_ns()
        self.error: SparkleError | None = None
        self._started_at = time.monotonic()
        self.role_lock = lock_role(self.rundir, self.role)
        path = self.rundir.socket(self.role)
        clear_stale_socket(path)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = wire.router(self.context, path)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._due: list[float] = []
        self._once: list[tuple[float, Callable[[], None]]] = []
        self._is_stopping = False
        self._wake_r, self._wake_w = socketlib.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self.watch(self._router, self._on_router)
        self.watch(self._wake_r.fileno(), self._drain_wake)
        self._parent = os.getppid()
        self.every(PARENT_CHECK_S, self._check_parent)
        self._process = psutil.Process()

    # --- hooks ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to get ready; must not block. Call `become(State.READY, …)` when able to serve."""

    def metrics(self) -> dict[str, Any]:
        """Values declared in sparkle.telemetry, for Status."""
        return {}

    def model_fingerprint(self) -> str | None:
        return None

    def on_wake(self) -> None:
        """`wake` was called: look at what other threads have left."""

    def on_peer_lost(self, peer: bytes) -> None:
        """A message could not be delivered: the peer has gone, or has not read for thousands of messages."""

    def stop(self) -> None:
        """Release everything; called once, in the loop's thread, on every way out."""

    # --- for subclasses --------------------------------------------------------------------------------------------

    def become(self, state: State, detail: str) -> None:
        if self._is_stopping and state in (State.STARTING, State.READY):
            return  # a signal came first: what was under way then changes nothing any more
        if state is not self.state:
            if state not in _TRANSITIONS[self.state]:
                raise RuntimeError(f"{self.role}: no way from {self.state} to {state}")
            log.info("%s detail=%r", state.value, detail)
        self.state, self.detail = state, detail

    def fail(self, error: SparkleError) -> None:
        """End this daemon with an error: it is logged, and the process exits with the error's code."""
        self.error = error
        if self.state is not State.FAILED:
            self.become(State.FAILED, str(error))
        self._is_stopping = True
        self.wake()

    def watch(self, source: Any, handler: Callable[[], None]) -> None:
        """Call `handler` when `source` (ZMQ socket or file descriptor) is readable."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def unwatch(self, source: Any) -> None:
        self._poller.unregister(source)
        del self._handlers[source]

    def every(self, interval_s: float, handler: Callable[[], None]) -> None:
        self._timers.append((interval_s, handler))
        self._due.append(time.monotonic())

    def after(self, delay_s: float, handler: Callable[[], None]) -> None:
        """Call `handler` once; nothing is added if it is going to be called already."""
        if all(waiting != handler for _, waiting in self._once):
            self._once.append((time.monotonic() + delay_s, handler))

    def wake(self) -> None:
        """Make the loop run once more; from any thread."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full of wake-ups already
            self._wake_w.send(b"\0")

    def reply(self, peer: bytes, message: Message) -> bool:
        """Send to a peer. False, and `on_peer_lost`, if it has gone or does not read."""
        try:
            self._router.send_multipart([peer, *wire.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            log.debug("peer_lost peer=%s kind=%s", peer.hex(), type(message).__name__)
            self.on_peer_lost(peer)
            return False
        return True

    # --- loop ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or failure; return the exit code."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        try:
            self.start()
            while not self._is_stopping:
                self._turn()
        except SparkleError as e:
            self.fail(e)
        finally:
            self._close()
        if self.error is not None:
            log.error("failed code=%s %s", self.error.code, self.error)
            return self.error.exit_code
        return 0

    def _turn(self) -> None:
        now = time.monotonic()
        for i, (interval_s, handler) in enumerate(self._timers):
            if now >= self._due[i]:
                self._due[i] = now + interval_s
                handler()
        ripe = [handler for due, handler in self._once if now >= due]
        self._once = [(due, handler) for due, handler in self._once if now < due]
        for handler in ripe:
            handler()
        dues = [*self._due, *(due for due, _ in self._once)]
        wait_s = min([TICK_S, *(due - time.monotonic() for due in dues)])
        for source, _ in self._poller.poll(max(0, math.ceil(wait_s * 1000))):  # rounded down, the loop would spin
            if source in self._handlers:  # an earlier handler may have unwatched it
                self._handlers[source]()

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self.state in (State.STARTING, State.READY):
            self.become(State.DRAINING, signal.Signals(signum).name)
        self._is_stopping = True
        self.wake()

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:
            log.warning("parent_gone")
            self._is_stopping = True

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass
        self.on_wake()

    def _on_router(self) -> None:
        for _ in range(256):  # then let timers and other sources have their turn
            try:
                peer, *frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._dispatch(peer, frames)

    def _dispatch(self, peer: bytes, frames: list[bytes]) -> None:
        request_id = None
        try:
            message = wire.decode(frames)
            request_id = getattr(message, "request_id", None)
            handler = getattr(self, "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).lower(), None)
            if handler is None:
                raise ProtocolError(f"the {self.role} daemon does not take {type(message).__name__} messages")
            handler(peer, message)
        except SparkleError as e:
            if isinstance(e, ProtocolError):
                kind = frames[1][:40] if len(frames) > 1 else b""
                log.warning("bad_message peer=%s kind=%r", peer.hex(), kind)  # its text may quote a prompt: not logged
            self.reply(peer, wire.error_of(e, request_id or wire.request_id_of(frames)))

    def _close(self) -> None:
        try:
            self.stop()
        finally:
            self._router.close()
            self.context.term()  # every socket has LINGER_MS: this returns within it
            self.rundir.socket(self.role).unlink(missing_ok=True)
            self.role_lock.remove_and_close()
            self._wake_r.close()
            self._wake_w.close()

    # --- messages that every daemon takes --------------------------------------------------------------------------

    def on_hello(self, peer: bytes, message: Hello) -> None:
        mine = self.model_fingerprint()
        if message.protocol != PROTOCOL:
            raise ProtocolError(
                f"{message.role} speaks protocol {message.protocol}, this daemon {PROTOCOL}: update both"
            )
        if message.model is not None and mine is not None and message.model != mine:
            raise ConfigError(
                f"{message.role} expects model {message.model[:12]}, this daemon serves {mine[:12]}; "
                "give both the same SPARKLE_MODEL"
            )
        self.reply(peer, Welcome(self.role, os.getpid(), PROTOCOL, self.state.value, self.epoch, mine))

    def on_status_request(self, peer: bytes, _message: StatusRequest) -> None:
        self.reply(peer, self.status())

    def on_ping(self, peer: bytes, _message: Ping) -> None:
        self.reply(peer, Pong())

    def on_error(self, peer: bytes, message: Error) -> None:
        log.warning("peer_error peer=%s code=%s %s", peer.hex(), message.code, message.message)

    def status(self) -> Status:
        return Status(
            role=self.role,
            pid=os.getpid(),
            state=self.state.value,
            detail=self.detail,
            uptime_s=time.monotonic() - self._started_at,
            rss_bytes=self._process.memory_info().rss,
            metrics=self.metrics(),
        )


def set_up_logging(role: str, level: str) -> None:
    """Log to stderr, one line per event: `role  level  event key=value …`."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format=f"{role:<8} %(levelname)-7s %(message)s", force=True
    )


def main(daemon: type[Daemon]) -> int:
    """Load settings from the environment and file, run the daemon, return its exit code."""
    try:
        settings = config.load()
        set_up_logging(daemon.role, settings.log_level)
        return daemon(settings).run()
    except SparkleError as e:
        print(f"{daemon.role}: {e}", file=sys.stderr)
        return e.exit_code
