"""Step 6: answers to read, MTP acceptance and, on request, routing traces.

Owns  the evaluation prompts and how acceptance is counted.
Reads a checkpoint folder of step 5 and the held-out documents of step 4.
Never uses a KV cache: texts are short, every token recomputes its row (minutes on a GPU, hours on a CPU).

    python -m scripts.train.evaluate OUT/hf-bf16 DATA/val.json [--traces traces.npz]
"""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.train import chat, checkpoint
from scripts.train.model import Context, Model, Routing
from scripts.train.packing import EXTRA

PROMPTS = [
    "Hello", "Hi, how are you?", "Who are you?", "What is the capital of France?", "Write a short story about a cat.",
    "Write a Python function that adds two numbers.", "What is 7 * 8?", "What is 12 + 35?",
    "Explain photosynthesis in one sentence.", "Why is the sky blue?", "List three fruits.",
    "How do I make a cup of tea?", "Tell me a joke.", "Write a haiku about the sea.", "What is the opposite of hot?",
    "Translate 'thank you' to French.", "Give me three tips to sleep better.", "What is machine learning?",
    "I feel sad today.", "Write an email to my boss about a day off.", "What is a penguin?",
    "Who wrote Romeo and Juliet?", "Tell me about volcanoes.",
    "Write a Python function that checks if a number is prime.", "What is the largest planet?",
    "Write a poem about autumn.", "How does a bicycle work?", "你好", "What's the weather today?", "Thanks!",
]  # fmt: skip
TEMPERATURE, TOP_K, TOP_P = 0.7, 20, 0.8
STRIDE = 64  # lengths are rounded up to the delta rule's chunk
N_LONG, N_SHORT = 72, 24  # held-out prompts: the teacher's, curated ones
MAX_CHARS, SHORT_CHARS = 900, 420
DEPTHS = 3
SEED = 5


def _padded(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.long)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return out.to(device)


def _one_document(ids: Tensor) -> Context:
    return Context.of(torch.zeros(ids.shape, dtype=torch.int16, device=ids.device))


def _draw(logits: Tensor, generator: Any) -> Tensor:
    """Draw one token a row: temperature, top-k, top-p."""
    logits = logits / TEMPERATURE
    logits[logits < logits.topk(TOP_K).values[:, -1:]] = float("-inf")
    probability, order = torch.sort(logits.softmax(-1), descending=True)
    probability[(probability.cumsum(-1) - probability) > TOP_P] = 0
    return order.gather(1, torch.multinomial(probability, 1, generator=generator))[:, 0]


