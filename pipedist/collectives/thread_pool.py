"""Threads for replicas that share a process, reused from one gang to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_CLOSE_S: Final = 5.0


class _Thread:
    """One thread that executes jobs, one at a time."""

    def __init__(self, pool: ReplicaThreadPool, number: int) -> None:
        self._pool = pool
        self._job: Callable[[], None] | None = None
        self._has_job = threading.Lock()
        self._has_job.acquire()
        # A daemon, so that a replica that hangs cannot keep the process from exiting.
        self.thread = threading.Thread(target=self._work, name=f"replica-{number}", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[[], None] | None) -> None:
        self._job = job  # None ends the thread
        self._has_job.release()

    def _work(self) -> None:
        while True:
            self._has_job.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            job()
            del job  # release what the replica referenced before waiting for the next job
            if not self._pool.recycle(self):
                return


class ReplicaThreadPool:
    """Runs each job in its own thread, and reuses threads whose jobs are done."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, in an idle or new thread; RuntimeError if there can be none."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the thread pool is closed")
            if self._idle:
                thread = self._idle.pop()
            else:
                thread = _Thread(self, len(self._all) + 1)
                self._all.append(thread)
        thread.submit(job)

    def recycle(self, thread: _Thread) -> bool:
        """Return whether a thread whose job is done is reused; if not, it must end."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(thread)
            return not self._is_closed

    def close(self) -> None:
        """End the threads; wait at most 5 s for each running job. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.submit(None)
        for thread in self._all:
            thread.thread.join(_CLOSE_S)
