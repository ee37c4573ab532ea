"""What is in a trace: tokens, hits, which experts are used and how far their use is concentrated. Numbers and screen.

Owns the look of `sparkle-ctl trace show`, at most 80 columns. Reads a trace that was read already; never a file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkle.policy_contract import Key
from sparkle.trace import Event, Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

COVERED = (0.1, 0.25, 0.5)  # shares of the experts whose share of the uses is shown
WINDOWS = (1, 8, 64, 512)  # tokens whose experts together are a working set; each is a multiple of the one before
LAYERS_SHOWN = 60  # one character each
BAR_WIDTH = 30
LEVELS = "▁▂▃▄▅▆▇█"


# --- numbers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of one row, which are tokens decoded, and steps of more: prompts, or drafts that are verified."""

    n_decoded: int
    n_prefill_steps: int
    n_prefilled: int

    @property
    def n_tokens(self) -> int:
        return self.n_decoded + self.n_prefilled


def count_steps(events: Iterable[Event]) -> StepCounts:
    """Count the steps of the layer that saw the most tokens: not every step goes through every layer."""
    last: dict[int, tuple[int, int]] = {}
    n_decoded, n_steps, n_rows = Counter[int](), Counter[int](), Counter[int]()
    for event in events:
        step = (event.step, event.stream)
        if last.get(event.layer) == step:
            continue  # a step may come to a layer in several parts
        last[event.layer] = step
        if event.rows == 1:
            n_decoded[event.layer] += 1
        else:
            n_steps[event.layer] += 1
            n_rows[event.layer] += event.rows
    layer = max(last, key=lambda x: n_decoded[x] + n_rows[x], default=0)
    return StepCounts(n_decoded[layer], n_steps[layer], n_rows[layer])


def facts_of(trace: Trace) -> dict[str, Any]:
    """Return the stable form for programs."""
    header, events = trace.header, trace.events
    steps, tally = count_steps(events), _tally(events)
    uses = tally.uses
    used_layers = {layer for layer, _ in uses}
    layers = [x for x in header.layers if x.index in used_layers]
    n_experts = sum(x.n_experts for x in layers)
    return {
        "file": str(trace.path),
        "model": header.model,
        "fingerprint": header.fingerprint,
        "started_at": header.started_at,
        "duration_s": round(max(0, tally.duration_us) / 1e6, 3),
        "is_truncated": trace.is_truncated,
        "policy": header.policy,
        "n_slots": list(header.n_slots),
        "events": len(events),
        "streams": len(tally.streams),
        "tokens": steps.n_tokens,
        "decoded_tokens": steps.n_decoded,
        "prefilled_tokens": steps.n_prefilled,
        "prefill_steps": steps.n_prefill_steps,
        "uses": uses.total(),
        "hits": tally.n_hits,
        "experts": n_experts,
        "experts_used": len(uses),
        "layers": [
            {"layer": x.index, "experts": x.n_experts, "used": sum(layer == x.index for layer, _ in uses)}
            for x in layers
        ],
        "coverage": [{"experts_frac": x, "uses_frac": round(_coverage(uses, x, n_experts), 4)} for x in COVERED],
        "working_sets": _working_sets(trace),
        "repeats_frac": _repeats_frac(events),
    }


@dataclass(slots=True)
class _Tally:
    uses: Counter[Key] = field(default_factory=Counter)
    n_hits: int = 0
    streams: set[int] = field(default_factory=set)
    duration_us: int = 0


def _tally(events: Iterable[Event]) -> _Tally:
    found, last_us = _Tally(), None
    for event in events:
        found.uses.update([(event.layer, expert) for expert in event.experts])
        found.n_hits += sum(event.is_hit)
        found.streams.add(event.stream)
        if last_us is not None:
            # The clock has 32 bits and starts anew every 71 minutes; events of two clients may be out of order.
            found.duration_us += (event.time_us - last_us + 2**31) % 2**32 - 2**31
        last_us = event.time_us
    return found


def _coverage(uses: Counter[Key], frac: float, n_experts: int) -> float:
    """The share of the uses that are of the hottest `frac` of the experts."""
    return sum(n for _, n in uses.most_common(round(frac * n_experts))) / max(1, uses.total())


