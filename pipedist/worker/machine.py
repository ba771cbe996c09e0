"""The worker's protocol, as a state machine without I/O.

Rules
-----
* `handle(event, now)` takes a message of the scheduler, or something that happened here, and
  returns commands; `deadline()` says when the next TimePassed is due. No clock, no socket, no data:
  the driver keeps programs, shards and results, and finds them by pass and lease.
* Calls of a lease are reported in order and without gaps: each exactly once, as done or as
  raised. So what was not reported is known to be the rest of the range.
* A finished call waits at most `flush_s` to be reported, also while the next one runs for
  minutes; short calls share a message.
* One lease executes; at most `leases_queued_max` wait. A lease that is cancelled, or whose
  pass is unbound, is dropped at once, and nothing of it is reported afterwards. No call runs while a
  message is handled, except those that are paused: overlapping async ones, and the replicas of a
  gang, which end where they wait for a collective.
* An `Execute` stands until its slice has ended. Until then the next `Execute` replaces it, and
  the `DropLease` of its lease withdraws it: one that was handed out and not begun is never begun
  once its lease, or its lease's pass, is gone.
* Whoever cancels a lease is told when that was heard (`Cancelled`): no call of it runs then.
* A lease of a gang is reported when all of its calls are over. Meanwhile its replicas take part in
  collectives, numbered from 1 without gaps; what other members bring is kept for a lease that
  executes or waits, and dropped where the lease is over: the messages have crossed.
* A state's values are kept until it is dropped; which versions, is the driver's matter.
* Results of a pass that has a key are kept before they are sent, until `Committed` says that they are
  durable, or the pass is over: should the scheduler vanish, the next incarnation offers them to whoever
  goes on with the run. What a `Recall` asks for is reported like the calls of any lease, in its turn.
* A worker that is to leave (`LeaveRequested`) finishes the slice that it executes, and says Goodbye.
* A message that the state does not allow is the scheduler's fault (RemoteProtocolError), any
  other event that it does not allow is ours (LocalProtocolError).

Theory of operation
-------------------
    joining --Welcome--> ready --Assign--> executing --last lease over or dropped--> ready
       any --Stop, Refuse, no Welcome in time--> stopping

Assigned leases stand in an `Agenda`: it knows the order, and what of each is reported. A lease is
executed in SLICES: `Execute` asks the driver for calls until `flush_s` has passed or
`flush_bytes` of results have gathered. Then the driver reports what is finished (`CallsFinished`,
`CallRaised`), says `SliceEnded`, and gets the next `Execute`: for the rest, or for the next lease.
Before it begins that one, it looks for messages. So a Cancel or Stop is seen between calls, at
the latest after a slice. If a call outlasts the slice, the driver reports what is finished of it
when `deadline()` has passed.

A gang's lease takes one slice to execute, however long, and may take more to be reported. While its
replicas wait for other members, the driver goes on handling messages: one `CollectiveReached` for each
collective that goes through the scheduler, `CollectiveOverdue` where one has waited too long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Cancelled,
    Code,
    Committed,
    DataVisible,
    DropState,
    Exchange,
    Failed,
    Goodbye,
    Hello,
    Message,
    Recall,
    Refuse,
    Relay,
    Results,
    Stalled,
    StateVersion,
    Stop,
    Unbind,
    Welcome,
)
from pipedist.worker.commands import (
    Command,
    DropLease,
    DropPass,
    Ending,
    Execute,
    Join,
    Leave,
    OpenPass,
    RecallLease,
    ReleaseResults,
    ReleaseState,
    Send,
    SendExchange,
    SendResults,
    StoreCode,
    StoreLease,
    StoreRelay,
    StoreState,
)
from pipedist.worker.events import (
    CallRaised,
    CallsFinished,
    CollectiveOverdue,
    CollectiveReached,
    DataFound,
    Event,
    LeaveRequested,
    RestartNeeded,
    SliceEnded,
    Started,
    TimePassed,
)
from pipedist.worker.lease_queue import Agenda, Lease
from pipedist.worker.limits import Limits
from pipedist.worker.states import TRANSITIONS, State


class WorkerMachine:
    """The protocol of one worker incarnation; see the module's text.

    Args:
        hello: what it says first.
        limits: its limits.
    """

    def __init__(self, hello: Hello, limits: Limits | None = None) -> None:
        self.state = State.JOINING
        self._hello = hello
        self._limits = limits or Limits()
        self._passes: set[int] = set()
        """Bound passes."""
        self._keeping: set[int] = set()
        """Those of them that have a key: their results are kept until they are durable."""
        self._spaces: set[int] = set()
        """States of which values are kept."""
        self._agenda = Agenda(self._limits)
        """Assigned leases; one is active exactly in EXECUTING."""
        self._due: float | None = None
        """When the answer to Hello, or the next report, is due; in JOINING and EXECUTING."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event and return what must be done, in order.

        Args:
            event: a message from the scheduler, or an event of this side.
            now: seconds on a clock that never goes back.

        Raises:
            RemoteProtocolError: if the scheduler may not say that now.
            LocalProtocolError: if the driver may not say that now.
        """
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            fault = RemoteProtocolError if isinstance(event, Message) else LocalProtocolError
            raise fault(f"a worker that is {self.state.value} does not expect {event!r}")
        before = self.state
        commands = _HANDLERS[type(event)](self, event, now)
        if self.state not in allowed:
            raise LocalProtocolError(
                f"{event!r} led from {before.value} to {self.state.value}, which the table does not allow"
            )
        return commands

    def deadline(self) -> float | None:
        """Return when a TimePassed, or a report of finished calls, is due at the latest; None: never."""
        return self._due

    # -- joining and leaving ---------------------------------------------------------

    def _on_started(self, _event: Started, now: float) -> list[Command]:
        self._due = now + self._limits.join_s
        return [Send(self._hello)]

    def _on_tick(self, _event: TimePassed, now: float) -> list[Command]:
        if self.state is not State.JOINING or self._due is None or now < self._due:
            return []
        return self._leave(Ending.UNANSWERED, f"no answer within {self._limits.join_s:g} s")

    def _on_welcome(self, event: Welcome, _now: float) -> list[Command]:
        self.state = State.READY
        self._due = None
        return [Join(event)]

    def _on_refuse(self, event: Refuse, _now: float) -> list[Command]:
        joined = self.state is not State.JOINING
        return self._leave(Ending.FENCED if joined else Ending.REFUSED, event.reason)

    def _on_stop(self, event: Stop, _now: float) -> list[Command]:
        return self._say_goodbye(Ending.STOPPED, event.reason)

    def _on_leaving(self, event: LeaveRequested, _now: float) -> list[Command]:
        # Also while joining: the Welcome may be on its way.
        return self._say_goodbye(Ending.STOPPED, event.reason)

    def _on_unfit(self, event: RestartNeeded, _now: float) -> list[Command]:
        return self._say_goodbye(Ending.UNFIT, event.reason)

    def _say_goodbye(self, ending: Ending, reason: str) -> list[Command]:
        hello = self._hello
        goodbye = Goodbye(hello.worker, hello.incarnation, reason, proof=hello.proof)
        return [Send(goodbye), *self._leave(ending, reason)]

    def _leave(self, ending: Ending, reason: str) -> list[Command]:
        self.state = State.STOPPING
        self._due = None
        self._agenda.clear()
        self._passes.clear()
        self._keeping.clear()
        self._spaces.clear()
        return [Leave(ending, reason)]

    # -- passes and leases -----------------------------------------------------------

    def _on_bind(self, event: Bind, _now: float) -> list[Command]:
        if event.pass_id in self._passes:
            raise RemoteProtocolError(f"pass {event.pass_id} was bound twice")
        if len(self._passes) >= self._limits.passes_max:
            raise RemoteProtocolError(f"more than {self._limits.passes_max} passes are bound")
        self._passes.add(event.pass_id)
        if event.key:
            self._keeping.add(event.pass_id)
        return [OpenPass(event.pass_id, event.key, event.elsewhere)]

    def _on_code(self, event: Code, _now: float) -> list[Command]:
        return [StoreCode(event)]

    def _on_saw(self, event: DataFound, _now: float) -> list[Command]:
        if event.pass_id not in self._passes:
            raise LocalProtocolError(f"the files of pass {event.pass_id} were seen, but it is not bound")
        return [Send(DataVisible(event.pass_id))]

    def _on_unbind(self, event: Unbind, now: float) -> list[Command]:
        if event.pass_id not in self._passes:
            raise RemoteProtocolError(f"pass {event.pass_id} was unbound, but is not bound")
        self._passes.discard(event.pass_id)
        self._keeping.discard(event.pass_id)
        withdrawn = map(DropLease, self._agenda.withdraw_pass(event.pass_id))
        drop = DropPass(event.pass_id)
        active = self._agenda.active
        if active is None or active.pass_id != event.pass_id:
            return [*withdrawn, drop]
        return [*withdrawn, DropLease(active.id), drop, *self._execute(self._agenda.next(), now)]

    def _on_assign(self, event: Assign, now: float) -> list[Command]:
        whole = event.pass_id in self._keeping and not event.elements
        return self._take(Lease(event.lease, event.pass_id, event.lo, event.hi, kept=whole), None, now)

    def _on_recall(self, event: Recall, now: float) -> list[Command]:
        if event.pass_id not in self._keeping:
            raise RemoteProtocolError(f"calls of pass {event.pass_id} were recalled, of which none is kept")
        return self._take(Lease(event.lease, event.pass_id, event.lo, event.hi, recalled=True), None, now)

    def _on_settled(self, event: Committed, _now: float) -> list[Command]:
        if event.pass_id not in self._keeping:
            raise RemoteProtocolError(f"calls of pass {event.pass_id} are settled, of which none is kept")
        return [ReleaseResults(event.pass_id, event.before)]

    def _on_assign_gang(self, event: AssignGang, now: float) -> list[Command]:
        if not 0 <= event.member < event.members:
            raise RemoteProtocolError(
                f"lease {event.lease} is of member {event.member} of a gang of {event.members}"
            )
        return self._take(Lease(event.lease, event.pass_id, event.lo, event.hi, event.members), event, now)

    def _take(self, lease: Lease, gang: AssignGang | None, now: float) -> list[Command]:
        if lease.pass_id not in self._passes:
            raise RemoteProtocolError(f"lease {lease.id} is of pass {lease.pass_id}, which is not bound")
        executes = self._agenda.take(lease)
        keep = RecallLease(lease.id) if lease.recalled else StoreLease(lease.id, gang)
        if not executes:
            return [keep]
        return [keep, *self._execute(lease, now)]

    def _on_relay(self, event: Relay, _now: float) -> list[Command]:
        lease = self._agenda.find(event.lease)
        if lease is None:
            return []  # a lease that is over: the messages have crossed
        if not 0 <= event.member < lease.members:
            raise RemoteProtocolError(
                f"member {event.member} brings something to lease {event.lease}, which has "
                + (f"{lease.members} members" if lease.members else "no gang")
            )
        return [StoreRelay(event)]

    def _on_cancel(self, event: Cancel, now: float) -> list[Command]:
        heard = Send(Cancelled(event.lease))
        active = self._agenda.active
        if active is not None and active.id == event.lease:
            return [DropLease(event.lease), heard, *self._execute(self._agenda.next(), now)]
        if self._agenda.withdraw(event.lease):
            return [DropLease(event.lease), heard]
        return [heard]  # a lease that is over: the messages have crossed

    # -- states ----------------------------------------------------------------------

    def _on_state(self, event: StateVersion, _now: float) -> list[Command]:
        if event.space not in self._spaces and len(self._spaces) >= self._limits.states_max:
            raise RemoteProtocolError(f"more than {self._limits.states_max} states are kept")
        self._spaces.add(event.space)
        return [StoreState(event.space, event.version)]

    def _on_drop_state(self, event: DropState, _now: float) -> list[Command]:
        self._spaces.discard(event.space)  # it may never have come here: whoever drops it need not know
        return [ReleaseState(event.space)]

    # -- execution -------------------------------------------------------------------

    def _execute(self, lease: Lease | None, now: float) -> list[Command]:
        """Execute a lease, from its first call that is not reported; None: none is left, be ready."""
        if lease is None:
            self.state = State.READY
            self._due = None
            return []
        self.state = State.EXECUTING
        self._due = now + self._limits.flush_s
        slice_s, slice_bytes = self._limits.flush_s, self._limits.flush_bytes
        return [Execute(lease.id, lease.pass_id, lease.next, lease.hi, slice_s, slice_bytes)]

    def _on_finished(self, event: CallsFinished, now: float) -> list[Command]:
        lease = self._agenda.report(event.lease, event.lo, event.hi)
        self._due = now + self._limits.flush_s
        cache_pass = lease.pass_id if lease.kept else 0
        return [SendResults(Results(event.lease, event.lo, event.hi, event.busy_ns), cache_pass)]

    def _on_raised(self, event: CallRaised, now: float) -> list[Command]:
        self._agenda.report(event.lease, event.call, event.call + 1)
        self._due = now + self._limits.flush_s
        failed = Failed(
            event.lease,
            event.call,
            event.stage,
            event.module,
            event.name,
            event.text,
            event.traceback,
            event.retryable,
            event.aborted,
        )
        return [Send(failed)]

    def _on_brought(self, event: CollectiveReached, _now: float) -> list[Command]:
        lease = self._agenda.gang(event.lease)
        if event.number != lease.collectives + 1:
            raise LocalProtocolError(f"collective {event.number} was reported of {lease}")
        lease.collectives += 1
        return [SendExchange(Exchange(event.lease, event.number))]

    def _on_missed(self, event: CollectiveOverdue, _now: float) -> list[Command]:
        self._agenda.gang(event.lease)
        return [Send(Stalled(event.lease, event.members, event.text))]

    def _on_slice_ended(self, event: SliceEnded, now: float) -> list[Command]:
        lease = self._agenda.active
        if lease is None or lease.id != event.lease:
            raise LocalProtocolError(f"a slice of lease {event.lease} ended, but {lease} executes")
        if lease.next < lease.hi:
            return self._execute(lease, now)
        return [DropLease(lease.id), *self._execute(self._agenda.next(), now)]

    # -- checks ----------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant of the whole state; used after each event in tests.

        Raises:
            LocalProtocolError: naming the invariant that does not hold.
        """
        story = self._broken_invariant()
        if story:
            raise LocalProtocolError(f"the worker's state is inconsistent: {story}")

    def _broken_invariant(self) -> str:
        """Return an invariant that does not hold, "" if all do; put into words only then."""
        executing = self.state is State.EXECUTING
        if executing != (self._agenda.active is not None):
            return "a lease is active exactly while executing"
        if not self._keeping <= self._passes:
            return "only results of bound passes are kept"
        if len(self._spaces) > self._limits.states_max:
            return "too many states are kept"
        if self.state is State.STOPPING and (self._passes or self._spaces):
            return "a worker that leaves keeps nothing"
        if executing and self._due is None:
            return "an executing worker has a report due"
        return self._agenda.broken_invariant(self._passes)


_HANDLERS: dict[type, Callable[[WorkerMachine, Any, float], list[Command]]] = {
    Started: WorkerMachine._on_started,
    TimePassed: WorkerMachine._on_tick,
    Welcome: WorkerMachine._on_welcome,
    Refuse: WorkerMachine._on_refuse,
    Stop: WorkerMachine._on_stop,
    RestartNeeded: WorkerMachine._on_unfit,
    LeaveRequested: WorkerMachine._on_leaving,
    Code: WorkerMachine._on_code,
    Bind: WorkerMachine._on_bind,
    DataFound: WorkerMachine._on_saw,
    Unbind: WorkerMachine._on_unbind,
    Assign: WorkerMachine._on_assign,
    Recall: WorkerMachine._on_recall,
    Committed: WorkerMachine._on_settled,
    AssignGang: WorkerMachine._on_assign_gang,
    StateVersion: WorkerMachine._on_state,
    DropState: WorkerMachine._on_drop_state,
    Relay: WorkerMachine._on_relay,
    Cancel: WorkerMachine._on_cancel,
    CallsFinished: WorkerMachine._on_finished,
    CallRaised: WorkerMachine._on_raised,
    CollectiveReached: WorkerMachine._on_brought,
    CollectiveOverdue: WorkerMachine._on_missed,
    SliceEnded: WorkerMachine._on_slice_ended,
}
