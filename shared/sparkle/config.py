"""Settings and deadlines: one frozen object, each value with its origin.

Precedence: command-line flag, then `SPARKLE_*` variable, then the file (`sparkle.toml` in the working directory, or
$SPARKLE_CONFIG), then the default. A malformed value is a ConfigError that names key, value and what is allowed;
nothing falls back in silence. `sparkle-ctl config` prints every value and where it came from.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkle.errors import ConfigError

# Deadlines. Every wait in Sparkle ends at one of these.
START_DEADLINE_S = 180.0  # a daemon waits this long for the daemon it depends on; loading a large model takes a minute
STATUS_DEADLINE_S = 0.6  # sparkle-ctl status must stay under a second
HELLO_DEADLINE_S = 5.0  # a client waits this long for a Welcome from a running daemon
FETCH_DEADLINE_S = 30.0  # a set of experts must be in its slots by then, or the request fails
RESEND_S = 1.0  # an unanswered FetchExperts is repeated: the daemon may have been restarted
CANCEL_DEADLINE_S = 0.5  # a client that gives a fetch up waits this long to learn what it was granted meanwhile
RING_DEADLINE_S = 10.0  # a full event ring must have been drained by then
REQUEST_SILENCE_S = 60.0  # a client gives a request up after this long without any message about it
SHUTDOWN_S = 3.5  # SIGTERM to exit; honcho kills at 5
LIVENESS_S = 3.0  # a silent peer is shown as unresponsive after this
PROGRESS_S = 0.5  # interval of Progress messages
RESIZE_DEADLINE_S = 20.0  # a resize of the pool is answered by then, done or not
PROFILE_S = 20.0  # interval at which recorded usage is saved

PREFETCH = ("auto", "off", "router", "token", "previous")  # sparkled/prefetch/forecasts.py
# native/src/kernels.h; scalar = bit for bit what MLX computes on x86; mlx = MLX's own code
KERNELS = ("auto", "avx512", "avx2", "neon", "portable", "scalar", "mlx")


def parse_size(text: str) -> int:
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not m:
        raise ValueError("a size such as 24GB, 512MiB or 1000000")
    step = 1024 if m[3] else 1000
    size = float(m[1]) * step ** ("kmgt".index(m[2].lower()) + 1 if m[2] else 0)
    if size >= 2**63:
        raise ValueError("a size below 8 EiB")
    return int(size)


def pool_text(text: str) -> str:
    """Check a pool's size: bytes, or a share of all experts such as 25%. Raises ValueError."""
    if text and not re.fullmatch(r"\d+(\.\d+)?%", text):
        parse_size(text)
    elif text and not 0 < float(text[:-1]) <= 100:
        raise ValueError("a size or a share of the experts between 0% and 100%")
    return text


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text.strip()) or not low <= int(text) <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return int(text)

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError("a number from 0 to 1")
    return value


def _path(text: str) -> Path:
    if not text:
        raise ValueError("a path")
    return Path(text).expanduser()


def _default_run_dir() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return f"{base}/sparkle" if base and Path(base).is_dir() else f"/tmp/sparkle-{os.getuid()}"


def _default_state_dir() -> str:
    base = os.environ.get("XDG_STATE_HOME")
    return f"{base}/sparkle" if base else "~/.local/state/sparkle"


