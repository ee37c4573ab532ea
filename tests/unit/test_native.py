"""The C++ core from Python: shared memory, the calls of the slot protocol, the event ring, and the stub."""

from __future__ import annotations

import ast
import errno
import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path

import numpy as np
import pytest

from sparkle import _native
from sparkle._native import EMPTY, EVICTING, LOADING, PAGE_BYTES, READY, RING_WORDS, Mapping, Pool, PoolClient
from sparkle.trace import Event

pytestmark = pytest.mark.unit

NAME = f"/spk-test-{os.getpid()}"
STUB = Path(__file__).resolve().parents[2] / "shared" / "sparkle" / "_native.pyi"
LAYERS, EXPERTS, SLOTS = 2, 5, 3
# where native/src/control.h has things
VERSION_AT, COMPLETE_AT, TABLE_AT = 8, 12, PAGE_BYTES
SLOTS_AT = TABLE_AT + 64 * -(-4 * LAYERS * EXPERTS // 64)
RINGS_AT = SLOTS_AT + 64 * SLOTS


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    Mapping.unlink(NAME)


@pytest.fixture
def pool() -> Pool:
    pool = Pool.create(NAME, LAYERS, EXPERTS, SLOTS, "fingerprint", '["layout"]')
    pool.complete()
    return pool


@pytest.fixture
def client(pool: Pool) -> PoolClient:
    return PoolClient.attach(NAME, 0)


def load(pool: Pool, slot: int, layer: int, expert: int, grants: int = 0) -> None:
    assert pool.begin_load(slot, layer, expert)
    pool.publish(slot, grants)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_memory_is_shared_zeroed_and_outlives_its_name() -> None:
    mine = Mapping.create(NAME, 3 * PAGE_BYTES)
    theirs = Mapping.attach(NAME).array()
    assert (mine.n_bytes, len(theirs)) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert not theirs.any()
    mine.array()[7] = 42
    assert theirs[7] == 42
    assert Mapping.unlink(NAME)
    assert not Mapping.unlink(NAME)
    mine.array()[8] = 43
    assert theirs[8] == 43


def test_views_outlive_the_mapping_object() -> None:
    view = Mapping.create(NAME, PAGE_BYTES).array()[100:200]
    gc.collect()
    view[:] = 7  # would be a segmentation fault if the mapping had gone with its object
    assert view.sum() == 700


def test_address_is_that_of_the_array() -> None:
    mapping = Mapping.create(NAME, PAGE_BYTES)
    assert mapping.address == mapping.array().ctypes.data
    assert mapping.address % 4096 == 0


def test_a_name_that_exists_is_refused_and_left_alone() -> None:
    mine = Mapping.create(NAME, PAGE_BYTES)
    mine.array()[0] = 1
    with pytest.raises(FileExistsError) as caught:
        Mapping.create(NAME, PAGE_BYTES)
    assert (caught.value.errno, NAME in str(caught.value)) == (errno.EEXIST, True)
    assert Mapping.attach(NAME).array()[0] == 1


def test_memory_that_does_not_fit_fails_at_creation_and_leaves_no_name() -> None:
    shm = os.statvfs("/dev/shm")
    with pytest.raises(OSError, match="posix_fallocate") as caught:
        Mapping.create(NAME, (shm.f_blocks + 1) * shm.f_frsize)
    assert caught.value.errno == errno.ENOSPC
    assert not Mapping.unlink(NAME)


def test_what_is_not_there_or_empty_is_refused() -> None:
    with pytest.raises(FileNotFoundError):
        Mapping.attach(NAME)
    Path(f"/dev/shm{NAME}").touch()
    with pytest.raises(OSError, match="empty"):
        Mapping.attach(NAME)


# --- the control segment ---------------------------------------------------------------------------------------------


def test_a_new_pool_is_empty(pool: Pool) -> None:
    assert (pool.fingerprint, pool.layout, pool.n_slots) == ("fingerprint", '["layout"]', SLOTS)
    assert [pool.state(s) for s in range(SLOTS)] == [EMPTY] * SLOTS
    assert [pool.owner(s) for s in range(SLOTS)] == [None] * SLOTS
    assert {pool.lookup(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)} == {-1}
    assert (pool.n_held(), [pool.client_name(b) for b in range(_native.MAX_CLIENTS)]) == (0, [""] * 16)


def test_both_sides_see_the_same(pool: Pool, client: PoolClient) -> None:
    pool.epoch = 2**63 + 1
    assert (client.epoch, client.fingerprint, client.layout) == (2**63 + 1, "fingerprint", '["layout"]')
    pool.set_client(3, "compute-1-ab")
    assert Pool.attach(NAME).client_name(3) == "compute-1-ab"


def test_an_unfinished_pool_is_for_its_owners_successor_only() -> None:
    Pool.create(NAME, LAYERS, EXPERTS, SLOTS, "fingerprint", '["layout"]')
    with pytest.raises(RuntimeError, match="never completed"):
        PoolClient.attach(NAME, 0)
    successor = Pool.attach(NAME)
    assert (successor.is_complete, successor.layout) == (False, '["layout"]')
    successor.complete()
    assert successor.is_complete
    PoolClient.attach(NAME, 0)


@pytest.mark.parametrize("attach", [Pool.attach, lambda name: PoolClient.attach(name, 0)], ids=["pool", "client"])
def test_foreign_segments_are_refused(attach: Callable[[str], object]) -> None:
    foreign = Mapping.create(NAME, 2 * PAGE_BYTES)
    foreign.array()[:] = 0xFF
    with pytest.raises(RuntimeError, match="not a Sparkle pool"):
        attach(NAME)


def test_truncated_and_newer_segments_are_refused(pool: Pool) -> None:
    path = Path(f"/dev/shm{NAME}")
    whole = path.read_bytes()
    path.unlink()
    for text, damaged in {
        "truncated": whole[:-1],
        "not a Sparkle pool": whole[: PAGE_BYTES - 1],
        "another version": whole[:VERSION_AT] + b"\x7f" + whole[VERSION_AT + 1 :],
        "never completed": whole[:COMPLETE_AT] + b"\x00" + whole[COMPLETE_AT + 1 :],
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=text):
            PoolClient.attach(NAME, 0)


def test_ids_out_of_range_are_index_errors(pool: Pool, client: PoolClient) -> None:
    for call in (
        lambda: pool.lookup(LAYERS, 0),
        lambda: pool.lookup(0, EXPERTS),
        lambda: pool.state(SLOTS),
        lambda: pool.begin_load(SLOTS, 0, 0),
        lambda: pool.begin_load(0, LAYERS, 0),
        lambda: client.hold(0, [EXPERTS]),
        lambda: pool.drain(_native.MAX_CLIENTS, 0),
        lambda: PoolClient.attach(NAME, _native.MAX_CLIENTS),
    ):
        with pytest.raises(IndexError):
            call()
    assert [pool.state(s) for s in range(SLOTS)] == [EMPTY] * SLOTS


def test_names_and_tables_that_do_not_fit_are_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="too long"):
        pool.set_client(0, "x" * 48)
    Mapping.unlink(NAME)
    for arguments in (("f" * 72, "[]"), ("f", "[" * 8192)):
        with pytest.raises(ValueError, match="too long"):
            Pool.create(NAME, LAYERS, EXPERTS, SLOTS, *arguments)
        assert not Mapping.unlink(NAME)


