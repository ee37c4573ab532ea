"""Eviction policies scored on recorded traces, beside the best decisions that the future allows. Numbers and table.

Owns the job that `sparkle-ctl trace replay` does; what a single run costs is counted by sparkle.replay. Reads traces
that were read already; never a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from sparkle.cli.trace_view import count_steps
from sparkle.errors import ConfigError, PoolError
from sparkle.policy import Key, LayerShape, make_policy
from sparkle.replay import belady, replay
from sparkle.trace import Event, Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

BASELINE = "lru"
OPTIMUM = "belady"
OPTIMUM_WITH_BYPASS = "belady+bypass"
NAME_WIDTH = 22


@dataclass(frozen=True, slots=True)
class _Pool:
    """The events of one layout class, whose layers share a pool. warm: those that come before, and are not scored."""

    layers: Sequence[LayerShape]
    record_bytes: int
    events: Sequence[Event]
    warm: Sequence[Event]

    @property
    def n_experts(self) -> int:
        return sum(layer.n_experts for layer in self.layers)

    @property
    def largest(self) -> int:
        """Slots that the largest event needs at once."""
        return max(len(set(event.experts)) for event in chain(self.warm, self.events))

    def n_slots(self, capacity: float) -> int:
        return max(1, round(capacity * self.n_experts))

    def misses(self, name: str, n_slots: int) -> int:
        if name in (OPTIMUM, OPTIMUM_WITH_BYPASS):
            return belady(self.events, n_slots, self._best_start(n_slots), name == OPTIMUM_WITH_BYPASS).n_misses
        n_misses = replay(chain(self.warm, self.events), self.layers, n_slots, make_policy(name, self.layers)).n_misses
        if self.warm:
            n_misses -= replay(self.warm, self.layers, n_slots, make_policy(name, self.layers)).n_misses
        return n_misses

    def _best_start(self, n_slots: int) -> list[Key]:
        """What was used while it was warmed and will be used soonest: no policy can have kept anything better."""
        seen = {(event.layer, expert) for event in self.warm for expert in event.experts}
        coming = dict.fromkeys((event.layer, expert) for event in self.events for expert in event.experts)
        return [key for key in coming if key in seen][:n_slots]


def facts_of(
    traces: Sequence[Trace],
    warm: Sequence[Trace],
    policies: Sequence[str],
    capacities: Sequence[float],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score `policies` at `capacities` (shares of the experts) on the traces, one after the other; the stable form.

    The baseline and both optima are always there. say: is told what is being done. Raises ConfigError if the traces are
    of different stores or without events, PoolError if not even the largest capacity can hold a step's experts.
    """
    _refuse_mixture([*traces, *warm])
    pools = list(_pools(traces, warm))
    if not pools:
        raise ConfigError(f"{', '.join(str(x.path) for x in traces)}: no events were recorded; nothing can be replayed")
    names = list(dict.fromkeys([BASELINE, *policies, OPTIMUM, OPTIMUM_WITH_BYPASS]))
    n_tokens = sum(count_steps(trace.events).n_tokens for trace in traces)
    n_uses = sum(len(set(event.experts)) for pool in pools for event in pool.events)
    sizes = []
    for capacity in capacities:
        n_slots = [pool.n_slots(capacity) for pool in pools]
        is_too_small = any(pool.largest > n for pool, n in zip(pools, n_slots, strict=True))
        scores = []
        for name in names if not is_too_small else ():
            say(f"{name} in a pool of {100 * capacity:g} %")
            misses = [pool.misses(name, n) for pool, n in zip(pools, n_slots, strict=True)]
            n_bytes = sum(pool.record_bytes * n for pool, n in zip(pools, misses, strict=True))
            scores.append({"policy": name, "misses": sum(misses), "bytes": n_bytes})
        sizes.append({"capacity_frac": capacity, "n_slots": sum(n_slots), "scores": scores})
        _compare(scores, n_uses, n_tokens)
    if not any(size["scores"] for size in sizes):
        raise PoolError(
            f"a step uses {max(pool.largest for pool in pools)} experts at once, which fit in none of these pools; "
            "replay with a larger --capacity, or traces with fewer rows per step"
        )
    return {
        "model": traces[0].header.model,
        "fingerprint": traces[0].header.fingerprint,
        "files": [str(trace.path) for trace in traces],
        "warmed_with": [str(trace.path) for trace in warm],
        "truncated": [str(trace.path) for trace in [*traces, *warm] if trace.is_truncated],
        "tokens": n_tokens,
        "uses": n_uses,
        "experts": sum(pool.n_experts for pool in pools),
        "sizes": sizes,
    }


