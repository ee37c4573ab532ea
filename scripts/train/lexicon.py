"""Word lists for prompts and exercises: WordNet's frequent nouns by subject, opposites, synonyms, definitions.

Owns  the choice of words: how frequent, how long, which subjects, which never.
Reads WordNet through wordnet.py, data/words.toml and data/facts.toml.
Never draws at random: the lists depend on the files alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.train import wordnet
from scripts.train.facts import Facts, read_toml
from scripts.train.wordnet import ADJECTIVE, ADJECTIVE_SATELLITE, NOUN, NOUN_FIELDS, VERB, Synset

CONCRETE = ("animal", "artifact", "food", "plant", "object", "substance", "body", "phenomenon")
ABSTRACT = ("cognition", "feeling", "state", "attribute", "act", "communication", "event")
KIND_FIELDS = {5, 6, 8, 13, 17, 18, 20, 27}  # subjects where "an X is a kind of Y" makes a sensible sentence
MIN_NOUN_COUNT, MIN_SYNONYM_COUNT, MIN_VERB_COUNT, MIN_ADJECTIVE_COUNT = 2, 5, 3, 2  # occurrences in tagged text
N_WORDNET_ANIMALS = 150

Pairs = list[tuple[str, str]]


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Words by use. Every pair reads (word, what is said of it)."""

    things: list[str]
    abstract: list[str]
    persons: list[str]
    food: list[str]
    animals: list[str]
    opposites: Pairs
    synonyms: Pairs
    kinds: Pairs
    noun_definitions: Pairs
    verb_definitions: Pairs


def _spaced(word: str) -> str:
    return word.replace("_", " ")


def _kinds(word: str, synset: Synset, synsets: dict[str, Synset]) -> Pairs:
    if synset.field not in KIND_FIELDS:
        return []
    parents = [_spaced(synsets[p.offset].words[0]) for p in synset.pointers if p.symbol == "@" and p.offset in synsets]
    return [(word, parent) for parent in parents if re.fullmatch("[a-z ]+", parent)]


def _synonyms(word: str, synset: Synset) -> Pairs:
    others = [_spaced(other) for other in synset.words if re.fullmatch("[a-z_]+", other) and _spaced(other) != word]
    return [(word, others[0])] if others else []


def _opposites(folder: Path, count: dict[tuple[str, str], int]) -> Pairs:
    entries, synsets = wordnet.read(folder, "adj")
    pairs: Pairs = []
    for word, entry in entries.items():
        frequency = count[word, ADJECTIVE] + count[word, ADJECTIVE_SATELLITE]
        if not (entry.n_tagged and frequency >= MIN_ADJECTIVE_COUNT and word.isalpha()):
            continue
        synset = synsets[entry.offsets[0]]
        if synset.words[0].lower() != word:  # "!" pointers belong to single words; take the head word's only
            continue
        for pointer in synset.pointers:
            if pointer.symbol == "!" and pointer.part_of_speech in "as" and pointer.offset in synsets:
                opposite = synsets[pointer.offset].words[0]
                if opposite.isalpha():
                    pairs.append((word, opposite))
    return pairs


def _verb_definitions(folder: Path, count: dict[tuple[str, str], int]) -> Pairs:
    entries, synsets = wordnet.read(folder, "verb")
    glosses = {w: synsets[e.offsets[0]].gloss for w, e in entries.items() if e.n_tagged and w.isalpha()}
    return [
        (word, gloss)
        for word, gloss in glosses.items()
        if count[word, VERB] >= MIN_VERB_COUNT and 8 < len(gloss) < 90 and "(" not in gloss
    ]


def load_lexicon(facts: Facts, folder: Path = wordnet.DEFAULT_FOLDER) -> Lexicon:
    """Build the word lists from the WordNet files in `folder`."""
    excluded = set(read_toml("words.toml")["excluded"])
    count = wordnet.counts(folder)
    entries, synsets = wordnet.read(folder, "noun")
    nouns: list[tuple[str, int, Synset]] = []
    by_field: dict[str, list[str]] = {name: [] for name in NOUN_FIELDS.values()}
    for entry_word, entry in entries.items():
        frequency, synset = count[entry_word, NOUN], synsets[entry.offsets[0]]
        is_plain = re.fullmatch(r"[a-z]+(_[a-z]+)?", entry_word) and len(entry_word) > 2
        is_frequent = entry.n_tagged and frequency >= MIN_NOUN_COUNT
        if is_plain and is_frequent and synset.field in NOUN_FIELDS and not set(entry_word.split("_")) & excluded:
            nouns.append((_spaced(entry_word), frequency, synset))
            by_field[NOUN_FIELDS[synset.field]].append(_spaced(entry_word))
    named = facts.lists
    animals = [*named["animals"], *named["birds"], *named["sea animals"], *named["insects"]]
    return Lexicon(
        things=sorted({word for field in CONCRETE for word in by_field[field]}),
        abstract=sorted({word for field in ABSTRACT for word in by_field[field]}),
        persons=sorted(set(by_field["person"])),
        food=sorted({*by_field["food"], *named["fruits"], *named["vegetables"]}),
        animals=sorted({*animals, *by_field["animal"][:N_WORDNET_ANIMALS]}),
        opposites=_opposites(folder, count),
        synonyms=[pair for w, n, s in nouns if n >= MIN_SYNONYM_COUNT for pair in _synonyms(w, s)],
        kinds=[pair for w, _, s in nouns for pair in _kinds(w, s, synsets)],
        noun_definitions=[(w, s.gloss) for w, _, s in nouns if 15 < len(s.gloss) < 110 and "(" not in s.gloss],
        verb_definitions=_verb_definitions(folder, count),
    )
