"""Step 4: filter the samples, train the tokenizer, write the token arrays.

Owns  the split into training and held-out documents.
Reads samples (step 3) and curated dialogues (step 2), JSON lines.
Writes OUT/tokenizer.json, OUT/{train,val}_{tokens,starts}.npy, OUT/val.json, OUT/examples.txt.
Never shows a held-out document to the trainer.

    python -m scripts.train.corpus OUT --samples samples.jsonl --curated curated.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from scripts.train import chat, tokens
from scripts.train.filters import Sample, conversation
from scripts.train.prompts import Prompt

CHUNK = 4000  # lines that a worker takes at a time
TOKENIZER_TEACHER, TOKENIZER_CURATED = 60_000, 30_000  # documents that the tokenizer is trained on
HELD_OUT_TEACHER, HELD_OUT_CURATED = 2000, 1000  # documents, at most a twentieth of each kind
N_EXAMPLES = 100
SEED = 1


def _chunks(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8") as file:
        while chunk := list(islice(file, CHUNK)):
            yield chunk


def teacher_texts(lines: list[str]) -> list[str]:
    """Return the conversations among `lines` that pass the filters."""
    records = map(json.loads, lines)
    samples = (Sample(Prompt(**record.pop("prompt")), **record) for record in records)
    return [text for text in map(conversation, samples) if text]


def curated_texts(lines: list[str]) -> list[str]:
    return [chat.render(record["messages"], record.get("tools")) for record in map(json.loads, lines)]


def split(texts: list[str], n_held_out: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return (held out, training), both in random order."""
    shuffled = [texts[i] for i in rng.permutation(len(texts))]
    n_held_out = min(n_held_out, len(texts) // 20)
    return shuffled[:n_held_out], shuffled[n_held_out:]


def build(out: Path, teacher: list[str], curated: list[str], vocab_size: int, tokenizer_path: Path | None) -> None:
    """Write tokenizer, arrays and held-out texts to `out`."""
    rng = np.random.default_rng(SEED)
    if tokenizer_path is None:
        chosen = [teacher[i] for i in rng.permutation(len(teacher))[:TOKENIZER_TEACHER]]
        chosen += [curated[i] for i in rng.permutation(len(curated))[:TOKENIZER_CURATED]]
        tokenizer = tokens.train_tokenizer(chosen, vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.save(str(out / "tokenizer.json"))
    teacher_held_out, teacher_train = split(teacher, HELD_OUT_TEACHER, rng)
    curated_held_out, curated_train = split(curated, HELD_OUT_CURATED, rng)
    held_out = {"teacher": teacher_held_out, "curated": curated_held_out}
    (out / "val.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=0), encoding="utf-8")
    for name, texts in (("val", teacher_held_out + curated_held_out), ("train", teacher_train + curated_train)):
        ids, starts = tokens.encode(tokenizer, texts)
        tokens.save(out, name, ids, starts)
        said_frac = (ids >= tokens.ASSISTANT_FLAG).mean()
        chars_per_token = sum(map(len, texts)) / len(ids)
        click.echo(
            f"{name}: {len(texts)} documents, {len(ids) / 1e6:.2f}M tokens, {chars_per_token:.2f} characters a token, "
            f"{said_frac:.0%} said by the assistant"
        )
    examples = teacher_train[:N_EXAMPLES] + curated_train[:N_EXAMPLES]
    (out / "examples.txt").write_text("\n=====\n".join(examples), encoding="utf-8")


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--samples", required=True, type=click.Path(exists=True, path_type=Path), help="Output of step 3.")
@click.option("--curated", required=True, type=click.Path(exists=True, path_type=Path), help="Output of step 2.")
@click.option("--vocab", default=6144, show_default=True, type=click.IntRange(300, tokens.MAX_VOCAB - 1))
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Use this one; train none.")
@click.option("--workers", type=int, help="Processes; default: one for each core.")
def main(out: Path, samples: Path, curated: Path, vocab: int, tokenizer: Path | None, workers: int | None) -> None:
    """Write the training corpus to the folder OUT."""
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        teacher_part = [text for part in pool.map(teacher_texts, _chunks(samples)) for text in part]
        curated_part = [text for part in pool.map(curated_texts, _chunks(curated)) for text in part]
    click.echo(f"kept {len(teacher_part)} conversations of the teacher, {len(curated_part)} curated dialogues")
    build(out, teacher_part, curated_part, vocab, tokenizer)


if __name__ == "__main__":
    main()
