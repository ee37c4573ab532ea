"""Questions whose answer can be computed or looked up: arithmetic, lists, capitals, translations, words, functions.

Owns  the wordings of these questions and answers.
Reads Facts and Lexicon, data/functions.toml for the Python functions, words.toml for names.
Never states what the program does not know to be so; what it knows is WordNet's and the data files' word.

Every method returns (question, answer). The draws come from one random.Random, so a seed gives the same exercises.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from scripts.train.facts import Facts, read_toml
from scripts.train.lexicon import Lexicon, with_article

Exercise = tuple[str, str]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
OBJECTS = ["apples", "books", "coins", "pencils", "cookies", "cards", "flowers", "oranges", "balls", "stickers"]
LANGUAGES = ("French", "Spanish", "German")
FAMOUS = ("France", "the United States", "Japan", "China")  # asked far more often than the rest
N_NEAR = 12  # the first countries of the list, asked more often too


def in_words(n: int) -> str:
    """Return 0..999 in English words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    return ONES[n // 100] + " hundred" + (" and " + in_words(n % 100) if n % 100 else "")


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def joined(items: list[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


class Exercises:
    """Draws exercises; holds the random stream that curated.py shares."""

    def __init__(self, facts: Facts, lexicon: Lexicon, rng: random.Random) -> None:
        self.facts, self.lexicon, self.rng = facts, lexicon, rng
        self._names: list[str] = read_toml("words.toml")["names"]
        self._functions = read_toml("functions.toml")
        self._questions = [(wording, q.answer) for q in facts.questions for wording in q.wordings]
        self._capitals = list(facts.capitals.items())
        self._elements = [(name, symbol, number) for name, (symbol, number) in facts.elements.items()]
        self._small: list[Callable[[], Exercise]] = [
            self._day_after, self._day_before, self._month_after, self._number_words, self._parity, self._larger,
            self._sort, self._element, self._spelling, self._count, self._week, self._year, self._first_letter,
            self._square,
        ]  # fmt: skip

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def question(self) -> Exercise:
        """One of the hand-written questions; every wording is equally likely."""
        return self.rng.choice(self._questions)

    def arithmetic(self) -> Exercise:
        rng, kind = self.rng, self.rng.random()
        limit = rng.choice((10, 10, 20, 50, 100, 100))
        a, b = rng.randrange(limit + 1), rng.randrange(limit + 1)
        if kind < 0.4:
            sign, word, result = "+", "plus", a + b
        elif kind < 0.65:
            a, b = max(a, b), min(a, b)
            sign, word, result = "-", "minus", a - b
        elif kind < 0.88:
            a, b = rng.randrange(13), rng.randrange(13)
            sign, word, result = self.pick("*", "×", "x"), "times", a * b
        else:
            b, result = rng.randrange(1, 13), rng.randrange(13)
            a, sign, word = b * result, "/", "divided by"
        term = f"{a} {sign} {b}"
        question = self.pick(
            f"What is {term}?", f"What is {term}?", term, f"{term} =", f"{term}=?", f"{a}{sign}{b}", f"What's {term}?",
            f"Calculate {term}.", f"What is {a} {word} {b}?", f"How much is {term}?", f"Compute {term}",
        )  # fmt: skip
        answers = (
            f"{term} = {result}.",
            f"{term} = {result}",
            f"{a} {word} {b} is {result}.",
            f"The answer is {result}.",
        )
        return question, self.pick(*answers)

    def word_problem(self) -> Exercise:
        giver, taker = self.pick(*self._names), self.pick(*self._names)
        objects = self.pick(*OBJECTS)
        a, b = self.rng.randrange(2, 20), self.rng.randrange(2, 20)
        if self.rng.random() < 0.5:
            question = f"{giver} has {a} {objects} and gets {b} more. How many {objects} does {giver} have?"
            return question, f"{giver} has {a} + {b} = {a + b} {objects}."
        a, b = max(a, b) + 1, min(a, b)
        question = f"{giver} has {a} {objects} and gives {b} to {taker}. How many {objects} are left?"
        return question, f"{giver} has {a} - {b} = {a - b} {objects} left."

    def listing(self) -> Exercise:
        rng = self.rng
        name = rng.choice(list(self.facts.lists))
        members = self.facts.lists[name]
        n = rng.randrange(2, min(8, len(members)) + 1) if rng.random() < 0.7 else 3
        chosen = rng.sample(members, n)
        number = in_words(n)
        question = self.pick(
            f"List {number} {name}.", f"List {n} {name}.", f"Name {number} {name}.", f"Give me {number} {name}.",
            f"Can you name {number} {name}?", f"Tell me {number} {name}.",
        )  # fmt: skip
        numbered = "\n".join(f"{i}. {capitalised(member)}" for i, member in enumerate(chosen, 1))
        if rng.random() < 0.6:
            return question, f"Here are {number} {name}:\n\n{numbered}"
        return question, numbered if rng.random() < 0.5 else capitalised(joined(chosen)) + "."

    def capital(self) -> Exercise:
        country, city = self.rng.choice(self._capitals)
        if self.rng.random() < 0.12:
            famous = [(name, self.facts.capitals[name]) for name in FAMOUS]
            country, city = self.rng.choice(self._capitals[:N_NEAR] + famous)
        kind = self.rng.random()
        if kind < 0.75:
            question = self.pick(
                f"What is the capital of {country}?", f"What is the capital of {country}?",
                f"What's the capital of {country}?", f"Capital of {country}?", f"what is the capital of {country}",
                f"Which city is the capital of {country}?", f"Tell me the capital of {country}.",
                f"Do you know the capital of {country}?", f"name the capital of {country}",
            )  # fmt: skip
            known = f"The capital of {country} is {city}."
            return question, self.pick(known, known, f"{city} is the capital of {country}.")
        if kind < 0.88:
            question = self.pick(
                f"{city} is the capital of which country?", f"In which country is {city}?", f"Where is {city}?"
            )
            return question, self.pick(
                f"{city} is the capital of {country}.", f"{city} is in {country}. It is the capital."
            )
        continent = self.rng.choice(list(self.facts.continents))
        place = self.rng.choice(self.facts.continents[continent])
        question = self.pick(f"On which continent is {place}?", f"What continent is {place} in?", f"Where is {place}?")
        return question, f"{place} is in {continent}."

    def translation(self) -> Exercise:
        word = self.rng.choice(list(self.facts.translations))
        i = self.rng.choice((0, 1, 2, 0, 1))  # French and Spanish twice as often as German
        foreign, language = self.facts.translations[word][i], LANGUAGES[i]
        question = self.pick(
            f"Translate '{word}' to {language}.", f'Translate "{word}" into {language}.',
            f"How do you say '{word}' in {language}?", f"What is '{word}' in {language}?",
            f"What is the {language} word for '{word}'?", f"Say '{word}' in {language}.",
        )  # fmt: skip
        known = f"'{capitalised(word)}' in {language} is '{foreign}'."
        return question, self.pick(known, f"In {language}, '{word}' is '{foreign}'.", foreign)

    def function(self) -> Exercise:
        """A small Python function from data/functions.toml under one of several sets of names."""
        names, entry = self._functions["names"], self.rng.choice(self._functions["function"])
        a, b = self.rng.choice(names["pairs"])
        slots = {"a": a, "b": b} | {slot: self.pick(*names[slot]) for slot in ("items", "text", "number")}

        def named(text: str) -> str:
            for slot, name in slots.items():
                text = text.replace("{" + slot + "}", name)
            return text

        task, call = entry["task"], entry["call"]
        question = self.pick(
            f"Write a Python function that {task}.", f"Write a Python function that {task}.",
            f"Write a function that {task}.", f"Can you write a Python function that {task}?",
            f"Python function that {task}", f"Please write a function in Python that {task}.",
            f"Show me a Python function that {task}.", f"How do I write a Python function that {task}?",
        )  # fmt: skip
        body = named(entry["body"]).strip("\n").replace("\n", "\n    ")
        code = f"```python\ndef {entry['name']}({named(entry['arguments'])}):\n    {body}\n```"
        head = self.pick(
            f"Here is a Python function that {task}:", "Here is a simple Python function:",
            "Sure! Here is the function:", f"This function {task}:",
        )  # fmt: skip
        result = entry.get("result")
        use = f"For example, `{call}` returns `{result}`." if result else f"You can call it with `{call}`."
        return question, f"{head}\n\n{code}{self.pick('', chr(10) * 2 + use)}"

    def word(self) -> Exercise:
        """A question about one word, answered from WordNet."""
        kind, lexicon, rng = self.rng.random(), self.lexicon, self.rng
        if kind < 0.2:
            a, b = rng.choice(lexicon.opposites)
            question = self.pick(
                f"What is the opposite of '{a}'?", f"What is the opposite of {a}?", f"Give me an antonym of '{a}'."
            )
            return question, self.pick(f"The opposite of '{a}' is '{b}'.", f"The opposite of {a} is {b}.")
        if kind < 0.35:
            a, b = rng.choice(lexicon.synonyms)
            question = self.pick(f"What is a synonym of '{a}'?", f"Give me another word for '{a}'.")
            return question, f"A synonym of '{a}' is '{b}'."
        if kind < 0.55:
            a, b = rng.choice(lexicon.kinds)
            question = self.pick(f"What kind of thing is {with_article(a)}?", f"What is {with_article(a)}?")
            return question, f"{with_article(a).capitalize()} is a kind of {b}."
        if kind < 0.65:
            a, b = rng.choice(lexicon.kinds)
            other = rng.choice(lexicon.kinds)[1] if rng.random() < 0.5 else b
            verdict = "Yes" if other == b else "No"
            return f"Is {with_article(a)} {with_article(other)}?", f"{verdict}, {with_article(a)} is {with_article(b)}."
        if kind < 0.85:
            a, gloss = rng.choice(lexicon.noun_definitions)
            question = self.pick(
                f"What does '{a}' mean?", f"Define '{a}'.", f"What is the meaning of the word '{a}'?",
                f"Give me a definition of {a}.",
            )  # fmt: skip
            return question, self.pick(f"'{a.capitalize()}' means {gloss}.", f"The word '{a}' means: {gloss}.")
        a, gloss = rng.choice(lexicon.verb_definitions)
        question = self.pick(f"What does 'to {a}' mean?", f"What does the verb '{a}' mean?")
        return question, f"'To {a}' means to {gloss}."

    def small(self) -> Exercise:
        """Days, months, numbers, elements, letters."""
        return self.rng.choice(self._small)()

    def _day_after(self) -> Exercise:
        i = self.rng.randrange(7)
        return f"What day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."

    def _day_before(self) -> Exercise:
        i = self.rng.randrange(7)
        return f"What day comes before {DAYS[i]}?", f"{DAYS[i - 1]} comes before {DAYS[i]}."

    def _month_after(self) -> Exercise:
        i = self.rng.randrange(12)
        return f"What month comes after {MONTHS[i]}?", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}."

    def _number_words(self) -> Exercise:
        n = self.rng.randrange(1000)
        return self.pick(f"Write {n} in words.", f"How do you write {n} in words?"), in_words(n).capitalize() + "."

    def _parity(self) -> Exercise:
        n = self.rng.randrange(300)
        question = self.pick(f"Is {n} even or odd?", f"Is {n} an even number?")
        return question, f"{n} is {'an odd' if n % 2 else 'an even'} number."

    def _larger(self) -> Exercise:
        a, b = self.rng.randrange(200), self.rng.randrange(200)
        answer = f"{max(a, b)} is larger than {min(a, b)}." if a != b else "They are equal."
        return f"Which is larger, {a} or {b}?", answer

    def _sort(self) -> Exercise:
        numbers = [self.rng.randrange(60) for _ in range(self.rng.randrange(3, 6))]
        listed = ", ".join(map(str, numbers))
        question = self.pick(f"Sort these numbers: {listed}", f"Put these numbers in order: {listed}.")
        return question, ", ".join(map(str, sorted(numbers)))

    def _element(self) -> Exercise:
        name, symbol, number = self.rng.choice(self._elements)
        return self.rng.choice((
            (f"What is the chemical symbol for {name}?", f"The chemical symbol for {name} is {symbol}."),
            (f"What is the atomic number of {name}?", f"The atomic number of {name} is {number}."),
            (f"Which element has the symbol {symbol}?", f"{symbol} is the symbol for {name}."),
        ))  # fmt: skip

    def _spelling(self) -> Exercise:
        word = self.rng.choice(self.lexicon.things + self.lexicon.animals)
        question = self.pick(f"How do you spell {word}?", f"Spell '{word}'.")
        letters = "-".join(word.replace(" ", "")).upper()
        return question, f"{word} is spelled {letters}." if len(word) < 10 else f"{word.capitalize()}."

    def _count(self) -> Exercise:
        n = self.rng.randrange(4, 11)
        return f"Count to {in_words(n)}.", ", ".join(map(str, range(1, n + 1))) + "."

    def _week(self) -> Exercise:
        return "What are the days of the week?", f"The days of the week are {joined(DAYS)}."

    def _year(self) -> Exercise:
        return "What are the months of the year?", f"The months of the year are {joined(MONTHS)}."

    def _first_letter(self) -> Exercise:
        word = self.rng.choice(self.lexicon.things)
        return f"What is the first letter of '{word}'?", f"The first letter of '{word}' is {word[0].upper()}."

    def _square(self) -> Exercise:
        n = self.rng.randrange(2, 10)
        return f"What is {n} squared?", f"{n} squared is {n * n}."
