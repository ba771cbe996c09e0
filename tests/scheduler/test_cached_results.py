"""Scenarios of results that a worker has cached for a previous driver."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.queues import Todo, TodoQueue
from tests.simulation.scenario import Scenario

PUSHED = PassSettings(replicas=2, pulled=False)


def test_cached_results_are_recalled_before_their_calls_are_assigned() -> None:
    """They may be announced before the worker joins, and before the steps are available."""
    scenario = Scenario()
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.CallsCached("far", 3, 1, ((0, 2), (4, 6), (90, 99))))
    scenario(
        ev.WorkerJoined("far", 3, supervised=True),
    )
    scenario(
        ev.StepsAvailable(1, 0, 4, 2),
        cmd.SendBind("far", 1),
        cmd.SendRecall("far", 1, 1, 0, 2),
        cmd.SendRecall("far", 2, 1, 4, 6),
    )
    scenario(
        ev.WorkerJoined("other", 0, supervised=True),
        cmd.SendBind("other", 1),
        cmd.SendAssign("other", 3, 1, 2, 3, 0),
    )
    scenario(
        ev.CallsDone("far", 3, 1, 0, 2, 10**9),
        cmd.AcceptResults(1, 0, 2, "far"),
        cmd.StepsReady(1, 0, 1),
    )
    scenario(
        ev.CallsDone("far", 3, 2, 4, 6, 10**9),
        cmd.AcceptResults(1, 4, 6, "far"),
        cmd.SendAssign("far", 4, 1, 3, 4, 0),
    )


def test_only_the_incarnation_with_the_cached_results_is_asked_for_them() -> None:
    scenario = Scenario()
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.CallsCached("far", 0, 1, ((0, 4),)))
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    scenario(ev.WorkerLost("far", 0, "gone"))
    scenario(ev.WorkerJoined("far", 1, supervised=True))
    scenario(ev.StepsAvailable(1, 0, 2, 2), cmd.SendBind("far", 1), cmd.SendAssign("far", 1, 1, 0, 1, 0))


def test_a_call_with_an_attempt_is_executed_and_not_recalled() -> None:
    """The recalled result itself may have ended its worker."""
    scenario = Scenario()
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.CallsCached("far", 0, 1, ((0, 2),)))
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    scenario(ev.StepsAvailable(1, 0, 1, 2), cmd.SendBind("far", 1), cmd.SendRecall("far", 1, 1, 0, 2))
    scenario(ev.WorkerLost("far", 0, "gone"))
    scenario(ev.CallsCached("far", 1, 1, ((0, 2),)))
    scenario(
        ev.WorkerJoined("far", 1, supervised=True),
        cmd.SendBind("far", 1),
        cmd.SendRecall("far", 2, 1, 1, 2),
    )
    scenario(
        ev.CallsDone("far", 1, 2, 1, 2, 10**9),
        cmd.AcceptResults(1, 1, 2, "far"),
        cmd.SendAssign("far", 3, 1, 0, 1, 1),
    )


def test_a_recall_without_results_is_reassigned() -> None:
    scenario = Scenario()
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.CallsCached("far", 0, 1, ((0, 2),)))
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    scenario(ev.StepsAvailable(1, 0, 1, 2), cmd.SendBind("far", 1), cmd.SendRecall("far", 1, 1, 0, 2))
    scenario(ev.WorkerJoined("other", 0, supervised=True))
    scenario(
        ev.WorkerLost("far", 0, "leaves", graceful=True),
        cmd.SendBind("other", 1),
        cmd.SendAssign("other", 2, 1, 0, 1, 0),
    )
    scenario(ev.CallsDone("far", 0, 1, 0, 2, 10**9), cmd.DropResults("far", 1))  # too late


def test_gangs_and_draining_and_closed_passes_recall_nothing() -> None:
    scenario = Scenario()
    scenario(ev.WorkerJoined("far", 0, supervised=True))
    scenario(ev.PassOpened(1, PassSettings(replicas=1, pulled=False, gang=True)))
    scenario(ev.CallsCached("far", 0, 1, ((0, 1),)))
    (bind, sent) = scenario.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert isinstance(sent, cmd.SendGang), bind
    scenario.setup(ev.PassClosed(1))
    scenario(ev.CallsCached("far", 0, 1, ((0, 1),)))
    scenario(ev.PassOpened(2, PUSHED))
    scenario(ev.CallsCached("far", 0, 2, ((0, 2),)))
    scenario.setup(ev.PassDraining(2))
    scenario(ev.StepsAvailable(2, 0, 1, 2))


def test_bound_workers_receive_the_number_of_durable_steps() -> None:
    scenario = Scenario()
    scenario(ev.PassOpened(1, PUSHED))
    scenario(ev.WorkerJoined("a", 0))
    scenario.setup(ev.StepsAvailable(1, 0, 1, 2))
    scenario(ev.WorkerJoined("b", 0), cmd.SendBind("b", 1), cmd.SendAssign("b", 2, 1, 1, 2, 0))
    scenario(ev.WorkerJoined("c", 0))
    scenario(ev.StepsCommitted(1, 3), cmd.SendCommitted("a", 1, 6), cmd.SendCommitted("b", 1, 6))
    scenario(ev.StepsCommitted(9, 3))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 1)), max_size=8),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_taking_calls_from_the_middle_loses_none(items: list[tuple[int, int, int]], lo: int, hi: int) -> None:
    queue = TodoQueue()
    there: dict[int, int] = {}
    for start, length, attempt in items:
        calls = range(start, start + length)
        if not any(c in there for c in calls):
            queue.put(start, start + length, attempt)
            there |= dict.fromkeys(calls, attempt)
    taken = queue.take_untried(lo, hi)
    expected = {c for c, attempt in there.items() if lo <= c < hi and attempt == 0}
    assert sorted(c for t in taken for c in range(t.lo, t.hi)) == sorted(expected)
    left = list(queue)
    assert left == sorted(left)
    assert {c: t.attempt for t in left for c in range(t.lo, t.hi)} == {
        c: a for c, a in there.items() if c not in expected
    }
    assert queue.calls == sum(t.hi - t.lo for t in left)
    assert all(isinstance(t, Todo) for t in taken)
