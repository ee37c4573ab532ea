"""Recorded usage of experts: which of them tokens have used of late, kept from one run to the next.

What a pool gains from it is a warm start: the prefetch daemon feeds a profile every event, saves it now and then, and
at its next start seeds the policies and fills the pool from it, hottest first. Usage decays, because hot sets are those
of a workload.

Owns the numbers and their file: one JSON file per model, replaced as a whole. Knows no pool and no clock but the
tokens', and never decides what to do about a file that it cannot use: it says so, and `set_aside` moves it away.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkle.errors import ConfigError, StorageError
from sparkle.policy_contract import Key, LayerShape
from sparkle.trace import Event

if TYPE_CHECKING:
    from sparkle.store import Store

FORMAT = "sparkle-usage"
VERSION = 1
# Tokens after which a use counts half: half an hour of uninterrupted output at 10 tok/s, hours of chat. The shipped
# model's hot set needs 2,000 tokens to settle; where a token uses 10 of 512 experts instead of 8 of 64, a use is 6
# times as rare. Longer would only keep an old workload in the way of a new one. scripts/bench/LOG.md#usage-profile
HALF_LIFE = 16384.0
# A step of many rows names who was used by any of them; of a prompt's hundreds that is nearly everyone. It counts as no
# more tokens than this, a verify pass of drafts in full: counted in full, prompts blur the hot set, and push out what
# decoding has shown. scripts/bench/LOG.md#usage-profile
MANY_ROWS = 8
PPM = 1_000_000  # the file has shares in millionths: 6 digits are less than one use within a half-life
MAX_FILE_BYTES = 16 << 20  # a hundred times that of 48 layers of 512 experts
MAX_COUNT = 2**53  # what any reader of JSON takes exactly
STALE_S = 600.0  # a temporary file this old is of a process that was killed: a save takes milliseconds
REMEDY = "Move it away; usage will be recorded anew"
_LARGEST_UNIT = 2.0**64


class UsageProfile:
    """Decayed usage of every expert of one model. `saved_at`: time of the file that it comes from, 0 if there is none.

    `is_saved`: nothing came in since it was saved or made; an idle daemon then leaves the file to others.
    """

    def __init__(
        self, fingerprint: str, model: str, layers: Sequence[LayerShape], half_life: float = HALF_LIFE
    ) -> None:
        self.fingerprint = fingerprint
        self.model = "".join(c if c.isprintable() else "?" for c in model)
        self.layers = tuple(layers)
        self.half_life = half_life
        self.saved_at = 0.0
        self.is_saved = True
        self.origin = "this profile"  # what messages call it
        ends = list(itertools.accumulate(x.n_experts for x in layers))
        self._uses = np.zeros(ends[-1] if ends else 0)
        self._row = {x.index: self._uses[end - x.n_experts : end] for x, end in zip(layers, ends, strict=True)}
        self._top_k = {x.index: x.top_k for x in layers}
        # Nothing is ever decayed: a later use counts more, `_unit` times a token of the beginning. So an event costs
        # what its experts cost, however large the model.
        self._unit = 1.0
        self._mass = 0.0  # all tokens, weighed in the same way
        self._clock = 0  # tokens that the layer with the most tokens has seen, as they count; the others follow it
        self._counted = dict.fromkeys(self._row, 0)
        self._n_rows = dict.fromkeys(self._row, 0)
        self._n_before = 0

    @classmethod
    def for_store(cls, store: Store) -> UsageProfile:
        """Return an empty profile of a store's model, all layers included."""
        layers = [LayerShape(x.index, x.n_experts, x.top_k) for x in store.layers]
        return cls(store.fingerprint, store.name, layers)

    def observe(self, event: Event) -> None:
        """Count one step's use of one layer; layer and experts must be the model's.

        A step's tokens are counted once, by the layer that sees them first; a layer that is not part of every step
        (MTP) thus has shares of all tokens too. The uses of many rows are spread evenly over the experts named.
        """
        n_tokens = min(max(event.rows, 1), MANY_ROWS)
        layer = event.layer
        self._n_rows[layer] += event.rows
        self._counted[layer] = counted = self._counted[layer] + n_tokens
        if counted > self._clock:
            self._advance(counted - self._clock)
        n_uses = n_tokens * min(1.0, self._top_k[layer] / max(1, len(event.experts)))
        self._row[layer][event.experts] += self._unit * n_uses
        self.is_saved = False

    def _advance(self, n_tokens: int) -> None:
        self._clock += n_tokens
        self._unit *= 2.0 ** (n_tokens / self.half_life)
        self._mass += self._unit * n_tokens
        if self._unit > _LARGEST_UNIT:
            self._uses /= self._unit
            self._mass /= self._unit
            self._unit = 1.0

    @property
    def n_tokens(self) -> int:
        """Tokens seen, however long ago; those of prompts in full."""
        return self._n_before + max(self._n_rows.values(), default=0)

    @property
    def recent_tokens(self) -> float:
        """Tokens as they count now: half those of a half-life ago. However many were seen, hardly over `limit`."""
        return self._mass / self._unit

    @property
    def limit(self) -> float:
        """Recent tokens of a profile that has seen tokens forever."""
        return self.half_life / math.log(2)

    def share(self, key: Key) -> float:
        """Return the share of tokens that used an expert, 0 to 1."""
        layer, expert = key
        return min(1.0, float(self._row[layer][expert]) / self._mass) if self._mass else 0.0

    def usage(self) -> Mapping[Key, float]:
        """Return the share of every expert that was used: what Policy.seed takes. Milliseconds; for starts only."""
        shares = self._shares()
        keys = self._keys()
        return {keys[i]: float(shares[i]) for i in np.flatnonzero(shares)}

    def hottest(self, n: int | None = None) -> list[Key]:
        """Return the `n` experts used most, or all that were used, from the hottest; equals in the model's order."""
        order = np.argsort(-self._uses, kind="stable")[: int(np.count_nonzero(self._uses))]
        keys = self._keys()
        return [keys[i] for i in order[:n]]

    def coverage(self, frac: float) -> float:
        """Return the share of all uses that go to the hottest `frac` of all experts: how concentrated usage is."""
        total = float(self._uses.sum())
        hottest = np.sort(self._uses)[::-1][: round(frac * len(self._uses))]
        return min(1.0, float(hottest.sum()) / total) if total else 0.0

    def merge(self, other: UsageProfile, weight: float = 1.0) -> None:
        """Add what another profile of the same model has seen; its tokens count `weight` times.

        Each counts by its recent tokens, so that a long past outvotes nobody. Raises ConfigError if it is of another
        model.
        """
        if not 0 < weight < math.inf:
            raise ValueError(f"weight {weight} must be positive")
        self._refuse_foreign(other)
        if other.recent_tokens:
            mass = self._unit * weight * min(other.recent_tokens, self.limit)
            self._uses += mass * other._shares()
            self._mass += mass
        self._n_before += round(weight * other.n_tokens)
        self.saved_at = max(self.saved_at, other.saved_at)
        self.is_saved = False

    def restore(self, path: Path) -> bool:
        """Add what a file has recorded; False if there is none.

        Raises StorageError if it is damaged or of a newer Sparkle, ConfigError if it is of another model; nothing has
        changed then. See `set_aside`.
        """
        data = _read(path)
        if data is None:
            return False
        was_saved = self.is_saved
        self.merge(_decode(data, path))
        self.is_saved = was_saved
        return True

    def save(self, path: Path, saved_at: float | None = None) -> None:
        """Write the file whole, under a name of its own that then replaces `path`. Raises StorageError.

        saved_at: the time to write down, if not now. Nothing waits for the disk: the rename is atomic for other
        processes and against kill -9; what a power cut tears is refused when it is loaded, and costs a warm start.
        """
        saved_at = time.time() if saved_at is None else saved_at
        _replace(path, json.dumps(self._to_json(saved_at), separators=(",", ":"), allow_nan=False).encode())
        self.saved_at, self.is_saved = saved_at, True

    # --- within ----------------------------------------------------------------------------------------------------

    def _keys(self) -> list[Key]:
        return [(x.index, expert) for x in self.layers for expert in range(x.n_experts)]

    def _shares(self) -> npt.NDArray[np.float64]:
        return np.minimum(1.0, self._uses / self._mass) if self._mass else np.zeros(len(self._uses))

    def _refuse_foreign(self, other: UsageProfile) -> None:
        if other.fingerprint != self.fingerprint:
            raise ConfigError(
                f"{other.origin} is of another model: {other.model}, fingerprint {other.fingerprint}; expected is "
                f"{self.model}, fingerprint {self.fingerprint}"
            )
        if other.layers != self.layers:
            raise ConfigError(f"{other.origin} has other layers than {self.model}, fingerprint {self.fingerprint}")

    def _to_json(self, saved_at: float) -> dict[str, Any]:
        ppm = np.rint(PPM * self._shares()).astype(np.int64)
        ends = itertools.accumulate(x.n_experts for x in self.layers)
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "saved_at": round(saved_at, 3),
            "half_life": self.half_life,
            "n_tokens": min(self.n_tokens, MAX_COUNT),
            "recent_tokens": round(min(self.recent_tokens, self.limit), 3),  # merged ones have more
            "layers": [
                {"index": x.index, "top_k": x.top_k, "used_ppm": ppm[end - x.n_experts : end].tolist()}
                for x, end in zip(self.layers, ends, strict=True)
            ],
        }


