"""A breadth-first search through all states of tests/slot_model.py; finds the shortest way to what is wrong."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from tests.slot_model import Fault, Protocol
from tests.slot_world import Model, harm, is_end

STUCK = "from here no end can be reached"


@dataclass(frozen=True, slots=True)
class Result:
    """`problem` is None, or what is wrong after the steps of `trace`. `steps`: all that happened, without numbers."""

    n_states: int
    steps: frozenset[str]
    problem: str | None
    trace: list[str]


def search(start: Model, fault: Fault | None = None) -> Result:
    """Visit every state that can be reached from `start`, nearest first; stop at the first that is unsafe."""
    protocol = Protocol(fault)
    came_from: dict[Model, tuple[Model, str] | None] = {start: None}
    before: dict[Model, list[Model]] = {start: []}
    queue, ends = deque([start]), []

    def result(problem: str | None, at: Model) -> Result:
        trace: list[str] = []
        while problem is not None and (origin := came_from[at]) is not None:
            at, step = origin
            trace.append(step)
        steps = frozenset(re.sub(r"(?<= )-?\d+", "#", origin[1]) for origin in came_from.values() if origin)
        return Result(len(came_from), steps, problem, trace[::-1])

    while queue:
        m = queue.popleft()
        if (problem := harm(m)) is not None:
            return result(problem, m)
        if is_end(m):
            ends.append(m)
        for step, after in protocol.steps(m):
            if after not in came_from:
                came_from[after] = (m, step)
                before[after] = []
                queue.append(after)
            before[after].append(m)
    can_end, todo = set(ends), ends
    while todo:
        for m in before[todo.pop()]:
            if m not in can_end:
                can_end.add(m)
                todo.append(m)
    stuck = next((m for m in came_from if m not in can_end), None)  # in the order of discovery: a nearest one
    return result(None if stuck is None else STUCK, stuck or start)
