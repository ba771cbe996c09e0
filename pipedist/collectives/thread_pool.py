"""Threads for replicas that share a process, reused from one gang to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

_CLOSE_S: Final = 5.0


class ReplicaThreadPool:
    """Runs each job in a thread of its own, and reuses threads whose jobs are done."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends a thread
        self._idle = 0  # number of threads without a job
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, in an idle or new thread; RuntimeError if there can be none."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the thread pool is closed")
            if self._idle:
                self._idle -= 1
            else:
                # A daemon, so that a replica that hangs cannot keep the process from exiting.
                name = f"replica-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # release what the replica referenced before waiting for the next job
            with self._lock:
                if self._is_closed:
                    return
                self._idle += 1

    def close(self) -> None:
        """End the threads; wait at most 5 s for each running job. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for _ in range(self._idle):
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
