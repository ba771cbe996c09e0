"""The scheduler's state does not grow with the number of workers that it has ever seen."""

from __future__ import annotations

import pickle

from pipedist.scheduler import PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.membership import GONE_WORKERS_KEPT
from tests.simulation.scenario import Scenario

WORKERS = 14_000


def test_the_state_is_flat_over_14_000_workers() -> None:
    """Each has another name and other GPUs, caches results, and executes a call; they end in all ways."""
    scheduler = Scheduler()
    scheduler.handle(ev.PassOpened(1, PassSettings(1, pulled=False, speculation=3.0)), 0.0)
    sizes = []
    for number in range(WORKERS):
        now, name = float(number), f"host:{number:06}"
        step = ev.StepsAvailable(1, number, number + 1, 1)
        scheduler.handle(ev.CallsCached(name, 0, 1, ((number + 10, number + 11),)), now)
        scheduler.handle(ev.WorkerJoined(name, 0, supervised=True, gpus=number / 7), now)
        (assigned,) = [c for c in scheduler.handle(step, now) if isinstance(c, cmd.SendAssign)]
        scheduler.handle(ev.CallsDone(name, 0, assigned.lease, number, number + 1, 10**9), now)
        scheduler.handle(ev.StepsConsumed(1, number + 1), now)
        match number % 4:
            case 0:
                scheduler.handle(ev.WorkerLost(name, 0, "left", graceful=True), now)
            case 1:
                scheduler.handle(ev.WorkerLost(name, 0, "signal 11 (SIGSEGV)"), now)
            case 2:
                evicted = scheduler.handle(ev.Tick(), now + 1000)
                assert [type(c) for c in evicted] == [cmd.EvictWorker]
            case _:
                scheduler.handle(ev.WorkerJoined(name, 1), now)
                refused = scheduler.handle(ev.CallsCached(name, 0, 1, ((number + 10, number + 11),)), now)
                refused += scheduler.handle(ev.WorkerJoined(name, 0), now)
                assert [type(c) for c in refused] == [cmd.EvictWorker]
                scheduler.handle(ev.WorkerLost(name, 1, "left"), now)
        if number % 2_000 == 1_999:
            scheduler.validate()
            sizes.append(len(pickle.dumps(scheduler)))
    assert max(sizes) < 1.05 * sizes[0], sizes


def test_a_gang_has_no_worker_that_was_forgotten_and_has_joined_again() -> None:
    gang = PassSettings(replicas=2, pulled=False, gang=True)
    scenario = Scenario().with_pass(gang)
    scenario.setup(ev.WorkerJoined("a", 0), ev.WorkerJoined("b", 0))
    sent = scenario.setup(ev.StepsAvailable(1, 0, 1, 2))[-1]
    assert isinstance(sent, cmd.SendGang)
    for part in sent.parts:
        scenario.setup(ev.CallsDone(part.worker, 0, part.lease, part.lo, part.hi, 10**9))
    scenario.setup(ev.WorkerLost("a", 0, "left"), ev.WorkerLost("b", 0, "left"))
    for number in range(GONE_WORKERS_KEPT):
        scenario.scheduler.handle(ev.WorkerJoined(f"w{number}", 0), 0.0)
        scenario.scheduler.handle(ev.WorkerLost(f"w{number}", 0, "left"), 0.0)
    scenario.setup(ev.WorkerJoined("a", 0), ev.WorkerJoined("b", 0))
    sent = scenario.setup(ev.StepsAvailable(1, 1, 2, 2))[-1]
    assert isinstance(sent, cmd.SendGang)
    assert [part.worker for part in sent.parts] == ["a", "b"]
