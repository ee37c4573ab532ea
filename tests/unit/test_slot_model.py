"""The slot protocol is safe and never stuck in any order of its steps, and each obvious variant of it is not."""

from __future__ import annotations

import functools

import pytest

from tests.slot_model import Fault, Model, world
from tests.slot_search import STUCK, search

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
