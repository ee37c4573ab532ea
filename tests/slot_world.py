"""A state of the world for the slot protocol's model: slots, clients, the daemon, messages on their way, memory.

What a state says and what is wrong about it (`harm`, `is_end`), and the small changes of which steps are made. The
steps themselves are in tests/slot_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

EMPTY, LOADING, READY, EVICTING, RETIRED = "EMPTY", "LOADING", "READY", "EVICTING", "RETIRED"
NOBODY, TORN, GONE = -1, -2, -3  # owner of an empty slot; content while bytes arrive, and where there is no memory
NOWHERE = -1  # table entry of an expert that is not in the pool

Program = tuple[tuple[int, ...], ...]  # the sets of experts that a client uses, one after the other
Mail = tuple[tuple[str, int], ...]  # messages on their way: (kind, request number)


class Slot(NamedTuple):
    state: str = EMPTY
    owner: int = NOBODY
    mask: int = 0
    content: int = TORN
    is_reading: bool = False  # the living daemon's read is under way


class Client(NamedTuple):
    """`at`: its next step. `held`: (expert, slot). `i`: which expert of the set todo[0] is looked up, `slot`: where.

    `request`: number of its last request. 0 and 1 in turn are enough to tell it from one that was given up.
    """

    todo: Program
    at: str = "R1"
    i: int = 0
    slot: int = 0
    missed: bool = False
    held: tuple[tuple[int, int], ...] = ()
    request: int = 0
    sent: Mail = ()
    got: Mail = ()


class Request(NamedTuple):
    client: int
    number: int
    experts: tuple[int, ...]
    is_placed: bool = False


class Job(NamedTuple):
    """What the daemon's thread is in the middle of: finding slots for `request`, publishing `slot`, or a resize.

    `at`: its next step. `todo`: experts that need a slot, or slots to retire, give back or restore; `given`: slots that
    the request has got. `could`: all slots so far could be retired.
    """

    at: str
    request: Request | None = None
    todo: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    slot: int = 0
    could: bool = True


class Model(NamedTuple):
    """One state of the world. The counts at the end say how often something bad may still happen.

    `in_force`: slots that the daemon uses, the first ones. `target`: how many a user wants, which outlives the daemon;
    `sizes`: what the user will ask for later, in this order.
    """

    slots: tuple[Slot, ...]
    table: tuple[int, ...]
    clients: tuple[Client, ...]
    requests: tuple[Request, ...] = ()
    answered: tuple[tuple[int, int], ...] = ()  # (client, number) of each client's last answer
    job: Job | None = None
    stale: tuple[tuple[int, int], ...] = ()  # (slot, expert) of reads that a dead daemon had begun
    is_up: bool = True
    in_force: int = 0
    target: int = 0
    sizes: tuple[int, ...] = ()
    crashes: int = 0
    deaths: int = 0
    cancels: int = 0
    repeats: int = 0


Steps = Iterator[tuple[str, Model]]


def world(
    n_slots: int,
    *programs: Program,
    sizes: tuple[int, ...] = (),
    crashes: int = 0,
    deaths: int = 0,
    cancels: int = 0,
    repeats: int = 0,
) -> Model:
    """Return the first state: an empty pool, all of it in force, and one client per program."""
    n_experts = 1 + max(e for program in programs for experts in program for e in experts)
    m = Model((Slot(),) * n_slots, (NOWHERE,) * n_experts, tuple(map(Client, programs)))
    m = m._replace(in_force=n_slots, target=n_slots, sizes=sizes)
    return m._replace(crashes=crashes, deaths=deaths, cancels=cancels, repeats=repeats)


def harm(m: Model) -> str | None:
    """Say which client computes with what is not the expert that it asked for, or which slot is used without memory."""
    for c, client in enumerate(m.clients):
        for expert, s in client.held if client.at == "use" else ():
            if m.slots[s].content != expert:
                return f"client {c} computes with slot {s} as expert {expert}, but it contains {m.slots[s].content}"
    for s, slot in enumerate(m.slots):
        if slot.content == GONE and slot.state in (LOADING, READY):
            return f"slot {s} is {slot.state} without memory"
    return None


def is_end(m: Model) -> bool:
    """All living clients are served, nothing is marked, and the daemon is up and has nothing to do.

    As many slots are in force as the user wants; the others are out of use, and their memory is given back.
    """
    is_idle = m.is_up and m.job is None and not m.requests and not m.stale
    is_sized = m.in_force == m.target and not m.sizes
    is_tidy = all((x.state == RETIRED) == (x.content == GONE) == (s >= m.target) for s, x in enumerate(m.slots))
    is_served = all(c.at in ("done", "dead") and not c.sent for c in m.clients)
    return is_idle and is_sized and is_tidy and is_served and not any(x.mask for x in m.slots)


# --- small changes of a state --------------------------------------------------------------------------------------


def with_job(m: Model, job: Job, **changes: object) -> Model:
    return m._replace(job=job._replace(**changes))  # type: ignore[arg-type]


def with_client(m: Model, c: int, after: Client) -> Model:
    return m._replace(clients=(*m.clients[:c], after, *m.clients[c + 1 :]))


def with_slot(m: Model, s: int, **changes: object) -> Model:
    return m._replace(slots=(*m.slots[:s], m.slots[s]._replace(**changes), *m.slots[s + 1 :]))  # type: ignore[arg-type]


def listed(m: Model, expert: int, s: int) -> Model:
    return m._replace(table=(*m.table[:expert], s, *m.table[expert + 1 :]))


def marked(m: Model, s: int, bits: int) -> Model:
    return with_slot(m, s, mask=m.slots[s].mask | bits)


def unmarked(m: Model, c: int, x: Client, s: int) -> Model:
    """R4: the bit goes when no other hold of this client is on the slot."""
    return m if any(slot == s for _, slot in x.held) else with_slot(m, s, mask=m.slots[s].mask & ~(1 << c))


def next_of(x: Client) -> Client:
    """The expert looked up is settled: on to the next of the set, or to what the whole set came to."""
    if x.i + 1 < len(x.todo[0]):
        return x._replace(at="R1", i=x.i + 1)
    if not x.missed:
        return x._replace(at="use")
    return x._replace(at="let go" if x.held else "ask")


def started(x: Client, todo: Program) -> Client:
    return x._replace(at="R1" if todo else "done", todo=todo, i=0, missed=False)


def is_in(m: Model, expert: int) -> bool:
    """True if an expert is in the pool or on its way there."""
    return any(x.owner == expert and x.state in (LOADING, READY) for x in m.slots)


def granted(m: Model, q: Request) -> Model:
    """Mark those experts of a set that are in the pool. One step: until it is over, no slot can be evicted."""
    for s in (m.table[e] for e in q.experts):
        m = m if s == NOWHERE else marked(m, s, 1 << q.client)
    return m


def told(m: Model, c: int, kind: str, number: int) -> Model:
    x = m.clients[c]
    return m if x.at == "dead" else with_client(m, c, x._replace(got=(*x.got, (kind, number))))


def answered(m: Model) -> Model:
    """Answer each placed request whose experts are all listed."""
    for q in m.requests:
        if q.is_placed and all(m.table[e] != NOWHERE for e in q.experts):
            others = tuple(x for x in m.requests if x != q)
            last = tuple(sorted({**dict(m.answered), q.client: q.number}.items()))
            m = told(m._replace(requests=others, answered=last), q.client, "ready", q.number)
    return m
