"""Which of the teacher's conversations are worth learning from.

Owns  the rules: no repetition, no placeholders, no other model's name, no half sentences, English only.
Reads one sample at a time.
Never edits the words of an answer: it cuts an unfinished one back to whole sentences, or drops it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.train import chat
from scripts.train.prompts import Prompt

UNWANTED = re.compile(
    r"SmolLM|Hugging ?Face|<\|im|\[Your|\[your|\[Name|\[insert|http|www\.|sexual|suicid|\bporn"
    r"|\bkill (him|her|them|you)",
    re.IGNORECASE,
)
SENTENCE_ENDS = (". ", "! ", ".\n", "!\n", '." ')
MIN_CUT_CHARS = 200  # a shorter remainder of an unfinished answer says too little
MIN_USER_CHARS, MAX_USER_CHARS = 6, 350


@dataclass(frozen=True, slots=True)
class Sample:
    """What the teacher said to a prompt.

    turns: the answer and, where there is a follow-up, its answer; for an open prompt the rest of the user's turn, then
    the answer. ended: whether the teacher ended the turn itself (else the length limit did).
    """

    prompt: Prompt
    turns: list[str]
    ended: list[bool]


def _n_foreign(text: str) -> int:
    return sum(ord(char) > 127 for char in text)


def _has_repetition(answer: str) -> bool:
    words = answer.split()
    if len(words) > 20:
        runs = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        if len(set(runs)) < 0.8 * len(runs):
            return True
    sentences = [s.strip() for s in re.split(r"[\n.]", answer) if len(s.strip()) > 15]
    return len(sentences) - len(set(sentences)) > 0.15 * len(sentences)


def clean(answer: str, ended: bool) -> str | None:
    """Return the answer to learn, or None."""
    answer = answer.strip()
    if not ended:
        cut = max(answer.rfind(end) for end in SENTENCE_ENDS)
        if cut < MIN_CUT_CHARS or "```" in answer:
            return None
        answer = re.sub(r"\n+\d+\.\s*$", "", answer[: cut + 1].strip()).strip()  # the number of an item cut off
    if not answer or UNWANTED.search(answer) or _n_foreign(answer) > 0.02 * len(answer) + 2:
        return None
    return None if _has_repetition(answer) else answer


def _is_good_user_turn(text: str) -> bool:
    words = text.split()
    return (
        MIN_USER_CHARS <= len(text) <= MAX_USER_CHARS
        and not UNWANTED.search(text)
        and _n_foreign(text) <= 2
        and len(set(words)) >= 0.5 * len(words)
    )


def conversation(sample: Sample) -> str | None:
    """Return the text of the conversation, or None if nothing of it is worth keeping."""
    prompt, turns, ended = sample.prompt, sample.turns, sample.ended
    if prompt.is_open:
        if len(turns) < 2 or not ended[0]:
            return None
        user, answer = (prompt.user + turns[0]).strip(), clean(turns[1], ended[1])
        return _text([(user, answer)]) if answer is not None and _is_good_user_turn(user) else None
    first = clean(turns[0], ended[0])
    if first is None:
        return None
    exchanges = [(prompt.user, first)]
    if prompt.follow_up and len(turns) > 1 and ended[0]:
        second = clean(turns[1], ended[1])
        if second is not None and second != first:
            exchanges.append((prompt.follow_up, second))
    return _text(exchanges)


def _text(exchanges: list[tuple[str, str]]) -> str:
    return "".join(chat.turn("user", user) + chat.turn("assistant", answer) for user, answer in exchanges)
