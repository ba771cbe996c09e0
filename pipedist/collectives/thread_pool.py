"""Threads for replicas that share a process; kept from one gang to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_CLOSE_S: Final = 5.0


class _Thread:
    """One thread that waits for jobs."""

    def __init__(self, threads: ReplicaThreadPool, number: int) -> None:
        self._threads = threads
        self._job: Callable[[], None] | None = None
        self._has_job = threading.Lock()
        self._has_job.acquire()
        # A daemon: a replica that hangs must not keep the process from ending.
        self.thread = threading.Thread(target=self._work, name=f"replica-{number}", daemon=True)
        self.thread.start()

    def give(self, job: Callable[[], None] | None) -> None:
        """Start a job; None: end the thread."""
        self._job = job
        self._has_job.release()

    def _work(self) -> None:
        while True:
            self._has_job.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            job()
            del job  # what a replica held must not live on until the next job comes
            if not self._threads.take_back(self):
                return


class ReplicaThreadPool:
    """Starts jobs, each in a thread of its own, and keeps the threads of those that are done."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, in a thread that has nothing else to do.

        Raises:
            RuntimeError: the threads is closed, or the system has no more threads.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this threads is closed")
            if self._idle:
                thread = self._idle.pop()
            else:
                thread = _Thread(self, len(self._all) + 1)
                self._all.append(thread)
        thread.give(job)

    def take_back(self, thread: _Thread) -> bool:
        """Keep a thread whose job is done; False: it is to end."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(thread)
            return not self._is_closed

    def close(self) -> None:
        """End the threads; waits a bounded time for those whose jobs still run. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            idle = self._idle
            self._idle = []
        for thread in idle:
            thread.give(None)
        for thread in self._all:
            thread.thread.join(_CLOSE_S)
