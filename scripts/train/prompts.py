"""Step 1: write the prompts that the teacher will answer (one JSON object a line).

Owns  the making of a prompt from a template and the word lists.
Reads data/teacher_prompts.toml, data/words.toml and the lexicon.
Never knows the teacher's chat format: prompts are plain user turns.

    python -m scripts.train.prompts OUT.jsonl --count 200000
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from scripts.train import wordnet
from scripts.train.facts import Facts, load_facts, read_toml
from scripts.train.lexicon import Lexicon, load_lexicon, with_article

CASUAL_FRAC = 0.06  # prompts typed carelessly or begun with "Please"
FOLLOW_UP_FRAC = 0.22
SLOT = re.compile(r"\{(a )?([a-z]+)\d*\}")  # the digit only makes the slot another one


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn for the teacher, or with is_open the first words of a turn that the teacher writes itself."""

    user: str
    follow_up: str | None = None
    is_open: bool = False


class PromptWriter:
    """Draws prompts; the same seed gives the same prompts."""

    def __init__(self, lexicon: Lexicon, facts: Facts, seed: int) -> None:
        words, templates = read_toml("words.toml"), read_toml("teacher_prompts.toml")
        self._rng = random.Random(seed)
        self._kinds: list[dict[str, Any]] = templates["kind"]
        self._shares = [kind["share"] for kind in self._kinds]
        self._openings: list[str] = words["openings"]
        self._follow_ups: list[str] = words["follow_ups"]
        self._choices: dict[str, list[str]] = templates["choices"]
        self._words: dict[str, list[str]] = {
            "thing": lexicon.things, "abstract": lexicon.abstract, "person": lexicon.persons, "food": lexicon.food,
            "animal": lexicon.animals, "list": list(facts.lists), "topic": words["topics"], "task": words["tasks"],
            "name": words["names"], "adjective": words["adjectives"], "place": words["places"],
            "function": words["functions"], "occasion": words["occasions"], "recipient": words["recipients"],
            "feeling": words["feelings"], "event": words["events"], "favourite": words["favourites"],
        }  # fmt: skip

    def fill(self, template: str) -> str:
        """Replace the slots of `template`; a slot named twice gets the same word."""
        drawn: dict[str, str] = {}

        def draw(slot: str) -> str:
            if slot not in drawn:
                kind = slot.rstrip("0123456789")
                choices = self._choices.get(kind)
                drawn[slot] = draw(self._rng.choice(choices)) if choices else self._rng.choice(self._words[kind])
            return drawn[slot]

        def word(match: re.Match[str]) -> str:
            slot = match[0].strip("{}").removeprefix("a ")
            return with_article(draw(slot)) if match[1] else draw(slot)

        return SLOT.sub(word, template)

    def prompt(self) -> Prompt:
        rng = self._rng
        kind = rng.choices(self._kinds, self._shares)[0]
        if kind["name"] == "open":
            return Prompt(rng.choice(self._openings), is_open=True)
        user = self.fill(rng.choice(kind["templates"]))
        if rng.random() < CASUAL_FRAC:
            is_careless = rng.random() < 0.6
            user = user.rstrip("?.!").lower() if is_careless else "Please " + user[0].lower() + user[1:]
        return Prompt(user, rng.choice(self._follow_ups) if rng.random() < FOLLOW_UP_FRAC else None)


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--count", default=200_000, show_default=True, help="Prompts to write.")
@click.option("--seed", default=100, show_default=True)
@click.option("--wordnet", "folder", default=wordnet.DEFAULT_FOLDER, show_default=True, type=click.Path(path_type=Path))
def main(out: Path, count: int, seed: int, folder: Path) -> None:
    """Write COUNT prompts for the teacher to OUT."""
    facts = load_facts()
    writer = PromptWriter(load_lexicon(facts, folder), facts, seed)
    with out.open("w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps(asdict(writer.prompt()), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
