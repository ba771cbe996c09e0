"""Steps that are executed before the scheduler sees them: it must not matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pipedist.errors import LocalProtocolError
from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.commands import GangAssignment
from tests.simulation.scenario import Scenario

RUN = PassSettings(replicas=2, ordered=False, pulled=False, gang=True)
"""The settings of `Strategy.run`."""
PLAIN = PassSettings(replicas=1, pulled=False)
MS = 10**6


def after_one_step(settings: PassSettings = RUN, *workers: str) -> Scenario:
    """Return a scenario whose pass 1 has executed one step."""
    scenario = Scenario().with_workers(*(workers or ("w0", "w1"))).with_pass(settings)
    general_step(scenario, 1, settings.replicas)
    return scenario


def general_step(scenario: Scenario, pass_id: int, replicas: int, took_ns: int = MS) -> list[cmd.Command]:
    """Offer a step of a pass, and report it; return the commands of the offer."""
    step = scenario.scheduler._passes[pass_id].offered
    commands = scenario.setup(ev.StepsAvailable(pass_id, step, step + 1, replicas))
    (gang,) = [each for each in commands if isinstance(each, cmd.SendGang)]
    scenario.setup(*reports(scenario, gang, took_ns))
    return commands


def reports(scenario: Scenario, gang: cmd.SendGang, took_ns: int) -> list[ev.CallsDone]:
    workers = scenario.scheduler._members.workers
    return [
        ev.CallsDone(name, workers[name].incarnation, lease, lo, hi, took_ns * lease, 10 * lease)
        for name, lease, lo, hi in gang.parts
    ]


def executed(scenario: Scenario, gang: cmd.SendGang, took_ns: int) -> ev.StepExecuted:
    """Return the event that stands for a step of which all members have reported."""
    done = reports(scenario, gang, took_ns)
    return ev.StepExecuted(
        gang.pass_id, gang.serial, tuple((each.worker, each.busy_ns, each.bytes) for each in done)
    )


def test_the_next_gang_is_known_before_its_step_is_offered() -> None:
    scenario = after_one_step()
    gang = cmd.SendGang(2, 1, 0, (GangAssignment("w0", 3, 2, 3), GangAssignment("w1", 4, 3, 4)))
    assert scenario.scheduler.foresee(1) == gang
    scenario(ev.StepsAvailable(1, 1, 2, 2), gang)


def test_an_executed_step_is_one_event() -> None:
    scenario = after_one_step()
    for _ in range(4):
        gang = scenario.scheduler.foresee(1)
        assert gang is not None
        scenario(executed(scenario, gang, MS))


def test_the_gang_of_the_first_step_is_not_known() -> None:
    scenario = Scenario().with_workers("w0", "w1").with_pass(RUN)
    assert scenario.scheduler.foresee(1) is None
    assert scenario.scheduler.foresee(2) is None


@pytest.mark.parametrize(
    "event",
    [
        ev.WorkerLost("w1", 0, "killed"),  # another group: its new member has no program yet
        ev.StepsAvailable(1, 1, 2, 2),  # a step is running
        ev.StepsAvailable(2, 0, 9, 1),  # other calls run
        ev.PassDraining(1),
        ev.PassClosed(1),
        ev.StepsEnded(1),
    ],
)
def test_a_gang_is_not_known_when_anything_else_is_going_on(event: ev.Event) -> None:
    scenario = after_one_step().with_pass(PLAIN, 2)
    scenario.setup(event)
    assert scenario.scheduler.foresee(1) is None


def test_a_replaced_worker_gets_the_program_first() -> None:
    scenario = after_one_step()
    scenario.setup(ev.WorkerLost("w1", 0, "killed"), ev.WorkerJoined("w1", 1))
    assert scenario.scheduler.foresee(1) is None
    general_step(scenario, 1, 2)
    assert scenario.scheduler.foresee(1) is not None


def test_an_event_that_was_not_foreseen_is_a_defect_of_the_driver() -> None:
    scenario = after_one_step()
    gang = scenario.scheduler.foresee(1)
    assert gang is not None
    with pytest.raises(LocalProtocolError, match="foreseen was"):
        scenario.setup(executed(scenario, replace(gang, serial=9), MS))


@pytest.mark.parametrize("seed", range(12))
def test_an_executed_step_leaves_the_state_of_the_events_that_it_stands_for(seed: int) -> None:
    """Two schedulers get the same history; one of them sees the steps only when they are over."""
    random = Random(seed)
    names = [f"w{number}" for number in range(random.randint(1, 3))]
    general, prepared = Scenario().with_workers(*names), Scenario().with_workers(*names)
    shapes = {1: replace(RUN, replicas=random.randint(1, 4)), 2: replace(RUN, replicas=2)}
    both = (general, prepared)
    for pass_id, settings in shapes.items():
        for scenario in both:
            scenario.with_pass(settings, pass_id)
    incarnations = dict.fromkeys(names, 0)
    foreseen = 0
    for at in range(40):
        for scenario in both:
            scenario.at(float(at))
        if random.random() < 0.1:
            lost = random.choice(names)
            incarnations[lost] += 1
            for scenario in both:
                scenario.setup(
                    ev.WorkerLost(lost, incarnations[lost] - 1, "killed"),
                    ev.WorkerJoined(lost, incarnations[lost]),
                )
        pass_id, took_ns = random.choice([1, 2]), random.randrange(10**9)
        replicas = shapes[pass_id].replicas
        gang = prepared.scheduler.foresee(pass_id)
        sent = general_step(general, pass_id, replicas, took_ns)
        if gang is None:
            assert general_step(prepared, pass_id, replicas, took_ns) == sent
        else:
            foreseen += 1
            assert sent == [gang]
            prepared.setup(executed(prepared, gang, took_ns))
        if at % 8 == 7:
            assert state_of(prepared) == state_of(general)
    assert foreseen > 12


def state_of(scenario: Scenario) -> Any:
    """Return the state of a scheduler as a tree of plain values."""
    scheduler = scenario.scheduler
    return [
        plain(vars(scheduler._members)),
        plain(scheduler._passes),
        plain(vars(scheduler._assigner)),
        scheduler._moved_at,
    ]


def plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    if isinstance(value, (int, float, str, bytes, type(None), frozenset, Enum)):
        return value
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return [(key, plain(each, above)) for key, each in value.items() if key != "_waiting"]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, (list, tuple, deque)):
        return [plain(each, above) for each in value]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {name: getattr(value, name) for name in slots if name != "__weakref__"} or vars(value)
    left_out = ("assigner", "backing_off_passes", "_order", "_limits", "_out")
    return type(value).__name__, plain({k: v for k, v in fields.items() if k not in left_out}, above)
