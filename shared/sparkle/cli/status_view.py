"""The status screen: turns what the daemons report into one screen of at most 80 columns.

Owns the look: words, colours, bars. Reads metrics by the names declared in sparkle.telemetry; ratios are derived here.
Never talks to a daemon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sparkle.cli.status import NOT_RUNNING, DaemonStatus, all_ready
from sparkle.telemetry import METRICS

WIDTH = 80
LABEL_WIDTH = 11
VALUE_WIDTH = 14
BAR_WIDTH = WIDTH - LABEL_WIDTH - VALUE_WIDTH - 2 - 1  # the columns' gap, and a free last column
STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow"}  # any other state is red
FEW_TOKENS = 16  # fewer say nothing: the compute daemon tries itself with some when it starts
DOT = " · "


def screen(statuses: Mapping[str, DaemonStatus], run_dir: Path) -> RenderableType:
    """Return the whole screen."""
    parts: list[RenderableType] = [_heading(statuses, run_dir), Text(), _daemons(statuses)]
    for role, section in (("prefetch", _pool), ("compute", _compute), ("front", _front)):
        if statuses[role].metrics:
            parts += [Text(), section(_Metrics(role, statuses[role].metrics))]
    if all(status.state == NOT_RUNNING for status in statuses.values()):
        parts += [Text(), Text("  Nothing runs here. Start the daemons with: honcho start")]
    return Group(*parts)


class _Metrics:
    """The metrics of one daemon by name. A daemon of another version may lack some, or mean other things by them."""

    def __init__(self, role: str, values: Mapping[str, object]) -> None:
        self._role = role
        self._values = values

    def number(self, name: str) -> float:
        value = self._get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else 0.0

    def count(self, name: str) -> str:
        return format_count(self.number(name))

    def items(self, name: str, noun: str) -> str:
        return f"{self.count(name)} {noun}{'' if self.number(name) == 1 else 's'}"

    def text(self, name: str) -> str:
        value = self._get(name)
        return value if isinstance(value, str) and value else "?"

    def nested(self, name: str) -> dict[str, dict[str, float]]:
        """The numbers of a metric with two labels."""
        value = self._get(name)
        outer = value if isinstance(value, Mapping) else {}
        return {
            key: {k: n for k, n in inner.items() if isinstance(n, int | float) and math.isfinite(n)}
            for key, inner in outer.items()
            if isinstance(inner, Mapping)
        }

    def _get(self, name: str) -> object:
        if (self._role, name) not in METRICS:
            raise KeyError(f"the {self._role} daemon has no metric '{name}'")
        return self._values.get(name)


# --- sections -------------------------------------------------------------------------------------------------------


def _heading(statuses: Mapping[str, DaemonStatus], run_dir: Path) -> RenderableType:
    n_ready = sum(status.state == "ready" for status in statuses.values())
    summary = "all ready" if all_ready(statuses) else f"{n_ready} of {len(statuses)} ready"
    line = Table.grid(expand=True)
    line.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    line.add_column(justify="right", no_wrap=True, width=len(summary) + 2)
    line.add_row(
        Text.assemble(("Sparkle", "bold"), ("  " + str(run_dir), "dim")),
        Text(summary, "bold green" if all_ready(statuses) else "bold red"),
    )
    return line


def _daemons(statuses: Mapping[str, DaemonStatus]) -> RenderableType:
    """One line each. Why a daemon is not ready is always shown in full, if need be below its line."""
    lines: list[RenderableType] = []
    for role, status in statuses.items():
        style = STATE_STYLES.get(status.state, "red")
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{role:<{LABEL_WIDTH}}", "bold")
        line.append(f"{'○' if status.state == NOT_RUNNING else '●'} {status.state.replace('_', ' '):<14}", style)
        if status.pid is not None:
            line.append("pid ", "dim").append(f"{status.pid:<8}")
        if status.uptime_s is not None and status.rss_bytes is not None:
            line.append("up ", "dim").append(f"{format_duration(status.uptime_s):<13}")
            line.append(f"{format_bytes(status.rss_bytes):<9}")
        detail = Text(status.detail, "dim" if status.state == NOT_RUNNING else style)
        if status.state == "ready":
            lines.append(line)  # the sections below say more
        elif line.cell_len + detail.cell_len < WIDTH:
            lines.append(line.append_text(detail))
        else:
            lines += [line, Padding(detail, (0, 0, 0, LABEL_WIDTH + 2))]
    return Group(*lines)


def _pool(m: _Metrics) -> RenderableType:
    """Rows that have nothing to say yet are left out, here and below: a fresh start is a short screen."""
    share = _share(m.number("n_slots"), m.number("n_experts"))
    table = _section("Pool", m.text("model_name"))
    table.add_row(
        "size",
        format_bytes(m.number("pool_bytes")),
        f"{share} of the experts{DOT}{m.items('n_regions', 'region')}{DOT}policy {m.text('policy')}",
    )
    target = format_bytes(m.number("pool_target_bytes"))
    if m.number("pool_bytes") < m.number("pool_target_bytes") and target != format_bytes(m.number("pool_bytes")):
        table.add_row("", f"of {target}", Text("asked for; memory says why", "yellow"))
    table.add_row("slots", f"{m.count('slots_used')} used", _slot_bar(m))
    table.add_row("", f"of {m.count('n_slots')}", _slot_legend(m))
    hits = {kind: "hits_" + kind.replace(" ", "_") for kind in ("resident", "in flight", "late")}
    n_hits = sum(m.number(name) for name in hits.values())
    if n_hits + m.number("misses"):
        split = DOT.join(f"{m.count(name)} {kind}" for kind, name in hits.items())
        table.add_row("hits", _share(n_hits, n_hits + m.number("misses")), split)
        evictions = m.items("evictions", "eviction")
        table.add_row("misses", m.count("misses"), f"{m.count('regrets')} regretted within 8 tokens{DOT}{evictions}")
    _reads(table, m)
    _unplaced(table, m)
    if m.number("tokens") >= FEW_TOKENS:
        _judgement(table, m)
        _prefetch(table, m)
    _memory(table, m)
    if m.number("profile_tokens"):
        table.add_row("profile", m.count("profile_tokens"), "tokens of usage recorded")
    if m.number("is_recording"):
        table.add_row("trace", Text("recording", "yellow"), "ends with: sparkle-ctl trace stop")
    _failures(table, m, {"fetches_failed": "fetches failed", "records_quarantined": "records quarantined"})
    return table


def _reads(table: Table, m: _Metrics) -> None:
    engine = f"{m.text('io_engine')}{DOT}direct I/O {m.text('direct_io')}"
    busy_s = m.number("read_busy_s")
    if not busy_s:
        table.add_row("reads", "none yet", engine)
        return
    parts = [format_bytes(m.number("bytes_read"))]
    if m.number("read_p50_ms"):  # of what clients asked for; empty slots may be filled before anybody asks
        parts += [f"p50 {format_ms(m.number('read_p50_ms'))}", f"p99 {format_ms(m.number('read_p99_ms'))}"]
    parts.append(f"depth {m.count('read_depth')}")
    table.add_row("reads", format_bytes(m.number("bytes_read") / busy_s) + "/s", DOT.join(parts))
    table.add_row("", "", engine)


def _judgement(table: Table, m: _Metrics) -> None:
    """How decoding did in the last minutes, next to the policy that knows the future (R_B, eta) and to no waiting."""
    n_tokens, decode_s, stall_s = m.number("judged_tokens"), m.number("judged_decode_s"), m.number("judged_stall_s")
    read, best = m.number("judged_bytes_read"), m.number("judged_bytes_belady")
    if not n_tokens:
        table.add_row("R_B", "–", "nothing judged yet: that takes a minute of use")
        return
    if best:
        table.add_row("R_B", f"{read / best:.2f} x", f"the bytes that the optimum reads{_eta(m)}")
    else:
        table.add_row("R_B", "–", f"the optimum reads nothing{_eta(m)}")
    stall, decode = (format_ms(1e3 * seconds / n_tokens) for seconds in (stall_s, decode_s))
    share = f"{_share(stall_s, decode_s)} of {decode} per token"
    table.add_row("stall", stall, f"{share}{DOT}last {format_count(n_tokens)} decoded")


def _eta(m: _Metrics) -> str:
    """The time that a token needs at least, of the time that it took: computing, or reading what the optimum reads."""
    decode_s, bytes_per_s = m.number("judged_decode_s"), m.number("disk_bytes_per_s")
    if not decode_s or not bytes_per_s:
        return ""
    needed_s = max(decode_s - m.number("judged_stall_s"), m.number("judged_bytes_belady") / bytes_per_s)
    return f"{DOT}η {_share(needed_s, decode_s)}"


def _prefetch(table: Table, m: _Metrics) -> None:
    active, reason = m.text("prefetch_active"), m.text("prefetch_reason")
    table.add_row("forecasts", active, reason.removeprefix(f"{active}: "))
    by_source = {source: n for source, n in m.nested("predicted_bytes").items() if source != "fill"}
    if not by_source:
        return
    # who runs, else who is on trial or was last, else who has read most
    tried = reason.partition(";")[0].partition("(")[0].split()
    shown = max(by_source, key=lambda x: (x == active, x in tried, by_source[x].get("issued", 0)))
    n_bytes = by_source[shown]
    parts = DOT.join(f"{format_bytes(n_bytes.get(outcome, 0))} {outcome}" for outcome in ("used", "late", "wasted"))
    table.add_row("", f"{format_bytes(n_bytes.get('issued', 0))} read", f"{shown}: {parts}")


def _memory(table: Table, m: _Metrics) -> None:
    available, pressure = m.number("memory_available_bytes"), m.number("memory_pressure_frac")
    if not available:
        return
    reason = m.text("governor_reason")
    pressure_text = f"pressure {100 * pressure:.0f} %{DOT}" if pressure >= 0.005 else ""
    text = pressure_text + ("governor off" if reason == "off" else reason)
    table.add_row("memory", f"{format_bytes(available)} left", text)


def _compute(m: _Metrics) -> RenderableType:
    table = _section("Compute", f"{m.text('model_type')} on {m.text('device')}")
    if m.number("decode_tps") or m.number("prefill_tps") or m.number("ttft_p50_ms"):
        table.add_row(
            "speed",
            f"{m.number('decode_tps'):.1f} tok/s",
            f"prefill {m.number('prefill_tps'):.1f} tok/s{DOT}first token {format_ms(m.number('ttft_p50_ms'))}",
        )
    table.add_row(
        "requests",
        f"{m.count('n_active')} active",
        f"{m.count('n_queued')} queued{DOT}{m.count('requests_finished')} finished",
    )
    table.add_row(
        "tokens",
        f"{m.count('output_tokens')} out",
        f"{m.count('prompt_tokens')} in{DOT}context {m.count('context_tokens')}",
    )
    if m.number("stall_s") >= 0.05:
        table.add_row("stall", f"{m.number('stall_s'):.1f} s", "waiting for experts, prompts included")
    _unplaced(table, m)
    _failures(table, m, {"requests_failed": "requests failed"})
    return table


def _front(m: _Metrics) -> RenderableType:
    table = _section("Front", "")
    table.add_row("clients", m.count("n_clients"), f"{m.items('n_sessions', 'session')}{DOT}{m.count('n_busy')} busy")
    table.add_row(
        "chats", m.count("chats"), f"{m.count('chats_finished')} finished{DOT}{m.count('chats_cancelled')} cancelled"
    )
    _failures(table, m, {"chats_failed": "chats failed", "bad_messages": "malformed messages"})
    return table


def _section(title: str, subtitle: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title = Text.assemble((f"{title:<{LABEL_WIDTH}}", "bold"), (subtitle, "cyan"))
    table.title_justify = "left"
    table.add_column(width=LABEL_WIDTH - 2, style="dim", no_wrap=True)
    table.add_column(width=VALUE_WIDTH, style="bold", overflow="fold")
    table.add_column(overflow="fold")
    return table


def _unplaced(table: Table, m: _Metrics) -> None:
    n = m.number("unplaced_experts")
    if n:
        count = Text.assemble((f" {format_count(n)} ", "bold white on red"))
        table.add_row("unplaced", count, Text("experts without a correct slot: their requests failed", "red"))
    else:
        table.add_row("unplaced", Text("0", "green"), "experts")


def _failures(table: Table, m: _Metrics, meanings: Mapping[str, str]) -> None:
    found = [f"{meaning}: {m.count(name)}" for name, meaning in meanings.items() if m.number(name)]
    if found:
        table.add_row("trouble", "", Text(DOT.join(found), "red"))


def _slot_parts(m: _Metrics) -> list[tuple[str, float, str, str]]:
    """(name, slots, character, colour): the parts differ in both, for those who see only one of the two."""
    pinned, side, loading = (m.number("slots_" + part) for part in ("pinned", "side", "loading"))
    used = max(0.0, m.number("slots_used") - pinned - side)
    return [
        ("pinned", pinned, "█", "magenta"),
        ("used", used, "▓", "cyan"),
        ("side", side, "▒", "blue"),
        ("loading", loading, "░", "yellow"),
    ]


def _slot_bar(m: _Metrics) -> Text:
    n_slots = max(1.0, m.number("n_slots"))
    bar, filled, total = Text(no_wrap=True), 0, 0.0
    for _, n, char, style in _slot_parts(m):
        total += n
        end = min(BAR_WIDTH, round(BAR_WIDTH * total / n_slots))
        bar.append(char * (end - filled), style)
        filled = end
    return bar.append("·" * (BAR_WIDTH - filled), "dim")


def _slot_legend(m: _Metrics) -> Text:
    """The meaning of the bar's parts; how many slots are used stands at its left."""
    entries = [
        Text(f"{char} {name}" if name == "used" else f"{char} {format_count(n)} {name}", style)
        for name, n, char, style in _slot_parts(m)
        if n
    ]
    return Text("  ").join(entries)


# --- numbers --------------------------------------------------------------------------------------------------------


def format_count(n: float) -> str:
    if n < 99_999.5:
        return f"{n:,.0f}"
    if n < 999_500:
        return f"{n / 1e3:.0f} k"
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} G"


def format_bytes(n: float) -> str:
    """Return `n` in the decimal units that settings use: 24.0 GB is 24e9 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}" if n < 99.95 else f"{n:.0f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def format_ms(ms: float) -> str:
    if ms >= 9999.5:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.2f} ms" if ms < 9.995 else f"{ms:.0f} ms"


def format_duration(s: float) -> str:
    if s < 60:
        return f"{s:.0f} s"
    if s < 3600:
        return f"{s // 60:.0f} min"
    if s < 86400:
        return f"{s // 3600:.0f} h {s % 3600 // 60:.0f} min"
    return f"{s // 86400:.0f} d {s % 86400 // 3600:.0f} h"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
