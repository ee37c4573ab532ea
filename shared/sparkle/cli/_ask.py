"""One request to one daemon, one answer: what commands need that change or ask something in a running Sparkle.

Owns a socket for as long as that takes. Never waits longer than it is told, and never starts a daemon.
"""

from __future__ import annotations

import time
from typing import TypeVar, overload

import zmq

from sparkle import wire
from sparkle._requests import REMEDY, frames_of
from sparkle.errors import PeerError, ProtocolError, from_code
from sparkle.messages import Error, Message
from sparkle.rundir import RunDir, is_listening

Answer = TypeVar("Answer", bound=Message)
LOOK_S = 0.5  # while it waits: is the daemon still there?


@overload
def ask(rundir: RunDir, role: str, message: Message, deadline_s: float) -> Message: ...
@overload
def ask(rundir: RunDir, role: str, message: Message, deadline_s: float, answer: type[Answer]) -> Answer: ...
def ask(rundir: RunDir, role: str, message: Message, deadline_s: float, answer: type[Message] = Message) -> Message:
    """Return the daemon's answer, which must be of type `answer`.

    Raises PeerError if the daemon is not there or does not answer in time, and the error that it answers with.
    """
    path = rundir.socket(role)
    if not is_listening(path):
        raise PeerError(f"the {role} daemon is not running (nobody listens at {path}); {REMEDY}")
    context = wire.Context()
    try:
        socket = wire.dealer(context, path)
        socket.send_multipart(frames_of(message))
        found = wire.decode(_receive(socket, rundir, role, deadline_s))
    finally:
        context.destroy(linger=0)
    if isinstance(found, Error):
        raise from_code(found.code, found.message)
    if not isinstance(found, answer):
        raise ProtocolError(
            f"the {role} daemon answered {type(message).__name__} with {type(found).__name__} instead of "
            f"{answer.__name__}; it may be of another version: restart it"
        )
    return found


def _receive(socket: wire.Socket, rundir: RunDir, role: str, deadline_s: float) -> list[bytes]:
    path, deadline = rundir.socket(role), time.monotonic() + deadline_s
    while (left_s := deadline - time.monotonic()) > 0:
        if socket.poll(int(1000 * min(left_s, LOOK_S)) + 1, zmq.POLLIN):
            return socket.recv_multipart()
        if not is_listening(path):
            raise PeerError(f"the {role} daemon has ended without an answer; {REMEDY}, and try again")
    raise PeerError(f"the {role} daemon at {path} has not answered for {deadline_s:g} s; see: sparkle-ctl status")
