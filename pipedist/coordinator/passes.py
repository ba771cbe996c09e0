"""The open passes: by number, by lease, by key of cached results."""

from __future__ import annotations

from collections.abc import Callable

from pipedist.coordinator.failures import DeathOutcome
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.results import CachedResultIndex
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.errors import PipedistError, RunCancelled
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event, Scheduler
from pipedist.scheduler import events as ev
from pipedist.worker.progress import Running


class OpenPasses:
    """Opens, finds and closes passes."""

    def __init__(self, post: Callable[[Event], None], scheduler: Scheduler, pool: WorkerPool) -> None:
        self._post = post
        self._scheduler = scheduler
        self._pool = pool
        self._cached = CachedResultIndex()
        self.last = 0
        self.handles: dict[int, PassHandle] = {}
        self._closing: dict[int, PassHandle] = {}  # closed, and workers may still report results

    def of_lease(self, worker: str, lease: int) -> PassHandle | None:
        """Return the pass of a lease; None: the worker holds no such lease."""
        pass_id = self._scheduler.pass_of(worker, lease)
        return None if pass_id is None else self.handles.get(pass_id)

    def of_cancelled(self, worker: str, lease: int) -> PassHandle | None:
        """Return the pass of a cancelled lease, if the pass keeps late results."""
        pass_id = self._scheduler.cancelled_pass_of(worker, lease)
        handle = None if pass_id is None else self.handles.get(pass_id) or self._closing.get(pass_id)
        return handle if handle is not None and handle.keeps_results else None

    def on_death(self, worker: str, running: Running, timed_out: bool) -> DeathOutcome | None:
        handle = self.of_lease(worker, running.lease)
        return None if handle is None else handle.on_death(running, timed_out=timed_out)

    # -- from beginning to end -------------------------------------------------------------

    def open(self, handle: PassHandle) -> None:
        """Open a pass, and use the results of it that workers have cached."""
        self.last = handle.id
        self.handles[handle.id] = handle
        if handle.policy.is_timed:
            self._pool.watch()
        self._post(ev.PassOpened(handle.id, handle.settings))
        for event in self._cached.of_pass(handle.key, handle.id):
            self._post(event)

    def close(self, pass_id: int) -> None:
        """Close a pass, before the scheduler does; does nothing if it is not open."""
        handle = self.handles.pop(pass_id, None)
        if handle is not None:
            self._pool.forget_pass(pass_id)
            if handle.keeps_results:
                self._closing[pass_id] = handle
            handle.on_closed(RunCancelled(f"{handle.name} was closed"))

    def settle(self) -> None:
        """Drop the closed passes of which no worker reports results any more."""
        if not self._closing:
            return
        for pass_id in [each for each in self._closing if not self._scheduler.may_report(each)]:
            self._closing.pop(pass_id).settled.set()

    def fail(self, error: PipedistError) -> None:
        for handle in list(self.handles.values()):
            handle.fail(error)

    # -- cached results ----------------------------------------------------------------------

    def add_cached(self, hello: msg.Hello) -> None:
        """Record a worker's cached results, before calls are assigned to it."""
        by_key = {handle.key: handle.id for handle in self.handles.values() if handle.key}
        for event in self._cached.add(hello, by_key):
            self._post(event)

    def on_leave(self, worker: str, incarnation: int) -> None:
        """Forget the cached results of a worker that is gone."""
        self._cached.forget(worker, incarnation)
        for handle in self.handles.values():
            if handle.record is not None:
                handle.record.recorder.left(worker)