def profile_path(state_dir: Path, fingerprint: str) -> Path:
    """Return where the usage of a model is recorded."""
    return state_dir / f"usage-{fingerprint[:16]}.json"


def load(path: Path) -> UsageProfile:
    """Return the profile in a file, of whatever model. Raises StorageError unless every number in it is sound."""
    data = _read(path)
    if data is None:
        raise StorageError(f"{path}: there is no such file: no usage has been recorded there")
    return _decode(data, path)


def set_aside(path: Path) -> Path | None:
    """Rename a file that cannot be used to `<name>.damaged`, or `.damaged-2` if that is taken; None if it is gone.

    Raises StorageError if the folder does not let it go.
    """
    names = (f"{path.name}.damaged" + (f"-{i}" if i > 1 else "") for i in itertools.count(1))
    target = next(p for p in map(path.with_name, names) if not os.path.lexists(p))
    try:
        path.rename(target)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StorageError(f"{path}: cannot be renamed to {target.name}: {e.strerror or e}. Move it away") from None
    return target


# --- the file -------------------------------------------------------------------------------------------------------


class _NewerFile(ValueError):
    pass


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StorageError(f"{path}: cannot be read: {e.strerror or e}. {REMEDY}") from None


def _decode(data: bytes, path: Path) -> UsageProfile:
    """Return the profile in the bytes of `path`. Raises StorageError."""
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        profile = _parse(json.loads(data))
    except _NewerFile as e:
        raise StorageError(f"{path} {e}. Update Sparkle, or move the file away") from None
    except (ValueError, RecursionError) as e:
        raise StorageError(f"{path} is damaged or no usage profile: {e}. {REMEDY}") from None
    profile.origin = str(path)
    return profile