# --- the slot protocol ------------------------------------------------------------------------------------------------


def test_an_expert_is_found_only_once_it_is_published(pool: Pool, client: PoolClient) -> None:
    assert client.hold(1, [4]) == [-1]
    assert pool.begin_load(2, 1, 4)
    assert (pool.state(2), pool.owner(2), pool.gen(2)) == (LOADING, (1, 4), 1)
    assert client.hold(1, [4]) == [-1]
    pool.publish(2, 0)
    assert (pool.state(2), pool.lookup(1, 4)) == (READY, 2)
    assert client.hold(1, [0, 4, 1]) == [-1, 2, -1]
    assert (pool.mask(2), client.n_held) == (1, 1)


def test_a_held_slot_is_not_evicted(pool: Pool, client: PoolClient) -> None:
    load(pool, 0, 0, 1)
    assert client.hold(0, [1]) == [0]
    assert client.hold(0, [1]) == [0]
    assert not pool.begin_load(0, 0, 2)
    assert (pool.state(0), pool.owner(0), pool.lookup(0, 1), pool.gen(0)) == (READY, (0, 1), 0, 1)
    client.release([0, -1])
    assert not pool.begin_load(0, 0, 2)  # held twice
    client.release([0])
    assert pool.begin_load(0, 0, 2)
    assert (pool.lookup(0, 1), pool.lookup(0, 2)) == (-1, -1)
    with pytest.raises(RuntimeError, match="not held"):
        client.release([0])


