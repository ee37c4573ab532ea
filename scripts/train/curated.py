"""Step 2: write short dialogues whose answers are known to be right (one JSON object a line).

Owns  the mixture of exercises, small talk and tool calls, and how they join into dialogues.
Reads exercises.py, data/dialogues.toml, data/tools.json.
Never renders text: messages and tools are written in OpenAI's form, chat.py turns them into tokens' text.

    python -m scripts.train.curated OUT.jsonl --count 380000
"""

from __future__ import annotations

import json
import operator
import random
from pathlib import Path
from typing import Any

import click

from scripts.train import wordnet
from scripts.train.chat import Message
from scripts.train.exercises import Exercise, Exercises
from scripts.train.facts import DATA, Facts, load_facts, read_toml
from scripts.train.lexicon import Lexicon, load_lexicon

TOOL_FRAC = 0.035
SINGLE_TURN_FRAC = 0.65
SYSTEM_FRAC = 0.25
LOWER_CASE_FRAC = 0.05
UNUSED_TOOL_FRAC = 0.25  # dialogues that offer tools but need none
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")


class Curator:
    """Draws curated dialogues; the same seed gives the same dialogues."""

    def __init__(self, facts: Facts, lexicon: Lexicon, seed: int) -> None:
        self.rng = random.Random(seed)
        self.exercises = exercises = Exercises(facts, lexicon, self.rng)
        self._cities = list(facts.capitals.values()), facts.lists["cities"]
        talk = read_toml("dialogues.toml")
        self._systems: list[str] = talk["systems"]
        self._groups: list[dict[str, Any]] = talk["group"]
        self._tools = {t["function"]["name"]: t for t in json.loads((DATA / "tools.json").read_text("utf-8"))}
        self._mixture = {
            self.small_talk: 13, exercises.question: 16, exercises.capital: 12, exercises.arithmetic: 17,
            exercises.word_problem: 4, exercises.listing: 11, exercises.translation: 7, exercises.small: 6,
            exercises.word: 14, exercises.function: 9,
        }  # fmt: skip

    def small_talk(self) -> Exercise:
        group = self.rng.choices(self._groups, [group["share"] for group in self._groups])[0]
        pair = self.rng.choice(group["pair"])
        return self.rng.choice(pair["ask"]), self.rng.choice(pair["answer"])

    def dialogue(self) -> dict[str, Any]:
        """Return {"messages": [...]}, with "tools" where the dialogue offers some."""
        rng = self.rng
        if rng.random() < TOOL_FRAC:
            return self.tool_dialogue()
        n_turns = 1 if rng.random() < SINGLE_TURN_FRAC else rng.randrange(2, 5)
        messages: list[Message] = []
        for _ in range(n_turns):
            question, answer = rng.choices(list(self._mixture), list(self._mixture.values()))[0]()
            if rng.random() < LOWER_CASE_FRAC:
                question = question.lower()
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if rng.random() < SYSTEM_FRAC:
            messages.insert(0, {"role": "system", "content": rng.choice(self._systems)})
        return {"messages": messages}

    def tool_dialogue(self) -> dict[str, Any]:
        """A question, the call of an offered tool, its result and the answer; or a question that needs no tool."""
        offered = self.rng.sample(list(self._tools), self.rng.randrange(1, len(self._tools) + 1))
        tools = [self._tools[name] for name in offered]
        if self.rng.random() < UNUSED_TOOL_FRAC:
            plain = self.rng.choice((self.small_talk, self.exercises.question, self.exercises.capital))
            question, answer = plain()
            messages: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return {"tools": tools, "messages": messages}
        name = self.rng.choice(offered)
        question, arguments, result, answer = getattr(self, f"_{name}")()
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": answer},
        ]
        return {"tools": tools, "messages": messages}

    # One method for each tool of data/tools.json: question, arguments, result, answer.

    def _city(self) -> str:
        return self.rng.choice(self._cities[self.rng.random() < 0.5])

    def _get_weather(self) -> tuple[str, dict[str, str], str, str]:
        city, degrees, condition = self._city(), self.rng.randrange(-5, 36), self.rng.choice(WEATHER)
        question = self.exercises.pick(
            f"What is the weather in {city}?", f"How is the weather in {city} today?",
            f"What's the weather like in {city}?", f"Is it cold in {city}?",
        )  # fmt: skip
        result = json.dumps({"temperature": degrees, "condition": condition})
        return (
            question,
            {"city": city},
            result,
            f"It is {condition} in {city}, with a temperature of {degrees} degrees.",
        )

    def _get_time(self) -> tuple[str, dict[str, str], str, str]:
        city, time = self._city(), f"{self.rng.randrange(24):02d}:{self.rng.randrange(60):02d}"
        question = self.exercises.pick(f"What time is it in {city}?", f"Tell me the time in {city}.")
        return question, {"city": city}, json.dumps({"time": time}), f"It is {time} in {city}."

    def _calculate(self) -> tuple[str, dict[str, str], str, str]:
        a, b, sign = self.rng.randrange(10, 999), self.rng.randrange(10, 999), self.rng.choice(list(OPERATORS))
        term, result = f"{a} {sign} {b}", str(OPERATORS[sign](a, b))
        question = self.exercises.pick(f"What is {term}?", f"Calculate {term}.")
        return question, {"expression": term}, result, f"{term} = {result}."


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--count", default=380_000, show_default=True, help="Dialogues to write.")
@click.option("--seed", default=200, show_default=True)
@click.option("--wordnet", "folder", default=wordnet.DEFAULT_FOLDER, show_default=True, type=click.Path(path_type=Path))
def main(out: Path, count: int, seed: int, folder: Path) -> None:
    """Write COUNT curated dialogues to OUT."""
    facts = load_facts()
    curator = Curator(facts, load_lexicon(facts, folder), seed)
    with out.open("w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps(curator.dialogue(), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
