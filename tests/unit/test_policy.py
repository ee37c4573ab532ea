"""Which expert leaves the pool: LRU against a plain list that says the same in other words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle.policy import LRU, Key

pytestmark = pytest.mark.unit

KEYS = st.tuples(st.integers(0, 2), st.integers(0, 3))


def test_the_least_recently_used_goes_first() -> None:
    lru = LRU()
    for key in ((0, 1), (0, 2), (0, 3)):
        lru.on_load(key, is_demand=True)
    lru.on_use((0, 1))
    assert list(lru.victims()) == [(0, 2), (0, 3), (0, 1)]
    lru.on_evict((0, 2))
    assert list(lru.victims()) == [(0, 3), (0, 1)]


def test_what_nobody_asked_for_goes_before_what_was_used() -> None:
    lru = LRU()
    lru.on_load((0, 1), is_demand=True)
    lru.on_load((0, 2), is_demand=False)
    lru.on_load((0, 3), is_demand=False)
    assert list(lru.victims()) == [(0, 3), (0, 2), (0, 1)]
    lru.on_use((0, 2))
    assert list(lru.victims()) == [(0, 3), (0, 1), (0, 2)]


def test_use_of_what_has_left_is_passed_over() -> None:
    lru = LRU()
    lru.on_load((0, 1), is_demand=True)
    lru.on_use((1, 1))
    assert list(lru.victims()) == [(0, 1)]


@given(st.lists(st.tuples(st.sampled_from(["load", "fill", "use", "evict"]), KEYS)))
def test_it_is_a_list_in_order_of_last_use(calls: list[tuple[str, Key]]) -> None:
    lru, order = LRU(), list[Key]()
    for call, key in calls:
        is_in = key in order
        if call in ("load", "fill") and not is_in:
            lru.on_load(key, is_demand=call == "load")
            order = [*order, key] if call == "load" else [key, *order]
        elif call == "use":
            lru.on_use(key)
            order = [*(k for k in order if k != key), key] if is_in else order
        elif call == "evict" and is_in:
            lru.on_evict(key)
            order.remove(key)
        assert list(lru.victims()) == order
