"""The table of metrics keeps its own rules, and the status screen uses only what it declares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sparkle import telemetry

pytestmark = pytest.mark.unit

SHARED = Path(__file__).resolve().parents[2] / "shared" / "sparkle"
UNITS = {"bytes", "bytes/s", "items", "tokens", "s", "ms", "tok/s", "ratio", "-"}


def test_the_table_is_well_formed() -> None:
    rows = [line.split()[:2] for line in telemetry._TABLE.strip().splitlines()]
    assert len(rows) == len(telemetry.METRICS)  # no name twice
    for (role, name), metric in telemetry.METRICS.items():
        assert role in ("prefetch", "compute", "front")
        assert metric.kind in ("counter", "gauge", "text"), name
        assert metric.unit in UNITS, name
        assert (metric.unit == "-") == (metric.kind == "text"), name
        assert metric.meaning, name


def test_names_carry_their_units() -> None:
    for (_, name), metric in telemetry.METRICS.items():
        if metric.unit in ("ms", "s"):
            assert name.endswith("_" + metric.unit), name
        if metric.unit == "tok/s":
            assert name.endswith("_tps"), name
        if metric.unit == "bytes":
            assert "bytes" in name, name
        if metric.unit == "bytes/s":
            assert name.endswith("_bytes_per_s"), name
        assert (metric.unit == "ratio") == name.endswith("_frac"), name
        if name.startswith("n_"):
            assert metric.kind == "gauge", name


def test_labels_are_part_of_the_declaration() -> None:
    metric = telemetry.METRICS["prefetch", "predicted_bytes"]
    assert (metric.labels, metric.kind) == (("source", "outcome"), "counter")
    assert metric.full_name == "predicted_bytes{source,outcome}"
    assert telemetry.METRICS["prefetch", "misses"].full_name == "misses"
    for metric in telemetry.METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\{[a-z]+(,[a-z]+)*\})?", metric.full_name)


def test_check_refuses_what_is_not_declared() -> None:
    telemetry.check("prefetch", {"misses": 1, "io_engine": "threads", "predicted_bytes": {}})
    with pytest.raises(KeyError, match="'mises' of the prefetch daemon"):
        telemetry.check("prefetch", {"mises": 1})
    with pytest.raises(KeyError, match="of the front daemon"):
        telemetry.check("front", {"misses": 1})


def test_the_status_screen_asks_for_declared_metrics_only() -> None:
    """Names in its source are literals: m.number("…"), m.count("…") and so on."""
    tree = ast.parse((SHARED / "cli" / "status_view.py").read_text(encoding="utf-8"))
    declared = {name for _, name in telemetry.METRICS}
    asked = {
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("number", "count", "items", "text", "nested")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(asked) > 20
    assert asked <= declared