def _working_sets(trace: Trace) -> list[dict[str, Any]]:
    """How many distinct experts so many decoded tokens in a row use, on average, and their bytes."""
    record_bytes = {x.index: trace.header.record_bytes[x.layout] for x in trace.header.layers}
    open_sets: list[set[Key]] = [set() for _ in WINDOWS]
    n_experts, n_bytes, n_windows = Counter[int](), Counter[int](), Counter[int]()

    def end_token(n_tokens: int) -> None:
        """Close the windows that end here; what one had is part of the next larger."""
        for i, (n, found) in enumerate(zip(WINDOWS, open_sets, strict=True)):
            if n_tokens % n:
                break
            n_windows[n] += 1
            n_experts[n] += len(found)
            n_bytes[n] += sum(record_bytes[layer] for layer, _ in found)
            if i + 1 < len(WINDOWS):
                open_sets[i + 1] |= found
            found.clear()

    last, n_tokens = None, 0
    for event in trace.events:
        if event.rows != 1:
            continue
        if (step := (event.step, event.stream)) != last:
            if last is not None:
                end_token(n_tokens := n_tokens + 1)
            last = step
        open_sets[0].update([(event.layer, expert) for expert in event.experts])
    if last is not None:
        end_token(n_tokens + 1)
    return [
        {"tokens": n, "experts": round(n_experts[n] / n_windows[n], 1), "bytes": round(n_bytes[n] / n_windows[n])}
        for n in WINDOWS
        if n_windows[n]
    ]


def _repeats_frac(events: Iterable[Event]) -> float | None:
    """The share of a decoded token's experts that the stream's token before used too."""
    before: dict[tuple[int, int], tuple[int, list[int]]] = {}
    n_repeats = n_uses = 0
    for event in events:
        step, experts = before.get((event.stream, event.layer), (event.step, []))
        if event.rows == 1 and experts and step != event.step:
            n_uses += len(event.experts)
            n_repeats += len(set(experts) & set(event.experts))
        before[event.stream, event.layer] = (event.step, event.experts if event.rows == 1 else [])
    return round(n_repeats / n_uses, 4) if n_uses else None


# --- screen ---------------------------------------------------------------------------------------------------------


def screen(facts: dict[str, Any]) -> RenderableType:
    """Return what `facts_of` found as one screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from sparkle.cli.status_view import DOT, format_bytes, format_count, format_duration

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=11, style="dim", no_wrap=True)
    table.add_column(width=14, style="bold", overflow="fold")
    table.add_column(overflow="fold")

    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["started_at"]))
    pool = f"{format_count(sum(facts['n_slots']))} slots under {facts['policy']}"
    table.add_row("recorded", format_duration(facts["duration_s"]), f"from {when}{DOT}{pool}")
    if facts["is_truncated"]:
        table.add_row(
            "", Text("cut off", "yellow"), Text("its writer did not close it; the last seconds may be missing")
        )
    table.add_row(
        "tokens",
        f"{format_count(facts['decoded_tokens'])} decoded",
        f"{format_count(facts['prefilled_tokens'])} prefilled in {_items(facts['prefill_steps'], 'step')}{DOT}"
        f"{_items(facts['streams'], 'stream')}",
    )
    hits = f"{_percent(facts['hits'], facts['uses'])} were in the pool" if facts["hits"] else "no hits recorded"
    table.add_row("uses", format_count(facts["uses"]), f"in {_items(facts['events'], 'event')}{DOT}{hits}")
    table.add_row(
        "experts",
        f"{format_count(facts['experts_used'])} used",
        f"{_percent(facts['experts_used'], facts['experts'])} of {format_count(facts['experts'])} in "
        f"{_items(len(facts['layers']), 'layer')}",
    )
    for i, line in enumerate(_layer_lines(facts["layers"])):
        table.add_row("by layer" if i == 0 else "", "used of all" if i == 0 else "", Text(line, "cyan"))
    for i, x in enumerate(facts["coverage"]):
        table.add_row("hottest" if i == 0 else "", f"{100 * x['experts_frac']:.0f} %", _bar(x["uses_frac"], "of uses"))
    for i, x in enumerate(facts["working_sets"]):
        share = x["experts"] / max(1, facts["experts"])
        label = "working set" if i == 0 else ""
        table.add_row(label, _items(x["tokens"], "token"), _bar(share, DOT.lstrip() + format_bytes(x["bytes"])))
    if facts["repeats_frac"] is not None:
        repeats = f"{100 * facts['repeats_frac']:.1f} %"
        table.add_row("repeats", repeats, "of a token's experts served the token before it")
    return Group(
        Text.assemble(("Trace        ", "bold"), (facts["model"], "cyan")),
        Text(f"             {facts['file']}", "dim", overflow="fold"),
        Text(),
        table,
    )


def _layer_lines(layers: Sequence[dict[str, Any]]) -> list[str]:
    """One character a layer: how many of its experts were used."""
    levels = [LEVELS[round((len(LEVELS) - 1) * x["used"] / x["experts"])] for x in layers]
    return ["".join(levels[i : i + LAYERS_SHOWN]) for i in range(0, len(levels), LAYERS_SHOWN)]


def _bar(share: float, what: str) -> Any:
    from rich.text import Text

    filled = min(BAR_WIDTH, round(BAR_WIDTH * share))
    return Text.assemble(("▓" * filled, "cyan"), ("·" * (BAR_WIDTH - filled), "dim"), f" {100 * share:.1f} % {what}")


def _items(n: int, noun: str) -> str:
    from sparkle.cli.status_view import format_count

    return f"{format_count(n)} {noun}{'' if n == 1 else 's'}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