def _parse(value: Any) -> UsageProfile:
    """Return the profile of a JSON form. Raises ValueError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    version = _integer(value, "version", 1, MAX_COUNT)
    if version > VERSION:
        raise _NewerFile(f"has version {version}; this Sparkle reads {VERSION}")
    fingerprint, model, entries = (value.get(name) for name in ("fingerprint", "model", "layers"))
    if not isinstance(fingerprint, str) or not re.fullmatch("[0-9a-f]{16,128}", fingerprint):
        raise ValueError("fingerprint is not one")
    if not isinstance(model, str) or len(model) > 255:
        raise ValueError("model is not a name")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("layers is not a list of layers")
    layers = [LayerShape(_integer(x, "index", 0, 65535), _width(x), _top_k(x)) for x in entries]
    if len({x.index for x in layers}) < len(layers):
        raise ValueError("a layer is there twice")
    profile = UsageProfile(fingerprint, model, layers, _number(value, "half_life", 1, MAX_COUNT))
    profile.saved_at = _number(value, "saved_at", 0, MAX_COUNT)
    profile._n_before = _integer(value, "n_tokens", 0, MAX_COUNT)
    profile._mass = _number(value, "recent_tokens", 0, profile.limit + 1)
    for entry in entries:
        profile._row[entry["index"]][:] = np.array(entry["used_ppm"]) * (profile._mass / PPM)
    return profile


def _number(of: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value: Any = of.get(name)
    if type(value) not in (int, float) or not low <= value <= high:  # NaN is within no bounds
        raise ValueError(f"{name} is not a number from {low:.0f} to {high:.0f}")
    return float(value)


def _integer(of: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = of.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is not an integer from {low} to {high}")
    return value


def _width(entry: Mapping[str, Any]) -> int:
    used = entry.get("used_ppm")
    if not isinstance(used, list) or not used or not all(type(n) is int and 0 <= n <= PPM for n in used):
        raise ValueError(f"used_ppm is not a list of integers from 0 to {PPM}")
    return len(used)


def _top_k(entry: Mapping[str, Any]) -> int:
    return _integer(entry, "top_k", 1, len(entry["used_ppm"]))


def _replace(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`; the folder is made if need be, for its owner alone."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(temporary, "xb", opener=_open_private) as file:
                file.write(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        raise StorageError(
            f"{path}: cannot be written: {e.strerror or e}. Make room, or choose another folder; "
            "SPARKLE_STATE_DIR is that of recorded usage"
        ) from None
    _sweep(path)


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _sweep(path: Path) -> None:
    """Remove what processes that were killed amid a save left behind."""
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            is_ours = other.name.startswith(f".{path.name}.") and other.name.endswith(".tmp")
            if is_ours and time.time() - other.stat().st_mtime > STALE_S:
                other.unlink()