def test_grants_keep_a_slot_until_it_is_adopted_and_released(pool: Pool, client: PoolClient) -> None:
    load(pool, 0, 0, 1, grants=1)
    assert not pool.begin_load(0, 0, 2)
    assert client.hold(0, [1]) == [0]
    client.release([0])
    assert pool.begin_load(0, 0, 2)
    assert not pool.grant(0, 1)  # only what is READY can be granted
    pool.publish(0, 0)
    assert pool.grant(0, 1)
    assert pool.n_held() == 1


def test_grants_that_nobody_waits_for_are_given_back(pool: Pool, client: PoolClient) -> None:
    for slot in range(3):
        load(pool, slot, 0, slot, grants=0b11)
    assert client.hold(0, [1]) == [1]
    client.drop_grants([0, 1])
    assert [pool.mask(s) for s in range(3)] == [0b10, 0b11, 0b11]
    client.reconcile()
    assert [pool.mask(s) for s in range(3)] == [0b10, 0b11, 0b10]
    assert pool.clear_client(1) == 3
    assert [pool.mask(s) for s in range(3)] == [0, 1, 0]


def test_a_failed_read_leaves_an_empty_slot(pool: Pool, client: PoolClient) -> None:
    assert pool.begin_load(0, 0, 1)
    pool.abandon(0)
    assert (pool.state(0), pool.owner(0), pool.lookup(0, 1)) == (EMPTY, None, -1)
    with pytest.raises(RuntimeError, match="not loading"):
        pool.publish(0, 0)


@pytest.mark.parametrize(
    ("state", "is_listed", "must_read", "after"),
    [
        (EMPTY, False, False, EMPTY),
        (LOADING, False, True, LOADING),  # read again for the same owner
        (READY, False, False, READY),  # died within E7
        (READY, True, False, READY),
        (EVICTING, True, False, READY),  # died at E1 or E2
        (EVICTING, False, True, LOADING),  # died after E3
    ],
)
def test_what_a_successor_makes_of_a_slot(pool: Pool, state: int, is_listed: bool, must_read: bool, after: int) -> None:
    load(pool, 1, 1, 2)
    memory = Mapping.attach(NAME).array()
    memory[SLOTS_AT + 64 :].view(np.uint32)[0] = state
    memory[TABLE_AT + 4 * (EXPERTS + 2) : SLOTS_AT].view(np.int32)[0] = 1 if is_listed else -1
    successor = Pool.attach(NAME)
    assert successor.recover(1) is must_read
    assert successor.state(1) == after
    assert successor.owner(1) == (None if after == EMPTY else (1, 2))
    assert successor.lookup(1, 2) == (1 if after == READY else -1)


# --- the event ring ---------------------------------------------------------------------------------------------------


def test_events_arrive_whole_and_in_order(pool: Pool, client: PoolClient) -> None:
    assert client.push_event(7, 65535, 2, 99, 1, [4, 0, 65535], [2, -1, 0])
    assert client.push_event(2**32 - 1, 0, 65535, 2**32 - 1, 0, [], [])
    assert client.ring_position == 13
    first, last = starmap(Event, pool.drain(0, 2**63))
    assert first == Event(7, first.time_us, 65535, 2, 99, 1, [4, 0, 65535], [True, False, True])
    assert last == Event(2**32 - 1, last.time_us, 0, 65535, 2**32 - 1, 0, [], [])
    assert 0 <= time.monotonic_ns() // 1000 % 2**32 - last.time_us < 1e6
    assert pool.drain(0, 2**63) == []
    with pytest.raises(ValueError, match="differ in length"):
        client.push_event(0, 0, 1, 0, 0, [1], [])


