"""A pool client that checks every byte it gets; in the test's process, or in one of its own that may be killed.

python -m tests.ipc.pool_user RUN_DIR STORE        then one command per line on stdin, one answer per line on stdout:
    hold LAYER EXPERT,EXPERT        holds them until told otherwise, and answers "held SLOT,SLOT" or the error's code
    release                         releases all, answers "released"
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sparkle.errors import SparkleError
from sparkle.pool_client import PoolClient
from sparkle.rundir import RunDir
from sparkle.store import Store
from sparkle.trace import Origin

ATTACH_S = 30.0


def record(store: Store, layer: int, expert: int) -> bytes:
    """The bytes of an expert as they are in the store's file."""
    with (store.path / store.layers[layer].file).open("rb") as file:
        file.seek(store.record_offset(layer, expert))
        return file.read(store.layout_of(layer).record_bytes)


class PoolUser:
    """A PoolClient, its held slots, and how many experts it has asked for."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        self.store = store
        self.client = PoolClient(RunDir(run_dir), store, [layer.index for layer in store.layers], "compute")
        self.held: list[int] = []
        self.n_asked = 0
        self._step = 0
        self._records: dict[tuple[int, int], bytes] = {}
        self.client.attach(ATTACH_S)

    def hold(self, layer: int, experts: Sequence[int], should_abort: Callable[[], bool] = lambda: False) -> list[int]:
        """Acquire a set and compare every byte with the store."""
        self._step += 1
        self.n_asked += len(experts)
        slots = self.client.acquire(layer, experts, Origin(self._step), should_abort)
        self.held += slots
        for slot, expert in zip(slots, experts, strict=True):
            if self.bytes_in(slot) != self._record(layer, expert):
                raise AssertionError(f"slot {slot} does not contain expert {expert} of layer {layer}")
        return slots

    def release(self) -> None:
        held, self.held = self.held, []
        self.client.release(held)

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        slots = self.hold(layer, experts)
        self.release()
        return slots

    def bytes_in(self, slot: int) -> bytes:
        for region in self.client.regions:
            i = slot - region.spec.first_slot
            if 0 <= i < region.spec.n_slots:
                return b"".join(piece[i].tobytes() for piece in region.pieces)
        raise AssertionError(f"slot {slot} is in no region")

    def _record(self, layer: int, expert: int) -> bytes:
        if (layer, expert) not in self._records:
            self._records[layer, expert] = record(self.store, layer, expert)
        return self._records[layer, expert]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()


class PoolUserProcess:
    """A PoolUser in a process of its own."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        command = [sys.executable, "-m", __name__, str(run_dir), str(store.path)]
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, command: str) -> str:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    with PoolUser(Path(sys.argv[1]), Store.open(sys.argv[2])) as user:
        for line in sys.stdin:
            match line.split():
                case ["hold", layer, experts]:
                    try:
                        slots = user.hold(int(layer), [int(e) for e in experts.split(",")])
                        answer = "held " + ",".join(map(str, slots))
                    except SparkleError as e:
                        answer = e.code
                case _:
                    user.release()
                    answer = "released"
            print(answer, flush=True)


if __name__ == "__main__":
    main()
