"""The passes that are open, found by number, by the lease of a worker, by the key of what workers kept."""

from __future__ import annotations

from collections.abc import Callable

from pipedist.coordinator.cached_results import Offers
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.program_distribution import Introductions
from pipedist.coordinator.worker_pool import Fate, Fleet
from pipedist.errors import PipedistError, RunCancelled
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev
from pipedist.worker.progress import Running


class Passes:
    """Opens and closes passes, and knows those between.

    Args:
        post: tells the scheduler.
        pass_of: the number of the pass of a lease that a worker holds; None: it holds no such lease.
        fleet: told whether it is to be looked for calls that take too long.
        introductions: told of passes that are over.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        pass_of: Callable[[str, int], int | None],
        fleet: Fleet,
        introductions: Introductions,
    ) -> None:
        self._post = post
        self._pass_of = pass_of
        self._fleet = fleet
        self._introductions = introductions
        self._offers = Offers()
        self.last = 0
        """The number of the latest one."""
        self.handles: dict[int, PassHandle] = {}
        """By number."""

    def of_lease(self, worker: str, lease: int) -> PassHandle | None:
        """Return the pass of a lease that a worker holds; None: it holds no such lease."""
        pass_id = self._pass_of(worker, lease)
        return None if pass_id is None else self.handles.get(pass_id)

    def explain(self, worker: str, running: Running, timed_out: bool) -> Fate | None:
        """Return what a worker's end means for the call that it ran; see `pipedist.coordinator.worker_pool`."""
        handle = self.of_lease(worker, running.lease)
        return None if handle is None else handle.ended(running, timed_out=timed_out)

    # -- from beginning to end -------------------------------------------------------------

    def open(self, handle: PassHandle) -> None:
        """Begin a pass, with what workers have finished of it for a scheduler that is gone."""
        self.last = handle.id
        self.handles[handle.id] = handle
        if handle.policy.is_timed:
            self._fleet.watch(wanted=True)
        self._post(ev.PassOpened(handle.id, handle.settings))
        for kept in self._offers.of_pass(handle.key, handle.id):
            self._post(kept)

    def forget(self, pass_id: int) -> None:
        """Let go of a pass, before the scheduler does; one that is not open is no fault."""
        handle = self.handles.pop(pass_id, None)
        if handle is not None:
            self._introductions.forget(pass_id)
            handle.closed(RunCancelled(f"{handle.name} was closed"))
            if handle.policy.is_timed and not any(x.policy.is_timed for x in self.handles.values()):
                self._fleet.watch(wanted=False)

    def fail(self, error: PipedistError) -> None:
        """End every pass with an error."""
        for handle in list(self.handles.values()):
            handle.fail(error)

    # -- what workers offer ----------------------------------------------------------------

    def offered(self, hello: msg.Hello) -> None:
        """Take note of what a worker has finished, before it is dealt anything.

        Raises:
            RemoteProtocolError: it is malformed.
        """
        by_key = {handle.key: handle.id for handle in self.handles.values() if handle.key}
        for kept in self._offers.take(hello, by_key):
            self._post(kept)

    def refused(self, hello: msg.Hello) -> None:
        """Forget what was offered by a worker that may not join."""
        self._offers.forget(hello.worker, hello.incarnation)