def test_draining_stops_at_the_limit(pool: Pool, client: PoolClient) -> None:
    client.push_event(1, 0, 1, 0, 0, [1], [0])
    position = client.ring_position
    client.push_event(2, 0, 1, 0, 0, [2], [0])
    assert [step for step, *_ in pool.drain(0, position)] == [1]
    assert [step for step, *_ in pool.drain(0, position)] == []
    assert [step for step, *_ in pool.drain(0, position + 1)] == [2]  # never half an event


def test_the_ring_wraps_around_and_drops_nothing_when_full(pool: Pool, client: PoolClient) -> None:
    experts = list(range(995))  # events of 1000 words: the ring's size is no multiple of it
    pushed = drained = 0
    while pushed < 200:
        while client.push_event(pushed, 0, 1, 0, 0, experts, [0] * 995):
            pushed += 1
        assert pushed - drained == RING_WORDS // 1000
        for step, *_, used, _ in pool.drain(0, 2**63):
            assert (step, used) == (drained, experts)
            drained += 1
    with pytest.raises(ValueError, match="larger than the ring"):
        client.push_event(0, 0, 1, 0, 0, [0] * RING_WORDS, [0] * RING_WORDS)


def test_damaged_rings_are_refused_until_they_are_reset(pool: Pool, client: PoolClient) -> None:
    memory = Mapping.attach(NAME).array()
    written, read = memory[RINGS_AT:].view(np.uint64), memory[RINGS_AT + 64 :].view(np.uint64)
    words = memory[RINGS_AT + 128 :].view(np.uint32)
    for damage in ((RING_WORDS + 1, 0), (0, 1), (2**64 - 1, 0)):
        written[0], read[0] = damage
        with pytest.raises(RuntimeError, match="positions are damaged"):
            pool.drain(0, 2**63)
    pool.reset_ring(0)
    assert client.push_event(1, 0, 1, 0, 0, [1, 2], [0, 0])
    words[4] = 3  # says that it has one expert more than was written
    for limit in (1, 2**63):
        with pytest.raises(RuntimeError, match="torn"):
            pool.drain(0, limit)
    pool.reset_ring(0)
    assert pool.drain(0, 2**63) == []
    assert client.push_event(2, 0, 1, 0, 0, [1], [0])
    assert [e.experts for e in starmap(Event, pool.drain(0, 2**63))] == [[1]]


# --- the stub ---------------------------------------------------------------------------------------------------------


def test_the_stub_and_the_module_name_the_same() -> None:
    stub = ast.parse(STUB.read_text())
    assert names(stub.body) == public(_native)
    for node in classes(stub):
        assert names(node.body) == public(getattr(_native, node.name)), node.name


def test_the_stub_and_the_module_take_the_same() -> None:
    """nanobind keeps each function's signature as Python source: compare arguments, and what is a property."""
    for node in classes(ast.parse(STUB.read_text())):
        members = vars(getattr(_native, node.name))
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            where, is_property = f"{node.name}.{method.name}", bool(decorators(method) & {"property"})
            assert isinstance(members[method.name], property) == is_property, where
            if not is_property:
                (signature, *_), *_ = members[method.name].__nb_signature__
                taken = ast.parse(signature.partition(" -> ")[0] + ": ...").body[0]
                assert isinstance(taken, ast.FunctionDef)
                assert [a.arg for a in taken.args.args] == [a.arg for a in method.args.args], where


def classes(stub: ast.Module) -> list[ast.ClassDef]:
    return [node for node in stub.body if isinstance(node, ast.ClassDef)]


def names(body: list[ast.stmt]) -> set[str]:
    named = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return named | {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def public(owner: object) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def decorators(method: ast.FunctionDef) -> set[str]:
    return {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
