"""The side region's account: every byte that was read ahead ends as used, late or wasted, or still waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkled.prefetch.side import FILL, SideRegion

pytestmark = pytest.mark.unit

KEY = st.tuples(st.integers(0, 2), st.integers(0, 3))


@given(st.lists(st.tuples(st.sampled_from(["fill", "router", "used", "late", "wasted", "passed"]), KEY)))
def test_every_byte_is_accounted_for_once(calls: list[tuple[str, tuple[int, int]]]) -> None:
    side = SideRegion(limit=3)
    for call, key in calls:
        if call in (FILL, "router"):
            if key not in side:
                side.add(key, call, 10)
        elif call == "passed":
            side.passed(key[0])
        else:
            getattr(side, call)(key, 10)
        issued = sum(n["issued"] for n in side.n_bytes.values())
        ended = sum(n[outcome] for n in side.n_bytes.values() for outcome in ("used", "late", "wasted"))
        assert issued - ended == 10 * len(side)


def test_a_forecast_is_due_until_its_layer_had_its_turn() -> None:
    side = SideRegion(limit=2)
    side.add((3, 1), "router", 10)
    side.add((4, 1), "router", 10)
    side.add((3, 2), FILL, 10)
    assert side.is_full
    assert [side.is_due(k) for k in ((3, 1), (4, 1), (3, 2))] == [True, True, False]
    side.passed(3)
    assert not side.is_full
    assert not side.is_due((3, 1))
    side.used((3, 1), 10)  # a turn later, but used it is
    assert side.n_bytes["router"] == {"issued": 20, "used": 10, "late": 0, "wasted": 0}
    side.wasted((9, 9), 10)  # nobody had wanted it
    assert side.n_bytes[FILL] == {"issued": 10, "used": 0, "late": 0, "wasted": 0}
