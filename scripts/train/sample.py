"""Step 3: let the teacher answer the prompts for a given time (one JSON object a line).

Owns  the system prompt and the length limits of the sampling run.
Reads prompts (step 1) and the teacher's GGUF file.
Never keeps the system prompt: it shapes the answers and is no part of the text.

    python -m scripts.train.sample PROMPTS.jsonl SAMPLES.jsonl --teacher model.gguf --seconds 330
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer

from scripts.train import chat, teacher
from scripts.train.filters import Sample
from scripts.train.prompts import Prompt
from scripts.train.sampler import Forced, Sampler, Settings

SYSTEM = "You are a helpful assistant. You give short, clear and correct answers."
MAX_FIRST, MAX_SECOND = 64, 40  # tokens of a forced part; longer prompts are skipped
STEPS_PER_SECOND = 160  # more than one H200 does; sizes the log
ROUND = 200  # steps between looks at the clock
ORDER_SEED = 3


def forced_texts(prompt: Prompt) -> tuple[str, str]:
    """Return what is forced before each of the two sampled turns ("" = there is no second)."""
    first = chat.TURN_START + "user\n" + prompt.user
    close = chat.TURN_END + "\n"  # begins with the teacher's EOS
    answer = chat.TURN_START + "assistant\n"
    if prompt.is_open:
        return first, close + answer
    return first + close + answer, close + chat.prompt(prompt.follow_up) if prompt.follow_up else ""


def load_prompts(path: Path, tokenizer: Tokenizer) -> tuple[list[Prompt], list[list[int]], list[list[int]]]:
    """Return prompts in random order with their forced tokens, too long ones left out."""
    prompts = [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [prompts[i] for i in np.random.default_rng(ORDER_SEED).permutation(len(prompts))]
    texts = zip(*map(forced_texts, prompts), strict=True)
    first, second = (
        [encoding.ids for encoding in tokenizer.encode_batch_fast(list(part), add_special_tokens=False)]
        for part in texts
    )
    kept = [i for i in range(len(prompts)) if len(first[i]) <= MAX_FIRST and len(second[i]) <= MAX_SECOND]
    return [prompts[i] for i in kept], [first[i] for i in kept], [second[i] for i in kept]


def run(sampler: Sampler, seconds: float) -> int:
    """Sample until the time or the log is used up; return the steps made."""
    sampler.run(ROUND)
    torch.cuda.synchronize()
    n_steps, start = ROUND, time.monotonic()
    while time.monotonic() - start < seconds and n_steps + ROUND <= sampler.settings.max_steps:
        sampler.run(ROUND)
        torch.cuda.synchronize()
        n_steps += ROUND
    rate = sampler.settings.slots * (n_steps - ROUND) / (time.monotonic() - start)
    click.echo(f"{n_steps} steps, {rate / 1e3:.0f}k positions/s, {int(sampler.n_started)} prompts started")
    return n_steps


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--teacher", "gguf", required=True, type=click.Path(exists=True, path_type=Path), help="GGUF file.")
@click.option("--seconds", default=330.0, show_default=True, help="Time to sample, compilation not counted.")
def main(prompts: Path, out: Path, gguf: Path, seconds: float) -> None:
    """Let the teacher answer PROMPTS; write what it says to OUT."""
    weights, tokenizer = teacher.load(gguf, "cuda")
    click.echo(f"attention kernel: relative error {teacher.check_attention():.1e}")
    kept, first, second = load_prompts(prompts, tokenizer)
    prefix = tokenizer.encode(chat.turn("system", SYSTEM), add_special_tokens=False).ids
    settings = Settings(max_steps=int(seconds * STEPS_PER_SECOND) + 2 * ROUND)
    sampler = Sampler(weights, Forced.of(first, MAX_FIRST), Forced.of(second, MAX_SECOND), prefix, settings, "cuda")
    run(sampler, seconds)
    n_samples = n_tokens = 0
    with out.open("w", encoding="utf-8") as file:
        for index, turns in sampler.conversations():
            ended = [bool(turn) and turn[-1] == teacher.EOS for turn in turns]
            texts = tokenizer.decode_batch(turns, skip_special_tokens=True)
            file.write(json.dumps(asdict(Sample(kept[index], texts, ended)), ensure_ascii=False) + "\n")
            n_samples += 1
            n_tokens += sum(map(len, turns))
    click.echo(f"{n_samples} conversations, {n_tokens / 1e6:.1f}M sampled tokens")


if __name__ == "__main__":
    main()
