"""One thread beside the loop, for work that would hold it up: loading the tokenizer, rendering and encoding prompts.

Owns the thread and its queues. Jobs run in order and touch nothing that the loop owns; results come back in the loop.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sparkle.errors import SparkleError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """Runs jobs for a daemon, in order. A prompt of a million characters takes about a second; the loop goes on."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: makes the loop call `deliver`; from any thread."""
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], then: Callable[[T | SparkleError], None]) -> None:
        """Run `job` in the thread, then `then` with its result or error in the loop."""
        self._jobs.put((job, then))

    def deliver(self) -> None:
        """Hand over what is done; in the loop."""
        with contextlib.suppress(queue.Empty):
            while True:
                then, result = self._results.get_nowait()
                then(result)

    def close(self, wait_s: float) -> None:
        """End after the job under way, waiting at most `wait_s` for it; what is not done yet is dropped."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None and not self._is_closed:
            job, then = entry
            try:
                result = job()
            except SparkleError as e:
                result = e
            except Exception as e:  # a fault here must fail one request, not the thread of all
                log.exception("job_failed")
                result = SparkleError(f"internal fault: {type(e).__name__}: {e}")
            if not self._is_closed:  # else there is no loop any more to wake
                self._results.put((then, result))
                self._wake()
