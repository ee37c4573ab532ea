"""The tokenizer of the store that is served: text to token ids, and the rendering of its chat template.

Owns the one Hugging Face tokenizer of the daemon. Reads the store's local files, never the network. Which ids end an
answer is compute's knowledge; only the tokenizer's own end token is known here: no other daemon can name its id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkle.errors import ConfigError
from sparkled.front.detokenizer import TokenBytes


class Tokenizer:
    """A loaded tokenizer. `added_tokens`: texts that it turns into one id each wherever they appear, with their ids."""

    def __init__(self, hf: Any, name: str) -> None:
        """hf: a transformers tokenizer with a Rust backend; name: for error texts. Raises ConfigError if unusable."""
        self.name = name
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{name}: its tokenizer has no tokenizer.json form; convert it with transformers first")
        if not getattr(hf, "chat_template", None):
            raise ConfigError(f"{name}: its tokenizer has no chat template; serve an instruction-tuned model")
        # What tokenizer_config.json may switch on is wrong for prompts: the end must not be cut off, and the template's
        # own control tokens must be recognised whatever `split_special_tokens` says.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._hf = hf
        self._backend = backend
        self._plain = _without_added_tokens(backend)
        self.added_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self.boundary_tokens: tuple[str, ...] = tuple(t for t in (hf.bos_token, hf.eos_token, hf.pad_token) if t)
        self.end_ids: tuple[int, ...] = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.token_bytes = TokenBytes(backend, self.end_ids)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load from a store's folder; takes a second or two. Raises ConfigError if the files there are no tokenizer."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # `local_files_only` has had holes; this closes them
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would advise on stderr to install PyTorch
        from transformers import AutoTokenizer  # here: importing it takes a second, in which the loop must answer

        try:
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as e:  # transformers and its Rust backend raise anything, bare Exception included
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ConfigError(f"cannot load a tokenizer from {folder}: {reason}; prepare the store again") from e
        return cls(hf, folder.name)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; added tokens in it become their ids. Nothing is put before or after."""
        return _encode(self._backend, text)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` as if there were no added tokens: all of it is text."""
        return _encode(self._plain, text)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Any:
        """Return the chat template's result up to where the answer begins; `template` knows its possible forms."""
        return self._hf.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
        )


def _encode(backend: Any, text: str) -> list[int]:
    """Encode with the one call that lets other threads run meanwhile: in tokenizers 0.23, `encode` keeps the GIL."""
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _without_added_tokens(backend: Any) -> Any:
    """Return a tokenizer of the same model that knows no added tokens.

    transformers' `split_special_tokens` is not enough: it still matches added tokens that are not flagged special,
    such as the <think> and <tool_call> of many models.
    """
    from tokenizers import Tokenizer as Backend

    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain
