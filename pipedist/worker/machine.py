"""The worker's protocol, as a state machine without I/O.

Rules
-----
* `handle(event, now)` takes a message from the scheduler, or an event of this process, and returns
  commands; `due` is the time when the next TimePassed is due. No clock, no socket, no data: the driver
  keeps programs, shards and results, and finds them by pass and lease.
* The calls of a lease are reported in order and without gaps, each exactly once, as finished or as raised.
  So the unreported calls are always the rest of the range.
* A finished call waits at most `flush_s` to be reported, also while the next one runs for minutes; short
  calls share a message.
* Leases whose calls only wait overlap: they begin at once, are reported in any order, and end with their last call.
  Results of elements may be reported before their call is over.
* Of the other leases, one executes; at most `leases_queued_max` wait. A lease that is cancelled, or whose pass
  is unbound, is dropped at once, and never reported afterwards. No call runs while a message is handled, except
  paused ones: overlapping async calls, and the replicas of a gang, which end where they wait for a
  collective.
* An `Execute` stands until its slice has ended. Until then the next `Execute` replaces it, and the
  `DropLease` of its lease withdraws it: the driver never begins a slice of a lease that is gone.
* Every Cancel is answered by `Cancelled`; from then on, no call of the lease runs.
* A gang's lease is reported when all of its calls are over. Meanwhile its replicas take part in
  collectives, numbered from 1 without gaps. Contributions of other members are stored for a lease that
  executes or waits, and dropped if the lease is over: the messages have crossed.
* While no lease is there, what an `AssignGang` causes is known: the lease executes (`executes_at_once`). So the driver
  may execute it first, and then report `StepReturned`. Before any other event, it hands over the `AssignGang`.
* The values of a state are stored until the state is dropped; the driver decides which versions.
* Results of a pass with a key are cached before they are sent, until `Committed` reports that they are
  durable, or the pass is over: if the scheduler vanishes, the next incarnation offers them to the resumed
  run. The calls that a `Recall` names are reported in turn, like those of any lease.
* A worker that is asked to leave (`LeaveRequested`) finishes its slice, and sends Goodbye.
* A message that the state does not allow is an error of the scheduler (RemoteProtocolError); any other
  event that it does not allow is an error of this process (LocalProtocolError).

Theory of operation
-------------------
    joining --Welcome--> ready --Assign--> executing --last lease over or dropped--> ready
       any --Stop, Refuse, no Welcome in time--> stopping

A `LeaseQueue` holds the assigned leases, their order, and the next unreported call of each. A lease is
executed in SLICES: `Execute` requests calls from the driver until `flush_s` has passed or `flush_bytes` of
results have gathered. Then the driver reports the finished calls (`CallsFinished`, `CallRaised`), sends
`SliceEnded`, and gets the next `Execute`, for the rest of the lease or for the next one. It handles received
messages before it begins. So a Cancel or Stop takes effect between calls, after one slice at the latest.
If a call outlasts the slice, the driver reports the calls before it when `due` has passed.

A gang's lease takes one slice to execute, however long, and may take more to be reported. While its
replicas wait for other members, the driver continues to handle messages: one `CollectiveReached` for each
collective that goes through the scheduler, `CollectiveOverdue` for one that has waited too long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.worker import commands as cmd
from pipedist.worker import events as ev
from pipedist.worker.events import TRANSITIONS, ProtocolState
from pipedist.worker.lease_queue import AssignedLease, LeaseQueue, WorkerLimits


class WorkerMachine:
    """The protocol of one worker incarnation; see the module docstring."""

    def __init__(self, hello: msg.Hello, limits: WorkerLimits | None = None) -> None:
        self.state = ProtocolState.JOINING
        self._hello = hello
        self._limits = limits or WorkerLimits()
        self._passes: dict[int, int] = {}  # bound passes, and the number of their latest quota
        self._cached_passes: set[int] = set()  # bound passes with a key
        self._spaces: set[int] = set()  # states with stored values
        self._leases = LeaseQueue(self._limits)  # one is active if and only if the state is EXECUTING
        self.due: float | None = None
        """When TimePassed (in JOINING: the reply to Hello) or a report (in EXECUTING) is due; None: no deadline."""

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        """Handle one event; return the commands to execute, in order."""
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            fault = RemoteProtocolError if isinstance(event, msg.Message) else LocalProtocolError
            raise fault(f"a worker in state {self.state.value!r} does not expect {event!r}")
        before = self.state
        commands = _HANDLERS[type(event)](self, event, now)
        if self.state not in allowed:
            raise LocalProtocolError(
                f"{event!r} led from {before.value} to {self.state.value}, which the table does not allow"
            )
        return commands

    def executes_at_once(self, assigned: msg.AssignGang) -> bool:
        """Return whether a lease of a gang, which is not handed over yet, will be the only one, and execute."""
        return (
            self.state is ProtocolState.READY
            and assigned.pass_id in self._passes
            and 0 <= assigned.member < assigned.members
            and 0 <= assigned.lo < assigned.hi
        )

    # -- joining and leaving ---------------------------------------------------------

    def _on_started(self, _event: ev.Started, now: float) -> list[cmd.Command]:
        self.due = now + self._limits.join_s
        return [cmd.Send(self._hello)]

    def _on_time_passed(self, _event: ev.TimePassed, now: float) -> list[cmd.Command]:
        if self.state is not ProtocolState.JOINING or self.due is None or now < self.due:
            return []
        return self._leave(cmd.Ending.UNANSWERED, f"no reply within {self._limits.join_s:g} s")

    def _on_welcome(self, event: msg.Welcome, _now: float) -> list[cmd.Command]:
        self.state = ProtocolState.READY
        self.due = None
        return [cmd.Apply(event)]

    def _on_refuse(self, event: msg.Refuse, _now: float) -> list[cmd.Command]:
        joined = self.state is not ProtocolState.JOINING
        return self._leave(cmd.Ending.FENCED if joined else cmd.Ending.REFUSED, event.reason)

    def _on_stop(self, event: msg.Stop | ev.LeaveRequested, _now: float) -> list[cmd.Command]:
        # Also while joining: the Welcome may be on its way.
        return self._send_goodbye(cmd.Ending.STOPPED, event.reason)

    def _on_restart_needed(self, event: ev.RestartNeeded, _now: float) -> list[cmd.Command]:
        return self._send_goodbye(cmd.Ending.UNFIT, event.reason)

    def _send_goodbye(self, ending: cmd.Ending, reason: str) -> list[cmd.Command]:
        hello = self._hello
        goodbye = msg.Goodbye(hello.worker, hello.incarnation, reason, proof=hello.proof)
        return [cmd.Send(goodbye), *self._leave(ending, reason)]

    def _leave(self, ending: cmd.Ending, reason: str) -> list[cmd.Command]:
        self.state = ProtocolState.STOPPING
        self.due = None
        self._leases.clear()
        self._passes.clear()
        self._cached_passes.clear()
        self._spaces.clear()
        return [cmd.Leave(ending, reason)]

    # -- passes and leases -----------------------------------------------------------

    def _on_bind(self, event: msg.Bind, _now: float) -> list[cmd.Command]:
        if event.pass_id in self._passes:
            raise RemoteProtocolError(f"pass {event.pass_id} was bound twice")
        if len(self._passes) >= self._limits.passes_max:
            raise RemoteProtocolError(f"more than {self._limits.passes_max} passes are bound")
        self._passes[event.pass_id] = 0
        if event.key:
            self._cached_passes.add(event.pass_id)
        return [cmd.Apply(event)]

    def _on_code(self, event: msg.Code, _now: float) -> list[cmd.Command]:
        return [cmd.Apply(event)]

    def _on_data_found(self, event: ev.DataFound, _now: float) -> list[cmd.Command]:
        if event.pass_id not in self._passes:
            raise LocalProtocolError(f"data files of pass {event.pass_id} were found, but it is not bound")
        return [cmd.Send(msg.DataVisible(event.pass_id))]

    def _on_unbind(self, event: msg.Unbind, now: float) -> list[cmd.Command]:
        if event.pass_id not in self._passes:
            raise RemoteProtocolError(f"pass {event.pass_id} was unbound, but is not bound")
        del self._passes[event.pass_id]
        self._cached_passes.discard(event.pass_id)
        withdrawn = map(cmd.DropLease, self._leases.withdraw_pass(event.pass_id))
        drop = cmd.Apply(event)
        active = self._leases.active
        if active is None or active.pass_id != event.pass_id:
            self._settle(now)
            return [*withdrawn, drop]
        return [*withdrawn, cmd.DropLease(active.id), drop, *self._execute(self._leases.next(), now)]

    def _on_assign(self, event: msg.Assign, now: float) -> list[cmd.Command]:
        cached = event.pass_id in self._cached_passes and not event.elements
        lease = AssignedLease(
            event.lease, event.pass_id, event.lo, event.hi, cached=cached, overlaps=event.overlaps
        )
        return self._enqueue(lease, event, now)

    def _on_recall(self, event: msg.Recall, now: float) -> list[cmd.Command]:
        if event.pass_id not in self._cached_passes:
            raise RemoteProtocolError(f"calls of pass {event.pass_id} were recalled, but none are cached")
        lease = AssignedLease(event.lease, event.pass_id, event.lo, event.hi, recalled=True)
        return self._enqueue(lease, event, now)

    def _on_committed(self, event: msg.Committed, _now: float) -> list[cmd.Command]:
        if event.pass_id not in self._cached_passes:
            raise RemoteProtocolError(f"calls of pass {event.pass_id} were committed, but none are cached")
        return [cmd.Apply(event)]

    def _on_quota(self, event: msg.Quota, _now: float) -> list[cmd.Command]:
        if event.pass_id not in self._passes:
            raise RemoteProtocolError(f"a quota of pass {event.pass_id}, which is not bound")
        if event.number <= self._passes[event.pass_id]:
            return []  # the scheduler gave what it allows to others since
        self._passes[event.pass_id] = event.number
        return [cmd.Apply(event)]

    def _on_quota_reached(self, event: ev.QuotaReached, _now: float) -> list[cmd.Command]:
        if event.pass_id not in self._passes:
            raise LocalProtocolError(f"a quota of pass {event.pass_id} was reached, but it is not bound")
        return [cmd.Send(msg.QuotaMet(event.pass_id, event.calls))]

    def _on_assign_gang(self, event: msg.AssignGang, now: float) -> list[cmd.Command]:
        if not 0 <= event.member < event.members:
            raise RemoteProtocolError(
                f"lease {event.lease} is for member {event.member} of a gang of {event.members}"
            )
        lease = AssignedLease(event.lease, event.pass_id, event.lo, event.hi, event.members)
        return self._enqueue(lease, event, now)

    def _enqueue(
        self, lease: AssignedLease, event: msg.Assign | msg.AssignGang | msg.Recall, now: float
    ) -> list[cmd.Command]:
        if lease.pass_id not in self._passes:
            raise RemoteProtocolError(f"lease {lease.id} belongs to pass {lease.pass_id}, which is not bound")
        executes = self._leases.add(lease)
        if lease.overlaps:
            if self.state is not ProtocolState.EXECUTING:
                self._settle(now)
            begin = cmd.Begin(lease.id, lease.pass_id, lease.next, lease.hi)
            return [cmd.Apply(event), begin]
        return [cmd.Apply(event), *(self._execute(lease, now) if executes else ())]

    def _on_relay(self, event: msg.Relay, _now: float) -> list[cmd.Command]:
        lease = self._leases.find(event.lease)
        if lease is None:
            return []  # a lease that is over: the messages have crossed
        if not 0 <= event.member < lease.members:
            raise RemoteProtocolError(
                f"member {event.member} contributed to lease {event.lease}, which has "
                + (f"{lease.members} members" if lease.members else "no gang")
            )
        return [cmd.Apply(event)]

    def _on_cancel(self, event: msg.Cancel, now: float) -> list[cmd.Command]:
        confirmation = cmd.Send(msg.Cancelled(event.lease))
        active = self._leases.active
        if active is not None and active.id == event.lease:
            return [cmd.DropLease(event.lease), confirmation, *self._execute(self._leases.next(), now)]
        if self._leases.withdraw(event.lease):
            self._settle(now)
            return [cmd.DropLease(event.lease), confirmation]
        return [confirmation]  # a lease that is over: the messages have crossed

    # -- states ----------------------------------------------------------------------

    def _on_state_version(self, event: msg.StateVersion, _now: float) -> list[cmd.Command]:
        if event.space not in self._spaces and len(self._spaces) >= self._limits.states_max:
            raise RemoteProtocolError(f"more than {self._limits.states_max} states are stored")
        self._spaces.add(event.space)
        return [cmd.Apply(event)]

    def _on_drop_state(self, event: msg.DropState, _now: float) -> list[cmd.Command]:
        self._spaces.discard(event.space)  # no error if unknown: DropState is sent to every worker
        return [cmd.Apply(event)]

    # -- execution -------------------------------------------------------------------

    def _execute(self, lease: AssignedLease | None, now: float) -> list[cmd.Command]:
        """Execute a lease from its first unreported call; None: become ready."""
        self._settle(now)
        if lease is None:
            return []
        slice_s, slice_bytes = self._limits.flush_s, self._limits.flush_bytes
        return [cmd.Execute(lease.id, lease.pass_id, lease.next, lease.hi, slice_s, slice_bytes)]

    def _settle(self, now: float) -> None:
        """Become executing if there is a lease that executes, else ready."""
        executes = self._leases.active is not None or bool(self._leases.overlapping)
        self.state = ProtocolState.EXECUTING if executes else ProtocolState.READY
        self.due = now + self._limits.flush_s if executes else None

    def _on_calls_finished(self, event: ev.CallsFinished, now: float) -> list[cmd.Command]:
        lease = self._leases.report(event.lease, event.lo, event.hi)
        self._settle(now)
        cache_pass = lease.pass_id if lease.cached else 0
        send = cmd.SendResults(msg.Results(event.lease, event.lo, event.hi, event.busy_ns), cache_pass)
        return [send, *_end_of(lease)]

    def _on_step_returned(self, event: ev.StepReturned, _now: float) -> list[cmd.Command]:
        assigned = event.assigned
        if not self.executes_at_once(assigned):
            raise LocalProtocolError(f"{assigned} was executed, but it had to be handed over first")
        return [cmd.SendResults(msg.Results(assigned.lease, assigned.lo, assigned.hi, event.busy_ns), 0)]

    def _on_elements_finished(self, event: ev.ElementsFinished, _now: float) -> list[cmd.Command]:
        lease = self._leases.find(event.lease)
        if lease is None or not lease.overlaps or not lease.next <= event.call < lease.hi:
            raise LocalProtocolError(f"elements of call {event.call} of {lease} were reported")
        return [cmd.SendResults(msg.Elements(event.lease, event.call))]

    def _on_call_raised(self, event: ev.CallRaised, now: float) -> list[cmd.Command]:
        failed = event.failed
        lease = self._leases.report(failed.lease, failed.call, failed.call + 1)
        self._settle(now)
        return [cmd.Send(failed), *_end_of(lease)]

    def _on_collective_reached(self, event: ev.CollectiveReached, _now: float) -> list[cmd.Command]:
        lease = self._leases.gang_lease(event.lease)
        if event.number != lease.collectives + 1:
            raise LocalProtocolError(f"collective {event.number} of {lease} was reported")
        lease.collectives += 1
        return [cmd.SendExchange(msg.Exchange(event.lease, event.number))]

    def _on_collective_overdue(self, event: ev.CollectiveOverdue, _now: float) -> list[cmd.Command]:
        self._leases.gang_lease(event.lease)
        return [cmd.Send(msg.Stalled(event.lease, event.members, event.text))]

    def _on_slice_ended(self, event: ev.SliceEnded, now: float) -> list[cmd.Command]:
        lease = self._leases.active
        if lease is None or lease.id != event.lease:
            raise LocalProtocolError(f"a slice of lease {event.lease} ended, but {lease} executes")
        if lease.next < lease.hi:
            return self._execute(lease, now)
        return [cmd.DropLease(lease.id), *self._execute(self._leases.next(), now)]

    # -- checks ----------------------------------------------------------------------

    def validate(self) -> None:
        """Check all invariants of the state; tests call it after each event."""
        broken = self._broken_invariant()
        if broken:
            raise LocalProtocolError(f"the worker's state is inconsistent: {broken}")

    def _broken_invariant(self) -> str:
        executing = self.state is ProtocolState.EXECUTING
        if executing != (self._leases.active is not None or bool(self._leases.overlapping)):
            return "a lease must execute if and only if the state is EXECUTING"
        if not self._cached_passes <= self._passes.keys():
            return "results of an unbound pass are cached"
        if len(self._spaces) > self._limits.states_max:
            return "too many states are stored"
        if self.state is ProtocolState.STOPPING and (self._passes or self._spaces):
            return "a stopping worker has passes or states"
        if executing and self.due is None:
            return "an executing worker has no report due"
        return self._leases.broken_invariant(self._passes)


def _end_of(lease: AssignedLease) -> list[cmd.Command]:
    return [cmd.DropLease(lease.id)] if lease.overlaps and lease.next == lease.hi else []


_HANDLERS: dict[type, Callable[[WorkerMachine, Any, float], list[cmd.Command]]] = {
    ev.Started: WorkerMachine._on_started,
    ev.TimePassed: WorkerMachine._on_time_passed,
    msg.Welcome: WorkerMachine._on_welcome,
    msg.Refuse: WorkerMachine._on_refuse,
    msg.Stop: WorkerMachine._on_stop,
    ev.RestartNeeded: WorkerMachine._on_restart_needed,
    ev.LeaveRequested: WorkerMachine._on_stop,
    msg.Code: WorkerMachine._on_code,
    msg.Bind: WorkerMachine._on_bind,
    ev.DataFound: WorkerMachine._on_data_found,
    msg.Unbind: WorkerMachine._on_unbind,
    msg.Assign: WorkerMachine._on_assign,
    msg.Recall: WorkerMachine._on_recall,
    msg.Committed: WorkerMachine._on_committed,
    msg.Quota: WorkerMachine._on_quota,
    ev.QuotaReached: WorkerMachine._on_quota_reached,
    msg.AssignGang: WorkerMachine._on_assign_gang,
    msg.StateVersion: WorkerMachine._on_state_version,
    msg.DropState: WorkerMachine._on_drop_state,
    msg.Relay: WorkerMachine._on_relay,
    msg.Cancel: WorkerMachine._on_cancel,
    ev.CallsFinished: WorkerMachine._on_calls_finished,
    ev.ElementsFinished: WorkerMachine._on_elements_finished,
    ev.CallRaised: WorkerMachine._on_call_raised,
    ev.CollectiveReached: WorkerMachine._on_collective_reached,
    ev.CollectiveOverdue: WorkerMachine._on_collective_overdue,
    ev.StepReturned: WorkerMachine._on_step_returned,
    ev.SliceEnded: WorkerMachine._on_slice_ended,
}
