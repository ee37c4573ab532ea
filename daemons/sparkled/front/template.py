"""Conversations to prompts: messages in, token ids out, and nothing typed ever becomes a control token.

Owns the forms of messages that are accepted, and how a rendered prompt is encoded. Reads the tokenizer.

A chat template writes control tokens as text (`<|im_end|>`), which the tokenizer then turns into ids; the same text
typed by a user would turn into the same ids and could end a turn or open a system message. So control tokens in the
input are marked before the template sees them (a random mark sets their characters apart, so that the tokenizer cannot
match them), and the rendered prompt is encoded in runs:

    <|im_start|>user\\n  Say <|im_end|> twice.  <|im_end|>\\n<|im_start|>assistant\\n
    └── control ──┘└─── stretch with marks ───┘└──────────── ordinary ───────────┘

A stretch between two control tokens of the template that holds a mark is encoded as text only, marks removed; all else
is encoded as usual. A prompt without marks is one ordinary run: its ids are those that `apply_chat_template` gives.

Answers in the history are the model's own words: there, only the tokens that delimit turns are marked. Its <think> or
<tool_call> stay the tokens that they were when it wrote them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2

from sparkle.errors import BadRequest, ConfigError
from sparkled.front.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
_ANSWER_FIELDS = ("content", "reasoning_content", "thinking")  # of an assistant message: what the model wrote
# What a template raises by itself, or when it meets data that it was not written for.
_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """The chat template of a tokenizer. Raises ConfigError if it cannot render a single user message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One character or white space is no markup, though some tokenizers hold such added tokens for brevity.
        control = [t for t in tokenizer.added_tokens if len(t) > 1 and not t.isspace()]
        self._control_ids = {tokenizer.added_tokens[t]: t for t in control}
        self._control = _any_of(control)
        try:
            probe = tokenizer.render([{"role": "user", "content": "x"}], None)
        except _FAULTS as e:
            raise ConfigError(f"{tokenizer.name}: its chat template fails on a plain user message: {e}") from e
        found = self._control.findall(probe) if isinstance(probe, str) else control
        self._turns = _any_of({*found, *tokenizer.boundary_tokens} & {*control})

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the prompt that asks for the next answer. messages: as returned by `clean`."""
        mark = f"\ue000{secrets.token_hex(8)}\ue001"  # private use; random, so that nobody can type it
        try:
            marked = [self._mark_message(m, mark) for m in messages]
            marked_tools = _mark(tools, self._control, mark) if tools else None
            rendered = self._tokenizer.render(marked, marked_tools)
        except _FAULTS as e:
            reason = str(e).replace(mark, "") or type(e).__name__
            raise BadRequest(f"messages: the model's chat template refuses this conversation: {reason}") from e
        if rendered == "":
            raise BadRequest("messages: the model's chat template makes an empty prompt of this conversation")
        if isinstance(rendered, str):
            return self._encode(rendered, mark)
        if marked != list(messages) or marked_tools != (tools or None):  # ids already: the marks are in them
            raise BadRequest("messages: they contain control tokens, which this model's tokenizer cannot write as text")
        return token_ids(rendered, self._tokenizer.encode)

    def _mark_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        is_answer = message["role"] == "assistant"
        return {
            key: _mark(value, self._turns if is_answer and key in _ANSWER_FIELDS else self._control, mark)
            for key, value in message.items()
        }

    def _encode(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        ordinary = ""
        for piece in self._control.split(rendered):  # stretches and, between them, control tokens of the template
            if mark in piece:
                ids += self._tokenizer.encode(ordinary) + self._encode_typed(piece.replace(mark, ""))
                ordinary = ""
            else:
                ordinary += piece
        return ids + self._tokenizer.encode(ordinary)

    def _encode_typed(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_plain(text)
        for token_id in self._control_ids.keys() & set(ids):  # a vocabulary may spell a control token by itself
            token = self._control_ids[token_id]
            raise BadRequest(f"messages: {token!r} cannot be written as text with this model's tokenizer; leave it out")
        return ids


def clean(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates take them. Raises BadRequest that names the field that is wrong.

    Content becomes a text (absent: empty; a list of text parts: joined), tool-call arguments become objects.
    """
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def token_ids(rendered: Any, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids in any form that `apply_chat_template` has returned over the years.

    They are: a text, a list, a list that holds one list, and a mapping with "input_ids" (BatchEncoding is no dict).
    """
    if isinstance(rendered, Mapping):
        rendered = rendered.get("input_ids")
    if isinstance(rendered, str):
        return encode(rendered)
    if isinstance(rendered, list | tuple) and len(rendered) == 1 and isinstance(rendered[0], list | tuple):
        rendered = rendered[0]
    if not isinstance(rendered, list | tuple) or not all(type(i) is int for i in rendered):
        raise ConfigError(f"the tokenizer's chat template returned {type(rendered).__name__}, not text or token ids")
    return list(rendered)


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        _refuse(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    cleaned = {**message, "content": _content(message.get("content"), f"{where}.content")}
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            _refuse(f"{where}.tool_calls", "a list", calls)
        cleaned["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return cleaned


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "text or a list of text parts", content)
    return "".join(_text_of(part, f"{where}[{i}]") for i, part in enumerate(content))


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        _refuse(f"{where}.type", "'text' (this model reads nothing else)", kind)
    text = part.get("text")
    if not isinstance(text, str):
        _refuse(f"{where}.text", "text", text)
    return str(text)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object; `function` is optional, as in templates."""
    if not isinstance(call, dict):
        _refuse(where, "a map", call)
    if "function" in call:
        return {**call, "function": _function(call["function"], f"{where}.function")}
    return _function(call, where)


def _function(function: Any, where: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        _refuse(where, "a map", function)
    if not isinstance(function.get("name"), str):
        _refuse(f"{where}.name", "text", function.get("name"))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        _refuse(f"{where}.arguments", "an object, or the JSON text of one", function["arguments"])
    return {**function, "arguments": arguments}


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or None: what is no strict JSON, or no text that UTF-8 can carry."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _mark(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Return `value` with every match of `pattern` in its texts, keys included, set apart by `mark`."""
    if isinstance(value, str):
        return pattern.sub(lambda m: f"{mark}{mark.join(m[0])}{mark}", value)
    if isinstance(value, dict):
        return {_mark(k, pattern, mark): _mark(v, pattern, mark) for k, v in value.items()}
    if isinstance(value, list):
        return [_mark(v, pattern, mark) for v in value]
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `texts`, the longest first; with a group, so that `split` keeps them."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _refuse(where: str, expected: str, found: Any) -> NoReturn:
    raise BadRequest(f"{where}: expected {expected}, got {str(found)[:60]!r}")
