"""One request's turns, without daemons: what is fed to the model and when it ends; ends of sequence; rates.

The model is a peer here: a small recurrence whose next token depends on every token fed so far and on their order. What
is under test is who feeds it what.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle.errors import Cancelled, StorageError
from sparkle.store import Store
from sparkled.compute import engine
from sparkled.compute.engine import Rate
from sparkled.compute.generation import Generation, Phase, Turn
from sparkled.compute.loader import LoadedModel, _generation_config, _stop_ids
from sparkled.compute.sampler import Choice
from sparkled.compute.streamed import ExpertSource

pytestmark = pytest.mark.unit

VOCAB = 97
GREEDY = Choice(seed=0, temperature=0.0)


def recur(state: int, token: int) -> int:
    return (5 * state + token + 1) % VOCAB


def expected_tokens(prompt: list[int], n: int) -> list[int]:
    state, out = 0, []
    for token in prompt:
        state = recur(state, token)
    for _ in range(n):
        out.append(state)
        state = recur(state, state)
    return out


class Model:
    """The next token is the recurrence's state. `calls`: what was fed; `fault` is raised by the next call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.fault: BaseException | None = None

    def make_cache(self) -> list[Any]:
        return [SimpleNamespace(state=mx.array(0))]

    def __call__(self, ids: Any, cache: list[Any]) -> mx.array:
        if self.fault is not None:
            raise self.fault
        self.calls.append(ids.tolist()[0])
        rows = []
        for token in self.calls[-1]:
            cache[0].state = (5 * cache[0].state + token + 1) % VOCAB
            rows.append(mx.arange(VOCAB) == cache[0].state)
        return mx.stack(rows)[None]


class Source:
    """Stands for the experts: knows whether a step is open, and how it ended."""

    def __init__(self) -> None:
        self.n_open = self.n_abandoned = 0

    def begin(self, _should_abort: Any, stream: int, ids: Sequence[int]) -> None:
        assert len(ids) > 0
        assert self.n_open == 0
        self.n_open = 1

    def finish(self) -> None:
        self.n_open -= 1

    def abandon(self) -> None:
        self.n_open -= 1
        self.n_abandoned += 1


class Run:
    """A generation, its model and its source."""

    def __init__(self, prompt: list[int], max_output: int = 8, stop_ids: tuple[int, ...] = (), **fields: Any) -> None:
        self.model, self.source = Model(), Source()
        self.loaded = LoadedModel(self.model, mx.float32, frozenset(stop_ids), {}, VOCAB)
        choice = fields.pop("choice", GREEDY)
        self.generation = Generation(b"peer", "r", prompt, choice, frozenset(stop_ids), max_output, **fields)

    def advance(self, rows: int = 4) -> Turn:
        turn = self.generation.advance(self.loaded, cast(ExpertSource, self.source), rows)
        assert self.source.n_open == 0, "the slots of a step go back within its turn"
        return turn

    def to_end(self, rows: int = 4) -> list[int]:
        """The tokens of all turns."""
        tokens = []
        while self.generation.phase is not Phase.DONE:
            turn = self.advance(rows)
            if turn.token is not None:
                tokens.append(turn.token)
        return tokens


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(prompts, st.integers(0, 8), st.integers(1, 7))
def test_every_token_is_fed_once_whatever_the_chunks_and_the_resume(
    prompt: list[int], n_resumed: int, rows: int
) -> None:
    """Resumed at any point the output goes on as if nothing had been, and nothing is said twice."""
    expected = expected_tokens(prompt, 8)
    run = Run(prompt, output=expected[:n_resumed])
    assert run.to_end(rows) == expected[n_resumed:]
    assert run.generation.output == expected
    assert run.generation.reason == "length"
    fed = [token for call in run.model.calls for token in call]
    assert fed == ([*prompt, *expected[:-1]] if n_resumed < 8 else []), "what is complete costs no step"
    assert max(map(len, run.model.calls), default=1) <= rows


def test_turns_of_a_prompt() -> None:
    run = Run(list(range(10)))
    turns = [run.advance() for _ in range(3)]
    assert [(t.token, t.n_prompt) for t in turns] == [(None, 4), (None, 4), (None, 1)]
    assert (run.generation.phase, run.generation.done) == (Phase.PREFILL, 9)
    first = run.advance()
    assert (first.token, first.n_prompt) == (expected_tokens(list(range(10)), 1)[0], 1)
    assert (run.generation.phase, run.generation.done) == (Phase.DECODE, 10)
    assert run.advance().n_prompt == 0
    assert [len(call) for call in run.model.calls] == [4, 4, 1, 1, 1]


def test_a_stop_id_ends_the_answer_and_is_no_part_of_it() -> None:
    prompt = [3, 1, 4]
    expected = expected_tokens(prompt, 8)
    n = next(i for i in range(2, 8) if expected[i] not in expected[:i])
    run = Run(prompt, stop_ids=(expected[n], 96))
    assert run.to_end() == expected[:n]
    assert run.generation.reason == "stop"
    usage = run.generation.usage()
    assert (usage.prompt_tokens, usage.output_tokens) == (3, n)


def test_an_answer_may_be_empty() -> None:
    run = Run([3, 1, 4], stop_ids=(expected_tokens([3, 1, 4], 1)[0],))
    assert run.to_end() == []
    usage = run.generation.usage()
    assert usage.output_tokens == 0 and usage.ttft_ms > 0.0 and usage.decode_tps == 0.0


