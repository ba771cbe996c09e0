"""Scenarios of the worker's protocol: events, and the commands that they must cause."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Cancelled,
    DropState,
    Elements,
    Exchange,
    Failed,
    Goodbye,
    Hello,
    Message,
    Quota,
    QuotaMet,
    Refuse,
    Relay,
    Results,
    Stalled,
    StateVersion,
    Stop,
    Unbind,
    Welcome,
)
from pipedist.worker import commands, events, lease_queue, machine
from pipedist.worker.lease_queue import WorkerLimits

HELLO = Hello("w0", 2, 1, "h", "b", 1, "3", "2", "0", "c")
WELCOME = Welcome("c", 1.0, ())
PACKAGES = ("pipedist", "pipedist.protocol", "pipedist.worker")
LIMITS = WorkerLimits(join_s=5, flush_s=0.5, flush_bytes=100, leases_queued_max=2, passes_max=2, states_max=2)


class Scenario:
    """A machine whose state is checked after each event."""

    def __init__(self, *events: Any) -> None:
        self.machine = machine.WorkerMachine(HELLO, LIMITS)
        self.now = 100.0
        for event in events:
            self.handle(event)

    def handle(self, event: Any) -> list[commands.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.validate()
        return commands


def ready() -> Scenario:
    return Scenario(events.Started(), WELCOME, Bind(1))


def execute(lease: int, lo: int, hi: int) -> commands.Execute:
    return commands.Execute(lease, 1, lo, hi, 0.5, 100)


def raised(lease: int, call: int) -> events.CallRaised:
    return events.CallRaised(Failed(lease, call, "s", "builtins", "KeyError", "'x'", "tb", True))


def test_a_worker_joins_with_hello_and_welcome() -> None:
    scenario = Scenario()
    assert scenario.handle(events.Started()) == [commands.Send(HELLO)]
    assert scenario.machine.due == 105
    assert scenario.handle(events.TimePassed()) == []
    assert scenario.handle(WELCOME) == [commands.Apply(WELCOME)]
    assert scenario.machine.due is None


def test_a_worker_leaves_if_no_scheduler_replies() -> None:
    scenario = Scenario(events.Started())
    scenario.now = 105.0
    assert scenario.handle(events.TimePassed()) == [
        commands.Leave(commands.Ending.UNANSWERED, "no reply within 5 s")
    ]


@pytest.mark.parametrize(
    ("before", "ending"), [((), commands.Ending.REFUSED), ((WELCOME,), commands.Ending.FENCED)]
)
def test_a_worker_may_be_rejected_before_and_after_joining(
    before: tuple[Message, ...], ending: commands.Ending
) -> None:
    assert Scenario(events.Started(), *before).handle(Refuse("no")) == [commands.Leave(ending, "no")]


def test_a_lease_is_executed_in_slices_and_reported_in_order() -> None:
    scenario = ready()
    assert scenario.handle(Assign(7, 1, 10, 14, 0)) == [
        commands.Apply(Assign(7, 1, 10, 14, 0)),
        execute(7, 10, 14),
    ]
    assert scenario.machine.due == 100.5
    assert scenario.handle(events.CallsFinished(7, 10, 12, 99)) == [
        commands.SendResults(Results(7, 10, 12, 99))
    ]
    assert scenario.handle(raised(7, 12)) == [
        commands.Send(Failed(7, 12, "s", "builtins", "KeyError", "'x'", "tb", True))
    ]
    scenario.now = 101.0
    assert scenario.handle(events.SliceEnded(7)) == [execute(7, 13, 14)]
    assert scenario.machine.due == 101.5
    scenario.handle(events.CallsFinished(7, 13, 14, 1))
    assert scenario.handle(events.SliceEnded(7)) == [commands.DropLease(7)]
    assert scenario.machine.state is events.ProtocolState.READY
    assert scenario.machine.due is None


def confirmed(lease: int) -> commands.Send:
    return commands.Send(Cancelled(lease))


def test_leases_wait_in_order() -> None:
    scenario = ready()
    scenario.handle(Assign(7, 1, 0, 1, 0))
    assert scenario.handle(Assign(8, 1, 1, 2, 0)) == [commands.Apply(Assign(8, 1, 1, 2, 0))]
    assert scenario.handle(Assign(9, 1, 2, 3, 0)) == [commands.Apply(Assign(9, 1, 2, 3, 0))]
    assert scenario.handle(Cancel(8)) == [commands.DropLease(8), confirmed(8)]
    scenario.handle(events.CallsFinished(7, 0, 1, 1))
    assert scenario.handle(events.SliceEnded(7)) == [commands.DropLease(7), execute(9, 2, 3)]


def test_a_step_may_be_executed_before_its_lease_is_seen() -> None:
    scenario, assigned = ready(), AssignGang(7, 1, 0, 1, 0, 1, 0, 2, "")
    assert scenario.machine.executes_at_once(assigned)
    assert scenario.handle(events.StepReturned(assigned, 5)) == [commands.SendResults(Results(7, 0, 1, 5))]
    assert scenario.machine.state is events.ProtocolState.READY
    scenario.handle(AssignGang(8, 1, 2, 3, 0, 2, 0, 2, ""))
    assert not scenario.machine.executes_at_once(assigned), "another lease executes"


@pytest.mark.parametrize(
    "assigned",
    [
        AssignGang(7, 2, 0, 1, 0, 1, 0, 2, ""),
        AssignGang(7, 1, 0, 1, 0, 1, 2, 2, ""),
        AssignGang(7, 1, 1, 1, 0, 1, 0, 2, ""),
    ],
    ids=["unbound", "no member", "no calls"],
)
def test_a_step_that_the_machine_would_reject_is_not_executed_before(assigned: AssignGang) -> None:
    scenario = ready()
    assert not scenario.machine.executes_at_once(assigned)
    with pytest.raises(LocalProtocolError, match="had to be handed over first"):
        scenario.handle(events.StepReturned(assigned, 5))


def test_a_report_moves_the_deadline() -> None:
    scenario = ready()
    scenario.handle(Assign(7, 1, 0, 3, 0))
    scenario.now = 100.5
    scenario.handle(events.CallsFinished(7, 0, 1, 1))
    assert scenario.machine.due == 101.0


@pytest.mark.parametrize("order", [Cancel(7), Unbind(1)])
def test_a_lease_is_dropped_whether_its_execution_has_begun_or_not(order: Message) -> None:
    for reported in ([], [events.CallsFinished(7, 0, 1, 1), events.SliceEnded(7)]):
        scenario = ready()
        scenario.handle(Assign(7, 1, 0, 9, 0))
        for event in reported:
            scenario.handle(event)
        then = confirmed(7) if isinstance(order, Cancel) else commands.Apply(Unbind(1))
        assert scenario.handle(order) == [commands.DropLease(7), then]
        assert scenario.machine.state is events.ProtocolState.READY
        assert scenario.machine.due is None
        with pytest.raises(LocalProtocolError):
            scenario.handle(events.CallsFinished(7, 0, 1, 1))


def test_the_next_lease_replaces_one_that_is_dropped_before_its_start() -> None:
    scenario = ready()
    scenario.handle(Assign(7, 1, 0, 9, 0))
    scenario.handle(Assign(8, 1, 9, 10, 0))
    scenario.now = 101.0
    assert scenario.handle(Cancel(7)) == [commands.DropLease(7), confirmed(7), execute(8, 9, 10)]
    assert scenario.machine.due == 101.5


def test_leases_that_overlap_begin_at_once_and_are_reported_in_any_order() -> None:
    scenario = ready()
    scenario.handle(Assign(1, 1, 0, 4, 0))
    second, third = Assign(2, 1, 4, 5, 0, overlaps=True), Assign(3, 1, 5, 7, 0, overlaps=True)
    assert scenario.handle(second) == [commands.Apply(second), commands.Begin(2, 1, 4, 5)]
    scenario.handle(third)
    elements = commands.SendResults(Elements(3, 5))
    assert scenario.handle(events.ElementsFinished(3, 5)) == [elements]
    finished = commands.SendResults(Results(3, 5, 6, 7))
    assert scenario.handle(events.CallsFinished(3, 5, 6, 7)) == [finished]
    last = raised(3, 6)
    assert scenario.handle(last) == [commands.Send(last.failed), commands.DropLease(3)]
    scenario.handle(events.CallsFinished(1, 0, 4, 7))
    scenario.handle(events.SliceEnded(1))
    assert scenario.machine.state is events.ProtocolState.EXECUTING
    assert scenario.handle(Cancel(2)) == [commands.DropLease(2), confirmed(2)]
    assert scenario.machine.state is events.ProtocolState.READY
    assert scenario.machine.due is None


def test_leases_that_overlap_end_with_their_pass() -> None:
    scenario = ready()
    scenario.handle(Assign(1, 1, 0, 1, 0, overlaps=True))
    assert scenario.handle(Unbind(1)) == [commands.DropLease(1), commands.Apply(Unbind(1))]
    assert scenario.machine.state is events.ProtocolState.READY


def test_a_quota_of_a_bound_pass_is_used_and_confirmed() -> None:
    scenario = ready()
    quota, met = Quota(1, 1, (4, 0), 2), commands.Send(QuotaMet(1, (4, 0)))
    assert scenario.handle(quota) == [commands.Apply(quota)]
    assert scenario.handle(events.QuotaReached(1, (4, 0))) == [met]
    for wrong, error in (
        (Quota(9, 1, (4,), 2), RemoteProtocolError),
        (events.QuotaReached(9, (4,)), LocalProtocolError),
    ):
        with pytest.raises(error):
            scenario.handle(wrong)


def test_a_quota_that_arrives_after_a_later_one_has_no_effect() -> None:
    scenario = ready()
    lower, higher = Quota(1, 2, (4, 0), 2), Quota(1, 1, (8, 0), 1)
    assert scenario.handle(lower) == [commands.Apply(lower)]
    assert scenario.handle(higher) == scenario.handle(lower) == []
    again = Quota(1, 3, (8, 0), 1)
    assert scenario.handle(again) == [commands.Apply(again)]


@pytest.mark.parametrize(
    "wrong",
    [events.CallsFinished(1, 1, 2, 0), events.ElementsFinished(1, 3), events.ElementsFinished(9, 0)],
)
def test_a_lease_that_overlaps_is_reported_without_gaps(wrong: Any) -> None:
    scenario = ready()
    scenario.handle(Assign(1, 1, 0, 2, 0, overlaps=True))
    with pytest.raises(LocalProtocolError):
        scenario.handle(wrong)


def test_unbinding_withdraws_the_slice_and_the_waiting_leases_of_the_pass() -> None:
    scenario = ready()
    scenario.handle(Bind(2))
    scenario.handle(Assign(6, 1, 0, 1, 0))
    scenario.handle(Assign(7, 1, 1, 2, 0))
    scenario.handle(Assign(8, 2, 1, 2, 0))
    assert scenario.handle(Unbind(1)) == [
        commands.DropLease(7),
        commands.DropLease(6),
        commands.Apply(Unbind(1)),
        commands.Execute(8, 2, 1, 2, 0.5, 100),
    ]


def test_unbinding_drops_waiting_leases_of_that_pass_only() -> None:
    scenario = ready()
    scenario.handle(Bind(2))
    scenario.handle(Assign(6, 2, 0, 1, 0))
    scenario.handle(Assign(7, 1, 0, 1, 0))
    scenario.handle(Assign(8, 2, 1, 2, 0))
    assert scenario.handle(Unbind(1)) == [commands.DropLease(7), commands.Apply(Unbind(1))]
    scenario.handle(events.CallsFinished(6, 0, 1, 1))
    assert scenario.handle(events.SliceEnded(6)) == [
        commands.DropLease(6),
        commands.Execute(8, 2, 1, 2, 0.5, 100),
    ]


def gang(lease: int, lo: int = 0, hi: int = 2, member: int = 0, members: int = 2) -> AssignGang:
    return AssignGang(lease, 1, lo, hi, 0, 5, member, members, "where")


def test_a_gang_lease_is_stored_with_its_assignment_and_executed_like_others() -> None:
    scenario = ready()
    assert scenario.handle(gang(7)) == [commands.Apply(gang(7)), execute(7, 0, 2)]
    assert scenario.handle(gang(8, 2, 4)) == [commands.Apply(gang(8, 2, 4))]
    scenario.handle(events.CallsFinished(7, 0, 1, 1))
    aborted = events.CallRaised(Failed(7, 1, "s", "m", "GangAborted", "", "", False, aborted=True))
    assert scenario.handle(aborted) == [
        commands.Send(Failed(7, 1, "s", "m", "GangAborted", "", "", False, True))
    ]
    assert scenario.handle(events.SliceEnded(7)) == [commands.DropLease(7), execute(8, 2, 4)]


def test_collectives_are_numbered_and_overdue_ones_are_reported() -> None:
    scenario = ready()
    scenario.handle(gang(7))
    assert scenario.handle(events.CollectiveReached(7, 1)) == [commands.SendExchange(Exchange(7, 1))]
    assert scenario.handle(events.CollectiveOverdue(7, ("1",), "who")) == [
        commands.Send(Stalled(7, ("1",), "who"))
    ]
    assert scenario.handle(events.CollectiveReached(7, 2)) == [commands.SendExchange(Exchange(7, 2))]
    for wrong in (
        events.CollectiveReached(7, 2),
        events.CollectiveReached(7, 4),
        events.CollectiveReached(8, 3),
        events.CollectiveOverdue(8, (), ""),
    ):
        with pytest.raises(LocalProtocolError):
            scenario.handle(wrong)


def test_only_a_gang_has_collectives() -> None:
    scenario = ready()
    scenario.handle(Assign(7, 1, 0, 9, 0))
    for wrong in (events.CollectiveReached(7, 1), events.CollectiveOverdue(7, (), "")):
        with pytest.raises(LocalProtocolError):
            scenario.handle(wrong)
    with pytest.raises(RemoteProtocolError, match="no gang"):
        scenario.handle(Relay(7, 0, 1, ""))


def test_relayed_parts_are_stored_for_a_lease_that_executes_or_waits() -> None:
    scenario = ready()
    assert scenario.handle(Relay(7, 1, 1, "")) == []  # crossed
    scenario.handle(gang(7))
    scenario.handle(gang(8))
    for lease in (7, 8):
        assert scenario.handle(Relay(lease, 1, 1, "")) == [commands.Apply(Relay(lease, 1, 1, ""))]
    assert scenario.handle(Cancel(8)) == [commands.DropLease(8), confirmed(8)]
    assert scenario.handle(Relay(8, 1, 2, "")) == []
    assert scenario.handle(Cancel(7)) == [commands.DropLease(7), confirmed(7)]
    assert scenario.handle(Relay(7, 1, 2, "")) == []
    scenario.handle(gang(9))
    with pytest.raises(RemoteProtocolError, match="2 members"):
        scenario.handle(Relay(9, 2, 1, ""))


def test_states_are_stored_and_dropped_also_while_a_lease_executes() -> None:
    scenario = ready()
    for lease in (7, 8):
        assert scenario.handle(StateVersion(3, 0)) == [commands.Apply(StateVersion(3, 0))]
        assert scenario.handle(StateVersion(3, 1)) == [commands.Apply(StateVersion(3, 1))]
        assert scenario.handle(DropState(3)) == [commands.Apply(DropState(3))]
        assert scenario.handle(DropState(99)) == [commands.Apply(DropState(99))]
        scenario.handle(Assign(lease, 1, 0, 9, 0))
    scenario.handle(StateVersion(1, 0))
    scenario.handle(StateVersion(2, 0))
    scenario.handle(StateVersion(2, 1))
    with pytest.raises(RemoteProtocolError, match="more than 2 states"):
        scenario.handle(StateVersion(3, 0))


def test_cancelling_a_finished_lease_is_allowed() -> None:
    assert ready().handle(Cancel(99)) == [confirmed(99)]


def test_a_process_that_does_not_fit_its_assignment_leaves_for_the_next_one() -> None:
    scenario = ready()
    scenario.handle(Assign(1, 1, 0, 3, 0))
    assert scenario.handle(events.RestartNeeded("other devices")) == [
        commands.Send(Goodbye("w0", 2, "other devices")),
        commands.Leave(commands.Ending.UNFIT, "other devices"),
    ]


@pytest.mark.parametrize("executing", [False, True])
def test_stop_ends_the_worker(executing: bool) -> None:
    scenario = ready()
    if executing:
        scenario.handle(Assign(7, 1, 0, 9, 0))
        scenario.handle(Assign(8, 1, 9, 10, 0))
    assert scenario.handle(Stop("enough")) == [
        commands.Send(Goodbye("w0", 2, "enough")),
        commands.Leave(commands.Ending.STOPPED, "enough"),
    ]
    assert scenario.machine.due is None


@pytest.mark.parametrize(
    ("before", "wrong", "names"),
    [
        ([events.Started()], Bind(1), "joining"),
        ([events.Started(), WELCOME], WELCOME, "ready"),
        ([events.Started(), WELCOME], Hello("w", 0, 1, "", "", 1, "", "", "", ""), "Hello"),
        ([events.Started(), WELCOME], Assign(1, 5, 0, 1, 0), "pass 5"),
        ([events.Started(), WELCOME, Bind(1)], Bind(1), "bound twice"),
        ([events.Started(), WELCOME, Bind(1), Bind(2)], Bind(3), "more than 2 passes"),
        ([events.Started(), WELCOME], Unbind(1), "not bound"),
        ([events.Started(), WELCOME, Bind(1)], Assign(1, 1, 3, 3, 0), r"\[3, 3\)"),
        ([events.Started(), WELCOME, Bind(1)], AssignGang(1, 1, 0, 1, 0, 1, 2, 2, ""), "member 2 of a gang"),
        ([events.Started(), WELCOME], AssignGang(1, 5, 0, 1, 0, 1, 0, 1, ""), "pass 5"),
        ([events.Started()], StateVersion(1, 0), "joining"),
        ([events.Started(), WELCOME, Bind(1), Assign(1, 1, 0, 1, 0)], Assign(1, 1, 1, 2, 0), "twice"),
        (
            [events.Started(), WELCOME, Bind(1), *[Assign(i, 1, i, i + 1, 0) for i in range(3)]],
            Assign(9, 1, 9, 10, 0),
            "more than 2 leases",
        ),
        ([events.Started(), WELCOME, Stop("x")], Bind(1), "stopping"),
    ],
)
def test_illegal_messages_are_remote_protocol_errors(before: list[Any], wrong: Message, names: str) -> None:
    scenario = Scenario(*before)
    with pytest.raises(RemoteProtocolError, match=names):
        scenario.handle(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        events.Started(),
        events.CallsFinished(8, 0, 1, 1),
        events.CallsFinished(7, 1, 2, 1),
        events.CallsFinished(7, 0, 10, 1),
        events.CallsFinished(7, 0, 0, 1),
        raised(7, 1),
        events.SliceEnded(8),
    ],
)
def test_illegal_events_of_the_driver_are_local_protocol_errors(wrong: Any) -> None:
    scenario = ready()
    scenario.handle(Assign(7, 1, 0, 9, 0))
    with pytest.raises(LocalProtocolError):
        scenario.handle(wrong)


def test_every_event_has_a_handler_and_every_handler_a_state() -> None:
    in_table = {event for row in events.TRANSITIONS.values() for event in row}
    assert in_table == set(machine._HANDLERS)
    assert set(events.TRANSITIONS) == set(events.ProtocolState)


@pytest.mark.parametrize("module", [machine, lease_queue])
def test_it_imports_errors_and_messages_only(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [
                f"{node.module}.{alias.name}" if node.module in PACKAGES else node.module
                for alias in node.names
            ]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    ours = {name for name in imported if name and name.startswith("pipedist")}
    assert ours <= {
        "pipedist.errors",
        "pipedist.protocol.messages",
        "pipedist.worker.lease_queue",
        "pipedist.worker.commands",
        "pipedist.worker.events",
    }
    assert not imported & {"anyio", "asyncio", "zmq", "numpy", "time", "random", "os", "threading"}


@given(st.data())
def test_every_call_is_reported_once_and_in_order_unless_its_lease_is_dropped(data: st.DataObject) -> None:
    scenario = ready()
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cancelled: set[int] = set()
    reported: dict[int, list[int]] = {lease: [] for lease in range(len(sizes))}
    standing: commands.Execute | None = None

    def handle(event: Any) -> None:
        nonlocal standing
        for command in scenario.handle(event):
            if isinstance(command, commands.Execute):
                standing = command
            elif isinstance(command, commands.DropLease) and standing and standing.lease == command.lease:
                standing = None
            elif isinstance(command, commands.SendResults):
                reported[command.message.lease] += range(command.message.lo, command.message.hi)
            elif isinstance(command, commands.Send) and isinstance(command.message, Failed):
                reported[command.message.lease].append(command.message.call)

    def maybe_cancel(assigned: int) -> None:
        lease = data.draw(st.integers(-3, assigned - 1))
        if lease >= 0:
            handle(Cancel(lease))
            cancelled.add(lease)

    gangs = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    for lease, size in enumerate(sizes):
        handle(gang(lease, 0, size) if lease in gangs else Assign(lease, 1, 0, size, 0))
        maybe_cancel(lease + 1)
    while standing is not None:
        run = standing
        assert run.lease not in cancelled
        call = run.lo
        if run.lease in gangs and call == 0:
            for number in range(1, data.draw(st.integers(1, 3))):
                handle(events.CollectiveReached(run.lease, number))
                handle(Relay(run.lease, 1, number, ""))
                maybe_cancel(len(sizes))  # seen while its replicas listen
                if run.lease in cancelled:
                    break
            if run.lease in cancelled:
                continue
        for _ in range(data.draw(st.integers(1, run.hi - run.lo))):
            handle(raised(run.lease, call) if data.draw(st.booleans()) else _finished(run.lease, call))
            call += 1
        handle(events.SliceEnded(run.lease))
        maybe_cancel(len(sizes))
    assert scenario.machine.state is events.ProtocolState.READY
    for lease, size in enumerate(sizes):
        assert reported[lease] == list(range(size))[: len(reported[lease])]
        assert lease in cancelled or len(reported[lease]) == size


def _finished(lease: int, call: int) -> events.CallsFinished:
    return events.CallsFinished(lease, call, call + 1, 1)
