"""From samples to the token arrays of the trainer: filters, tokenizer, flags, packing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.train import chat, corpus, tokens
from scripts.train.filters import Sample, clean, conversation
from scripts.train.packing import EXTRA, PAD_DOCUMENT, build_rows, pack
from scripts.train.prompts import Prompt

pytestmark = pytest.mark.unit

SENTENCES = "A cat sat on the mat. It was warm there. Nobody minded, because the house was quiet. "
TEXTS = [chat.turn("user", f"Count to {n}.") + chat.turn("assistant", f"{n}, and done.") for n in range(40)]


LONG = (
    "Bread is made from flour, water, salt and yeast. First the dough is mixed by hand. Then it rests under a cloth "
    "for an hour, until it has doubled in size. Bakers fold it again and shape loaves. A hot oven does the rest."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokens.train_tokenizer([*TEXTS, SENTENCES] * 4, vocab_size=400)


# --- filters --------------------------------------------------------------------------------------------------------


def test_a_finished_answer_is_kept_as_it_is() -> None:
    assert clean("  Paris is the capital.\n", ended=True) == "Paris is the capital."


def test_an_unfinished_answer_is_cut_back_to_whole_sentences() -> None:
    assert clean(LONG + " And then it", ended=False) == LONG
    assert clean(LONG + "\n\n7. ", ended=False) == LONG
    assert clean("Short. And then it", ended=False) is None
    assert clean(LONG + " ```python\nx = 1", ended=False) is None


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I am SmolLM, made by Hugging Face.",
        "Dear [Your Name], thank you.",
        "See https://example.com for more.",
        "你好，我可以帮你。",
        SENTENCES * 3,  # the same sentences again
        "one two three four five six seven " * 6,
    ],
)
def test_what_is_not_worth_learning_is_dropped(answer: str) -> None:
    assert clean(answer, ended=True) is None


def test_conversations() -> None:
    def exchange(user: str, answer: str) -> str:
        return chat.turn("user", user) + chat.turn("assistant", answer)

    prompt = Prompt("Who?", follow_up="Why?")
    both = exchange("Who?", "Anna.") + exchange("Why?", "Because.")
    assert conversation(Sample(prompt, ["Anna.", "Because."], [True, True])) == both
    assert conversation(Sample(prompt, ["Anna.", "Anna."], [True, True])) == exchange("Who?", "Anna.")
    assert conversation(Sample(prompt, ["Anna."], [True])) == exchange("Who?", "Anna.")
    assert conversation(Sample(prompt, ["http://", "Because."], [True, True])) is None


def test_turns_that_the_teacher_wrote() -> None:
    open_prompt = Prompt("What is", is_open=True)
    expected = chat.turn("user", "What is a noun?") + chat.turn("assistant", "A word.")
    assert conversation(Sample(open_prompt, [" a noun?", "A word."], [True, True])) == expected
    assert conversation(Sample(open_prompt, [" a noun?", "A word."], [False, True])) is None
    assert conversation(Sample(open_prompt, [" a noun?"], [True])) is None
    assert conversation(Sample(open_prompt, [" a a a a a a a", "A word."], [True, True])) is None


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_tokenizer(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in chat.SPECIAL_TOKENS] == list(range(len(chat.SPECIAL_TOKENS)))
    assert all(token.special for token in tokenizer.get_added_tokens_decoder().values())
    for text in ("1234 + 5", "naïve 你好 😀\n\n  tabs\t", TEXTS[3]):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("2024").ids) == 4  # digits stand alone


def test_only_what_the_assistant_says_is_flagged(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[chat.Message] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "assistant\n"},
    ]
    rendered = [chat.render(messages), TEXTS[0]]
    flagged, starts = tokens.encode(tokenizer, rendered)
    said = []
    for text, (start, end) in zip(rendered, pairwise(starts.tolist()), strict=True):
        document = flagged[start:end]
        ids, is_said = document & (tokens.ASSISTANT_FLAG - 1), document >= tokens.ASSISTANT_FLAG
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text.removesuffix("\n")
        said.append(tokenizer.decode(ids[is_said].tolist(), skip_special_tokens=False))
    call_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert said == [f"Hello.\n{call_text}<|im_end|>assistant\n<|im_end|>", "0, and done.<|im_end|>"]


# --- packing --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(32, 64))
def test_packing(lengths: list[int], row_tokens: int) -> None:
    """Every document is in exactly one row, and rows hold no more than fits."""
    rows = pack(np.array(lengths), row_tokens)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(min(lengths[document], row_tokens) for document in row) <= row_tokens for row in rows)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_rows_hold_the_documents(lengths: list[int]) -> None:
    row_tokens = 40
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = np.arange(starts[-1]).astype(np.uint16)
    ids, documents = build_rows(flat, starts, row_tokens)
    assert ids.shape == documents.shape == (len(ids), row_tokens + EXTRA)
    found = []
    for row, numbers in zip(ids, documents, strict=True):
        for number in range(numbers.max() + 1):
            found.append(row[numbers == number].tolist())
        assert not row[numbers == PAD_DOCUMENT].any()
    found.sort()
    expected = [flat[a:b].tolist() for a, b in pairwise(starts.tolist())]
    for part, whole in zip(found, expected, strict=True):
        assert part == whole[: len(part)]
        assert len(part) == len(whole) or len(part) >= row_tokens  # only what is longer than a row is cut


# --- the whole step -------------------------------------------------------------------------------------------------


def test_corpus_from_files(tmp_path: Path) -> None:
    samples, curated = tmp_path / "samples.jsonl", tmp_path / "curated.jsonl"
    kept = [f"Answer {n} is here." for n in range(60)]
    records = [
        {"prompt": {"user": f"Q{n}?", "follow_up": None, "is_open": False}, "turns": [answer], "ended": [True]}
        for n, answer in enumerate([*kept, "http://dropped"])
    ]
    samples.write_text("\n".join(map(json.dumps, records)))
    dialogue = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    curated.write_text("\n".join([json.dumps(dialogue)] * 40))
    out = tmp_path / "out"
    arguments = [str(out), "--samples", str(samples), "--curated", str(curated), "--vocab", "300", "--workers", "1"]
    result = CliRunner().invoke(corpus.main, arguments)
    assert result.exit_code == 0, result.output
    assert "kept 60 conversations of the teacher, 40 curated dialogues" in result.output
    held_out = json.loads((out / "val.json").read_text())
    assert (len(held_out["teacher"]), len(held_out["curated"])) == (3, 2)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    texts = []
    for name in ("train", "val"):
        flagged, starts = tokens.load(out, name)
        parts = [(flagged[a:b] & 0x7FFF).tolist() for a, b in pairwise(starts.tolist())]
        texts.append([tokenizer.decode(part, skip_special_tokens=False) + "\n" for part in parts])
    assert sorted(texts[1]) == sorted(held_out["teacher"] + held_out["curated"])
    assert len(texts[0]) == 95
    assert not set(held_out["teacher"]) & set(texts[0])
