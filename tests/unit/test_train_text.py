"""The texts that the shipped model is trained on: prompts, exercises, dialogues and their rendering."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.train import chat, exercises
from scripts.train.curated import Curator
from scripts.train.exercises import Exercises
from scripts.train.facts import load_facts, read_toml
from scripts.train.lexicon import Lexicon, load_lexicon, with_article
from scripts.train.prompts import SLOT, PromptWriter

pytestmark = pytest.mark.unit

FACTS = load_facts()
LEXICON = Lexicon(
    things=["anchor", "book"],
    abstract=["idea"],
    persons=["actor"],
    food=["bread"],
    animals=["owl", "cat"],
    opposites=[("hot", "cold")],
    synonyms=[("car", "auto")],
    kinds=[("oak", "tree"), ("owl", "bird")],
    noun_definitions=[("oak", "a large tree")],
    verb_definitions=[("run", "move fast")],
)


def _drawn(seed: int = 1) -> Exercises:
    return Exercises(FACTS, LEXICON, random.Random(seed))


# --- facts ----------------------------------------------------------------------------------------------------------


def test_facts_are_consistent() -> None:
    assert sum(len(question.wordings) for question in FACTS.questions) == 205
    assert all(country in FACTS.capitals for countries in FACTS.continents.values() for country in countries)
    assert all(len(foreign) == 3 and all(foreign) for foreign in FACTS.translations.values())
    numbers = [number for _, number in FACTS.elements.values()]
    assert len(set(numbers)) == len(numbers)
    assert set(range(1, 37)) <= set(numbers)
    assert all(len(set(members)) == len(members) >= 5 for members in FACTS.lists.values())


# --- prompts --------------------------------------------------------------------------------------------------------


def test_every_template_can_be_filled() -> None:
    writer = PromptWriter(LEXICON, FACTS, seed=1)
    templates = [template for kind in read_toml("teacher_prompts.toml")["kind"] for template in kind["templates"]]
    assert len(templates) > 120
    for template in templates:
        filled = writer.fill(template)
        assert "{" not in filled
        assert (filled == template) == (SLOT.search(template) is None)


def test_a_slot_named_twice_is_the_same_word() -> None:
    writer = PromptWriter(LEXICON, FACTS, seed=1)
    filled = {writer.fill("{a animal}, {animal}, {animal2}") for _ in range(100)}
    assert filled == {f"{same}, {other}" for same in ("an owl, owl", "a cat, cat") for other in ("owl", "cat")}


def test_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (
        [writer.prompt() for _ in range(300)] for writer in (PromptWriter(LEXICON, FACTS, seed) for seed in (1, 1, 2))
    )
    assert first == again != other
    assert {prompt.is_open for prompt in first} == {False, True}
    assert any(prompt.follow_up for prompt in first)
    assert not any(prompt.follow_up for prompt in first if prompt.is_open)


# --- exercises ------------------------------------------------------------------------------------------------------


def test_arithmetic_is_right() -> None:
    drawn = _drawn()
    for _ in range(500):
        question, answer = drawn.arithmetic()
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in question).split()]
        result = int("".join(c if c.isdigit() else " " for c in answer).split()[-1])
        a, b = numbers
        sign = next(s for s in ("+", "-", "*", "×", "x", "/", "plus", "minus", "times", "divided") if s in question)
        if sign in ("+", "plus"):
            assert result == a + b
        elif sign in ("-", "minus"):
            assert result == a - b >= 0
        elif sign in ("/", "divided"):
            assert result * b == a
        else:
            assert result == a * b


def test_word_problems_are_right() -> None:
    drawn = _drawn()
    for _ in range(200):
        _, answer = drawn.word_problem()
        left, right = answer.split(" has ")[1].split(" = ")
        a, sign, b = left.split()
        assert int(right.split()[0]) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) > 0


@pytest.mark.parametrize("entry", read_toml("functions.toml")["function"], ids=lambda entry: entry["name"])
def test_functions_do_what_they_say(entry: dict[str, Any]) -> None:
    """The code of an answer runs, and the call that it names returns the result that it names."""
    drawn = _drawn()
    drawn._functions = drawn._functions | {"function": [entry]}
    for _ in range(8):  # several sets of names
        _, answer = drawn.function()
        code = answer.split("```python\n")[1].split("```")[0]
        scope: dict[str, Any] = {}
        exec(code, scope)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = eval(entry["call"], scope)
        if "result" in entry:
            assert result == eval(entry["result"])
        else:
            assert result is not None or printed.getvalue()


def test_other_exercises_are_whole_sentences() -> None:
    drawn = _drawn()
    made = {}
    for make in (drawn.question, drawn.listing, drawn.capital, drawn.translation, drawn.small, drawn.word):
        made[make] = [make() for _ in range(400)]
        assert all(question and answer and "{" not in question + answer for question, answer in made[make])
    for question, answer in made[drawn.listing]:
        assert question
        items = [line.split(". ", 1)[1] for line in answer.splitlines() if line[:1].isdigit()]
        assert len(set(items)) == len(items)
    verdicts = {answer for question, answer in made[drawn.word] if question.startswith("Is ")}
    assert {"Yes, an oak is a tree.", "No, an oak is a tree."} <= verdicts


@pytest.mark.parametrize(
    ("n", "words"), [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety-nine"), (100, "one hundred")]
)
def test_numbers_in_words(n: int, words: str) -> None:
    assert exercises.in_words(n) == words
    assert exercises.in_words(305) == "three hundred and five"
    assert exercises.in_words(999) == "nine hundred and ninety-nine"


# --- dialogues and their text ---------------------------------------------------------------------------------------


def test_tool_calls_name_an_offered_tool() -> None:
    curator = Curator(FACTS, LEXICON, seed=1)
    called = set()
    for _ in range(200):
        dialogue = curator.tool_dialogue()
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue["tools"]}
        for message in dialogue["messages"]:
            for call in message.get("tool_calls", []):
                function = call["function"]
                assert set(function["arguments"]) == set(offered[function["name"]]["required"])
                called.add(function["name"])
    assert called == {"get_weather", "get_time", "calculate"}


def test_the_shipped_template_is_the_one_of_the_recipe() -> None:
    shipped = Path(__file__).resolve().parents[2] / "models" / "sparkle-46m" / "chat_template.jinja"
    assert shipped.read_text(encoding="utf-8") == chat.template()


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"ü": [1, None]}}}] * 2
HANDMADE = [
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "a"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "system", "content": "t"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": CALLS}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": CALLS},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "c"},
    ],
]


def test_both_forms_of_the_chat_format_agree(reference_tokenizer: Any) -> None:
    """The corpus is rendered in Python, the prompts of a running model by the Jinja template."""
    curator = Curator(FACTS, LEXICON, seed=1)
    tools = curator.tool_dialogue()["tools"]
    dialogues = [curator.dialogue() for _ in range(200)] + [curator.tool_dialogue() for _ in range(100)]
    dialogues += [{"messages": messages, "tools": offered} for messages in HANDMADE for offered in (None, tools)]
    for dialogue in dialogues:
        messages, offered = dialogue["messages"], dialogue.get("tools")
        expected = reference_tokenizer.apply_chat_template(messages, tools=offered, tokenize=False)
        assert chat.render(messages, offered) == expected
    question = [{"role": "user", "content": "Hi"}]
    begun = reference_tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert chat.prompt("Hi") == begun


# --- WordNet --------------------------------------------------------------------------------------------------------

# Four synsets and two adjectives in WordNet's own form: offset, file number, type, words, pointers | definition.
DATA_NOUN = """  1 licence text
00000001 05 n 02 owl 0 bird_of_Minerva 0 001 @ 00000002 n 0000 | nocturnal bird of prey with hawk-like beak; "an owl"
00000002 05 n 01 bird 0 000 | warm-blooded egg-laying vertebrates with feathers
00000003 06 n 02 auto 0 car 0 000 | a motor vehicle with four wheels; usually propelled by an engine
00000004 04 n 01 murder 0 000 | unlawful premeditated killing of a human being
"""
INDEX_NOUN = """  1 licence text
bird n 1 1 @ 1 1 00000002
car n 1 0 1 1 00000003
murder n 1 0 1 1 00000004
owl n 1 1 @ 1 1 00000001
rare n 1 0 1 0 00000003
"""
DATA_ADJ = """00000005 00 a 01 hot(a) 0 001 ! 00000006 a 0101 | of high temperature
00000006 00 a 01 cold 0 001 ! 00000005 a 0101 | of low temperature
"""
INDEX_ADJ = "cold a 1 1 ! 1 1 00000006\nhot a 1 1 ! 1 1 00000005\n"
DATA_VERB = "00000007 38 v 01 run 0 000 01 + 02 00 | move fast by using the feet\n"
INDEX_VERB = "run v 1 0 1 1 00000007\n"
COUNTS = """owl%1:05:00:: 1 3
bird%1:05:00:: 1 9
car%1:06:00:: 1 71
murder%1:04:00:: 1 9
hot%3:00:01:: 1 2
hot%5:00:01:: 1 1
cold%3:00:01:: 1 1
run%2:38:00:: 1 106
"""


def test_word_lists_from_wordnet(tmp_path: Path) -> None:
    texts = {
        "data.noun": DATA_NOUN, "index.noun": INDEX_NOUN, "data.adj": DATA_ADJ, "index.adj": INDEX_ADJ,
        "data.verb": DATA_VERB, "index.verb": INDEX_VERB, "cntlist.rev": COUNTS,
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    lexicon = load_lexicon(FACTS, tmp_path)
    assert lexicon.things == ["bird", "car", "owl"]  # neither the rare word nor the excluded one
    assert lexicon.abstract == []
    assert {"bird", "owl", "shark"} <= set(lexicon.animals)
    assert lexicon.kinds == [("owl", "bird")]
    assert lexicon.synonyms == [("car", "auto")]  # "bird of Minerva" is not lower case
    assert lexicon.opposites == [("hot", "cold")]  # "cold" occurs too rarely here
    assert ("owl", "nocturnal bird of prey with hawk-like beak") in lexicon.noun_definitions
    assert lexicon.verb_definitions == [("run", "move fast by using the feet")]


def test_articles() -> None:
    assert [with_article(word) for word in ("owl", "cat")] == ["an owl", "a cat"]
