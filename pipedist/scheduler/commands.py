"""Outputs of the scheduler. The driver executes each one, in order, and decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class Command(Struct, frozen=True):
    """An output of the scheduler."""


class StartWorker(Command, frozen=True):
    """Start a worker process."""

    worker: str
    incarnation: int


class EvictWorker(Command, frozen=True):
    """End this incarnation: it is lost, stale or broke the protocol."""

    worker: str
    incarnation: int
    reason: str


class SendBind(Command, frozen=True):
    """Send the pass's program to a worker, before its first Assign of that pass."""

    worker: str
    pass_id: int


class SendUnbind(Command, frozen=True):
    """Send a worker the end of a pass."""

    worker: str
    pass_id: int


class SendAssign(Command, frozen=True):
    """Send calls [lo, hi) with their shards."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int
    attempt: int
    # The elements of a single call to send: ranges [a, b) of their positions in its shard; empty: all of them
    elements: tuple[tuple[int, int], ...] = ()
    twin: int = 0  # the lease of a slow worker with the same calls; 0: there is none
    overlaps: bool = False  # the calls only wait: they are executed beside those of other leases


class GangAssignment(NamedTuple):
    """The calls [lo, hi) of one member of a gang."""

    worker: str
    lease: int
    lo: int
    hi: int


class SendGang(Command, frozen=True):
    """Send each member of a gang its calls with their shards.

    `serial` grows while the scheduler runs; `parts` has one entry per member, in order.
    """

    serial: int
    pass_id: int
    attempt: int
    parts: tuple[GangAssignment, ...]

    def following(self, replicas: int) -> SendGang:
        """Return the command for the next step, if nothing else happens; `replicas`: calls of a step."""
        count, new = len(self.parts), tuple.__new__  # cheaper than the class
        parts = tuple(
            [
                new(GangAssignment, (worker, lease + count, lo + replicas, hi + replicas))
                for worker, lease, lo, hi in self.parts
            ]
        )
        return SendGang(self.serial + 1, self.pass_id, 0, parts)


class StashResults(Command, frozen=True):
    """Hold back results of a gang until its GangEnded."""

    serial: int
    lo: int
    hi: int
    worker: str


class GangEnded(Command, frozen=True):
    """End a gang."""

    serial: int
    counts: bool  # accept the stashed results; otherwise drop them
    aborted: bool  # calls of it may still run, and wait for contributions that will not come


class SendRecall(Command, frozen=True):
    """Request calls [lo, hi), which a worker has cached for an earlier scheduler, under a lease."""

    worker: str
    lease: int
    pass_id: int
    lo: int
    hi: int


class SendCommitted(Command, frozen=True):
    """Report to a worker that calls of a pass below `before` are durable."""

    worker: str
    pass_id: int
    before: int


class SendQuota(Command, frozen=True):
    """Set how much of the limits of a pass a worker may use; see `messages.Quota`."""

    worker: str
    pass_id: int
    number: int
    calls: tuple[int, ...]
    sharing: int


class SendCancel(Command, frozen=True):
    """Cancel the calls of a worker's lease that have not begun."""

    worker: str
    lease: int


class AcceptResults(Command, frozen=True):
    """Accept the results of calls [lo, hi), and release their inputs."""

    pass_id: int
    lo: int
    hi: int
    worker: str


class SizeCall(Command, frozen=True):
    """Report how many elements of a failed call can be tried apart (CallSized), for its bisection."""

    pass_id: int
    call: int


class Cause(Struct, frozen=True):
    """Why a call or one of its elements failed: the stage, "" if unknown, and a text for people."""

    stage: str
    text: str


UNKNOWN = Cause("", "")


class CallsQuarantined(Command, frozen=True):
    """Quarantine elements of calls [lo, hi), one call's or a gang's."""

    pass_id: int
    lo: int
    hi: int
    # Position in the call's shard and cause of each element that fails alone
    culprits: tuple[tuple[int, Cause], ...]
    # Why all elements of the calls are quarantined, though none fails alone; None: the culprits are
    whole: Cause | None = None
    # The result of the other elements counts, and follows; otherwise the calls have none
    remains: bool = False


class QuarantineFull(Command, frozen=True):
    """Fail a pass: more elements than its `quarantine_max` failed; sent once."""

    pass_id: int
    elements: int
    first: tuple[tuple[int, Cause], ...]  # call and cause of the first failures


class DropResults(Command, frozen=True):
    """Drop a result whose lease is not held any more."""

    worker: str
    lease: int


class RequestSteps(Command, frozen=True):
    """Request `count` more steps, beyond all that were requested before."""

    pass_id: int
    count: int


class StepsReady(Command, frozen=True):
    """Publish steps [first, last): all of their calls are done."""

    pass_id: int
    first: int
    last: int


class Failure(Struct, frozen=True):
    """Why a call failed for good; `cause` is how its last worker died, None if the call raised."""

    call: int
    attempts: int
    worker: str
    cause: str | None = None


class StepFailed(Command, frozen=True):
    """Report a complete step with calls that failed for good; lowest call first."""

    pass_id: int
    step: int
    failures: tuple[Failure, ...]


class PassComplete(Command, frozen=True):
    """Report that all steps of the pass were published."""

    pass_id: int


class PassDrained(Command, frozen=True):
    """Report that nothing of a draining pass is running any more."""

    pass_id: int


class ClusterFailed(Command, frozen=True):
    """Fail the cluster: workers die faster than they join."""

    reason: str
