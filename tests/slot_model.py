"""The slot protocol as a small model: every step that can be taken from a state of the world.

Steps carry the numbers of native/src/slots.h (R1-R4, E1-E7). One step is one atomic access to shared memory, one
message, or one event of the world: a disk that is done, a death, a crash. tests/slot_search.py goes through every order
of them and asks two things:

    safety    whenever a client computes with slot s as expert e, s contains the whole record of e (`wrong_bytes`)
    progress  from every state an end can still be reached: living clients served, no slot marked (`is_end`)

Progress excludes deadlock, and also a grant that stays for ever on a slot that nobody uses. It needs no notion of time:
deadlines and repeats are just steps that may happen. Left out: a record is one expert number; a client has one request
under way, as in PoolClient; a restarted daemon takes stock of all slots at once, as in Residency.start.

Assumption about the machine: a direct read that a killed daemon had begun may still land in its slot after the
successor has started (`stale`), but not after a later read of the same record into the same slot has ended. (Killed
threads stay until their read is done, and their lock with them; io_uring's requests are not waited for.)
`Fault.DISK_REORDERS` drops the assumption, and shows the harm that would follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

EMPTY, LOADING, READY, EVICTING = "EMPTY", "LOADING", "READY", "EVICTING"
NOBODY, TORN = -1, -2  # owner of an empty slot; content while bytes arrive
NOWHERE = -1  # table entry of an expert that is not in the pool

Program = tuple[tuple[int, ...], ...]  # the sets of experts that a client uses, one after the other
Mail = tuple[tuple[str, int], ...]  # messages on their way: (kind, request number)


class Fault(Enum):
    """Obvious variants of the protocol, each of which does harm."""

    CHECK_THEN_MARK = auto()  # R3 before R2
    OWNER_THEN_STATE = auto()  # R3 loads the owner before the state
    IGNORE_MASK = auto()  # no E2
    PUBLISH_EARLY = auto()  # E7 before the read has ended
    EMPTY_ON_ADOPTION = auto()  # recover makes LOADING slots EMPTY
    CLEAR_THE_SILENT = auto()  # bits are cleared without proof of death
    KEEP_GRANTS_IN_QUEUE = auto()  # a set that has no room keeps what it got
    NO_RECONCILE = auto()  # a client that gave up leaves its grants
    SERVE_REPEATS = auto()  # a repeat of an answered request is granted again
    DISK_REORDERS = auto()  # see the module


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
    """What the daemon's thread is in the middle of: finding slots for `request`, or publishing `slot`."""

    at: str
    request: Request | None = None
    todo: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    slot: int = 0


class Model(NamedTuple):
    """One state of the world. The counts at the end say how often something bad may still happen."""

    slots: tuple[Slot, ...]
    table: tuple[int, ...]
    clients: tuple[Client, ...]
    requests: tuple[Request, ...] = ()
    answered: tuple[tuple[int, int], ...] = ()  # (client, number) of each client's last answer
    job: Job | None = None
    stale: tuple[tuple[int, int], ...] = ()  # (slot, expert) of reads that a dead daemon had begun
    is_up: bool = True
    crashes: int = 0
    deaths: int = 0
    cancels: int = 0
    repeats: int = 0


Steps = Iterator[tuple[str, Model]]


def world(
    n_slots: int, *programs: Program, crashes: int = 0, deaths: int = 0, cancels: int = 0, repeats: int = 0
) -> Model:
    """Return the first state: an empty pool, and one client per program."""
    n_experts = 1 + max(e for program in programs for experts in program for e in experts)
    m = Model((Slot(),) * n_slots, (NOWHERE,) * n_experts, tuple(map(Client, programs)))
    return m._replace(crashes=crashes, deaths=deaths, cancels=cancels, repeats=repeats)


def wrong_bytes(m: Model) -> str | None:
    """Say which client computes with what is not the expert that it asked for."""
    for c, client in enumerate(m.clients):
        for expert, s in client.held if client.at == "use" else ():
            if m.slots[s].content != expert:
                return f"client {c} computes with slot {s} as expert {expert}, but it contains {m.slots[s].content}"
    return None


