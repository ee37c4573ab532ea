"""The slot protocol as a small model: every step that can be taken from a state of the world.

Steps carry the numbers of native/src/slots.h (R1-R4, E1-E7). One step is one atomic access to shared memory, one
message, or one event of the world: a disk that is done, a death, a crash. tests/slot_search.py goes through every order
of them and asks two things:

    safety    whenever a client computes with slot s as expert e, s contains the whole record of e; no read goes to a
              slot without memory (`harm`)
    progress  from every state an end can still be reached: living clients served, no slot marked, as many slots with
              memory as the user wants (`is_end`)

Progress excludes deadlock, and also a grant that stays for ever on a slot that nobody uses. It needs no notion of time:
deadlines and repeats are just steps that may happen. Left out: a record is one expert number; a client has one request
under way, as in PoolClient; a restarted daemon takes stock of all slots at once, as in Extent and Residency.start; a
resize goes all the way in one of Extent's steps, and takes no heed of what a set needs.

Assumption about the machine: a direct read that a killed daemon had begun may still land in its slot after the
successor has started (`stale`), but not after a later read of the same record into the same slot has ended. (Killed
threads stay until their read is done, and their lock with them; io_uring's requests are not waited for.)
`Fault.DISK_REORDERS` drops the assumption, and shows the harm that would follow.
"""

from __future__ import annotations

from enum import Enum, auto

