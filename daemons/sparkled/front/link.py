"""The connection to the compute daemon.

Owns the DEALER socket and what is known of the daemon behind it: whether it is there, its state, and which
*incarnation* it is. An incarnation ends with the daemon's process or the connection: requests sent to an earlier one
are lost. Sends Hello, and what the service gives it. Never queues more than the first Hello for an absent daemon.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from sparkle import config, wire
from sparkle.errors import PeerError, ProtocolError, from_code
from sparkle.lifecycle import Daemon, State
from sparkle.messages import Error, Hello, Message, Welcome

log = logging.getLogger(__name__)

HELLO_S = 1.0  # a Hello and not a Ping keeps the link alive: its Welcome also tells state and epoch
HELLO_NOT_READY_S = 0.25  # so that nobody waits long after compute has become ready
ABSENT, UNRESPONSIVE = "absent", "unresponsive"


class ComputeLink:
    """`state` is ABSENT, UNRESPONSIVE, or the State that compute has told. `down_since`: when it ceased to be ready."""

    def __init__(self, daemon: Daemon, on_message: Callable[[Message], None], on_change: Callable[[], None]) -> None:
        """on_change: called when `state` or `incarnation` has changed."""
        self.state = ABSENT
        self.incarnation = 0
        self.down_since = time.monotonic()
        self._daemon = daemon
        self._model: str | None = None
        self._on_message = on_message
        self._on_change = on_change
        self._told_state: str | None = None  # None while nobody is at the other end
        self._epoch: int | None = None
        self._heard_at = 0.0
        self._hello_at = 0.0
        self._is_connected = False
        self._socket = wire.dealer(daemon.context, daemon.rundir.socket("compute"))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        daemon.watch(self._socket, self._on_readable)
        daemon.watch(self._monitor, self._on_connection)

    @property
    def is_ready(self) -> bool:
        return self.state == State.READY.value

    @property
    def is_answering(self) -> bool:
        """False if what was sent last may never be answered."""
        return self.state not in (ABSENT, UNRESPONSIVE)

    def describe(self) -> str:
        """Return what is wrong, for people."""
        if self.state == ABSENT:
            return "the compute daemon is not running"
        if self.state == UNRESPONSIVE:
            return f"the compute daemon has been silent for more than {config.LIVENESS_S:g} s"
        return f"the compute daemon is {self.state}"

    def start(self, model: str) -> None:
        """Greet compute; before, nothing is sent. model: the store's fingerprint."""
        self._model = model
        self.down_since = time.monotonic()
        self._hello()  # waits in the socket if compute is not there yet

    def send(self, message: Message) -> None:
        """Send to compute. Raises PeerError if it does not read, ProtocolError if the message is too large."""
        try:
            self._socket.send_multipart(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerError("the compute daemon does not take any more messages; try again later") from None

    def tick(self) -> None:
        """Keep the link alive and see whether it is; call a few times a second."""
        now = time.monotonic()
        if self._is_connected and now - self._hello_at > (HELLO_S if self.is_ready else HELLO_NOT_READY_S):
            self._hello()
        self._update()

    def close(self) -> None:
        self._daemon.unwatch(self._socket)
        self._daemon.unwatch(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _hello(self) -> None:
        if self._model is None:
            return
        self._hello_at = time.monotonic()
        try:
            self.send(Hello(self._daemon.role, os.getpid(), model=self._model))
        except PeerError as e:
            log.warning("compute_blocked %s", e)

    def _on_connection(self) -> None:
        """Follow connects and disconnects, so that a death is seen at once and not only as silence."""
        self._receive(None)  # what a daemon said before its end comes before its end
        while self._monitor.poll(0):
            self._is_connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._hello()
            else:
                self._told_state = self._epoch = None
        self._update()

    def _on_readable(self) -> None:
        self._receive(256)  # then let timers and other sources have their turn

    def _receive(self, limit: int | None) -> None:
        n_received = 0
        while limit is None or n_received < limit:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            n_received += 1
            self._heard_at = time.monotonic()
            try:
                message = wire.decode(frames)
            except ProtocolError as e:
                log.warning("bad_message peer=compute %s", e)
                continue
            self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._is_connected = True
            self._told_state = message.state
            if message.epoch != self._epoch:
                self._epoch = message.epoch
                self.incarnation += 1
                log.info("compute_connected pid=%d incarnation=%d", message.pid, self.incarnation)
                self._update(is_new=True)
            else:
                self._update()
        elif isinstance(message, Error) and message.request_id is None:
            if self._told_state is None:  # it refuses our Hello: another protocol or another model
                raise from_code(message.code, message.message)
            log.warning("compute_error code=%s %s", message.code, message.message)
        else:
            self._on_message(message)

    def _update(self, is_new: bool = False) -> None:
        """Derive `state` anew, and tell if it or the incarnation has changed."""
        state = self._told_state or ABSENT
        if state != ABSENT and time.monotonic() - self._heard_at > config.LIVENESS_S:
            state = UNRESPONSIVE
        if state == self.state and not is_new:
            return
        if self.is_ready:
            self.down_since = time.monotonic()
        if state != self.state:
            log.info("compute_state state=%s", state)
        self.state = state
        self._on_change()
