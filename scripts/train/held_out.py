"""Step 7, on a CPU: held-out perplexity on assistant tokens, float32.

Owns  the choice of documents and what counts as a token the assistant said.
Reads Hugging Face checkpoint folders (a quantised model first goes through scripts/dequantise.py) and val.json.
Never batches: every document is a row of its own.

    python -m scripts.train.held_out DATA/val.json FOLDER [FOLDER ...]
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer

from scripts.train import checkpoint, tokens
from scripts.train.model import Context, Model

N_DOCUMENTS = 150  # of each kind
MAX_TOKENS = 512
SEED = 2


def score(model: Model, tokenizer: Tokenizer, texts: list[str]) -> dict[str, float]:
    """Return perplexity and top-1 accuracy over the assistant's tokens of `texts`."""
    flagged, starts = tokens.encode(tokenizer, texts)
    n_tokens = n_hits = 0
    loss = 0.0
    for start, end in pairwise(starts.tolist()):
        document = flagged[start : min(end, start + MAX_TOKENS)]
        ids = torch.from_numpy((document & (tokens.ASSISTANT_FLAG - 1)).astype(np.int64))
        said = torch.from_numpy(document[1:] >= tokens.ASSISTANT_FLAG)
        context = Context.of(torch.zeros(1, len(ids) - 1, dtype=torch.int16))
        hidden, _ = model.trunk(ids[None, :-1], context)
        log_probability = model.logits(hidden)[0].log_softmax(-1)[said]
        target = ids[1:][said]
        loss -= float(log_probability.gather(1, target[:, None]).double().sum())
        n_hits += int((log_probability.argmax(-1) == target).sum())
        n_tokens += len(target)
    return {"perplexity": math.exp(loss / n_tokens), "top1": n_hits / n_tokens, "tokens": n_tokens}


@click.command()
@click.argument("held_out", type=click.Path(exists=True, path_type=Path))
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(held_out: Path, folders: tuple[Path, ...]) -> None:
    """Print held-out figures of each checkpoint FOLDER."""
    kinds: dict[str, list[str]] = json.loads(held_out.read_text(encoding="utf-8"))
    rng = np.random.default_rng(SEED)
    chosen = {kind: [texts[i] for i in rng.permutation(len(texts))[:N_DOCUMENTS]] for kind, texts in kinds.items()}
    for folder in folders:
        model, tokenizer = checkpoint.load(folder)
        with torch.no_grad():
            figures = {kind: score(model, tokenizer, texts) for kind, texts in chosen.items()}
        click.echo(json.dumps({"folder": str(folder), **figures}))


if __name__ == "__main__":
    main()
