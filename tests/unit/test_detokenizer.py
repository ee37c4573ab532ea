"""Text from ids: the joined pieces are the whole text, and no character is ever broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from sparkle.errors import ConfigError
from sparkled.front.detokenizer import Detokenizer, TokenBytes
from sparkled.front.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

BROKEN = "\ufffd"


def pieces(token_bytes: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(token_bytes)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@given(st.data())
def test_pieces_join_to_the_decoding_of_any_ids(
    shipped_tokenizer: Tokenizer, reference_tokenizer: Any, data: st.DataObject
) -> None:
    n_vocabulary = len(reference_tokenizer)
    ids = data.draw(st.lists(st.integers(0, n_vocabulary - 1).filter(lambda i: i not in shipped_tokenizer.end_ids)))
    decoded = reference_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(pieces(shipped_tokenizer.token_bytes, ids)) == decoded


@given(text=st.text())
def test_no_piece_of_a_valid_text_breaks_a_character(shipped_tokenizer: Tokenizer, text: str) -> None:
    out = pieces(shipped_tokenizer.token_bytes, shipped_tokenizer.encode_plain(text))
    assert "".join(out) == text
    assert BROKEN in text or not any(BROKEN in piece for piece in out)


def test_an_emoji_comes_whole(shipped_tokenizer: Tokenizer) -> None:
    ids = shipped_tokenizer.encode("a😀b")
    assert len(ids) > 3  # the emoji is split
    assert [p for p in pieces(shipped_tokenizer.token_bytes, ids) if p] == ["a", "😀", "b"]


def test_two_answers_never_mix(shipped_tokenizer: Tokenizer) -> None:
    first, second = (Detokenizer(shipped_tokenizer.token_bytes) for _ in range(2))
    out = ["", ""]
    for a, b in zip(shipped_tokenizer.encode("😀"), shipped_tokenizer.encode("🤖"), strict=True):
        out[0] += first.add(a)
        out[1] += second.add(b)
    assert out == ["😀", "🤖"]


def test_half_a_character_before_other_text_is_one_replacement(shipped_tokenizer: Tokenizer) -> None:
    half = shipped_tokenizer.encode("😀")[:2]
    for rest in (" b", "東", "<tool_call>"):
        out = "".join(pieces(shipped_tokenizer.token_bytes, half + shipped_tokenizer.encode(rest)))
        assert out == BROKEN + rest


def test_half_a_character_at_the_end_is_one_replacement_at_flush(shipped_tokenizer: Tokenizer) -> None:
    half = shipped_tokenizer.encode("ok 😀")[:-1]
    *before, last = pieces(shipped_tokenizer.token_bytes, half)
    assert ("".join(before), last) == ("ok ", BROKEN)


def test_invalid_bytes_are_not_held(shipped_tokenizer: Tokenizer) -> None:
    continuation = shipped_tokenizer.encode("😀")[-1]
    assert pieces(shipped_tokenizer.token_bytes, [continuation] * 1000) == [BROKEN] * 1000 + [""]


def test_a_replacement_character_that_the_model_wrote_is_not_held(shipped_tokenizer: Tokenizer) -> None:
    *before, last = pieces(shipped_tokenizer.token_bytes, shipped_tokenizer.encode("x\ufffd"))
    assert ("".join(before), last) == ("x\ufffd", "")


def test_end_tokens_and_padding_have_no_text(shipped_tokenizer: Tokenizer) -> None:
    assert shipped_tokenizer.end_ids == (shipped_tokenizer.added_tokens["<|im_end|>"],)
    ids = [*shipped_tokenizer.encode("a"), *shipped_tokenizer.end_ids, 10**6, 2**40, -1]
    assert "".join(pieces(shipped_tokenizer.token_bytes, ids)) == "a"


# --- SentencePiece with byte fallback -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece() -> Backend:
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abc", "▁a"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@given(text=st.text(alphabet="abc 😀東é", min_size=1))
def test_sentencepiece_text_comes_back(sentencepiece: Backend, text: str) -> None:
    ids = sentencepiece.encode(text).ids
    out = pieces(TokenBytes(sentencepiece, ()), ids)
    assert "".join(out) == sentencepiece.decode(ids) == text
    assert not any(BROKEN in piece for piece in out)


def test_sentencepiece_keeps_the_valid_part_of_a_broken_run(sentencepiece: Backend) -> None:
    ids = sentencepiece.encode("a😀東").ids[:-1]
    assert "".join(pieces(TokenBytes(sentencepiece, ()), ids)) == "a😀" + BROKEN


def test_metaspace_is_a_space(sentencepiece: Backend) -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    assert "".join(pieces(TokenBytes(backend, ()), [1, 2, 1])) == backend.decode([1, 2, 1]) == "ab a"


def test_an_unknown_decoder_is_refused() -> None:
    backend = Backend(models.WordPiece({"a": 0}, unk_token="a"))
    with pytest.raises(ConfigError, match="none"):
        TokenBytes(backend, ())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(backend, ())
