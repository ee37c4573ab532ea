"""The tokenizer, and documents as arrays of tokens.

Owns  the form on disk: NAME_tokens.npy is one uint16 array of documents laid end to end, NAME_starts.npy the int64
      offsets of their starts plus the end. Bit 15 marks tokens that the assistant said (the vocabulary is far smaller).
Reads texts in the form of chat.py.
Never adds tokens to a document: a text that begins a conversation is encoded as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.train import chat

ASSISTANT_FLAG = 0x8000
MAX_VOCAB = ASSISTANT_FLAG
BATCH = 20_000  # texts encoded at a time
Tokens = npt.NDArray[np.uint16]
Starts = npt.NDArray[np.int64]

# Qwen's pre-tokenizer pattern: words with their leading space, single digits, punctuation, line ends.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with the special tokens of chat.py as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=chat.SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, chat.SPECIAL_TOKENS)))
    tokenizer.train_from_iterator((special.sub("\n", text) for text in texts), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tokens, Starts]:
    """Return tokens with the assistant's flagged, and starts; the line end after the last turn is dropped."""
    parts: list[Tokens] = []
    starts = [0]
    for i in range(0, len(texts), BATCH):
        batch = [text.removesuffix("\n") for text in texts[i : i + BATCH]]
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array(encoding.ids, np.uint16))
            starts.append(starts[-1] + len(encoding.ids))
    tokens = np.concatenate(parts)
    tokens[_said_by_assistant(tokenizer, tokens)] |= ASSISTANT_FLAG
    return tokens, np.array(starts, np.int64)


def _said_by_assistant(tokenizer: Tokenizer, tokens: Tokens) -> npt.NDArray[np.bool_]:
    """Mark what follows each "<|im_start|>assistant\\n", up to its <|im_end|> inclusive."""
    begins = np.flatnonzero(tokens == tokenizer.token_to_id(chat.TURN_START)) + 1
    header = tokenizer.encode("assistant\n", add_special_tokens=False).ids
    is_assistant = np.ones(len(begins), bool)
    for offset, token in enumerate(header):
        at = begins + offset
        is_assistant &= (at < len(tokens)) & (tokens[np.minimum(at, len(tokens) - 1)] == token)
    begins = begins[is_assistant] + len(header)
    ends = np.flatnonzero(tokens == tokenizer.token_to_id(chat.TURN_END))
    stops = ends[np.searchsorted(ends, begins)] + 1
    steps = np.zeros(len(tokens) + 1, np.int32)
    np.add.at(steps, begins, 1)
    np.add.at(steps, stops, -1)
    return np.cumsum(steps[:-1]) > 0


def save(folder: Path, name: str, tokens: Tokens, starts: Starts) -> None:
    np.save(folder / f"{name}_tokens.npy", tokens)
    np.save(folder / f"{name}_starts.npy", starts)


def load(folder: Path, name: str) -> tuple[Tokens, Starts]:
    return np.load(folder / f"{name}_tokens.npy"), np.load(folder / f"{name}_starts.npy")