def generate(model: Model, prompts: list[list[int]], n_tokens: int, end: int, greedy: bool) -> list[list[int]]:
    """Return prompts with their answers, up to and including `end`."""
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(0)
    length = torch.tensor([len(ids) for ids in prompts], device=device)
    ids = _padded(prompts, int(length.max()) + n_tokens + STRIDE, device)
    rows = torch.arange(len(prompts), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(n_tokens):
        width = -(-int(length.max()) // STRIDE) * STRIDE
        hidden, _ = model.trunk(ids[:, :width], _one_document(ids[:, :width]), torch.bfloat16)
        logits = model.logits(hidden[rows, length - 1]).float()
        token = logits.argmax(-1) if greedy else _draw(logits, generator)
        ids[rows, length] = torch.where(done, ids[rows, length], token)  # a finished row is left alone
        length = length + (~done).long()
        done = done | (token == end)
        if done.all():
            break
    return [row[:n].tolist() for row, n in zip(ids, length.tolist(), strict=True)]


def acceptance(drafted: list[Any], texts: list[list[int]], n_prompt: list[int]) -> dict[str, Any]:
    """Return how often drafts equal the greedy text.

    drafted[d][row, t]: the draft of depth d + 1 for token t + 2 + d. Prefix rule: a depth counts as accepted only if
    all depths before it were.
    """
    hits: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for row, ids in enumerate(texts):
        for t in range(n_prompt[row] - 1, len(ids) - 1):  # ids[t + 1] is the token that the model just produced
            accepted = True
            for depth in range(min(DEPTHS, len(ids) - t - 2)):
                accepted = accepted and int(drafted[depth][row, t]) == ids[t + 2 + depth]
                hits[depth].append(accepted)
    share = [float(np.mean(depth)) for depth in hits]
    conditional = [share[0], *(after / before for before, after in pairwise(share))]
    return {"positions": len(hits[0]), "prefix": share, "conditional": conditional, "tokens_per_step": 1 + sum(share)}


def held_out_prompts(held_out: dict[str, list[str]]) -> list[str]:
    """Return beginnings of held-out conversations; every third goes up to the last answer, the others to the first."""
    texts = [text for kind in ("teacher", "curated") for text in held_out[kind] if len(text) < MAX_CHARS]
    texts = [texts[i] for i in np.random.default_rng(SEED).permutation(len(texts))]
    chosen = [text for text in texts if len(text) > SHORT_CHARS][:N_LONG]
    chosen += [text for text in texts if len(text) <= SHORT_CHARS][:N_SHORT]
    header = chat.TURN_START + "assistant\n"
    ends = [(t.rindex if i % 3 == 0 else t.index)(header) + len(header) for i, t in enumerate(chosen)]
    return [text[:end] for text, end in zip(chosen, ends, strict=True)]


def show_answers(model: Model, tokenizer: Tokenizer, end: int) -> None:
    prompts = [tokenizer.encode(chat.prompt(user), add_special_tokens=False).ids for user in PROMPTS]
    for greedy in (True, False):
        click.echo(f"##### {'greedy' if greedy else f'temperature {TEMPERATURE}'}")
        texts = generate(model, prompts, 220, end, greedy)
        for user, prompt, ids in zip(PROMPTS, prompts, texts, strict=True):
            click.echo(f"Q: {user}\nA: {tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)!r}")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("held_out", type=click.Path(exists=True, path_type=Path))
@click.option("--traces", type=click.Path(dir_okay=False, path_type=Path), help="Write routing traces here (npz).")
def main(folder: Path, held_out: Path, traces: Path | None) -> None:
    """Print answers and MTP acceptance of the checkpoint in FOLDER."""
    model, tokenizer = checkpoint.load(folder)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    (end,) = tokenizer.encode(chat.TURN_END, add_special_tokens=False).ids
    with torch.no_grad():
        show_answers(model, tokenizer, end)
        beginnings = held_out_prompts(json.loads(held_out.read_text(encoding="utf-8")))
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in beginnings]
        texts = generate(model, prompts, 240, end, greedy=True)
        width = -(-(max(map(len, texts)) + EXTRA) // STRIDE) * STRIDE
        ids = _padded(texts, width + EXTRA, model.embed.weight.device)
        context = _one_document(ids[:, :width])
        hidden, record = model.trunk(ids[:, :width], context, torch.bfloat16)
        drafts: list[Routing] = []
        states = model.draft(hidden, ids, context, DEPTHS, drafts)
        drafted = [model.logits(state).argmax(-1).cpu() for state in states]
    lengths = [len(prompt) for prompt in prompts]
    click.echo(json.dumps({"acceptance": acceptance(drafted, texts, lengths)}, indent=1))
    if traces:
        layers = [routing.experts.view(len(texts), width, -1) for routing in [*record, drafts[0]]]
        experts = torch.stack(layers, 2).cpu().numpy().astype(np.uint8)  # (text, token, layer, k); the MTP layer last
        arrays = {f"e{i}": experts[i, : len(text)] for i, text in enumerate(texts)}
        all_ids, ends = np.array(list(chain(*texts)), np.int32), np.array([len(text) for text in texts])
        np.savez_compressed(traces, prompt_len=np.array(lengths), tokens=all_ids, lens=ends, **arrays)


if __name__ == "__main__":
    main()
