"""A neighbour that needs memory gets it from the pool: nobody is killed, nothing stalls, no answer changes.

Real daemons in a real control group. Its limit is set so that without a smaller pool the neighbour would exceed it, and
the kernel would kill.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sparkle import _native
from sparkle.messages import Tokens
from tests.cgroups import MemoryGroup, memory_group
from tests.daemons import DaemonProcess, Peer, spawn
from tests.ipc.computes import finish, request
from tests.models_random import write_qwen3_moe

pytestmark = [
    pytest.mark.ipc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not _native.CAN_DISCARD, reason="this system gives shared memory back whole only"),
]

BALLAST_BYTES = 400 << 20  # what the neighbour has from the start: a limit of nearly 1 GB, 120 MB of it to be kept free
STEP_BYTES = 8 << 20  # of the neighbour, twenty times a second: 40 MB between two decisions of the governor
STEP_S = 0.05
EXCESS_BYTES = 40 << 20  # what the neighbour takes beyond what there was
MAX_GAP_S = 3.0  # between two tokens
WAIT_S = 60.0


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 experts of 418 kB: 214 MB, a large part of what the daemons take; a step needs no more than 66 at once."""
    folder = tmp_path_factory.mktemp("large")
    source = write_qwen3_moe(folder / "hf", hidden=512, moe_intermediate=256, experts=64, layers=8)
    store = folder / "large.store"
    subprocess.run([sys.executable, "-m", "sparkled.compute.prepare", str(source), str(store)], check=True)
    return store


@contextmanager
def daemons_in(group: MemoryGroup, store: Path) -> Iterator[tuple[DaemonProcess, DaemonProcess]]:
    """A prefetch and a compute daemon that count in the group from their first moment on: the pool's memory too."""
    env = {"SPARKLE_MODEL": str(store), "SPARKLE_POOL": "100%", "SPARKLE_READ_DEPTH": "4", "SPARKLE_GOVERNOR": "on"}
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as folder, ExitStack() as stack:
        prefetch = stack.enter_context(spawn("prefetch", Path(folder), env))
        group.add(prefetch.process.pid)
        compute = stack.enter_context(spawn("compute", Path(folder), env))
        group.add(compute.process.pid)
        compute.wait_for_state("ready")
        yield prefetch, compute


class Neighbour:
    """A program that takes memory when it is told to."""

    CODE = "import sys\nkept = []\nfor line in sys.stdin:\n    kept.append(b'x' * int(line))\n    print(flush=True)\n"

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", self.CODE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.taken_bytes = 0

    def take(self, n_bytes: int) -> None:
        """Returns when every page has been written."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(b"%d\n" % n_bytes)
        self.process.stdin.flush()
        assert self.process.stdout.readline(), f"the neighbour was killed after {self.taken_bytes} bytes"
        self.taken_bytes += n_bytes

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def neighbour(group: MemoryGroup) -> Iterator[Neighbour]:
    one = Neighbour()
    try:
        group.add(one.process.pid)
        yield one
    finally:
        one.end()


class Decoder:
    """Asks the same question again and again, and looks at the clock at every token."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.answer: list[int] = []
        self.max_gap_s = 0.0
        self.n_answers = 0

    def tokens(self) -> Iterator[None]:
        """One more token each time, without end."""
        while True:
            self._peer.received.clear()
            asked = request(max_tokens=60)
            self._peer.send(asked)
            last = time.monotonic()
            said: list[int] = []
            while len(said) < 60:
                message = self._peer.receive(WAIT_S)
                if isinstance(message, Tokens):
                    said += message.ids
                    now = time.monotonic()
                    self.max_gap_s, last = max(self.max_gap_s, now - last), now
                    yield
            finish(self._peer, asked.request_id)
            self.answer = self.answer or said
            assert said == self.answer, "the same question, the same answer, whatever the size of the pool"
            self.n_answers += 1


def test_the_pool_gives_way_to_a_neighbour_and_comes_back(large_store: Path) -> None:
    with memory_group() as group, daemons_in(group, large_store) as (prefetch, compute):
        full = prefetch.wait_for_state("ready", slots_used=512, slots_loading=0).metrics
        decoder = Decoder(compute.peer())
        tokens = decoder.tokens()
        _answers(decoder, tokens, 2)
        with neighbour(group) as other:
            other.take(BALLAST_BYTES)
            group.set_limit(int(group.used() * 1.3))  # enough for the pool to stay as it is
            _decode(tokens, 1.0)
            before = prefetch.status().metrics
            assert (before["pool_bytes"], before["pool_shrinks"]) == (full["pool_bytes"], 0), before["governor_reason"]

            most = other.taken_bytes + before["memory_available_bytes"] + EXCESS_BYTES
            while other.taken_bytes < most:
                other.take(STEP_BYTES)
                _decode(tokens, STEP_S)
            _decode(tokens, 1.0)
            small = prefetch.status().metrics
            assert small["pool_shrinks"] > 0
            assert small["pool_bytes"] <= before["pool_bytes"] - EXCESS_BYTES, small["governor_reason"]
            assert small["memory_available_bytes"] > 0
            _answers(decoder, tokens, 2)
            _nobody_died(group, prefetch, compute)
            assert other.process.poll() is None

        end = time.monotonic() + WAIT_S
        while (now := prefetch.status().metrics)["pool_grows"] < 2:
            assert time.monotonic() < end, now["governor_reason"]
            _decode(tokens, 0.5)
        assert now["pool_bytes"] > small["pool_bytes"]
        assert now["pool_shrinks"] == small["pool_shrinks"], "it grew into free memory"
        _answers(decoder, tokens, 2)
        _nobody_died(group, prefetch, compute)
        assert now["unplaced_experts"] == 0
        assert decoder.max_gap_s < MAX_GAP_S


def _answers(decoder: Decoder, tokens: Iterator[None], n: int) -> None:
    """Decode until `n` more whole answers have come; the first of them may have begun before."""
    end = decoder.n_answers + n
    while decoder.n_answers < end:
        next(tokens)


def _decode(tokens: Iterator[None], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        next(tokens)


def _nobody_died(group: MemoryGroup, *daemons: DaemonProcess) -> None:
    assert group.oom_kills() == 0
    for daemon in daemons:
        assert daemon.process.poll() is None, daemon.stderr()
