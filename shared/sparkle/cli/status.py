"""How the daemons are: asks all of them at once, each over its own socket.

Reads the run directory and sends StatusRequest. Never waits longer than config.STATUS_DEADLINE_S, and never starts,
stops or changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from sparkle import config, wire
from sparkle.errors import SparkleError, from_code
from sparkle.messages import Error, Message, Status, StatusRequest
from sparkle.rundir import RunDir, is_listening

ROLES = ("prefetch", "compute", "front")  # in the order in which they depend on each other
NOT_RUNNING = "not_running"  # nobody listens at the socket
UNRESPONSIVE = "unresponsive"  # somebody listens, but does not answer in time


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """`state` is one of sparkle.lifecycle.State, or NOT_RUNNING or UNRESPONSIVE; what is unknown then is None."""

    state: str
    detail: str
    pid: int | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def gather(rundir: RunDir) -> dict[str, DaemonStatus]:
    """Ask every daemon how it is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    waiting: dict[zmq.Socket[bytes], str] = {}
    found: dict[str, DaemonStatus] = {}
    poller = zmq.Poller()
    try:
        for role in ROLES:
            if not is_listening(rundir.socket(role)):
                found[role] = _not_running(rundir, role)
                continue
            socket = wire.dealer(context, rundir.socket(role))
            waiting[socket] = role
            socket.send_multipart(wire.encode(StatusRequest()))
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + config.STATUS_DEADLINE_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left_s * 1000)):
                found[waiting.pop(socket)] = _read(socket.recv_multipart())
                poller.unregister(socket)
                socket.close(linger=0)
        for role in waiting.values():
            silence = f"no answer within {config.STATUS_DEADLINE_S:g} s"
            found[role] = DaemonStatus(UNRESPONSIVE, silence, _pid_in_lock(rundir, role))
    finally:
        context.destroy(linger=0)
    return {role: found[role] for role in ROLES}


def as_json(statuses: Mapping[str, DaemonStatus]) -> dict[str, Any]:
    """Return the stable form for programs: {"daemons": {role: {state, pid, uptime_s, rss_bytes, detail, metrics}}}."""
    keys = ("state", "pid", "uptime_s", "rss_bytes", "detail", "metrics")
    return {"daemons": {role: {key: getattr(status, key) for key in keys} for role, status in statuses.items()}}


def all_ready(statuses: Mapping[str, DaemonStatus]) -> bool:
    return all(status.state == "ready" for status in statuses.values())


def _read(frames: list[bytes]) -> DaemonStatus:
    try:
        message: Message = wire.decode(frames)
        if isinstance(message, Error):
            raise from_code(message.code, message.message)
    except SparkleError as e:
        return DaemonStatus(UNRESPONSIVE, f"answered with an error: {e}")
    if not isinstance(message, Status):
        return DaemonStatus(UNRESPONSIVE, f"answered with {type(message).__name__} instead of its status")
    return DaemonStatus(
        message.state, message.detail, message.pid, message.uptime_s, message.rss_bytes, message.metrics
    )


def _not_running(rundir: RunDir, role: str) -> DaemonStatus:
    """A daemon that ends in order removes its socket; one that was killed leaves it behind."""
    if rundir.socket(role).exists():
        return DaemonStatus(NOT_RUNNING, "it died and left its socket behind")
    return DaemonStatus(NOT_RUNNING, "no socket in the run directory")


def _pid_in_lock(rundir: RunDir, role: str) -> int | None:
    try:
        text = (rundir.path / f"{role}.lock").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None
