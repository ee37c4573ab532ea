"""The slot protocol is safe and never stuck in any order of its steps, and each obvious variant of it is not."""

from __future__ import annotations

import functools

import pytest

from tests.slot_model import Fault
from tests.slot_search import STUCK, search
from tests.slot_world import Model, world

pytestmark = pytest.mark.unit

A, B = (0,), (1,)  # one slot, and clients that want different experts in it: every use evicts

explored = functools.cache(search)  # several tests look at the same worlds

WORLDS = {
    "two clients take turns": world(1, (A, A), (B,)),
    "two clients want the same": world(1, (A,), (A,), deaths=1, crashes=1),
    "sets of two that share an expert": world(2, ((0, 1),), ((2, 1),)),
    "a client dies": world(1, (A,), (B,), deaths=1),
    "a client cancels": world(1, (A,), (B,), cancels=1),
    "a client repeats a request too early": world(1, (A,), (B,), repeats=1),
    "prefetch is killed": world(1, (A,), (B,), crashes=1),
    "everything happens to one client": world(1, (A, B), crashes=2, cancels=1, deaths=1, repeats=1),
    "the pool shrinks and grows": world(2, (A,), (B,), sizes=(1, 2)),
    "the pool shrinks and a client dies": world(2, (A,), (B,), sizes=(1,), deaths=1),
    "the pool shrinks and prefetch is killed": world(2, (A,), (B,), sizes=(1,), crashes=1),
    "the pool grows and prefetch is killed": world(2, (A, B), sizes=(1, 2), crashes=1),
    "two slots go and come at once, prefetch is killed": world(3, (A, B), sizes=(1, 3), crashes=1),
    "a shrink is called off, prefetch is killed": world(2, (A, B), sizes=(0, 2), crashes=1),
    "the only slot goes and comes": world(1, (A,), (B,), sizes=(0, 1)),
    "the only slot goes and comes, and everything happens": world(
        1, (A,), sizes=(0, 1), crashes=2, cancels=1, deaths=1
    ),
    "sets of two in a pool that shrinks to two": world(3, ((0, 1),), ((2, 1),), sizes=(2, 3)),
}

# the least world in which a fault does harm, and which harm: wrong bytes, or a state without a way out
HARM = {
    Fault.CHECK_THEN_MARK: (world(1, (A, A), (B,)), "computes with"),
    Fault.OWNER_THEN_STATE: (world(1, (A, A), (B,)), "computes with"),
    Fault.IGNORE_MASK: (world(1, (A,), (B,)), "computes with"),
    Fault.PUBLISH_EARLY: (world(1, (A,)), "computes with"),
    Fault.EMPTY_ON_ADOPTION: (world(1, (A,), (B,), crashes=1), "computes with"),
    Fault.CLEAR_THE_SILENT: (world(1, (A,), (B,)), "computes with"),
    Fault.KEEP_GRANTS_IN_QUEUE: (world(2, ((0, 1),), ((2, 1),)), STUCK),
    Fault.NO_RECONCILE: (world(1, (A,), cancels=1), STUCK),
    Fault.SERVE_REPEATS: (world(1, (A,), repeats=1), STUCK),
    Fault.RETIRE_LOADING: (world(1, (A,), sizes=(0, 1)), STUCK),
    Fault.RETIRE_HELD: (world(1, (A,), sizes=(0, 1)), "computes with"),
    Fault.GIVE_BACK_SOME: (world(2, (A, B), sizes=(0, 2)), "LOADING without memory"),
    Fault.RESTORE_FIRST: (world(1, (A,), sizes=(0, 1), crashes=1), "LOADING without memory"),
    Fault.LEAVE_MEMORY: (world(2, (A,), sizes=(1,), crashes=1), STUCK),
    Fault.DISK_REORDERS: (world(1, (A, B), crashes=1), "computes with"),  # not a fault of ours: see slot_model
}


@pytest.mark.parametrize("start", WORLDS.values(), ids=WORLDS.keys())
def test_every_order_of_steps_is_safe_and_comes_to_an_end(start: Model) -> None:
    result = explored(start)
    assert result.problem is None, "\n".join([*result.trace, result.problem])
    assert result.n_states > 1000  # the world is not so small that nothing can happen in it


@pytest.mark.parametrize("fault", Fault)
def test_variants_of_the_protocol_do_harm(fault: Fault) -> None:
    start, harm = HARM[fault]
    assert explored(start).problem is None
    assert harm in str(search(start, fault).problem)


def test_every_step_of_the_protocol_is_taken_somewhere() -> None:
    """The worlds would prove nothing of a step that they never take."""
    steps = {step for start in WORLDS.values() for step in explored(start).steps}
    for number in ("R1 finds", "R2", "R3 sees READY", "R3 sees EVICTING", "R3 sees owner", "R4 undoes", "R4 releases"):
        assert any(number in step for step in steps), number
    for number in ("E1", "E2 slot # is marked", "E2 slot # is not", "E3", "E4", "E5", "E6", "E7 slot", "E7 expert"):
        assert any(number in step for step in steps), number
    for event in ("no room", "answers client # again", "gets cancelled", "an old read", "buries", "no longer waits"):
        assert any(event in step for step in steps), event
    for size in ("is EMPTY", "is LOADING", "nobody's", "RETIRED", "slot # EMPTY", "try again", "all", "gives memory"):
        assert any(size in step for step in steps), size
    for size in ("a user wants # slots, # come back", "has shrunk", "grows", "restored", "has all slots back"):
        assert any(size in step for step in steps), size
