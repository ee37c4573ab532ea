"""Step 5: train the model for a given time and write it as a Hugging Face checkpoint.

Owns  the losses, the schedule and the loop.
Reads the token arrays and the tokenizer of step 4.
Writes OUT/hf-bf16 and OUT/history.json.
Never runs over its time: the schedule follows the clock, so the learning rate has decayed when the time is up.

    python -m scripts.train.train DATA OUT --seconds 900 [--set rows=128 ...]
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from scripts.train import checkpoint, tokens
from scripts.train.model import Config, Context, Model
from scripts.train.optimiser import Muon, group_parameters
from scripts.train.packing import EXTRA, build_rows
from scripts.train.tokens import ASSISTANT_FLAG

USER_WEIGHT = 0.1  # loss weight of tokens that the assistant did not say
WARM_UP_STEPS = 100
COMPILE_STEPS = 3  # before the clock starts; the second runs the MTP rollout, so that it is compiled too
MAX_DEPTH = 3
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters. Shares of the run are measured by the clock."""

    row_tokens: int = 512
    rows: int = 256  # a step: 131k tokens
    lr: float = 4e-3  # Muon
    lr_adam: float = 3e-3
    weight_decay: float = 0.1  # Muon
    weight_decay_adam: float = 0.01
    balance: float = 0.003  # weight of the load-balance loss
    mtp: float = 0.3  # weight of MTP depth 1
    rollout: float = 0.15  # weight of each of depths 2 and 3
    rollout_from: float = 0.55  # share of the run after which depths 2 and 3 are trained
    rollout_frac: float = 0.25  # share of the rows they are trained on
    decay_from: float = 0.45  # share of the run after which the learning rates fall
    final_lr_frac: float = 0.02
    log_every: int = 50
    seed: int = 0

    def lr_frac(self, step: int, done_frac: float) -> float:
        """Return the share of the learning rates: linear warm-up, constant, linear decay."""
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        if done_frac < self.decay_from:
            return warm
        left = max(0.0, (1 - done_frac) / (1 - self.decay_from))
        return warm * (left * (1 - self.final_lr_frac) + self.final_lr_frac)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cross_entropy_sum(hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return (F.cross_entropy(logits, target, reduction="none") * weight).sum()


def losses(
    model: Model, ids: Tensor, documents: Tensor, depths: int, recipe: Recipe, loss_sum: Loss, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the losses by name ("main", "mtp1".., "balance") and the load (layers, experts).

    ids, documents (rows, row_tokens + EXTRA); ids are flagged as in tokens.py. depths > 1 rolls the MTP module out on
    the first rows, from states that carry no gradient.
    """
    rows, n_tokens = ids.shape[0], ids.shape[1] - EXTRA
    token = (ids & (ASSISTANT_FLAG - 1)).long()
    said_weight = torch.where(ids >= ASSISTANT_FLAG, 1.0, USER_WEIGHT)
    context = Context.of(documents[:, :n_tokens])
    hidden, record = model.trunk(token[:, :n_tokens], context, dtype)

    def predict(state: Tensor, ahead: int, n_rows: int) -> Tensor:
        """Weighted mean loss of predicting the token `ahead` places on, within the same document."""
        here, there = documents[:n_rows, :n_tokens], documents[:n_rows, ahead : ahead + n_tokens]
        weight = (said_weight[:n_rows, ahead : ahead + n_tokens] * ((there == here) & (here >= 0))).flatten()
        target = token[:n_rows, ahead : ahead + n_tokens].flatten()
        return loss_sum(state.flatten(0, 1), model.head.weight, target, weight) / weight.sum().clamp_min(1)

    out = {"main": predict(hidden, 1, rows)}
    (first,) = model.draft(hidden, token, context, 1, record)
    out["mtp1"] = predict(first, 2, rows)
    if depths > 1:
        n_rows = max(1, int(rows * recipe.rollout_frac))
        states = model.draft(hidden[:n_rows].detach(), token[:n_rows], context.first_rows(n_rows), depths, [])
        out |= {f"mtp{depth}": predict(states[depth - 1], depth + 1, n_rows) for depth in range(2, depths + 1)}
    out["balance"] = torch.stack([routing.balance for routing in record]).mean()
    return out, torch.stack([routing.load for routing in record])


def total(out: dict[str, Tensor], recipe: Recipe) -> Tensor:
    rolled_out = sum(out[f"mtp{depth}"] for depth in range(2, MAX_DEPTH + 1) if f"mtp{depth}" in out)
    return out["main"] + recipe.mtp * out["mtp1"] + recipe.balance * out["balance"] + recipe.rollout * rolled_out


class Trainer:
    """A model, its optimisers and its rows on one device."""

    def __init__(self, data: Path, recipe: Recipe, config: Config) -> None:
        self.recipe, self.config = recipe, config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        is_cuda = self.device == "cuda"
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.train_rows, self.val_rows = (self._rows(data, name) for name in ("train", "val"))
        self.model = Model(config).to(self.device)
        self.dtype = torch.bfloat16 if is_cuda else torch.float32
        self.loss_sum: Loss = torch.compile(cross_entropy_sum, dynamic=False) if is_cuda else cross_entropy_sum
        if is_cuda:
            self.model.compile_pieces()
        groups = group_parameters(self.model)
        self.muon = Muon(groups.muon, recipe.weight_decay)
        self.adam_parameters = groups.adam + groups.adam_undecayed
        adam_groups = [
            {"params": groups.adam, "weight_decay": recipe.weight_decay_adam},
            {"params": groups.adam_undecayed, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(adam_groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, fused=is_cuda)

    def _rows(self, data: Path, name: str) -> tuple[Tensor, Tensor]:
        ids, documents = build_rows(*tokens.load(data, name), self.recipe.row_tokens)
        click.echo(f"{name}: {len(ids)} rows, {(documents >= 0).mean():.1%} filled")
        return torch.from_numpy(ids.astype(np.int32)).to(self.device), torch.from_numpy(documents).to(self.device)

    def losses(self, ids: Tensor, documents: Tensor, depths: int) -> tuple[dict[str, Tensor], Tensor]:
        return losses(self.model, ids, documents, depths, self.recipe, self.loss_sum, self.dtype)

    def step(self, rows: Tensor, depths: int, lr_frac: float) -> tuple[dict[str, Tensor], Tensor]:
        ids, documents = self.train_rows
        out, load = self.losses(ids[rows], documents[rows], depths)
        total(out, self.recipe).backward()
        torch.nn.utils.clip_grad_norm_(self.adam_parameters, CLIP_NORM)  # Muon's update has its own size
        self.muon.step(self.recipe.lr * lr_frac)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.lr_adam * lr_frac
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return out, load

    def run(self, seconds: float) -> list[dict[str, float]]:
        """Train for `seconds` after compilation; return the logged losses."""
        recipe, n_rows = self.recipe, len(self.train_rows[0])
        order, at, step, start = torch.randperm(n_rows, device=self.device), 0, 0, math.inf
        history: list[dict[str, float]] = []
        while True:
            if at + recipe.rows > n_rows:
                order, at = torch.randperm(n_rows, device=self.device), 0
            if step == COMPILE_STEPS:
                start = time.monotonic()
            done_frac = max(0.0, time.monotonic() - start) / seconds
            if done_frac >= 1:
                return history
            depths = MAX_DEPTH if done_frac > recipe.rollout_from or step == 1 else 1
            out, load = self.step(order[at : at + recipe.rows], depths, recipe.lr_frac(step, done_frac))
            at += recipe.rows
            step += 1
            if step % recipe.log_every == 0 or step <= COMPILE_STEPS:
                entry = {"step": step, "done_frac": done_frac} | {name: float(v.detach()) for name, v in out.items()}
                uneven = load * self.config.num_experts  # 1 = the same for all experts
                entry |= {"max_load": float(uneven.max()), "min_load": float(uneven.min())}
                history.append(entry)
                click.echo("  ".join(f"{name} {value:.4g}" for name, value in entry.items()))
                if not math.isfinite(entry["main"]):
                    raise RuntimeError(f"step {step}: the loss is {entry['main']}; nothing was saved")

    def validate(self) -> dict[str, float]:
        """Return the mean held-out losses, all MTP depths, over whole batches (the compiled shape)."""
        ids, documents = self.val_rows
        n = self.recipe.rows
        if len(ids) < n:
            repeats = -(-n // len(ids))
            ids, documents = ids.repeat(repeats, 1)[:n], documents.repeat(repeats, 1)[:n]
        sums: dict[str, list[float]] = {}
        with torch.no_grad():
            for i in range(0, len(ids) - n + 1, n):
                out, _ = self.losses(ids[i : i + n], documents[i : i + n], MAX_DEPTH)
                for name, value in out.items():
                    sums.setdefault(name, []).append(float(value))
        return {name: float(np.mean(values)) for name, values in sums.items()}


def overridden(base: Any, pairs: tuple[str, ...]) -> Any:
    """Return the dataclass `base` with "name=value" pairs applied, each in the type of the field it replaces."""
    known = {field.name: type(getattr(base, field.name)) for field in fields(base)}
    changes = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in known:
            raise click.UsageError(f"--set {pair}: no such hyperparameter; there are {', '.join(known)}")
        try:
            changes[name] = known[name](float(value))
        except ValueError as error:
            raise click.UsageError(f"--set {pair}: {error}") from error
    return replace(base, **changes)


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seconds", default=900.0, show_default=True, help="Time to train, compilation not counted.")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="Change a hyperparameter of Recipe.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=VALUE", help="Change a field of the model's Config.")
def main(data: Path, out: Path, seconds: float, pairs: tuple[str, ...], shapes: tuple[str, ...]) -> None:
    """Train on the corpus in DATA and write OUT/hf-bf16."""
    recipe, config = overridden(Recipe(), pairs), overridden(Config(), shapes)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    trainer = Trainer(data, recipe, config)
    history = trainer.run(seconds)
    validation = trainer.validate()
    click.echo(f"held out: {validation}")
    checkpoint.save(out / "hf-bf16", trainer.model.state_dict(), config, tokenizer)
    record = {"seconds": seconds, "recipe": {f.name: getattr(recipe, f.name) for f in fields(Recipe)}}
    (out / "history.json").write_text(json.dumps(record | {"held_out": validation, "steps": history}, indent=1))


if __name__ == "__main__":
    main()
