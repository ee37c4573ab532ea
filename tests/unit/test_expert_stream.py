"""A layer's experts, looked up and waited for while the graph runs: what is held, asked and told; what a fault does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import starmap

import mlx.core as mx
import numpy as np
import pytest

from sparkle import _mlx_ops
from sparkle._native import RING_WORDS, Mapping, Pool, PoolClient
from sparkle.errors import StorageError
from sparkle.trace import Event
from tests.unit.test_kernels import HIDDEN, quantized_experts

pytestmark = pytest.mark.unit

NAME = f"/spk-stream-{os.getpid()}"
LAYER, N_EXPERTS, FIRST_SLOT, N_SLOTS = 1, 16, 5, 7
ROUTING = [[3, 9, 4], [9, 3, 12]]
ROWS = np.random.default_rng(1).normal(size=(2, HIDDEN)).astype(np.float32)


class Disk:
    """A provider that puts experts into the slots that the test names, and tells what it was asked."""

    def __init__(self, pool: Pool, client: PoolClient, slots: list[int]) -> None:
        self._pool, self._client, self._slots = pool, client, slots
        self.fault: Exception | None = None
        self.fetched: list[int] = []
        self.looked_up: list[list[int]] = []
        self.hints: list[tuple[int, list[int]]] = []
        self.held_at_wait: list[int] = []

    def look_up(self, layer: int, experts: list[int]) -> list[int]:
        self.looked_up.append(experts)
        self._pool.drain(0, 2**63)
        slots = self._client.hold(layer, experts)
        assert self._client.push_event(0, 0, 1, 0, layer, experts, slots)
        return slots

    def fetch(self, layer: int, experts: list[int]) -> None:
        if self.fault:
            raise self.fault
        assert layer == LAYER
        self.fetched += experts

    def wait(self) -> list[int]:
        self.held_at_wait.append(self._client.n_held)
        for expert in self.fetched:
            load(self._pool, self._slots.pop(0), expert)
        return self._client.hold(LAYER, self.fetched)

    def hint(self, layer: int, experts: list[int]) -> None:
        self.hints.append((layer, experts))


def load(pool: Pool, slot: int, expert: int, layer: int = LAYER) -> None:
    assert pool.begin_load(slot, layer, expert)
    pool.publish(slot, 0)


class World:
    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)
        self.pool = Pool.create(NAME, 2, N_EXPERTS, FIRST_SLOT + N_SLOTS, "fingerprint", "[]")
        self.pool.complete()
        self.client = PoolClient.attach(NAME, 0)
        processor = _mlx_ops.Processor("portable", 2, 20)
        self.arrays, experts = quantized_experts(np.random.default_rng(0), N_SLOTS, (8, 8, 8), mx.float32)
        self._processor, self._experts = processor, experts
        self.stream = _mlx_ops.ExpertStream(processor)
        self.stream.attach(self.client.share(), [None, experts])
        self.disk = Disk(self.pool, self.client, [6, 7, 8, 9])

    def begin(self) -> None:
        self.stream.begin(40, 3, 2, 77, self.disk)

    def run(
        self, layer: int = LAYER, layout: int = 1, logits: list[tuple[int, int, mx.array]] | None = None
    ) -> mx.array:
        routing = mx.array(ROUTING, mx.uint32)
        y = _mlx_ops.streamed_mlp(self.stream, layer, layout, HIDDEN, mx.array(ROWS), routing, logits or [])
        mx.eval(y)
        return y

    def expected(self, slot_of: dict[int, int]) -> mx.array:
        slots = mx.array([[slot_of[e] for e in row] for row in ROUTING], mx.int32)
        return _mlx_ops.expert_mlp(self._processor, self._experts, mx.array(ROWS), slots)


@pytest.fixture
def world() -> Iterator[World]:
    yield World()
    Mapping.unlink(NAME)


def test_hits_ask_nobody_and_are_told(world: World) -> None:
    slot_of = {3: 5, 9: 11, 4: 8, 12: 6}
    for expert, slot in slot_of.items():
        load(world.pool, slot, expert)
    world.begin()
    assert mx.array_equal(world.run(), world.expected(slot_of))
    world.stream.check()
    assert (world.disk.looked_up, world.disk.fetched, world.client.n_held) == ([], [], 0)
    (event,) = starmap(Event, world.pool.drain(0, 2**63))
    assert event == Event(40, event.time_us, 3, 2, 77, LAYER, [3, 4, 9, 12], [True] * 4)


@pytest.mark.parametrize("there", [{}, {9: 11}, {3: 5, 4: 10, 12: 11}], ids=["none", "one", "all but one"])
def test_what_is_absent_is_waited_for(world: World, there: dict[int, int]) -> None:
    for expert, slot in there.items():
        load(world.pool, slot, expert)
    missing = [e for e in (3, 4, 9, 12) if e not in there]
    world.begin()
    y = world.run()
    world.stream.check()
    assert world.disk.fetched == missing
    assert world.disk.held_at_wait == [0], "who waits must hold nothing"
    assert mx.array_equal(y, world.expected({**there, **dict(zip(missing, (6, 7, 8, 9), strict=False))}))
    assert world.client.n_held == 0
    (event,) = starmap(Event, world.pool.drain(0, 2**63))
    assert event.is_hit == [e in there for e in (3, 4, 9, 12)]


def test_layers_of_one_graph_run_in_their_order(world: World) -> None:
    """The second layer takes the first one's slots: it may look for them only when the first has let go."""
    world.begin()
    x, routing = mx.array(ROWS), mx.array(ROUTING, mx.uint32)
    for _ in range(3):
        y = _mlx_ops.streamed_mlp(world.stream, LAYER, 1, HIDDEN, x, routing, [])
        x = y.mean(axis=1)
    mx.eval(x)
    world.stream.check()
    assert world.disk.fetched == [3, 4, 9, 12]
    assert len(world.pool.drain(0, 2**63)) == 3


