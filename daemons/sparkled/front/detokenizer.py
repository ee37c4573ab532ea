"""Token ids back to text, one at a time, without ever breaking a character.

Owns the bytes of every token, and per answer the at most three bytes of a character that is not complete yet.

The library's `tokenizers.decoders.DecodeStream` (0.23) was tried and is not used: it has no flush, so an answer's tail
is lost; it holds any run of invalid bytes without bound; and it holds a U+FFFD that the model really wrote. Working on
bytes has none of these faults: Python's incremental UTF-8 decoder replaces what is invalid by the same rule as the
library's `decode` (one U+FFFD for each longest prefix of a character), so the joined pieces equal `decode` of all ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkle.errors import ConfigError

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """The bytes that each token stands for, as the tokenizer's decoder has them.

    Two families cover the models that mlx-lm serves: byte-level BPE, and SentencePiece with byte fallback. In the
    latter the library gives up a whole run of byte tokens if one is invalid; here the valid characters of it stay.
    """

    def __init__(self, backend: Any, silent_ids: Iterable[int]) -> None:
        """silent_ids: end tokens, which have no text. Raises ConfigError for a decoder of another family."""
        steps = list(_steps(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and not (kinds and kinds <= _SENTENCEPIECE):
            raise ConfigError(f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported")
        self._replacements = [pair for step in steps if (pair := _replacement(step))]
        self.strips_first_space = any(_strips_first_space(step) for step in steps)
        self._id_to_token = backend.id_to_token
        self._known: dict[int, bytes] = dict.fromkeys(silent_ids, b"")

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that pads the model's vocabulary."""
        if token_id not in self._known:
            token = self._id_to_token(token_id) if 0 <= token_id < 2**32 else None
            self._known[token_id] = b"" if token is None else self._bytes_of(token)
        return self._known[token_id]

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF[c] for c in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        if m := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(m[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


class Detokenizer:
    """The text of one answer. `add` each id, `flush` once at the end; the joined results are the whole text."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = token_bytes.strips_first_space

    def add(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        return self._strip(self._utf8.decode(self._bytes[token_id]))

    def flush(self) -> str:
        """Return U+FFFD if the ids ended inside a character, else nothing."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace":
        if "String" not in step["pattern"]:
            raise ConfigError("the tokenizer's decoder replaces by a regular expression, which is not supported")
        return step["pattern"]["String"], step["content"]
    return None


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable Latin-1 stands for itself, the rest is shifted.

    Source: bytes_to_unicode in openai/gpt-2, src/encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [b for b in range(0x100) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()
