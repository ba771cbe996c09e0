"""Playbooks of calls that a worker has finished for a scheduler that is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.scheduler.queues import Todo, TodoQueue
from tests.simulation.scenario import Scenario

UNASKED = PassSettings(replicas=2, pulled=False)


def test_what_a_worker_kept_is_recalled_before_it_is_dealt() -> None:
    """It may be offered before the worker joins, and before the steps are there."""
    play = Scenario()
    play(ev.PassOpened(1, UNASKED))
    play(ev.CallsCached("far", 3, 1, ((0, 2), (4, 6), (90, 99))))
    play(
        ev.WorkerJoined("far", 3, supervised=True),
    )
    play(
        ev.StepsAvailable(1, 0, 4, 2),
        cmd.SendBind("far", 1),
        cmd.SendRecall("far", 1, 1, 0, 2),
        cmd.SendRecall("far", 2, 1, 4, 6),
    )
    play(
        ev.WorkerJoined("other", 0, supervised=True),
        cmd.SendBind("other", 1),
        cmd.SendAssign("other", 3, 1, 2, 3, 0),
    )
    play(
        ev.CallsDone("far", 3, 1, 0, 2, 10**9),
        cmd.AcceptResults(1, 0, 2, "far"),
        cmd.StepsReady(1, 0, 1),
    )
    play(
        ev.CallsDone("far", 3, 2, 4, 6, 10**9),
        cmd.AcceptResults(1, 4, 6, "far"),
        cmd.SendAssign("far", 4, 1, 3, 4, 0),
    )


def test_only_the_incarnation_that_offered_it_is_asked() -> None:
    play = Scenario()
    play(ev.PassOpened(1, UNASKED))
    play(ev.CallsCached("far", 0, 1, ((0, 4),)))
    play(ev.WorkerJoined("far", 0, supervised=True))
    play(ev.WorkerLost("far", 0, "gone"))
    play(ev.WorkerJoined("far", 1, supervised=True))
    play(ev.StepsAvailable(1, 0, 2, 2), cmd.SendBind("far", 1), cmd.SendAssign("far", 1, 1, 0, 1, 0))


def test_a_call_that_was_tried_here_is_executed() -> None:
    """What ended its worker may be the very report that was recalled."""
    play = Scenario()
    play(ev.PassOpened(1, UNASKED))
    play(ev.CallsCached("far", 0, 1, ((0, 2),)))
    play(ev.WorkerJoined("far", 0, supervised=True))
    play(ev.StepsAvailable(1, 0, 1, 2), cmd.SendBind("far", 1), cmd.SendRecall("far", 1, 1, 0, 2))
    play(ev.WorkerLost("far", 0, "gone"))
    play(ev.CallsCached("far", 1, 1, ((0, 2),)))
    play(
        ev.WorkerJoined("far", 1, supervised=True),
        cmd.SendBind("far", 1),
        cmd.SendRecall("far", 2, 1, 1, 2),
    )
    play(
        ev.CallsDone("far", 1, 2, 1, 2, 10**9),
        cmd.AcceptResults(1, 1, 2, "far"),
        cmd.SendAssign("far", 3, 1, 0, 1, 1),
    )


def test_a_recall_that_is_not_answered_goes_elsewhere() -> None:
    play = Scenario()
    play(ev.PassOpened(1, UNASKED))
    play(ev.CallsCached("far", 0, 1, ((0, 2),)))
    play(ev.WorkerJoined("far", 0, supervised=True))
    play(ev.StepsAvailable(1, 0, 1, 2), cmd.SendBind("far", 1), cmd.SendRecall("far", 1, 1, 0, 2))
    play(ev.WorkerJoined("other", 0, supervised=True))
    play(
        ev.WorkerLost("far", 0, "leaves", graceful=True),
        cmd.SendBind("other", 1),
        cmd.SendAssign("other", 2, 1, 0, 1, 0),
    )
    play(ev.CallsDone("far", 0, 1, 0, 2, 10**9), cmd.DropResults("far", 1))  # too late


def test_gangs_held_and_closed_passes_recall_nothing() -> None:
    play = Scenario()
    play(ev.WorkerJoined("far", 0, supervised=True))
    play(ev.PassOpened(1, PassSettings(replicas=1, pulled=False, gang=True)))
    play(ev.CallsCached("far", 0, 1, ((0, 1),)))
    (bind, sent) = play.setup(ev.StepsAvailable(1, 0, 1, 1))
    assert isinstance(sent, cmd.SendGang), bind
    play.setup(ev.PassClosed(1))
    play(ev.CallsCached("far", 0, 1, ((0, 1),)))
    play(ev.PassOpened(2, UNASKED))
    play(ev.CallsCached("far", 0, 2, ((0, 2),)))
    play.setup(ev.PassDraining(2))
    play(ev.StepsAvailable(2, 0, 1, 2))


def test_those_who_were_told_of_a_pass_are_told_what_is_durable() -> None:
    play = Scenario()
    play(ev.PassOpened(1, UNASKED))
    play(ev.WorkerJoined("a", 0))
    play.setup(ev.StepsAvailable(1, 0, 1, 2))
    play(ev.WorkerJoined("b", 0), cmd.SendBind("b", 1), cmd.SendAssign("b", 2, 1, 1, 2, 0))
    play(ev.WorkerJoined("c", 0))
    play(ev.StepsCommitted(1, 3), cmd.SendCommitted("a", 1, 6), cmd.SendCommitted("b", 1, 6))
    play(ev.StepsCommitted(9, 3))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 1)), max_size=8),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_taking_out_of_the_middle_loses_no_call(items: list[tuple[int, int, int]], lo: int, hi: int) -> None:
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
