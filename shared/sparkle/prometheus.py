"""Every daemon's metrics in the text format that Prometheus reads (exposition format 0.0.4).

Owns the names there: `sparkle_ROLE_NAME` in base units (seconds, not milliseconds), `_total` at the end of counters.
Reads what sparkle.cli.status gathered, by the table of sparkle.telemetry. A value that is missing or of another type,
as a daemon of another version may send it, is left out. Never talks to a daemon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from sparkle.telemetry import METRICS, Metric

if TYPE_CHECKING:
    from sparkle.cli.status import DaemonStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# (end of a name here, its end there, what a value is divided by)
_BASE_UNITS = (
    ("_per_s", "_per_second", 1),
    ("_ms", "_seconds", 1000),
    ("_s", "_seconds", 1),
    ("_tps", "_tokens_per_second", 1),
    ("_frac", "_ratio", 1),
)
# Texts that explain have numbers in them: as labels they would begin a new series at every reading.
_EXPLAINS = "_reason"

Labels = Mapping[str, str]


def prometheus(statuses: Mapping[str, DaemonStatus]) -> str:
    """Return the text; each line of it ends with a newline."""
    return "".join(f"{line}\n" for line in _lines(statuses))


def _lines(statuses: Mapping[str, DaemonStatus]) -> Iterator[str]:
    answers = {role: status.uptime_s is not None for role, status in statuses.items()}
    ready = {role: status.state == "ready" for role, status in statuses.items()}
    yield from _of_daemons("sparkle_up", "1 if the daemon answers", answers)
    yield from _of_daemons("sparkle_ready", "1 if the daemon is ready to serve", ready)
    for role, status in statuses.items():
        for name, meaning, value in (
            ("uptime_seconds", "time since the daemon was started", status.uptime_s),
            (
                "resident_memory_bytes",
                "memory of the process and what it touched of the pool",
                status.rss_bytes,
            ),
        ):
            yield from _family(f"sparkle_{role}_{name}", "gauge", meaning, _samples(value, (), {}))
        yield from _info(role, status.metrics)
        for metric in METRICS.values():
            if metric.role == role and metric.kind != "text":
                name, divisor = _name_there(metric)
                samples = _samples(status.metrics.get(metric.name), metric.labels, {})
                in_units = ((labels, value if divisor == 1 else value / divisor) for labels, value in samples)
                yield from _family(name, metric.kind, metric.meaning, in_units)


def _of_daemons(name: str, meaning: str, values: Mapping[str, bool]) -> Iterator[str]:
    return _family(name, "gauge", meaning, (({"daemon": role}, int(value)) for role, value in values.items()))


def _info(role: str, values: Mapping[str, object]) -> Iterator[str]:
    """A text cannot be a value: it becomes a label of a constant."""
    labels = {}
    for metric in METRICS.values():
        text = values.get(metric.name)
        is_label = metric.kind == "text" and not metric.name.endswith(_EXPLAINS)
        if metric.role == role and is_label and isinstance(text, str):
            labels[metric.name] = text
    return _family(f"sparkle_{role}_info", "gauge", "what this daemon runs with", [(labels, 1)] if labels else [])


def _family(name: str, kind: str, meaning: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    """All lines of a name, which must stand together; nothing if there is no sample."""
    is_first = True
    for labels, value in samples:
        if is_first:
            yield f"# HELP {name} {_escape(meaning)}"
            yield f"# TYPE {name} {kind}"
            is_first = False
        inner = ",".join(f'{label}="{_escape(text, quote=True)}"' for label, text in labels.items())
        yield f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def _samples(value: object, names: tuple[str, ...], labels: Labels) -> Iterator[tuple[Labels, float]]:
    """What a metric's value says: a number, or maps in maps down to numbers, one for each of `names`."""
    if names and isinstance(value, Mapping):
        for text, inner in value.items():
            if isinstance(text, str):
                yield from _samples(inner, names[1:], {**labels, names[0]: text})
    elif not names and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield labels, value


def _name_there(metric: Metric) -> tuple[str, int]:
    """Return the name that Prometheus gets, and what to divide values by."""
    name, divisor = f"sparkle_{metric.role}_{metric.name}", 1
    for here, there, n in _BASE_UNITS:
        if name.endswith(here):
            name, divisor = name.removesuffix(here) + there, n
            break
    return name + ("_total" if metric.kind == "counter" else ""), divisor


def _escape(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
