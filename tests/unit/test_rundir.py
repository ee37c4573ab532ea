"""The run directory: private, one instance per role, and nothing removed but what is proved dead."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkle.errors import ConfigError
from sparkle.rundir import (
    IPC_PATH_LIMIT,
    LONGEST_SOCKET_NAME,
    FileLock,
    RunDir,
    clear_stale_socket,
    is_listening,
    lock_is_free,
    lock_role,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def listener(rundir: RunDir) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(rundir.socket("front")))
        bound.listen()
        yield bound


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    path.mkdir(parents=True, mode=0o755)
    rundir = RunDir(path)
    assert (mode_of(rundir.path), mode_of(rundir.clients)) == (0o700, 0o700)


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    fits = tmp_path / ("x" * (IPC_PATH_LIMIT - len(str(tmp_path)) - len(LONGEST_SOCKET_NAME) - 2))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(RunDir(fits).socket("prefetch")))
    with pytest.raises(ConfigError) as caught:
        RunDir(fits.with_name(fits.name + "x"))
    message = str(caught.value)
    assert str(fits) in message
    assert f"{IPC_PATH_LIMIT + 1} bytes" in message
    assert "SPARKLE_RUN_DIR" in message


def test_the_limit_counts_bytes_not_characters(tmp_path: Path) -> None:
    n_chars = (IPC_PATH_LIMIT - len(str(tmp_path)) - len(LONGEST_SOCKET_NAME) - 2) // 2
    with pytest.raises(ConfigError, match="too long"):
        RunDir(tmp_path / ("巴" * n_chars))


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="cannot create run directory"):
        RunDir(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_second_instance_is_refused(rundir: RunDir) -> None:
    first = lock_role(rundir, "front")
    with pytest.raises(ConfigError, match=rf"pid {os.getpid()}\) already runs"):
        lock_role(rundir, "front")
    lock_role(rundir, "compute").close()  # another role is another matter
    first.remove_and_close()
    lock_role(rundir, "front").remove_and_close()
    assert not (rundir.path / "front.lock").exists()


def test_a_lock_that_a_dead_daemon_left_is_taken(rundir: RunDir) -> None:
    path = rundir.path / "front.lock"
    path.write_text("999999\n")
    lock = lock_role(rundir, "front")
    assert path.read_text() == f"{os.getpid()}\n"
    lock.close()


def test_lock_is_free(rundir: RunDir) -> None:
    path = rundir.path / "client.lock"
    assert lock_is_free(path)
    lock = FileLock(path)
    assert lock_is_free(path)
    assert lock.try_acquire()
    assert not lock_is_free(path)
    lock.close()
    assert lock_is_free(path)


def test_a_stale_socket_is_removed(rundir: RunDir) -> None:
    path = rundir.socket("front")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    clear_stale_socket(path)
    assert not path.exists()
    clear_stale_socket(path)  # nothing there is fine


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_anything_else_at_the_sockets_place_is_an_error(rundir: RunDir, tmp_path: Path, kind: str) -> None:
    path = rundir.socket("front")
    target = tmp_path / "precious"
    target.write_text("mine")
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(target)
    with pytest.raises(ConfigError, match="is not a socket"):
        clear_stale_socket(path)
    assert path.exists()
    assert target.read_text() == "mine"


def test_is_listening(rundir: RunDir, listener: socket.socket) -> None:
    path = rundir.socket("front")
    assert is_listening(path)
    listener.close()
    assert path.exists()
    assert not is_listening(path)  # a dead daemon's socket
    path.unlink()
    assert not is_listening(path)


def test_a_daemon_that_does_not_accept_is_listening_still(rundir: RunDir, listener: socket.socket) -> None:
    listener.listen(0)
    assert all(is_listening(rundir.socket("front")) for _ in range(5))  # its backlog is full by now


def test_shm_names_fit_macos(tmp_path: Path) -> None:
    """31 characters with the slash; what follows the prefix has 18 of them."""
    prefixes = {RunDir(tmp_path / name).shm_prefix for name in ("a", "b", "a-longer-name-than-that")}
    assert len(prefixes) == 3
    assert all(len(prefix) == 13 and prefix.startswith("/spk-") for prefix in prefixes)
    assert RunDir(tmp_path / "a").shm_prefix in prefixes  # the same path, the same names


def test_a_lock_on_a_file_that_was_removed_is_taken_on_the_new_one(rundir: RunDir) -> None:
    """Opened before its owner removed it: a lock on the old file would leave the new one free for a third."""
    first, late = FileLock(rundir.path / "x.lock"), FileLock(rundir.path / "x.lock")
    assert first.try_acquire()
    first.remove_and_close()
    assert late.try_acquire()
    third = FileLock(rundir.path / "x.lock")
    assert not third.try_acquire()
    late.remove_and_close()
    third.close()
