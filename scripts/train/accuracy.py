"""Step 8, with MLX: how many of the facts that were in the corpus the quantised model repeats, greedily.

Owns  which questions are asked and what counts as a hit (the expected text occurs in the answer).
Reads an MLX model folder and the facts under data/.
Never measures generalisation: these wordings and facts were in the training text.

    python -m scripts.train.accuracy models/sparkle-46m
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import click
import mlx.core as mx
from mlx_lm import generate, load

from scripts.train.exercises import Exercise
from scripts.train.facts import Facts, load_facts

N_CAPITALS, N_SUMS, N_WORDS, N_QUESTIONS = 40, 30, 25, 40
MAX_TOKENS = 60
SEED = 99


def exercises(facts: Facts) -> dict[str, list[Exercise]]:
    """Return (question, text that the answer must hold) by kind."""
    rng = random.Random(SEED)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(N_SUMS)]
    factors = [(rng.randrange(2, 13), rng.randrange(2, 13)) for _ in range(N_SUMS)]
    words = rng.sample(list(facts.translations.items()), N_WORDS)
    return {
        "capitals": [
            (f"What is the capital of {c}?", k) for c, k in rng.sample(list(facts.capitals.items()), N_CAPITALS)
        ],
        "sums below 100": [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs],
        "differences": [(f"What is {max(p)} - {min(p)}?", str(max(p) - min(p))) for p in pairs],
        "products to 12 x 12": [(f"What is {a} * {b}?", str(a * b)) for a, b in factors],
        "words to French": [(f"Translate '{word}' to French.", foreign[0]) for word, foreign in words],
        "questions": [(q.wordings[0], q.answer) for q in rng.sample(facts.questions, N_QUESTIONS)],
    }


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print hits and questions by kind for the model in FOLDER."""
    model, tokenizer = load(str(folder))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)

    def answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return str(generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS))

    for kind, asked in exercises(load_facts()).items():
        missed = [
            {"question": q, "answer": a} for q, expected in asked if expected.lower() not in (a := answer(q)).lower()
        ]
        click.echo(json.dumps({"kind": kind, "hits": len(asked) - len(missed), "of": len(asked), "missed": missed[:3]}))


if __name__ == "__main__":
    main()