def test_more_resumed_than_allowed_feeds_nothing() -> None:
    """A client's word: 1000 resumed tokens must not be prefilled beyond the context."""
    run = Run([1, 2], max_output=8, output=[5] * 1000)
    assert run.to_end() == []
    assert run.generation.reason == "length"
    assert run.model.calls == []


def test_usage_counts_resumed_tokens_but_its_rates_do_not() -> None:
    run = Run([1, 2], output=expected_tokens([1, 2], 5))
    run.to_end()
    usage = run.generation.usage()
    assert usage.output_tokens == 8
    seconds = run.generation.last_token_at - run.generation.first_token_at
    assert usage.decode_tps * seconds == pytest.approx(2), "of three new tokens, two came after the first"


@pytest.mark.parametrize("n_turns", [0, 1, 3, 5])
def test_cancelled_between_turns(n_turns: int) -> None:
    """Before the first, in prefill, in decode."""
    run = Run(list(range(10)))
    for _ in range(n_turns):
        run.advance()
    n_calls = len(run.model.calls)
    run.generation.cancel()
    assert run.advance().token is None
    assert run.generation.reason == "cancelled"
    assert run.generation.phase is Phase.DONE
    assert len(run.model.calls) == n_calls


@pytest.mark.parametrize("fault", [Cancelled("within a step"), StorageError("damaged"), RuntimeError("MLX")])
@pytest.mark.parametrize("n_turns", [0, 1, 3, 5])
def test_a_fault_within_a_step_drops_its_caches(n_turns: int, fault: Exception) -> None:
    run = Run(list(range(10)))
    for _ in range(n_turns):
        run.advance()
    run.model.fault = fault
    with pytest.raises(type(fault)):
        run.advance()
    assert run.generation._cache == []
    assert run.source.n_abandoned == 1
    run.generation.end()
    assert run.generation.phase is Phase.DONE


def test_an_ended_generation_keeps_no_caches() -> None:
    run = Run([1, 2, 3])
    run.to_end()
    assert run.generation._cache == []


def test_two_requests_are_never_the_same() -> None:
    """The engine finds a generation in its queues by identity: two clients may ask alike."""
    assert Generation.__eq__ is object.__eq__


# --- ends of sequence ------------------------------------------------------------------------------------------------


def store_with(path: Path, config: dict[str, Any], **files: Any) -> Store:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return Store(path, "", (), (), {"vocab_size": VOCAB, **config}, {}, {}, {})


def stops(store: Store) -> set[int]:
    return set(_stop_ids(store, _generation_config(store)))


ADDED = {
    "added_tokens": [{"id": 5, "content": "<a>"}, {"id": 6, "content": "<end>"}, {"id": 7, "content": "<|endoftext|>"}]
}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 1}, {}, {1}),
        ({"eos_token_id": 0}, {}, {0}),
        ({"eos_token_id": [1, 2]}, {}, {1, 2}),
        ({"eos_token_id": None}, {"generation_config": {"eos_token_id": None}}, set()),
        ({"text_config": {"eos_token_id": 4, "vocab_size": VOCAB}}, {}, {4}),
        ({"eos_token_id": 1}, {"generation_config": {"eos_token_id": [2, 3]}}, {1, 2, 3}),
        ({"eos_token_id": [1, 2]}, {"generation_config": {"eos_token_id": 3}}, {1, 2, 3}),
        ({"eos_token_id": 1}, {"tokenizer": ADDED, "tokenizer_config": {"eos_token": "<end>"}}, {1, 6}),
        ({}, {"tokenizer": ADDED, "tokenizer_config": {"eos_token": {"content": "<end>", "lstrip": False}}}, {6}),
        ({}, {"tokenizer": ADDED, "tokenizer_config": {"eos_token": None}}, set()),
        ({}, {"tokenizer": ADDED, "tokenizer_config": {}}, set()),
        ({}, {"tokenizer": ADDED}, set()),
        ({}, {"tokenizer_config": {"eos_token": "<end>"}}, set()),
        (
            {"eos_token_id": 1},
            {
                "generation_config": {"eos_token_id": [2]},
                "tokenizer": ADDED,
                "tokenizer_config": {"eos_token": "<|endoftext|>"},
            },
            {1, 2, 7},
        ),
    ],
)
def test_stop_ids_are_the_union_of_all_files(
    config: dict[str, Any], files: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    assert stops(store_with(tmp_path, config, **files)) == expected


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(StorageError, match=r"generation_config\.json"):
        stops(store_with(tmp_path, {}))


@pytest.mark.parametrize(
    "bad",
    [{"temperature": "warm"}, {"top_k": [1]}, {"top_p": 2.0}, {"temperature": -1.0}, {"top_k": float("inf")}],
    ids=str,
)
def test_a_default_that_would_fail_every_request_fails_the_start(bad: dict[str, Any], tmp_path: Path) -> None:
    store = store_with(tmp_path, {}, generation_config={"do_sample": True, **bad})
    with pytest.raises(StorageError, match=r"generation_config\.json: a default for sampling"):
        _generation_config(store)


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rate_counts_busy_time_within_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))
    rate = Rate()
    assert rate.value() == 0.0
    rate.add(10, 0.5)
    assert rate.value() == 20.0
    now = 105.0  # idle seconds are not busy ones
    assert rate.value() == 20.0
    rate.add(30, 0.5)
    assert rate.value() == 40.0
    now = 100.0 + engine.RATE_WINDOW_S + 0.1  # the first has left
    assert rate.value() == 60.0
    now += engine.RATE_WINDOW_S
    assert rate.value() == 0.0
    rate.add(0, 0.0)
    assert rate.value() == 0.0
