"""The states of a daemon, without a process: what a signal changes while something else is under way."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle import config
from sparkle.errors import StorageError
from sparkle.lifecycle import Daemon, State

pytestmark = pytest.mark.unit


class Quiet(Daemon):
    role = "quiet"


@pytest.fixture
def daemon() -> Iterator[Quiet]:
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder:
        quiet = Quiet(config.load(environ={"SPARKLE_RUN_DIR": folder}))
        yield quiet
        quiet._close()
        assert sorted(p.name for p in Path(folder).iterdir()) == ["clients"]


def test_what_a_thread_reports_after_sigterm_changes_nothing(daemon: Quiet) -> None:
    """A signal comes at any moment, also just before the loop hears that the model is loaded."""
    daemon._on_signal(signal.SIGTERM, None)
    daemon.become(State.READY, "loaded")
    assert (daemon.state, daemon.detail) == (State.DRAINING, "SIGTERM")
    daemon.fail(StorageError("a failure is still one"))
    assert daemon.state is State.FAILED


def test_a_way_that_does_not_exist_is_a_fault(daemon: Quiet) -> None:
    daemon.become(State.READY, "serving")
    daemon.become(State.STARTING, "its peer has gone")
    daemon.become(State.DRAINING, "stopping")
    with pytest.raises(RuntimeError, match="no way from"):
        daemon.become(State.READY, "serving")
