"""The picture of `sparkle-ctl trace replay`: miss rate by size of the pool, a line per policy, above the optimum.

Owns the drawing, which needs matplotlib, an optional extra. Lines differ in marker and dashes as well as in colour, so
that they can be told apart in print.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparkle.cli.trace_replay import BASELINE, OPTIMUM, OPTIMUM_WITH_BYPASS
from sparkle.errors import ConfigError, StorageError

FORMATS = (".svg", ".png", ".pdf")
# Okabe & Ito's palette, which colour-blind eyes tell apart; with few policies the darkest come first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
INK, FAINT = "#222222", "#D8D8D8"
DPI = 160


def check_plot(path: Path) -> None:
    """Raise ConfigError now if `draw` could not be done later."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: a plot's name ends in one of {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib, which is not installed: pip install 'sparkle-moe[plot]'")


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the picture of what `trace_replay.facts_of` found; a file at `path` is replaced. Raises StorageError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sizes = [size for size in facts["sizes"] if size["scores"]]
    shares = [100 * size["capacity_frac"] for size in sizes]
    rates = {
        x["policy"]: [
            100 * next(y for y in size["scores"] if y["policy"] == x["policy"])["miss_frac"] for size in sizes
        ]
        for x in sizes[0]["scores"]
    }
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(shares, rates[OPTIMUM], color=FAINT, alpha=0.45, linewidth=0)
    axes.plot(shares, rates[OPTIMUM], color=INK, linewidth=2.4, label="Belady (knows the future)", zorder=3)
    axes.plot(shares, rates[OPTIMUM_WITH_BYPASS], color=INK, linewidth=1, linestyle=":", label="Belady, may bypass")
    names = [name for name in rates if name not in (OPTIMUM, OPTIMUM_WITH_BYPASS)]
    for i, name in enumerate(names):
        is_baseline = name == BASELINE
        axes.plot(
            shares,
            rates[name],
            color="#999999" if is_baseline else COLOURS[(i - 1) % len(COLOURS)],
            linestyle=DASHES[i % len(DASHES)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=3.5 if is_baseline else 1.5,  # it shows where another lies on it
            label=name,
            zorder=4,
        )
    _label(axes, facts, shares)
    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text: small, and can be found
            figure.savefig(path, dpi=DPI)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written: {e.strerror or e}. Choose another folder") from None


def _label(axes: Any, facts: Mapping[str, Any], shares: list[float]) -> None:
    start = "pool warmed by another trace" if facts["warmed_with"] else "pool empty at first"
    axes.set_title(f"Miss rate by size of the pool: {facts['model']}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.025, f"{facts['tokens']:,} tokens, {start}", transform=axes.transAxes, fontsize=9, color="#555555")
    axes.set_xlabel(f"experts in the pool (% of {facts['experts']:,})")
    axes.set_ylabel("miss rate (% of uses)")
    axes.set_xlim(min(shares) - 1, max(shares) + 1)
    axes.set_ylim(bottom=0)
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[2:] + handles[:2], labels[2:] + labels[:2], fontsize=9, frameon=False, loc="upper right")
