"""What tests of the compute daemon say and expect: requests, whole answers, and the daemons that give them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkle.messages import Accepted, Error, Finished, Generate, Ping, Pong, Progress, Sampling, Tokens
from tests.daemons import DaemonProcess, Peer, spawn

GREEDY = Sampling(temperature=0.0)
EOS_IDS = (0, 1, 2)  # of tiny_store, each from another file
PROMPT = list(range(20, 43))
IDS = itertools.count(1)
CONTEXT, VOCAB = 1024, 320  # of tiny_store
MAX_ACTIVE, MAX_QUEUE = 2, 3
# With half of the experts in the pool, a prompt is read 7 rows at a time, and steps have to fetch.
LIMITS = {"SPARKLE_MAX_ACTIVE": str(MAX_ACTIVE), "SPARKLE_MAX_QUEUE": str(MAX_QUEUE), "SPARKLE_POOL": "50%"}
PENALISED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.5}
# Four slots of 32, as few as the guard allows, none filled in the background: nearly every step has to fetch.
SMALLEST = {"SPARKLE_POOL": "12.5%", "SPARKLE_BACKGROUND_FILL": "off"}


def sampled(seed: int | None, **fields: Any) -> Sampling:
    """Sampling that never ends by itself."""
    never = {str(i): -1000.0 for i in EOS_IDS}
    return Sampling(**{"temperature": 1.0, "logit_bias": never, "seed": seed, **fields})


def request(prompt: list[int] | None = None, **fields: Any) -> Generate:
    fields = {"request_id": f"r{next(IDS)}", "max_tokens": 12, "sampling": GREEDY, **fields}
    return Generate(token_ids=PROMPT if prompt is None else prompt, **fields)


@dataclass(frozen=True, slots=True)
class Answer:
    """All that came for one request. `end` is its only end."""

    accepted: Accepted
    tokens: list[int]
    end: Finished | Error


def finish(peer: Peer, request_id: str, first_index: int = 0) -> Answer:
    """Receive until a request ends. Checks what holds for every answer: Accepted first, no gap, one end."""
    while not any(is_end(m, request_id) for m in peer.received):
        peer.receive()
    mine = [m for m in peer.received if getattr(m, "request_id", None) == request_id]
    assert [i for i, m in enumerate(mine) if is_end(m, request_id)] == [len(mine) - 1], "one end, after everything"
    assert isinstance(mine[0], Accepted), mine
    assert all(isinstance(m, Tokens | Progress) for m in mine[1:-1])
    said = [m for m in mine if isinstance(m, Tokens)]
    assert [m.index for m in said] == list(range(first_index, first_index + len(said)))
    assert all(len(m.ids) == 1 for m in said)
    end = mine[-1]
    assert isinstance(end, Finished | Error)
    if isinstance(end, Finished):
        assert end.usage.output_tokens == first_index + len(said)
    return Answer(mine[0], [m.ids[0] for m in said], end)


def is_end(message: object, request_id: str) -> bool:
    return isinstance(message, Finished | Error) and message.request_id == request_id


def ask(peer: Peer, message: Generate) -> Answer:
    peer.send(message)
    return finish(peer, message.request_id, len(message.resume_tokens))


def tokens_of(peer: Peer, message: Generate) -> list[int]:
    answer = ask(peer, message)
    assert isinstance(answer.end, Finished), answer.end
    return answer.tokens


def refusal(peer: Peer, message: Generate) -> Error:
    """Send a request that must be refused at once, and return why."""
    peer.send(message)
    error = peer.receive()
    assert isinstance(error, Error) and error.request_id == message.request_id, error
    return error


def wait_for_tokens(peer: Peer, request_id: str, n: int) -> None:
    while n_tokens(peer, request_id) < n:
        peer.receive()


def n_tokens(peer: Peer, request_id: str) -> int:
    return sum(isinstance(m, Tokens) and m.request_id == request_id for m in peer.received)


def catch_up(peer: Peer) -> None:
    """Receive everything that the daemon has said so far."""
    peer.send(Ping())
    peer.wait_for(Pong)


@dataclass(slots=True)
class Pair:
    """A prefetch and a compute daemon. `prefetch` may be replaced by a successor."""

    prefetch: DaemonProcess
    compute: DaemonProcess
    settings: dict[str, str]
    _stack: ExitStack

    def restart_prefetch(self) -> None:
        """Start a new prefetch daemon in place of one that was killed."""
        self.prefetch = self._stack.enter_context(spawn("prefetch", self.compute.run_dir.path, self.settings))


@contextmanager
def pair(store: Path, settings: Mapping[str, str], deadlines: Mapping[str, float] | None = None) -> Iterator[Pair]:
    """Start both daemons and wait until they are ready. deadlines: of compute, shortened."""
    env = {"SPARKLE_MODEL": str(store), "SPARKLE_READ_DEPTH": "4", **settings}
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder, ExitStack() as stack:
        prefetch = stack.enter_context(spawn("prefetch", Path(folder), env))
        compute = stack.enter_context(spawn("compute", Path(folder), env, deadlines))
        compute.wait_for_state("ready")
        yield Pair(prefetch, compute, env, stack)
