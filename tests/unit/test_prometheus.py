"""The text for Prometheus: its grammar, its names, and what is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparkle.cli.status import NOT_RUNNING, ROLES, UNRESPONSIVE, DaemonStatus
from sparkle.prometheus import prometheus
from sparkle.telemetry import METRICS

pytestmark = pytest.mark.unit

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
HELP = re.compile(rf"# HELP ({NAME}) ((?:[^\\]|\\[\\n])+)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge)")
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?\d+(?:\.\d+)?(?:e[+-]\d+)?)")
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> tuple[dict[str, str], Series]:
    """Return the type of each family, and each series' value, by a grammar stricter than the format's."""
    assert text.endswith("\n") and "\n\n" not in text
    types: dict[str, str] = {}
    series: Series = {}
    helped, family = "", ""
    for line in text.removesuffix("\n").split("\n"):
        if found := HELP.fullmatch(line):
            helped = found[1]
        elif found := TYPE.fullmatch(line):
            family = found[1]
            assert family == helped, "HELP comes before TYPE"
            assert family not in types, "the lines of a family stand together"
            types[family] = found[2]
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1] == family, "a sample follows the TYPE of its family"
            labels = [(m[1], m[2]) for m in re.finditer(LABEL, found[2] or "")]
            assert len(labels) == len(dict(labels)), "no label twice"
            key = (family, frozenset((name, unescape(value)) for name, value in labels))
            assert key not in series, "no series twice"
            series[key] = float(found[found.lastindex or 0])
    return types, series


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text)


def ready(**metrics: Any) -> DaemonStatus:
    return DaemonStatus("ready", "serving", 123, 3725.5, 1_200_000_000, metrics)


DOWN = {role: DaemonStatus(NOT_RUNNING, "no socket") for role in ROLES}


def series_of(role: str, **metrics: Any) -> dict[str, float]:
    """The series of one daemon, written as in the text, without those that do not come from its metrics."""
    _, series = parse(prometheus({role: ready(**metrics)}))
    out = {}
    for (name, labels), value in series.items():
        inner = ",".join(f'{k}="{v}"' for k, v in sorted(labels))
        out[name.removeprefix(f"sparkle_{role}_") + (f"{{{inner}}}" if inner else "")] = value
    for name in (f'sparkle_up{{daemon="{role}"}}', f'sparkle_ready{{daemon="{role}"}}'):
        assert out.pop(name) == 1
    assert (out.pop("uptime_seconds"), out.pop("resident_memory_bytes")) == (3725.5, 1.2e9)
    return out


def test_every_declared_metric_arrives_under_a_name_of_its_own() -> None:
    statuses = {}
    for role in ROLES:
        values: dict[str, Any] = {}
        for metric in METRICS.values():
            value: Any = "text" if metric.kind == "text" else 3
            for label in reversed(metric.labels):
                value = {f"some {label}": value}
            values[metric.name] = value
        statuses[role] = ready(**{m.name: values[m.name] for m in METRICS.values() if m.role == role})
    types, series = parse(prometheus(statuses))
    numbers = [m for m in METRICS.values() if m.kind != "text"]
    assert len(types) == len(numbers) + 2 + 3 * len(ROLES)  # up and ready; uptime, memory and info of each
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(s|ms|us|tps|frac)(_total)?$", name), f"{name}: base units, written out"
    assert {labels for name, labels in series if name == "sparkle_up"} == {
        frozenset([("daemon", role)]) for role in ROLES
    }


def test_base_units() -> None:
    assert series_of("prefetch", read_p50_ms=350, read_busy_s=1.5, misses=7, memory_pressure_frac=0.25) == {
        "read_p50_seconds": 0.35,
        "read_busy_seconds_total": 1.5,
        "misses_total": 7,
        "memory_pressure_ratio": 0.25,
    }
    assert series_of("prefetch", disk_bytes_per_s=3e9, bytes_read=2**60) == {
        "disk_bytes_per_second": 3e9,
        "bytes_read_total": 2**60,
    }
    assert series_of("compute", decode_tps=26.5, n_active=1) == {"decode_tokens_per_second": 26.5, "n_active": 1}


def test_labels() -> None:
    predicted = {"router": {"issued": 123, "used": 100}, 'odd "\\\n name': {"late": 4}, "empty": {}}
    assert series_of("prefetch", predicted_bytes=predicted) == {
        'predicted_bytes_total{outcome="issued",source="router"}': 123,
        'predicted_bytes_total{outcome="used",source="router"}': 100,
        'predicted_bytes_total{outcome="late",source="odd "\\\n name"}': 4,
    }


def test_texts_are_labels_of_one_constant() -> None:
    texts = {"model_name": 'a "model"', "io_engine": "threads", "policy": "lru"}
    assert series_of("prefetch", **texts) == {'info{io_engine="threads",model_name="a "model"",policy="lru"}': 1}


def test_reasons_are_left_out() -> None:
    """They have numbers in them: each would be a series of its own."""
    assert series_of("prefetch", governor_reason="full size: 12 GB", prefetch_reason="off: +1.2%") == {}


@pytest.mark.parametrize(
    "metrics",
    [
        {"from_the_future": 1},
        {"misses": "many"},
        {"misses": None},
        {"misses": True},
        {"misses": [1]},
        {"misses": {"a": 1}},
        {"read_p50_ms": float("nan")},
        {"read_p50_ms": float("inf")},
        {"predicted_bytes": 5},
        {"predicted_bytes": {"router": 5}},
        {"predicted_bytes": {"router": {"used": "many"}}},
        {"predicted_bytes": {"router": {"used": {"deeper": 1}}}},
        {"predicted_bytes": {"router": {"used": float("inf")}}},
        {"model_name": 5},
    ],
)
def test_what_another_version_may_send_is_left_out(metrics: dict[str, Any]) -> None:
    assert series_of("prefetch", **metrics) == {}


def test_daemons_that_are_down() -> None:
    statuses = {
        "prefetch": DaemonStatus(UNRESPONSIVE, "no answer within 0.6 s", 123),
        "compute": DaemonStatus("starting", "loading", 124, 2.0, 1000),
        "front": DaemonStatus(NOT_RUNNING, "no socket"),
    }
    _, series = parse(prometheus(statuses))
    by_role = {
        name: {role: series[name, frozenset([("daemon", role)])] for role in ROLES}
        for name in ("sparkle_up", "sparkle_ready")
    }
    assert by_role["sparkle_up"] == {"prefetch": 0, "compute": 1, "front": 0}
    assert by_role["sparkle_ready"] == {"prefetch": 0, "compute": 0, "front": 0}
    assert {name for name, _ in series} - by_role.keys() == {
        "sparkle_compute_uptime_seconds",
        "sparkle_compute_resident_memory_bytes",
    }
    parse(prometheus(DOWN))
