"""The run directory: one private place per running instance, for sockets, locks and client marks.

Owns its layout and permissions (0700). A daemon holds an exclusive lock on `<role>.lock` for as long as it lives, so a
second instance refuses to start and a stale socket of a dead one can be removed safely. Never deletes anything but
sockets and lock files that it has proved dead.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket as socketlib
import stat
import sys
import time
from pathlib import Path

from sparkle.errors import ConfigError

# sockaddr_un.sun_path, less the terminating zero (Linux 108, macOS and BSD 104)
IPC_PATH_LIMIT = 107 if sys.platform == "linux" else 103
LAST_READS_S = 60.0  # the block layer gives a request up after 30
LOCK_POLL_S = 0.02
LONGEST_SOCKET_NAME = "prefetch.sock"


class RunDir:
    """Paths of one instance. Creating the object creates and checks the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        longest = len(os.fsencode(self.path / LONGEST_SOCKET_NAME))
        if longest > IPC_PATH_LIMIT:
            raise ConfigError(
                f"run directory {self.path} is too long for a socket: {longest} bytes with {LONGEST_SOCKET_NAME}, "
                f"the system's limit is {IPC_PATH_LIMIT}; set SPARKLE_RUN_DIR (or --run-dir) to a shorter path"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.clients.mkdir(mode=0o700, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"cannot create run directory {self.path}: {e.strerror}; set SPARKLE_RUN_DIR") from e
        info = self.path.stat()
        if info.st_uid != os.getuid():
            raise ConfigError(f"run directory {self.path} is owned by uid {info.st_uid}; set SPARKLE_RUN_DIR")
        if stat.S_IMODE(info.st_mode) & 0o077:
            self.path.chmod(0o700)

    @property
    def clients(self) -> Path:
        """Folder of the lock files that prove a pool client alive."""
        return self.path / "clients"

    def socket(self, role: str) -> Path:
        return self.path / f"{role}.sock"

    @property
    def shm_prefix(self) -> str:
        """Start of the names of this instance's shared-memory objects: `/spk-` and 8 hex digits of the path.

        macOS allows 31 characters in all, whatever the run directory's name.
        """
        return "/spk-" + hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]


class FileLock:
    """An exclusive lock on a file, held until `close` or the process's end; the kernel drops it with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_acquire(self) -> bool:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return False
                raise
            if self._is_at_path():
                return True
            os.close(self._fd)  # its last owner removed the file between our open and our lock: others see a new one
            self._fd = self._open()

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except FileNotFoundError:
            return False

    def fileno(self) -> int:
        return self._fd

    def write_pid(self) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def remove_and_close(self) -> None:
        """Unlink while still locked, so that no other process can lock a file about to vanish unseen."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def lock_role(rundir: RunDir, role: str) -> FileLock:
    """Take the lock of a daemon role. Raises ConfigError if another instance holds it.

    The lock of a dead prefetch daemon stays taken while reads that it began may still land in the pool (keep_open in
    native/src/reader.h): that is waited for.
    """
    lock = FileLock(rundir.path / f"{role}.lock")
    deadline = time.monotonic() + LAST_READS_S
    while not (is_ours := lock.try_acquire()) and _is_dead(_read_pid(lock.path)) and time.monotonic() < deadline:
        time.sleep(LOCK_POLL_S)
    if not is_ours:
        pid = _read_pid(lock.path)
        lock.close()
        raise ConfigError(
            f"a {role} daemon (pid {pid}) already runs in {rundir.path}; "
            "stop it, or set SPARKLE_RUN_DIR for a second instance"
        )
    lock.write_pid()
    return lock


def _is_dead(pid: str) -> bool:
    if not pid.isdigit():
        return False  # its holder has not written it yet
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _read_pid(path: Path) -> str:
    try:
        return path.read_text().strip() or "unknown"
    except FileNotFoundError:  # it is just ending
        return "unknown"


def clear_stale_socket(path: Path) -> None:
    """Remove the socket file of a dead predecessor; call with the role's lock held. Anything else there is an error."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket; move it away or set SPARKLE_RUN_DIR")
    path.unlink()


def lock_is_free(path: Path) -> bool:
    """True if nobody holds the lock at `path` any more: the proof that its owner is dead."""
    if not path.exists():
        return True
    lock = FileLock(path)
    try:
        return lock.try_acquire()
    finally:
        lock.close()


def is_listening(path: Path) -> bool:
    """True if a process accepts connections on the socket at `path`; that of a dead daemon refuses them."""
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # alive, but too busy (or stopped) to accept
            return True
        except OSError:
            return False
        return True
