"""The meter: token times, regrets, and chapters judged against the optimum."""

from __future__ import annotations

import random

import pytest

from sparkle.policy import Key
from sparkle.replay import belady
from sparkle.trace import Event
from sparkled.prefetch import meter as module
from sparkled.prefetch.meter import Meter, Verdict

pytestmark = pytest.mark.unit

RECORD_BYTES = 100
N_SLOTS = 6
JOIN_S = 10.0


def event(
    step: int, layer: int, experts: list[int], hits: list[bool], stream: int = 0, rows: int = 1, ms: int = 0
) -> Event:
    return Event(step, ms * 1000 % 2**32, stream, rows, 0, layer, experts, hits)


def new(resident: list[Key] | None = None) -> Meter:
    return Meter(lambda layout: (N_SLOTS, resident or []), [RECORD_BYTES])


def judge(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setattr(module, "CHAPTER_S", 0.0)
    meter.turn_pages()
    assert meter._judge is not None
    meter._judge.join(JOIN_S)
    return meter.judged()


def test_a_chapter_is_judged_by_what_the_optimum_would_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, resident = random.Random(1), [(0, 1), (1, 2)]
    meter, events = new(resident), list[Event]()
    for step in range(200):
        for layer in range(2):
            experts = rng.sample(range(6), 2)
            events.append(event(step, layer, experts, [rng.random() < 0.5 for _ in experts], ms=10 * step))
            meter.observe(events[-1], 0)
    verdict = judge(meter, monkeypatch)
    assert verdict.tokens == 199, "the first has no beginning"
    assert verdict.bytes_read == RECORD_BYTES * sum(e.is_hit.count(False) for e in events)
    assert verdict.bytes_belady == RECORD_BYTES * belady(events, N_SLOTS, resident).n_misses
    assert verdict.decode_s == pytest.approx(199 * 0.01)


def test_prompts_take_slots_but_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = new()
    meter.observe(event(1, 0, [0, 1, 2, 3], [False] * 4, rows=9), 0)
    meter.observe(event(2, 0, [0, 5], [True, False]), 0)
    verdict = judge(meter, monkeypatch)
    assert (verdict.tokens, verdict.bytes_read, verdict.bytes_belady) == (0, RECORD_BYTES, RECORD_BYTES)


def test_only_consecutive_steps_of_one_conversation_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, seen = new(), list[tuple[float, float]]()
    meter.on_token = lambda seconds, stall_s: seen.append((round(seconds, 6), round(stall_s, 6)))
    meter.observe(event(1, 0, [0], [True], ms=0), 0)
    meter.observe(event(1, 1, [0], [True], ms=5), 0)
    meter.stalled(0.002)
    meter.observe(event(2, 0, [0], [True], ms=10), 0)  # 10 ms, 2 of them stalled
    meter.observe(event(3, 0, [0], [True], stream=1, ms=20), 0)  # another conversation
    meter.observe(event(5, 0, [0], [True], stream=1, ms=30), 0)  # a step is missing
    meter.observe(event(6, 0, [0, 1], [True, True], stream=1, rows=4, ms=40), 0)  # a prompt
    meter.observe(event(7, 0, [0], [True], stream=1, ms=50), 0)
    meter.stalled(1.0)
    meter.observe(event(8, 0, [0], [True], stream=1, ms=53), 0)  # never more stalled than it took
    assert seen == [(0.01, 0.002), (0.003, 0.003)]
    verdict = judge(meter, monkeypatch)
    assert verdict.tokens == 2
    assert (verdict.decode_s, verdict.stall_s) == pytest.approx((0.013, 0.005))


def test_the_clock_wraps_around() -> None:
    meter, seen = new(), list[float]()
    meter.on_token = lambda seconds, stall_s: seen.append(seconds)
    meter.observe(Event(1, 2**32 - 4000, 0, 1, 0, 0, [0], [True]), 0)
    meter.observe(Event(2, 6000, 0, 1, 0, 0, [0], [True]), 0)
    assert seen == [pytest.approx(0.01)]


def test_regret_is_for_what_left_a_few_tokens_ago() -> None:
    meter = new()
    meter.evicted((0, 1))
    meter.evicted((0, 2))
    for step in range(module.REGRET_TOKENS):
        meter.observe(event(step, 0, [0], [True]), 0)
    meter.missed((0, 1))
    meter.missed((0, 1))  # once for each eviction
    meter.observe(event(99, 0, [0], [True]), 0)
    meter.missed((0, 2))
    assert meter.counts["regrets"] == 1


def test_a_pool_of_another_size_begins_another_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = new()
    meter.observe(event(1, 0, [0, 1], [False, False]), 0)
    meter.resized()
    meter.observe(event(2, 0, [2], [False]), 0)
    assert judge(meter, monkeypatch).bytes_read == RECORD_BYTES
