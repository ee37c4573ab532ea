"""Forecasts: what is remembered, for how long, and in what order it is handed out."""

from __future__ import annotations

import pytest

from sparkle.trace import Event
from sparkled.prefetch.forecasts import MAX_TOKENS, Forecasts

pytestmark = pytest.mark.unit

N_LAYERS = 4


def forecasts(active: str | None) -> Forecasts:
    made = Forecasts(lambda layer: [(layer + i) % N_LAYERS for i in range(1, N_LAYERS)])
    made.active = active
    return made


def event(layer: int, experts: list[int], token: int = 7, stream: int = 0, rows: int = 1) -> Event:
    return Event(0, 0, stream, rows, token, layer, experts, [False] * len(experts))


def test_a_token_is_expected_to_use_what_it_used_last_time() -> None:
    it = forecasts("token")
    for layer in range(N_LAYERS):
        it.observe(event(layer, [layer, 9], token=7))
        it.observe(event(layer, [5, 6], token=8))
    list(it.take())
    it.observe(event(0, [1, 2], token=7))
    assert list(it.take()) == [(1, 1), (1, 9), (2, 2), (2, 9)]  # two layers ahead, the nearest first


def test_a_conversation_is_expected_to_go_on_as_it_did() -> None:
    it = forecasts("previous")
    it.observe(event(1, [3], token=1, stream=1))
    it.observe(event(1, [4], token=2, stream=2))
    list(it.take())
    it.observe(event(0, [0], token=3, stream=1))
    assert list(it.take()) == [(1, 3)]


def test_what_was_wanted_for_a_layer_is_forgotten_at_its_turn() -> None:
    it = forecasts("router")
    it.hint("router", 2, [1, 2])
    it.hint("router", 3, [8])
    taken = it.take()
    assert next(taken) == (2, 1)
    it.observe(event(2, [0]))
    assert list(it.take()) == [(3, 8)]


def test_only_the_active_predictor_is_heard() -> None:
    for active in (None, "token"):
        it = forecasts(active)
        it.hint("router", 2, [1, 2])
        assert list(it.take()) == []


def test_a_prompt_teaches_nothing() -> None:
    it = forecasts("token")
    for layer in range(N_LAYERS):
        it.observe(event(layer, [1], rows=20))
    it.observe(event(0, [1]))
    assert list(it.take()) == []


def test_memory_is_bounded() -> None:
    it = forecasts("token")
    for token in range(MAX_TOKENS + 1):
        it.observe(event(1, [3], token=token))
    for token, expected in ((0, []), (MAX_TOKENS, [(1, 3)])):
        it.observe(event(0, [0], token=token))
        assert list(it.take()) == expected
