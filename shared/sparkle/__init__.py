"""Sparkle: run mixture-of-experts models that do not fit in memory. This package is what a user imports.

Owns the public names. Everything is imported when it is first used, so that `import sparkle` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkle.aclient import AsyncClient
    from sparkle.client import Client
    from sparkle.errors import (
        BadRequest,
        Cancelled,
        ConfigError,
        ContextTooLong,
        Overloaded,
        PeerError,
        PoolError,
        ProtocolError,
        SessionError,
        SparkleError,
        StorageError,
        UnplacedExpert,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Cancelled",
    "Client",
    "ConfigError",
    "ContextTooLong",
    "Overloaded",
    "PeerError",
    "PoolError",
    "ProtocolError",
    "SessionError",
    "SparkleError",
    "StorageError",
    "UnplacedExpert",
    "__version__",
]

_HOMES = {"AsyncClient": "sparkle.aclient", "Client": "sparkle.client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparkle' has no attribute '{name}'")
    return getattr(import_module(_HOMES.get(name, "sparkle.errors")), name)


def __dir__() -> list[str]:
    return list(__all__)