def is_end(m: Model) -> bool:
    """All living clients are served, nothing is marked, and the daemon is up and has nothing to do."""
    is_idle = m.is_up and m.job is None and not m.requests and not m.stale
    is_served = all(c.at in ("done", "dead") and not c.sent for c in m.clients)
    return is_idle and is_served and not any(x.mask for x in m.slots)


class Protocol:
    """The steps; with a fault, those of a daemon or client that has it."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault

    def steps(self, m: Model) -> Steps:
        """Yield (what happens, the state after it) for each step that is possible in `m`."""
        for c, client in enumerate(m.clients):
            if client.at not in ("dead", "done"):
                yield from self._client(m, c, client)
        yield from self._disk(m)
        if not m.is_up:
            yield from self._restart(m)
            return
        yield from self._loop(m) if m.job is None else self._job(m, m.job)
        if m.crashes:
            stale = {(s, x.owner) for s, x in enumerate(m.slots) if x.is_reading} | set(m.stale)
            after = m._replace(requests=(), answered=(), job=None, stale=tuple(sorted(stale)), is_up=False)
            slots = tuple(x._replace(is_reading=False) for x in m.slots)
            clients = tuple(x._replace(sent=()) for x in m.clients)  # what it had not read is lost
            yield "prefetch is killed", after._replace(slots=slots, clients=clients, crashes=m.crashes - 1)

    # --- a client: PoolClient.acquire and Holder -------------------------------------------------------------------

    def _client(self, m: Model, c: int, x: Client) -> Steps:
        """Hold each expert of the set; if one is missing, let go of all and ask for the set."""
        name, missed = f"client {c}:", x._replace(missed=True)
        checks_first = self.fault is Fault.CHECK_THEN_MARK
        if m.deaths:
            yield f"{name} dies", _client(m, c, x._replace(at="dead", sent=(), got=()))._replace(deaths=m.deaths - 1)
        if x.at == "R1":
            slot = m.table[x.todo[0][x.i]]
            found = x._replace(at="R3" if checks_first else "R2", slot=slot)
            after = _next(missed) if slot == NOWHERE else found
            yield f"{name} R1 finds expert {x.todo[0][x.i]} in slot {slot}", _client(m, c, after)
        elif x.at == "R2":
            after = x._replace(at="held" if checks_first else "R3")
            yield f"{name} R2 marks slot {x.slot}", _client(_mark(m, x.slot, 1 << c), c, after)
        elif x.at in ("R3", "R3b"):
            yield from self._check(m, c, x)
        elif x.at == "R4":
            yield f"{name} R4 undoes slot {x.slot}", _client(_unmark(m, c, x, x.slot), c, _next(missed))
        elif x.at == "held":
            held = (*x.held, (x.todo[0][x.i], x.slot))
            yield f"{name} has slot {x.slot}", _client(m, c, _next(x._replace(held=held)))
        elif x.at in ("use", "let go"):
            (_, slot), left = x.held[0], x._replace(held=x.held[1:])
            after = left
            if not left.held:
                after = left._replace(at="ask") if x.at == "let go" else _start(left, x.todo[1:])
            yield f"{name} R4 releases slot {slot}", _client(_unmark(m, c, left, slot), c, after)
        elif x.at == "ask":
            number = 1 - x.request
            after = x._replace(at="wait", request=number, sent=(*x.sent, ("fetch", number)))
            yield f"{name} sends FetchExperts {number}", _client(m, c, after)
        else:
            yield from self._wait(m, c, x)

    def _check(self, m: Model, c: int, x: Client) -> Steps:
        """R3, two loads: the state, then the owner. READY seen with our bit set means that the owner stays."""
        slot, checks_first = m.slots[x.slot], self.fault is Fault.CHECK_THEN_MARK
        loads_state = (x.at == "R3") == (self.fault is not Fault.OWNER_THEN_STATE)
        is_right = slot.state == READY if loads_state else slot.owner == x.todo[0][x.i]
        if not is_right:
            after = _next(x._replace(missed=True)) if checks_first else x._replace(at="R4")
        elif x.at == "R3":
            after = x._replace(at="R3b")
        else:
            after = x._replace(at="R2" if checks_first else "held")
        saw = slot.state if loads_state else f"owner {slot.owner}"
        yield f"client {c}: R3 sees {saw} of slot {x.slot}", _client(m, c, after)

    def _wait(self, m: Model, c: int, x: Client) -> Steps:
        """Wait for the whole set, then hold it by R1-R4: grants only keep it there meanwhile."""
        is_giving_up = x.at == "giving up"
        is_known = bool(x.sent) or any(q.client == c for q in m.requests)
        if x.got:
            (kind, number), after = x.got[0], x._replace(got=x.got[1:])
            label = f"client {c}: gets {kind} {number}"
            if number != x.request:
                yield label, _client(self._reconcile(m, c, x), c, after)
            elif is_giving_up:
                yield label, self._give_up(m, c, after)
            else:
                yield label, _client(m, c, after._replace(at="R1", i=0, missed=False))
        elif is_giving_up:
            if not is_known:
                yield f"client {c}: no longer waits for an answer", self._give_up(m, c, x)
        else:
            again = _client(m, c, x._replace(sent=(*x.sent, ("fetch", x.request))))
            if m.is_up and not is_known:
                yield f"client {c}: repeats FetchExperts {x.request}", again
            elif m.repeats and len(x.sent) < 2:
                yield f"client {c}: repeats FetchExperts {x.request} early", again._replace(repeats=m.repeats - 1)
            if m.cancels:
                after = x._replace(at="giving up", sent=(*x.sent, ("cancel", x.request)))
                yield f"client {c}: cancels", _client(m, c, after)._replace(cancels=m.cancels - 1)

    def _give_up(self, m: Model, c: int, x: Client) -> Model:
        return _client(self._reconcile(m, c, x), c, _start(x, x.todo[1:]))

    def _reconcile(self, m: Model, c: int, x: Client) -> Model:
        """Clear our bit wherever no hold stands behind it."""
        held = {slot for _, slot in x.held}
        slots = (y if s in held else y._replace(mask=y.mask & ~(1 << c)) for s, y in enumerate(m.slots))
        return m if self.fault is Fault.NO_RECONCILE else m._replace(slots=tuple(slots))

    # --- the prefetch daemon: service, Residency and Evictor -------------------------------------------------------

    def _loop(self, m: Model) -> Steps:
        """What the daemon's loop may turn to next."""
        for c, x in enumerate(m.clients):
            if x.sent:
                yield from self._take(_client(m, c, x._replace(sent=x.sent[1:])), c, *x.sent[0])
            is_thought_dead = x.at == "dead" or (x.at == "use" and self.fault is Fault.CLEAR_THE_SILENT)
            if is_thought_dead and (any(y.mask >> c & 1 for y in m.slots) or any(q.client == c for q in m.requests)):
                slots = tuple(y._replace(mask=y.mask & ~(1 << c)) for y in m.slots)
                requests = tuple(q for q in m.requests if q.client != c)
                yield f"prefetch buries client {c}", m._replace(slots=slots, requests=requests)
        for q in m.requests:
            if not q.is_placed:
                absent = tuple(e for e in q.experts if not _is_in(m, e))
                yield f"prefetch places the set of client {q.client}", m._replace(job=Job("choose", q, absent))
        for s, y in enumerate(m.slots):
            if y.state == LOADING and (not y.is_reading or self.fault is Fault.PUBLISH_EARLY):
                yield f"prefetch learns that slot {s} is read", m._replace(job=Job("E6", slot=s))

    def _take(self, m: Model, c: int, kind: str, number: int) -> Steps:
        mine = [q for q in m.requests if (q.client, q.number) == (c, number)]
        if kind == "cancel":
            after = m._replace(requests=tuple(q for q in m.requests if q not in mine))
            yield f"prefetch takes the cancel of client {c}", _tell(after, c, "cancelled", number) if mine else after
        elif mine:
            yield f"prefetch takes a repeat of client {c}", m
        elif (c, number) in m.answered and self.fault is not Fault.SERVE_REPEATS:
            yield f"prefetch answers client {c} again", _tell(m, c, "ready", number)
        else:  # for a client that is done: what it sent last, before it gave up
            experts = m.clients[c].todo[0] if m.clients[c].todo else ()
            requests = (*m.requests, Request(c, number, experts))
            yield f"prefetch takes FetchExperts {number} of client {c}", m._replace(requests=requests)

    def _job(self, m: Model, job: Job) -> Steps:
        if job.request is None:
            yield from self._publish(m, job)
        elif job.at == "choose":
            yield from self._choose(m, job, job.request)
        else:
            yield from self._evict(m, job)

    def _choose(self, m: Model, job: Job, q: Request) -> Steps:
        """Find a slot for the next absent expert; grants once all have one, or everything given back."""
        if not job.todo:
            requests = tuple(x._replace(is_placed=True) if x == q else x for x in m.requests)
            after = _grant_present(m, q)._replace(requests=requests, job=None)
            yield f"prefetch grants what is there of client {q.client}'s set", _answer(after)
            return
        if self.fault is Fault.KEEP_GRANTS_IN_QUEUE:
            yield "prefetch lets the set wait with what it got", _grant_present(m, q)._replace(job=None)
        free = [s for s, x in enumerate(m.slots) if x.state == EMPTY]
        if free:
            yield f"prefetch takes empty slot {free[0]}", m._replace(job=job._replace(at="E4", slot=free[0]))
            return
        for s, x in enumerate(m.slots):
            if x.state == READY and x.owner not in q.experts:
                after = m._replace(job=job._replace(at="E3" if self.fault is Fault.IGNORE_MASK else "E2", slot=s))
                yield f"prefetch: E1 slot {s} EVICTING", _slot(after, s, state=EVICTING)
        if self.fault is not Fault.KEEP_GRANTS_IN_QUEUE:
            after = m._replace(job=None)
            for s in job.given:
                after = _slot(after, s, state=EMPTY, owner=NOBODY, is_reading=False)
            yield "prefetch finds no room: the set waits", after

    def _evict(self, m: Model, job: Job) -> Steps:
        """E2-E5, one access each. The read may begin with E5."""
        s, slot = job.slot, m.slots[job.slot]
        if job.at == "E2" and slot.mask:
            after = _slot(m, s, state=READY)
            yield f"prefetch: E2 slot {s} is marked, READY again", after._replace(job=job._replace(at="choose"))
        elif job.at == "E2":
            yield f"prefetch: E2 slot {s} is not marked", m._replace(job=job._replace(at="E3"))
        elif job.at == "E3":
            after = _list(m, slot.owner, NOWHERE)
            yield f"prefetch: E3 expert {slot.owner} leaves", after._replace(job=job._replace(at="E4"))
        elif job.at == "E4":
            after = _slot(m, s, owner=job.todo[0])
            yield f"prefetch: E4 slot {s} is for expert {job.todo[0]}", after._replace(job=job._replace(at="E5"))
        else:
            more = job._replace(at="choose", todo=job.todo[1:], given=(*job.given, s))
            after = _slot(m, s, state=LOADING, content=TORN, is_reading=True)
            yield f"prefetch: E5 slot {s} LOADING", after._replace(job=more)

    def _publish(self, m: Model, job: Job) -> Steps:
        s, slot = job.slot, m.slots[job.slot]
        if job.at == "E6":
            bits = 0
            for q in m.requests:
                bits |= 1 << q.client if q.is_placed and slot.owner in q.experts else 0
            yield f"prefetch: E6 slot {s} granted to {bits:#b}", _mark(m, s, bits)._replace(job=job._replace(at="E7"))
        elif job.at == "E7":
            yield f"prefetch: E7 slot {s} READY", _slot(m, s, state=READY)._replace(job=job._replace(at="E7b"))
        else:
            after = _list(m, slot.owner, s)._replace(job=None)
            yield f"prefetch: E7 expert {slot.owner} is listed", _answer(after)

    def _restart(self, m: Model) -> Steps:
        """A new daemon adopts the pool: Evictor.recover on each slot."""
        for s, x in enumerate(m.slots):
            is_listed = x.owner != NOBODY and m.table[x.owner] == s
            if x.state == EMPTY or (x.state == LOADING and self.fault is Fault.EMPTY_ON_ADOPTION):
                m = _slot(m, s, state=EMPTY, owner=NOBODY)
            elif x.state == READY or (x.state == EVICTING and is_listed):
                m = _list(_slot(m, s, state=READY), x.owner, s)
            else:
                m = _slot(m, s, state=LOADING, is_reading=True, content=TORN)
        yield "prefetch starts again", m._replace(is_up=True)

    # --- the disk --------------------------------------------------------------------------------------------------

    def _disk(self, m: Model) -> Steps:
        for s, x in enumerate(m.slots):
            if x.is_reading:
                keep = self.fault is Fault.DISK_REORDERS
                stale = tuple(old for old in m.stale if old != (s, x.owner) or keep)
                after = _slot(m, s, content=x.owner, is_reading=False)
                yield f"disk: slot {s} contains expert {x.owner}", after._replace(stale=stale)
        for s, expert in m.stale:
            after = m._replace(stale=tuple(old for old in m.stale if old != (s, expert)))
            is_harmless = m.slots[s].content == expert  # the same bytes once more
            label = f"disk: an old read of expert {expert} lands in slot {s}"
            yield label, after if is_harmless else _slot(after, s, content=TORN)


