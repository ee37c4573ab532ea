"""Every error that Sparkle raises on purpose.

SparkleError                 70  internal fault
├── ConfigError              78  a setting, path or machine limit is wrong; the text names key, value and remedy
├── ProtocolError            76  a peer sent bytes that are not the protocol
├── PeerError                69  a daemon is absent, restarted or silent past a named deadline
├── StorageError             74  an expert store or a read of it failed
├── PoolError                75  the pool cannot give what was asked
│   └── UnplacedExpert       75  an expert could not be given a correct slot; nothing was computed
└── SessionError             65  a request cannot be served as asked
    ├── BadRequest           65  a field of the request is wrong; the text names it
    ├── ContextTooLong       65  prompt and answer do not fit the context
    ├── Overloaded           75  queues are full; try again later
    └── Cancelled            75  the client, or a shutdown, ended the request

The numbers are exit codes (sysexits.h). `code` is what travels in an `Error` message; `from_code` turns it back.
"""

from __future__ import annotations

from typing import ClassVar


class SparkleError(Exception):
    """Base of all. `retryable`: the same request may succeed later without a change by the user."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 70
    retryable: ClassVar[bool] = False


class ConfigError(SparkleError):
    code = "config"
    exit_code = 78


class ProtocolError(SparkleError):
    code = "protocol"
    exit_code = 76


class PeerError(SparkleError):
    code = "peer"
    exit_code = 69
    retryable = True


class StorageError(SparkleError):
    code = "storage"
    exit_code = 74


class PoolError(SparkleError):
    code = "pool"
    exit_code = 75
    retryable = True


class UnplacedExpert(PoolError):
    code = "unplaced_expert"


class SessionError(SparkleError):
    code = "session"
    exit_code = 65


class BadRequest(SessionError):
    code = "bad_request"


class ContextTooLong(SessionError):
    code = "context_too_long"


class Overloaded(SessionError):
    code = "overloaded"
    exit_code = 75
    retryable = True


class Cancelled(SessionError):
    code = "cancelled"
    exit_code = 75


def _tree(cls: type[SparkleError]) -> list[type[SparkleError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _tree(sub)]


def from_code(code: str, message: str) -> SparkleError:
    """Return the error that an `Error` message stands for; an unknown code becomes SparkleError."""
    for cls in _tree(SparkleError):
        if cls.code == code:
            return cls(message)
    return SparkleError(f"{code}: {message}")