def _refuse_mixture(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for trace in traces:
        here, there = trace.header, first.header
        if (here.fingerprint, here.layers) != (there.fingerprint, there.layers):
            raise ConfigError(
                f"{trace.path} is of another store than {first.path}: {here.model} ({here.fingerprint[:12]}…), not "
                f"{there.model} ({there.fingerprint[:12]}…)"
            )


def _pools(traces: Sequence[Trace], warm: Sequence[Trace]) -> Iterator[_Pool]:
    """Layers that nothing used, such as those of a drafter that is off, do not count as experts of a pool."""
    header = traces[0].header
    events = [event for trace in traces for event in trace.events]
    before = [event for trace in warm for event in trace.events]
    used = {event.layer for event in events}
    for layout, record_bytes in enumerate(header.record_bytes):
        layers = [x for x in header.layers if x.layout == layout and x.index in used]
        indexes = {x.index for x in layers}
        if layers:
            yield _Pool(
                [LayerShape(x.index, x.n_experts, x.top_k) for x in layers],
                record_bytes,
                [event for event in events if event.layer in indexes],
                [event for event in before if event.layer in indexes],
            )


def _compare(scores: list[dict[str, Any]], n_uses: int, n_tokens: int) -> None:
    """Add what is derived. Between classes, experts count by their bytes: those are what the disk has to read."""
    n_bytes = {x["policy"]: x["bytes"] for x in scores}
    for x in scores:
        gap = n_bytes[BASELINE] - n_bytes[OPTIMUM]
        x["misses_per_token"] = round(x["misses"] / max(1, n_tokens), 4)
        x["miss_frac"] = round(x["misses"] / max(1, n_uses), 6)
        x["bytes_per_token"] = round(x["bytes"] / max(1, n_tokens))
        x["r_b"] = round(x["bytes"] / n_bytes[OPTIMUM], 4) if n_bytes[OPTIMUM] else None
        x["gap_recovered_frac"] = round((n_bytes[BASELINE] - x["bytes"]) / gap, 4) if gap else None


# --- screen ---------------------------------------------------------------------------------------------------------


def screen(facts: dict[str, Any]) -> RenderableType:
    """Return what `facts_of` found as a table of at most 80 columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from sparkle.cli.status_view import DOT, format_bytes, format_count

    uses = f"{format_count(facts['uses'])} uses of {format_count(facts['experts'])} experts"
    start = "the pool was warmed with: " if facts["warmed_with"] else "the pool is empty at first"
    lines: list[RenderableType] = [
        Text.assemble(
            ("Replay  ", "bold"),
            (facts["model"], "cyan"),
            (f"{DOT}{format_count(facts['tokens'])} tokens{DOT}{uses}", "dim"),
        ),
        Text("        " + start + ", ".join(facts["warmed_with"]), "dim"),
    ]
    if facts["truncated"]:
        lines.append(Text("        cut off at its end: " + ", ".join(facts["truncated"]), "yellow"))
    for size in facts["sizes"]:
        title = f"{100 * size['capacity_frac']:g} %"
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column(Text.assemble((title, "bold"), f" = {format_count(size['n_slots'])} slots"), width=NAME_WIDTH)
        for heading in ("misses/token", "read/token", "miss rate", "R_B", "gap"):
            table.add_column(heading, justify="right", no_wrap=True)
        best = min((x["bytes"] for x in size["scores"] if not x["policy"].startswith(OPTIMUM)), default=0)
        for x in size["scores"]:
            is_bound = x["policy"].startswith(OPTIMUM)
            table.add_row(
                x["policy"].replace("+", " with "),
                f"{x['misses_per_token']:,.2f}",
                format_bytes(x["bytes_per_token"]),
                f"{100 * x['miss_frac']:.2f} %",
                "–" if x["r_b"] is None else f"{x['r_b']:.3f}",
                "–" if x["gap_recovered_frac"] is None else f"{100 * x['gap_recovered_frac']:.1f} %",
                style="dim" if is_bound else "bold" if x["bytes"] == best else "",
            )
        lines += [Text(), table]
        if not size["scores"]:
            lines.append(Text("a step of the trace uses more experts at once", "yellow"))
    legend = "R_B: bytes read over Belady's. gap: what is saved of LRU's misses beyond Belady."
    return Group(*lines, Text(), Text(legend, "dim"))
