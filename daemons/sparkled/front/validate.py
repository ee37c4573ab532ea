"""What a Chat may ask for: limits of its fields, beyond the types that the wire has checked.

Owns the ranges. Every refusal is a BadRequest that names the field, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkle.errors import BadRequest
from sparkle.messages import Chat, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 1000  # an answer is held back by as much as may be the start of a stop string
MAX_ID_CHARS = 200  # a request id travels with every piece of the answer
MAX_BIAS = 100.0

_SAMPLING: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: v >= 0, "0 (greedy) or more"),
    "top_p": (lambda v: 0 < v <= 1, "more than 0, at most 1"),
    "top_k": (lambda v: v >= 0, "0 (off) or more"),
    "min_p": (lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda v: v > 0, "more than 0"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "from -2 to 2"),
    "seed": (lambda v: v >= 0, "0 or more"),
}


def check(chat: Chat) -> None:
    """Raise BadRequest for the first field out of its range; messages are `template.clean`'s subject."""
    check_id("request_id", chat.request_id)
    if chat.session_id is not None:
        check_id("session_id", chat.session_id)
    _require(bool(chat.messages), "messages", "at least one message", chat.messages)
    if chat.max_tokens is not None:
        _require(chat.max_tokens >= 1, "max_tokens", "1 or more", chat.max_tokens)
    _require(len(chat.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} texts", len(chat.stop))
    for i, stop in enumerate(chat.stop):
        _require(0 < len(stop) <= MAX_STOP_CHARS, f"stop[{i}]", f"1 to {MAX_STOP_CHARS} characters", len(stop))
    _check_sampling(chat.sampling)


def check_id(field: str, value: str) -> None:
    _require(0 < len(value) <= MAX_ID_CHARS, field, f"1 to {MAX_ID_CHARS} characters", len(value))


def _check_sampling(sampling: Sampling) -> None:
    for name, (is_allowed, allowed) in _SAMPLING.items():
        value = getattr(sampling, name)
        if value is not None:
            _require(is_allowed(value), f"sampling.{name}", allowed, value)
    for token_id, bias in (sampling.logit_bias or {}).items():
        is_id = token_id.isascii() and token_id.isdecimal() and len(token_id) < 10
        _require(is_id, "sampling.logit_bias", "token ids as keys", token_id)
        _require(abs(bias) <= MAX_BIAS, f"sampling.logit_bias.{token_id}", f"from -{MAX_BIAS:g} to {MAX_BIAS:g}", bias)


def _require(is_met: bool, field: str, expected: str, found: Any) -> None:
    if not is_met:
        raise BadRequest(f"{field}: expected {expected}, got {str(found)[:60]}")
