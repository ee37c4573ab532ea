"""The generated parts of the READMEs are up to date: else run python scripts/gen_docs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import gen_docs
from sparkle.errors import ConfigError
from sparkle.messages import KINDS
from sparkle.telemetry import METRICS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("path", gen_docs.TARGETS, ids=lambda path: path.parent.name)
def test_up_to_date(path: Path) -> None:
    old, new = gen_docs.updated(path)
    assert old == new


def test_nothing_is_left_out() -> None:
    text = gen_docs.updated(gen_docs.TARGETS[0])[1]
    for kind in KINDS:
        assert f"| `{kind}` |" in text
    for metric in METRICS.values():
        assert f"| `{metric.full_name}` |" in text
    assert "| `predicted_bytes{source,outcome}` |" in text


def test_an_unknown_block_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- generated: nonsense -->\n<!-- end -->\n")
    with pytest.raises(ConfigError, match="nothing makes 'nonsense'"):
        gen_docs.updated(path)
