"""The facts, word lists and templates under data/, as typed values.

Owns  the form of the files in data/; every other module asks here.
Reads data/*.toml and data/questions.txt.
Never draws at random and never looks at WordNet (lexicon.py does).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkle.errors import ConfigError

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Question:
    """One fact: several wordings of the question, one answer."""

    wordings: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Facts:
    """data/facts.toml and data/questions.txt."""

    capitals: dict[str, str]  # country -> city
    continents: dict[str, list[str]]
    lists: dict[str, list[str]]
    elements: dict[str, tuple[str, int]]  # name -> symbol, atomic number
    translations: dict[str, list[str]]  # English -> French, Spanish, German
    questions: list[Question]


def read_toml(name: str) -> dict[str, Any]:
    with (DATA / name).open("rb") as file:
        return tomllib.load(file)


def load_facts() -> Facts:
    table = read_toml("facts.toml")
    questions = []
    for n, line in enumerate((DATA / "questions.txt").read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#"):
            continue
        wordings, bar, answer = line.rpartition(" | ")
        if not bar or not answer:
            raise ConfigError(f"data/questions.txt, line {n}: expected 'question / variant | answer', got {line!r}")
        questions.append(Question(tuple(wordings.split(" / ")), answer))
    return Facts(
        capitals=table["capitals"],
        continents=table["continents"],
        lists=table["lists"],
        elements={name: (symbol, number) for name, (symbol, number) in table["elements"].items()},
        translations=table["translations"],
        questions=questions,
    )