def test_a_full_ring_is_left_to_the_provider(world: World) -> None:
    while world.client.push_event(0, 0, 1, 0, 0, list(range(995)), [0] * 995):
        pass
    for expert, slot in zip((3, 4, 9, 12), (5, 6, 7, 8), strict=True):
        load(world.pool, slot, expert)
    n_words = world.client.ring_position
    while RING_WORDS - n_words > 4:  # no room for one more word of ours
        n_experts = min(900, RING_WORDS - n_words - 5)
        assert world.client.push_event(0, 0, 1, 0, 0, [0] * n_experts, [0] * n_experts)
        n_words = world.client.ring_position
    world.begin()
    world.run()
    world.stream.check()
    assert (world.disk.looked_up, world.client.n_held) == ([[3, 4, 9, 12]], 0)


def test_hints_name_the_likeliest_that_are_absent(world: World) -> None:
    for expert, slot in zip((3, 4, 9, 12), (5, 6, 7, 8), strict=True):
        load(world.pool, slot, expert)
    load(world.pool, 9, 2, layer=0)
    logits = np.zeros((2, N_EXPERTS), np.float32)
    logits[0, 15] = 9.0  # of a row that is not the last
    logits[1, [7, 2, 11]] = 5.0, 4.0, 3.0
    world.begin()
    world.run(logits=[(0, 4, mx.array(logits))])
    world.stream.check()
    assert world.disk.hints == [(0, [7, 11, 0])]  # 2 is there; of equals the first


def test_a_fault_is_raised_once_and_the_rest_of_the_step_is_nan(world: World) -> None:
    world.disk.fault = StorageError("record 3 of layer 1 is damaged")
    load(world.pool, 5, 9)
    world.begin()
    assert mx.isnan(world.run()).all()
    world.disk.fault = None
    assert mx.isnan(world.run()).all(), "a step that failed computed on"
    assert (world.disk.fetched, world.client.n_held) == ([], 0)
    with pytest.raises(StorageError, match="record 3 of layer 1 is damaged") as raised:
        world.stream.check()
    assert raised.value.code == "storage"
    world.stream.check()
    world.begin()
    assert not mx.isnan(world.run()).any(), "the next step suffers from the last one's fault"
    world.stream.check()


def test_misuse_is_a_fault_too(world: World) -> None:
    for layer, layout, error in ((7, 1, IndexError), (LAYER, 0, RuntimeError), (LAYER, 5, RuntimeError)):
        world.begin()
        assert mx.isnan(world.run(layer, layout)).all()
        with pytest.raises(error):
            world.stream.check()
        assert world.client.n_held == 0
    world.stream.end()
    assert mx.isnan(world.run()).all()
    with pytest.raises(RuntimeError, match="outside of a step"):
        world.stream.check()
