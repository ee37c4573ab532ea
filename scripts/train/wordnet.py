"""Read the WordNet 3.0 database files (Debian package wordnet-base), as far as the word lists need them.

Owns  nothing.
Reads data.<pos>, index.<pos> and cntlist.rev; their format is in WordNet's wndb(5WN) and cntlist(5WN).
Never changes or keeps the files; their licence is in models/sparkle-46m/NOTICE.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DEFAULT_FOLDER = Path("/usr/share/wordnet")

# Lexicographer files of nouns, lexnames(5WN); 3 (Tops) is left out.
NOUN_FIELDS = {
    4: "act", 5: "animal", 6: "artifact", 7: "attribute", 8: "body", 9: "cognition", 10: "communication", 11: "event",
    12: "feeling", 13: "food", 14: "group", 15: "location", 16: "motive", 17: "object", 18: "person", 19: "phenomenon",
    20: "plant", 21: "possession", 22: "process", 23: "quantity", 24: "relation", 25: "shape", 26: "state",
    27: "substance", 28: "time",
}  # fmt: skip

NOUN, VERB, ADJECTIVE, ADJECTIVE_SATELLITE = "1", "2", "3", "5"  # ss_type digits of sense keys


class Pointer(NamedTuple):
    """One relation of a synset: "@" is a kind of, "!" the opposite."""

    symbol: str
    offset: str
    part_of_speech: str


@dataclass(frozen=True, slots=True)
class Synset:
    """One meaning: the words that share it and its definition."""

    field: int  # number of its lexicographer file
    words: list[str]
    pointers: list[Pointer]
    gloss: str  # first part of the definition, no examples


@dataclass(frozen=True, slots=True)
class Entry:
    """One word: how many of its senses occur in tagged text, and its synsets, most frequent first."""

    n_tagged: int
    offsets: list[str]


def _synset(line: str) -> tuple[str, Synset]:
    head, gloss = line.rstrip("\n").split(" | ", 1)
    fields = head.split()
    n_words = int(fields[3], 16)
    words = [re.sub(r"\(.*\)", "", word) for word in fields[4 : 4 + 2 * n_words : 2]]  # "(a)" marks positions
    first = 4 + 2 * n_words
    pointers = [Pointer(*fields[at : at + 3]) for at in range(first + 1, first + 1 + 4 * int(fields[first]), 4)]
    definition = gloss.split('; "')[0].split(";")[0].strip()
    return fields[0], Synset(int(fields[1]), words, pointers, definition)


def _entry(line: str) -> tuple[str, Entry]:
    fields = line.split()
    n_symbols = int(fields[3])
    return fields[0], Entry(int(fields[5 + n_symbols]), fields[6 + n_symbols :])


def read(folder: Path, part_of_speech: str) -> tuple[dict[str, Entry], dict[str, Synset]]:
    """Return words and synsets (by offset) of "noun", "verb" or "adj", in the order of the files."""
    with (folder / f"data.{part_of_speech}").open(encoding="utf-8", errors="replace") as file:
        synsets = dict(_synset(line) for line in file if not line.startswith("  "))  # two spaces: the licence
    with (folder / f"index.{part_of_speech}").open(encoding="utf-8") as file:
        entries = dict(_entry(line) for line in file if not line.startswith("  "))
    return entries, synsets


def counts(folder: Path) -> Counter[tuple[str, str]]:
    """Return how often each (word, ss_type digit) occurs in WordNet's tagged text."""
    total: Counter[tuple[str, str]] = Counter()
    for line in (folder / "cntlist.rev").read_text(encoding="utf-8").splitlines():
        sense_key, _sense_number, count = line.split()
        word, rest = sense_key.split("%")
        total[word, rest[0]] += int(count)
    return total
