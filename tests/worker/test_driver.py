"""The worker's driver over a scripted socket, which delivers messages in a fixed order."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from pipedist.errors import ProtocolError
from pipedist.protocol.codec import encode
from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancel,
    Failed,
    Goodbye,
    LogLine,
    Message,
    Results,
    Stop,
    Unbind,
    Welcome,
)
from pipedist.protocol.program import to_frames
from pipedist.worker.driver import Driver
from pipedist.worker.machine import WorkerMachine
from pipedist.worker.process_setup import make_hello
from pipedist.worker.progress import CallProgress
from tests.worker.fake_scheduler import program


class Script:
    """Messages that have all arrived; collects what is answered."""

    def __init__(self, *messages: Any) -> None:
        self.left = deque(messages)
        self.sent: list[Message] = []

    def send(self, message: Message, payload: Sequence[Any] = (), **_how: Any) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float) -> bool:
        if not self.left and timeout_s:
            raise ProtocolError("the script is over")
        if self.left and self.left[0] is None:
            if not timeout_s:
                return False
            self.left.popleft()
        return bool(self.left)

    def recv(self) -> tuple[Message, list[memoryview]]:
        message = self.left.popleft()
        message, payload = message if isinstance(message, tuple) else (message, [])
        return message, [memoryview(frame) for frame in payload]


def driver_of(script: Script) -> Driver:
    def die(text: str) -> None:
        raise AssertionError(text)

    machine = WorkerMachine(make_hello("w0", 0))
    return Driver(script, machine, threads=1, join_s=1, progress=CallProgress(), die=die)


def run(script: Script) -> list[Message]:
    driver_of(script).run()
    return [message for message in script.sent if isinstance(message, (Results, Goodbye))]


@pytest.mark.parametrize("order", [Unbind(1), Cancel(1)])
def test_a_lease_that_is_dropped_before_its_start_is_never_executed(order: Message) -> None:
    function = program("tests.worker.replica_functions:identity")
    assign = (Assign(1, 1, 0, 2, 0), encode([None, None, [1, 2]]))
    again = (Assign(2, 2, 5, 6, 0), encode([None, None, [1]]))
    script = Script(
        Welcome("c", 1.0, ()),
        (Bind(1), to_frames(function)),
        (Bind(2), to_frames(function)),
        assign,
        order,
        again,
        None,  # nothing more has arrived
        Stop("over"),
    )
    results, goodbye = run(script)
    assert isinstance(results, Results)
    assert (results.lease, results.lo, results.hi) == (2, 5, 6)
    assert isinstance(goodbye, Goodbye)


def step(lease: int, pass_id: int = 1, value: int = 1) -> tuple[Message, list[Any]]:
    """A step of a program of one replica, whose function gets a number."""
    assigned = AssignGang(lease, pass_id, lease, lease + 1, 0, lease, 0, 1, "")
    return assigned, encode([None, None, [value]])


SAME = "tests.worker.replica_functions:identity"


def unsendable(x: int) -> object:
    return object() if x == 1 else x


def fails(x: int) -> int:
    return 1 // (x - 1)


@pytest.mark.parametrize(
    ("function", "waiting", "seen", "sent"),
    [
        (SAME, (), ["StepReturned"] * 2, ["Results"] * 2),
        (
            "tests.worker.test_driver:fails",
            (),
            ["AssignGang", "CallRaised", "SliceEnded", "StepReturned"],
            ["Failed", "Results"],
        ),
        (
            "tests.worker.test_driver:unsendable",
            (),
            ["AssignGang", "CallRaised", "SliceEnded", "StepReturned"],
            ["Failed", "Results"],
        ),
        (
            "tests.worker.replica_functions:identity",
            (Cancel(1),),
            ["AssignGang", "Cancel", "StepReturned"],
            ["Results"],
        ),
        (
            "tests.worker.replica_functions:identity",
            (Unbind(2),),
            ["AssignGang", "Unbind", "CallsFinished", "SliceEnded", "StepReturned"],
            ["Results"] * 2,
        ),
    ],
    ids=["executed", "raises", "unsendable", "cancelled", "something else"],
)
def test_a_step_is_one_event_unless_something_else_happens(
    function: str, waiting: tuple[Message, ...], seen: list[str], sent: list[str]
) -> None:
    script = Script(
        Welcome("c", 1.0, ()),
        (Bind(1), to_frames(program(function, gang=True))),
        (Bind(2), to_frames(program(function))),
        None,
        step(1),
        *waiting,
        None,
        step(2, value=3),
        None,
        Stop("over"),
    )
    driver, events = driver_of(script), list[str]()
    handle = driver._machine.handle

    def see(event: Any, now: float) -> Any:
        events.append(type(event).__name__)
        return handle(event, now)

    driver._machine.handle = see  # type: ignore[method-assign]
    driver.run()
    driver._machine.validate()
    assert events[4:-1] == seen
    assert [type(each).__name__ for each in script.sent if isinstance(each, (Results, Failed))] == sent


busy: list[threading.Lock] = []


def prints(x: list[int]) -> list[int]:
    """Print while another thread uses the socket."""
    with busy[0]:
        print("printed")
    return x


def test_printed_lines_are_sent_before_the_result_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the last result of a run looks for nothing that comes later."""
    script = Script(
        Welcome("c", 1.0, ()),
        (Bind(1), to_frames(program("tests.worker.test_driver:prints"))),
        (Assign(1, 1, 0, 1, 0), encode([None, None, [1]])),
        None,
        Stop("over"),
    )
    driver = driver_of(script)
    monkeypatch.setattr("tests.worker.test_driver.busy", [driver._lock])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    driver.output.install()
    driver.run()
    assert [type(message) for message in script.sent if isinstance(message, (LogLine, Results))] == [
        LogLine,
        Results,
    ]