# --- small changes of a state --------------------------------------------------------------------------------------


def _client(m: Model, c: int, after: Client) -> Model:
    return m._replace(clients=(*m.clients[:c], after, *m.clients[c + 1 :]))


def _slot(m: Model, s: int, **changes: object) -> Model:
    return m._replace(slots=(*m.slots[:s], m.slots[s]._replace(**changes), *m.slots[s + 1 :]))  # type: ignore[arg-type]


def _list(m: Model, expert: int, s: int) -> Model:
    return m._replace(table=(*m.table[:expert], s, *m.table[expert + 1 :]))


def _mark(m: Model, s: int, bits: int) -> Model:
    return _slot(m, s, mask=m.slots[s].mask | bits)


def _unmark(m: Model, c: int, x: Client, s: int) -> Model:
    """R4: the bit goes when no other hold of this client is on the slot."""
    return m if any(slot == s for _, slot in x.held) else _slot(m, s, mask=m.slots[s].mask & ~(1 << c))


def _next(x: Client) -> Client:
    """The expert looked up is settled: on to the next of the set, or to what the whole set came to."""
    if x.i + 1 < len(x.todo[0]):
        return x._replace(at="R1", i=x.i + 1)
    if not x.missed:
        return x._replace(at="use")
    return x._replace(at="let go" if x.held else "ask")


def _start(x: Client, todo: Program) -> Client:
    return x._replace(at="R1" if todo else "done", todo=todo, i=0, missed=False)


def _is_in(m: Model, expert: int) -> bool:
    """True if an expert is in the pool or on its way there."""
    return any(x.owner == expert and x.state in (LOADING, READY) for x in m.slots)


def _grant_present(m: Model, q: Request) -> Model:
    """Mark those experts of a set that are in the pool. One step: until it is over, no slot can be evicted."""
    for s in (m.table[e] for e in q.experts):
        m = m if s == NOWHERE else _mark(m, s, 1 << q.client)
    return m


def _tell(m: Model, c: int, kind: str, number: int) -> Model:
    x = m.clients[c]
    return m if x.at == "dead" else _client(m, c, x._replace(got=(*x.got, (kind, number))))


def _answer(m: Model) -> Model:
    """Answer each placed request whose experts are all listed."""
    for q in m.requests:
        if q.is_placed and all(m.table[e] != NOWHERE for e in q.experts):
            others = tuple(x for x in m.requests if x != q)
            answered = tuple(sorted({**dict(m.answered), q.client: q.number}.items()))
            m = _tell(m._replace(requests=others, answered=answered), q.client, "ready", q.number)
    return m