def _setting(default: str | Callable[[], str], parse: Callable[[str], Any], doc: str) -> Any:
    return field(metadata={"default": default, "parse": parse, "doc": doc})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Build with `load`; each field's doc is shown by `sparkle-ctl config` and in `--help`."""

    run_dir: Path = _setting(_default_run_dir, _path, "folder of sockets and locks, one per running instance")
    model: Path = _setting("models/sparkle-46m.store", _path, "expert store to serve (see sparkle-ctl models)")
    memory: int = _setting("0", parse_size, "the one dial: memory for weights, pool and KV; 0 = from RAM or limit")
    pool: str = _setting("", pool_text, "override of the expert pool: a size, or a share of all experts such as 25%")
    policy: str = _setting("auto", str.strip, "which expert leaves the pool first, see sparkle.policy; auto = the best")
    pin_fraction: float = _setting("0", _fraction, "share of the pool pinned to the experts used most so far")
    prefetch: str = _setting("auto", _choice(*PREFETCH), "who predicts experts: auto = whoever saves time, or nobody")
    profile: str = _setting("on", _choice("on", "off"), "record usage, and fill the pool from it at start")
    governor: str = _setting("on", _choice("on", "off"), "shrink the pool when memory gets short, grow it back later")
    state_dir: Path = _setting(_default_state_dir, _path, "folder of what outlives a run: usage profiles")
    device: str = _setting("auto", _choice("auto", "cpu", "gpu"), "MLX device; auto takes the GPU if mlx has one")
    kernels: str = _setting("auto", _choice(*KERNELS), "CPU kernels; auto = the fastest that this processor can run")
    threads: int = _setting("0", _integer(0, 256), "threads of the CPU kernels; 0 = all cores but one")
    io: str = _setting("auto", _choice("auto", "uring", "threads"), "how records are read; auto = io_uring if allowed")
    direct_io: str = _setting("auto", _choice("auto", "on", "off"), "bypass the page cache; auto = if the disk can")
    read_depth: int = _setting("0", _integer(0, 64), "reads under way at once; 0 = measured at start")
    checksum_frac: float = _setting("0.01", _fraction, "share of reads checked after a record's first")
    background_fill: str = _setting("on", _choice("on", "off"), "fill empty slots while the disk is idle")
    max_active: int = _setting("4", _integer(1, 64), "requests that generate at the same time, taking turns")
    max_queue: int = _setting("32", _integer(0, 4096), "requests that may wait; one more is refused as overloaded")
    max_sessions: int = _setting("256", _integer(1, 100000), "sessions kept; least recently used goes first")
    log_level: str = _setting("info", _choice("debug", "info", "warning", "error"), "log level on stderr")
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)

    def resolved_model(self) -> Path:
        return self.model.absolute()


def setting_names() -> list[str]:
    return [f.name for f in dataclasses.fields(Settings) if f.name != "origins"]


def setting_doc(name: str) -> str:
    return next(str(f.metadata["doc"]) for f in dataclasses.fields(Settings) if f.name == name)


def load(flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in force. `flags`: texts given on the command line, None where absent."""
    env = os.environ if environ is None else environ
    names = setting_names()
    from_file, file_name = _read_file(env, names)
    for key in env:
        if key.startswith("SPARKLE_") and key != "SPARKLE_CONFIG" and key[8:].lower() not in names:
            raise ConfigError(f"unknown variable {key}; known: {', '.join('SPARKLE_' + n.upper() for n in names)}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for f in dataclasses.fields(Settings):
        if f.name == "origins":
            continue
        default = f.metadata["default"]
        candidates = [
            ("flag --" + f.name.replace("_", "-"), (flags or {}).get(f.name)),
            ("variable SPARKLE_" + f.name.upper(), env.get("SPARKLE_" + f.name.upper())),
            (f"file {file_name}", from_file.get(f.name)),
            ("default", default() if callable(default) else default),
        ]
        origin, text = next((o, t) for o, t in candidates if t is not None)
        try:
            values[f.name] = f.metadata["parse"](text)
        except ValueError as e:
            raise ConfigError(f"{f.name} = {text!r} ({origin}): expected {e}") from None
        origins[f.name] = origin
    return Settings(**values, origins=origins)


def _read_file(env: Mapping[str, str], names: list[str]) -> tuple[dict[str, str], str]:
    named = env.get("SPARKLE_CONFIG")
    path = Path(named) if named else Path("sparkle.toml")
    if not path.exists():
        if named:
            raise ConfigError(f"SPARKLE_CONFIG names {path}, which does not exist")
        return {}, str(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from None
    for key, value in table.items():
        if key not in names:
            raise ConfigError(f"{path}: unknown key '{key}'; known: {', '.join(names)}")
        if isinstance(value, dict | list | bool):
            raise ConfigError(f"{path}: key '{key}' must be text or a number")
    return {k: str(v) for k, v in table.items()}, str(path)