from tests.slot_world import (
    EMPTY,
    EVICTING,
    GONE,
    LOADING,
    NOBODY,
    NOWHERE,
    READY,
    RETIRED,
    TORN,
    Client,
    Job,
    Model,
    Request,
    Steps,
    answered,
    granted,
    is_in,
    listed,
    marked,
    next_of,
    started,
    told,
    unmarked,
    with_client,
    with_job,
    with_slot,
)


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
    RETIRE_LOADING = auto()  # retire asks for no state
    RETIRE_HELD = auto()  # retire has no E2
    GIVE_BACK_SOME = auto()  # memory of those slots that could be retired goes although others could not
    RESTORE_FIRST = auto()  # a growing pool's slots are restored before they have memory
    LEAVE_MEMORY = auto()  # a successor does not look for memory behind retired slots
    DISK_REORDERS = auto()  # see the module


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
            dead = with_client(m, c, x._replace(at="dead", sent=(), got=()))
            yield f"{name} dies", dead._replace(deaths=m.deaths - 1)
        if x.at == "R1":
            slot = m.table[x.todo[0][x.i]]
            found = x._replace(at="R3" if checks_first else "R2", slot=slot)
            after = next_of(missed) if slot == NOWHERE else found
            yield f"{name} R1 finds expert {x.todo[0][x.i]} in slot {slot}", with_client(m, c, after)
        elif x.at == "R2":
            after = x._replace(at="held" if checks_first else "R3")
            yield f"{name} R2 marks slot {x.slot}", with_client(marked(m, x.slot, 1 << c), c, after)
        elif x.at in ("R3", "R3b"):
            yield from self._check(m, c, x)
        elif x.at == "R4":
            yield f"{name} R4 undoes slot {x.slot}", with_client(unmarked(m, c, x, x.slot), c, next_of(missed))
        elif x.at == "held":
            held = (*x.held, (x.todo[0][x.i], x.slot))
            yield f"{name} has slot {x.slot}", with_client(m, c, next_of(x._replace(held=held)))
        elif x.at in ("use", "let go"):
            (_, slot), left = x.held[0], x._replace(held=x.held[1:])
            after = left
            if not left.held:
                after = left._replace(at="ask") if x.at == "let go" else started(left, x.todo[1:])
            yield f"{name} R4 releases slot {slot}", with_client(unmarked(m, c, left, slot), c, after)
        elif x.at == "ask":
            number = 1 - x.request
            after = x._replace(at="wait", request=number, sent=(*x.sent, ("fetch", number)))
            yield f"{name} sends FetchExperts {number}", with_client(m, c, after)
        else:
            yield from self._wait(m, c, x)

    def _check(self, m: Model, c: int, x: Client) -> Steps:
        """R3, two loads: the state, then the owner. READY seen with our bit set means that the owner stays."""
        slot, checks_first = m.slots[x.slot], self.fault is Fault.CHECK_THEN_MARK
        loads_state = (x.at == "R3") == (self.fault is not Fault.OWNER_THEN_STATE)
        is_right = slot.state == READY if loads_state else slot.owner == x.todo[0][x.i]
        if not is_right:
            after = next_of(x._replace(missed=True)) if checks_first else x._replace(at="R4")
        elif x.at == "R3":
            after = x._replace(at="R3b")
        else:
            after = x._replace(at="R2" if checks_first else "held")
        saw = slot.state if loads_state else f"owner {slot.owner}"
        yield f"client {c}: R3 sees {saw} of slot {x.slot}", with_client(m, c, after)

    def _wait(self, m: Model, c: int, x: Client) -> Steps:
        """Wait for the whole set, then hold it by R1-R4: grants only keep it there meanwhile."""
        is_giving_up = x.at == "giving up"
        is_known = bool(x.sent) or any(q.client == c for q in m.requests)
        if x.got:
            (kind, number), after = x.got[0], x._replace(got=x.got[1:])
            label = f"client {c}: gets {kind} {number}"
            if number != x.request:
                yield label, with_client(self._reconcile(m, c, x), c, after)
            elif is_giving_up:
                yield label, self._give_up(m, c, after)
            else:
                yield label, with_client(m, c, after._replace(at="R1", i=0, missed=False))
        elif is_giving_up:
            if not is_known:
                yield f"client {c}: no longer waits for an answer", self._give_up(m, c, x)
        else:
            again = with_client(m, c, x._replace(sent=(*x.sent, ("fetch", x.request))))
            if m.is_up and not is_known:
                yield f"client {c}: repeats FetchExperts {x.request}", again
            elif m.repeats and len(x.sent) < 2:
                yield f"client {c}: repeats FetchExperts {x.request} early", again._replace(repeats=m.repeats - 1)
            if m.cancels:
                after = x._replace(at="giving up", sent=(*x.sent, ("cancel", x.request)))
                yield f"client {c}: cancels", with_client(m, c, after)._replace(cancels=m.cancels - 1)

    def _give_up(self, m: Model, c: int, x: Client) -> Model:
        return with_client(self._reconcile(m, c, x), c, started(x, x.todo[1:]))

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
                yield from self._take(with_client(m, c, x._replace(sent=x.sent[1:])), c, *x.sent[0])
            is_thought_dead = x.at == "dead" or (x.at == "use" and self.fault is Fault.CLEAR_THE_SILENT)
            if is_thought_dead and (any(y.mask >> c & 1 for y in m.slots) or any(q.client == c for q in m.requests)):
                slots = tuple(y._replace(mask=y.mask & ~(1 << c)) for y in m.slots)
                requests = tuple(q for q in m.requests if q.client != c)
                yield f"prefetch buries client {c}", m._replace(slots=slots, requests=requests)
        for q in m.requests:
            if not q.is_placed:
                absent = tuple(e for e in q.experts if not is_in(m, e))
                yield f"prefetch places the set of client {q.client}", m._replace(job=Job("choose", q, absent))
        for s, y in enumerate(m.slots):
            if y.state == LOADING and (not y.is_reading or self.fault is Fault.PUBLISH_EARLY):
                yield f"prefetch learns that slot {s} is read", m._replace(job=Job("E6", slot=s))
        yield from self._resize(m)

    def _take(self, m: Model, c: int, kind: str, number: int) -> Steps:
        mine = [q for q in m.requests if (q.client, q.number) == (c, number)]
        if kind == "cancel":
            after = m._replace(requests=tuple(q for q in m.requests if q not in mine))
            yield f"prefetch takes the cancel of client {c}", told(after, c, "cancelled", number) if mine else after
        elif mine:
            yield f"prefetch takes a repeat of client {c}", m
        elif (c, number) in m.answered and self.fault is not Fault.SERVE_REPEATS:
            yield f"prefetch answers client {c} again", told(m, c, "ready", number)
        else:  # for a client that is done: what it sent last, before it gave up
            experts = m.clients[c].todo[0] if m.clients[c].todo else ()
            requests = (*m.requests, Request(c, number, experts))
            yield f"prefetch takes FetchExperts {number} of client {c}", m._replace(requests=requests)

    def _job(self, m: Model, job: Job) -> Steps:
        if job.at in ("E6", "E7", "E7b"):
            yield from self._publish(m, job)
        elif job.at == "choose" and job.request is not None:
            yield from self._choose(m, job, job.request)
        elif job.at in ("retire", "give back", "restore"):
            yield from self._go_on(m, job)
        elif job.at in ("E4", "E5"):
            yield from self._load(m, job)
        else:
            yield from self._vacate(m, job)

    def _choose(self, m: Model, job: Job, q: Request) -> Steps:
        """Find a slot for the next absent expert; grants once all have one, or everything given back."""
        if not job.todo:
            requests = tuple(x._replace(is_placed=True) if x == q else x for x in m.requests)
            after = granted(m, q)._replace(requests=requests, job=None)
            yield f"prefetch grants what is there of client {q.client}'s set", answered(after)
            return
        if self.fault is Fault.KEEP_GRANTS_IN_QUEUE:
            yield "prefetch lets the set wait with what it got", granted(m, q)._replace(job=None)
        free = [s for s, x in enumerate(m.slots) if x.state == EMPTY]
        if free:
            yield f"prefetch takes empty slot {free[0]}", m._replace(job=job._replace(at="E4", slot=free[0]))
            return
        for s, x in enumerate(m.slots):
            if x.state == READY and x.owner not in q.experts:
                after = m._replace(job=job._replace(at="E3" if self.fault is Fault.IGNORE_MASK else "E2", slot=s))
                yield f"prefetch: E1 slot {s} EVICTING", with_slot(after, s, state=EVICTING)
        if self.fault is not Fault.KEEP_GRANTS_IN_QUEUE:
            after = m._replace(job=None)
            for s in job.given:
                after = with_slot(after, s, state=EMPTY, owner=NOBODY, is_reading=False)
            yield "prefetch finds no room: the set waits", after

    def _vacate(self, m: Model, job: Job) -> Steps:
        """Evictor.vacate after E1: as unload for a request, as retire for a resize. One access each."""
        s, slot, is_for_request = job.slot, m.slots[job.slot], job.request is not None
        if job.at == "E2" and slot.mask:
            after = with_slot(m, s, state=READY)
            again = job._replace(at="choose") if is_for_request else _next_slot(job, could=False)
            yield f"prefetch: E2 slot {s} is marked, READY again", after._replace(job=again)
        elif job.at == "E2":
            yield f"prefetch: E2 slot {s} is not marked", with_job(m, job, at="E3")
        elif job.at == "E3":
            after = listed(m, slot.owner, NOWHERE)
            yield f"prefetch: E3 expert {slot.owner} leaves", with_job(after, job, at="nobody's")
        elif job.at == "nobody's":
            yield f"prefetch: slot {s} is nobody's", with_job(with_slot(m, s, owner=NOBODY), job, at="vacant")
        elif is_for_request:
            yield f"prefetch: slot {s} EMPTY", with_job(with_slot(m, s, state=EMPTY), job, at="E4")
        else:
            after = with_slot(m, s, state=RETIRED)
            yield f"prefetch: slot {s} RETIRED", after._replace(job=_next_slot(job))

    def _load(self, m: Model, job: Job) -> Steps:
        """E4 and E5 of an EMPTY slot. The read may begin with E5."""
        s = job.slot
        if job.at == "E4":
            after = with_slot(m, s, owner=job.todo[0])
            yield f"prefetch: E4 slot {s} is for expert {job.todo[0]}", with_job(after, job, at="E5")
        else:
            more = job._replace(at="choose", todo=job.todo[1:], given=(*job.given, s))
            content = GONE if m.slots[s].content == GONE else TORN
            after = with_slot(m, s, state=LOADING, content=content, is_reading=True)
            yield f"prefetch: E5 slot {s} LOADING", after._replace(job=more)

    def _publish(self, m: Model, job: Job) -> Steps:
        s, slot = job.slot, m.slots[job.slot]
        if job.at == "E6":
            bits = 0
            for q in m.requests:
                bits |= 1 << q.client if q.is_placed and slot.owner in q.experts else 0
            yield f"prefetch: E6 slot {s} granted to {bits:#b}", marked(m, s, bits)._replace(job=job._replace(at="E7"))
        elif job.at == "E7":
            yield f"prefetch: E7 slot {s} READY", with_slot(m, s, state=READY)._replace(job=job._replace(at="E7b"))
        else:
            after = listed(m, slot.owner, s)._replace(job=None)
            yield f"prefetch: E7 expert {slot.owner} is listed", answered(after)

    def _restart(self, m: Model) -> Steps:
        """A new daemon adopts the pool: Extent takes stock, then Evictor.recover looks at each slot."""
        in_force = max((s + 1 for s, x in enumerate(m.slots) if x.state != RETIRED), default=0)
        for s, x in enumerate(m.slots):
            is_listed = x.owner != NOBODY and m.table[x.owner] == s
            is_torn = x.state == LOADING and self.fault is Fault.EMPTY_ON_ADOPTION
            if s >= in_force:
                m = with_slot(m, s, content=x.content if self.fault is Fault.LEAVE_MEMORY else GONE)
            elif x.state in (EMPTY, RETIRED) or x.owner == NOBODY or is_torn:
                m = with_slot(m, s, state=EMPTY, owner=NOBODY)
            elif x.state == READY or (x.state == EVICTING and is_listed):
                m = listed(with_slot(m, s, state=READY), x.owner, s)
            else:
                m = with_slot(m, s, state=LOADING, is_reading=True, content=TORN)
        yield "prefetch starts again", m._replace(is_up=True, in_force=in_force)

    # --- its size: Sizing and Extent, with Evictor.retire and restore ----------------------------------------------

    def _resize(self, m: Model) -> Steps:
        """What a user wants, and the way there; a shrink that found slots in use is tried again and again."""
        if m.sizes:
            target = m.sizes[0]
            back = tuple(s for s in range(min(target, m.in_force)) if m.slots[s].state == RETIRED)
            after = m._replace(target=target, sizes=m.sizes[1:], job=Job("restore", todo=back) if back else None)
            yield f"a user wants {target} slots, {len(back)} come back", after
        if m.target < m.in_force:
            yield "prefetch begins to shrink", m._replace(job=Job("retire", todo=tuple(range(m.target, m.in_force))))
        elif m.target > m.in_force:
            new = tuple(range(m.in_force, m.target))
            after = m if self.fault is Fault.RESTORE_FIRST else _with_memory(m, new)
            yield "prefetch grows", after._replace(in_force=m.target, job=Job("restore", todo=new))

    def _go_on(self, m: Model, job: Job) -> Steps:
        """The next slot of a resize, or what all of them came to."""
        if not job.todo:
            yield from self._resized(m, job)
            return
        s, slot = job.todo[0], m.slots[job.todo[0]]
        if job.at == "restore":
            after = with_slot(m, s, state=EMPTY)
            yield f"prefetch: slot {s} restored", with_job(after, job, todo=job.todo[1:])
        elif job.at == "give back":
            after = with_slot(m, s, content=GONE)
            yield f"prefetch gives memory of slot {s} back", with_job(after, job, todo=job.todo[1:])
        elif slot.state == LOADING and self.fault is not Fault.RETIRE_LOADING:
            yield f"prefetch: slot {s} is LOADING", m._replace(job=_next_slot(job, could=False))
        elif slot.state == READY:
            at = "E3" if self.fault is Fault.RETIRE_HELD else "E2"
            yield f"prefetch: E1 slot {s} EVICTING", with_job(with_slot(m, s, state=EVICTING), job, at=at, slot=s)
        else:
            yield f"prefetch: slot {s} is {slot.state}", with_job(m, job, at="nobody's", slot=s)

    def _resized(self, m: Model, job: Job) -> Steps:
        if job.at == "retire" and not job.could:
            after = m._replace(job=None)
            if self.fault is Fault.GIVE_BACK_SOME:
                for s, slot in enumerate(m.slots):
                    after = with_slot(after, s, content=GONE) if slot.state == RETIRED else after
            yield "prefetch will try again", after
        elif job.at == "retire":
            yield "prefetch has retired all", m._replace(job=Job("give back", todo=tuple(range(m.target, m.in_force))))
        elif job.at == "give back":
            yield "prefetch has shrunk", m._replace(in_force=m.target, job=None)
        else:
            after = m
            if self.fault is Fault.RESTORE_FIRST:
                after = _with_memory(m, tuple(range(m.in_force)))
            yield "prefetch has all slots back", after._replace(job=None)

    # --- the disk --------------------------------------------------------------------------------------------------

    def _disk(self, m: Model) -> Steps:
        for s, x in enumerate(m.slots):
            if x.is_reading:
                keep = self.fault is Fault.DISK_REORDERS
                stale = tuple(old for old in m.stale if old != (s, x.owner) or keep)
                after = with_slot(m, s, content=x.owner, is_reading=False)
                yield f"disk: slot {s} contains expert {x.owner}", after._replace(stale=stale)
        for s, expert in m.stale:
            after = m._replace(stale=tuple(old for old in m.stale if old != (s, expert)))
            is_harmless = m.slots[s].content == expert  # the same bytes once more
            label = f"disk: an old read of expert {expert} lands in slot {s}"
            yield label, after if is_harmless else with_slot(after, s, content=TORN)


def _next_slot(job: Job, could: bool = True) -> Job:
    """A resize is done with the first slot of `todo`."""
    return job._replace(at="retire", todo=job.todo[1:], slot=0, could=job.could and could)


def _with_memory(m: Model, slots: tuple[int, ...]) -> Model:
    """Memory behind `slots`; what has some keeps it."""
    for s in slots:
        m = with_slot(m, s, content=TORN) if m.slots[s].content == GONE else m
    return m
