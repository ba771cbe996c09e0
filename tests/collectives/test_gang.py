"""The turn, merge_call and broadcast, timeouts, and what a gang leaves behind."""

from __future__ import annotations

import contextvars
import os
import re
import signal
import threading
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from pipedist import values
from pipedist.collectives.channel import GangAborted
from pipedist.collectives.gang import LocalGang, LocalReplica, ReplicaState
from pipedist.collectives.options import CommunicationOptions
from pipedist.collectives.requests import CallSite, CollectiveRequest
from pipedist.collectives.thread_pool import ReplicaThreadPool
from pipedist.errors import CollectiveTimeoutError, RemoteError
from pipedist.protocol.codec import UnsendableError
from tests.collectives.gangs import TRANSFERS, Replica, run_gang, run_member, spans_of
from tests.collectives.queues import Board, QueueChannel

SPREADS = [
    (sizes, transfer)
    for sizes in ([2], [1, 1])
    for transfer in (TRANSFERS if len(sizes) > 1 else TRANSFERS[:1])
]
spread = pytest.mark.parametrize(("sizes", "transfer"), SPREADS)
Point = namedtuple("Point", "x y")


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


# The turn


def test_one_replica_runs_at_a_time_in_an_order_that_follows_from_the_program() -> None:
    story: list[str] = []
    running = threading.Lock()

    def function(replica: Replica) -> None:
        for part in range(3):
            assert running.acquire(blocking=False)
            story.append(f"{replica.number}{'abc'[part]}")
            time.sleep(0.001)  # somebody else would run now
            running.release()
            if part < 2:
                replica.barrier()

    for _ in range(5):
        story.clear()
        run_gang([3], function)
        assert " ".join(story) == "0a 1a 2a 0b 1b 2b 0c 1c 2c"


def test_the_first_replica_runs_in_the_calling_thread_and_each_in_its_own() -> None:
    def function(replica: Replica) -> int:
        before = threading.get_ident()
        replica.barrier()
        assert threading.get_ident() == before
        return before

    threads = run_gang([3], function)
    assert threads[0] == threading.get_ident()
    assert len(set(threads)) == 3


def test_context_variables_are_copied() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("caller's")

    def function(replica: Replica) -> tuple[str, str]:
        before = variable.get()
        variable.set(f"replica {replica.number}")
        replica.barrier()
        return before, variable.get()

    assert run_gang([2], function) == [("caller's", f"replica {r}") for r in range(2)]
    assert variable.get() == "caller's"


def test_what_waits_outside_lets_the_others_run() -> None:
    came = threading.Event()

    def function(replica: Replica) -> float:
        if replica.number == 0:
            with replica.gang.outside(0):
                assert came.wait(60)
        else:
            came.set()
        return float(replica.all_reduce("sum", 1.0))

    assert run_gang([2], function) == [2.0, 2.0]
    came.clear()
    assert run_gang([2, 1], function) == [3.0, 3.0, 3.0]


def test_a_collective_is_called_by_the_replica_itself() -> None:
    def function(replica: Replica) -> str:
        if replica.number == 0:
            other = Replica(replica.gang, 1)
            with pytest.raises(RuntimeError, match="replica 1 called a collective outside its turn"):
                other.barrier()
        replica.barrier()
        return "met"

    assert run_gang([2], function) == ["met", "met"]


def test_every_outcome_is_told_also_of_what_is_no_exception() -> None:
    def function(replica: Replica) -> Any:
        if replica.number == 1:
            raise SystemExit(3)
        return replica.number

    outcomes = run_gang([3], function)
    assert outcomes[0] == 0
    assert type(outcomes[1]) is SystemExit
    assert outcomes[2] == 2


def test_a_pool_reuses_threads_and_ends_them_with_it() -> None:
    before = set(threading.enumerate())

    def begun() -> set[threading.Thread]:
        """Those of this test: threads of others may end meanwhile."""
        return {*threading.enumerate()} - before

    def left() -> set[threading.Thread]:
        for thread in begun():
            thread.join(60)
        return begun()

    def function(replica: Replica) -> int:
        replica.barrier()
        return threading.get_ident()

    pool = ReplicaThreadPool()
    first = run_gang([3], function, threads=pool)
    assert set(run_gang([3], function, threads=pool)) == set(first)
    assert len(begun()) == 2
    pool.close()
    pool.close()
    assert not left()
    run_gang([3], function)
    assert not left()


def test_a_signals_handler_that_raises_ends_the_gang_and_hangs_nobody() -> None:
    delivered = threading.Event()

    def interrupt(_signal: int, _frame: Any) -> None:
        delivered.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)

    def function(replica: Replica) -> str:
        if replica.number == 1:
            with replica.gang.outside(1):
                for _ in range(300):  # one that comes right before a wait is seen after it, says CPython
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                    if delivered.wait(0.1):
                        break
                assert delivered.is_set()
        replica.barrier()
        return "met"

    try:
        outcomes = run_gang([3], function)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt, GangAborted, GangAborted]


def test_aborted_by_the_process() -> None:
    gangs: list[LocalGang] = []
    waits = threading.Event()

    def function(replica: Replica) -> None:
        gangs.append(replica.gang)
        if replica.number == 0:
            waits.set()
            replica.barrier()
        else:
            assert waits.wait(60)
            replica.gang.abort("the lease is cancelled")
            with pytest.raises(GangAborted):
                replica.barrier()

    outcomes = run_gang([2], function)
    assert type(outcomes[0]) is GangAborted
    assert str(outcomes[0]) == "the lease is cancelled"


def test_user_code_does_not_swallow_the_end_of_its_gang() -> None:
    def function(replica: Replica) -> str:
        if replica.number == 1:
            raise ValueError("boom")
        try:
            replica.barrier()
        except Exception:
            return "swallowed"
        return "met"

    outcomes = run_gang([2], function)
    assert [type(outcome) for outcome in outcomes] == [GangAborted, ValueError]


# broadcast and merge_call


@spread
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast(sizes: list[int], transfer: str, source: int) -> None:
    def function(replica: Replica) -> Any:
        mine = {"p": Point(np.full(3, replica.number), [replica.number, None]), "t": "x" * replica.number}
        got = replica.broadcast(mine if replica.number == source else None, source)
        got["p"].x[0] += replica.number  # its own
        return got

    for replica, got in enumerate(run_gang(sizes, function, transfer=transfer)):
        assert got["p"].x.tolist() == [source + replica, source, source]
        assert type(got["p"]) is Point
        assert got["p"].y == [source, None]
        assert got["t"] == "x" * source


@spread
def test_merge_call_runs_once_in_replica_0_on_per_replica_values(sizes: list[int], transfer: str) -> None:
    calls = []

    def merged(tree: Any, *, scale: Any) -> Any:
        calls.append(threading.get_ident())
        assert [type(leaf) for leaf in (tree["x"], scale)] == [values.PerReplica] * 2
        assert scale.components == (10, 10)
        total = values.reduce("sum", tree["x"], None, 2)
        return {"total": total, "own": tree["x"], "text": "same", "none": None, "n": [scale]}

    def function(replica: Replica) -> Any:
        mine = threading.get_ident()
        got = replica.merge_call(merged, {"x": np.array([replica.number, 5.0]), "none": None}, scale=10)
        got["total"][0] += 100
        return mine, got

    outcomes = run_gang(sizes, function, transfer=transfer)
    assert calls == [outcomes[0][0]]
    for replica, (_, got) in enumerate(outcomes):
        assert got["total"].tolist() == [101.0, 10.0]
        assert got["own"].tolist() == [replica, 5.0]
        assert (got["text"], got["none"], got["n"]) == ("same", None, [10])


@spread
def test_all_replicas_raise_the_error_of_a_merged_function(sizes: list[int], transfer: str) -> None:
    def boom(_x: Any) -> None:
        raise ValueError("boom")

    def odd(_x: Any) -> None:
        raise NeedsTwo(1, 2)

    def missing(_x: Any) -> None:
        raise KeyError("a")

    def function(replica: Replica) -> Any:
        with pytest.raises(ValueError, match=r"^boom$"):
            replica.merge_call(boom, 1)
        with pytest.raises(KeyError, match=r"^'a'$"):
            replica.merge_call(missing, 1)
        return replica.merge_call(odd, 1)

    outcomes = run_gang(sizes, function, transfer=transfer)
    assert type(outcomes[0]) is NeedsTwo
    assert type(outcomes[1]) is RemoteError  # also where both are in one process
    assert "(1, 2)" in str(outcomes[1])


@spread
def test_the_result_of_a_merged_function_must_be_sendable(sizes: list[int], transfer: str) -> None:
    """Also where it would not have to: the same program works on any number of workers."""

    def function(replica: Replica) -> Any:
        return replica.merge_call(lambda: {"f": print})

    outcomes = run_gang(sizes, function, transfer=transfer)
    assert type(outcomes[0]) is UnsendableError
    for outcome in outcomes:
        assert "builtin_function_or_method" in str(outcome)


@spread
def test_per_replica_of_another_strategy_is_rejected(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        return replica.merge_call(lambda: values.PerReplica([1, 2, 3]))

    for outcome in run_gang(sizes, function, transfer=transfer):
        assert type(outcome) is ValueError
        assert "3 components, but there are 2 replicas" in str(outcome)


@spread
def test_no_collectives_inside_a_merged_function(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        return replica.merge_call(lambda: replica.barrier())

    for outcome in run_gang(sizes, function, transfer=transfer):
        assert type(outcome) is RuntimeError
        assert "barrier was called in the function of a merge_call" in str(outcome)


def test_collectives_work_with_one_replica() -> None:
    def function(replica: Replica) -> Any:
        x = np.arange(3)
        return [
            replica.all_reduce("mean", x).tolist(),
            replica.all_gather(x).tolist(),
            replica.broadcast({"x": 1}),
            replica.merge_call(lambda v: v, 7),
            replica.barrier(),
        ]

    assert run_gang([1], function) == [[[0.0, 1.0, 2.0], [0, 1, 2], {"x": 1}, 7, None]]


# Timeouts

SOON = CommunicationOptions(timeout_s=0.05)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_member_that_does_not_come_is_a_timeout(transfer: str) -> None:
    over = threading.Event()

    def function(replica: Replica) -> Any:
        if replica.number == 2:
            assert over.wait(60)
            return "late"
        try:
            return replica.all_reduce("sum", np.zeros(3), SOON)
        finally:
            over.set()

    outcomes = run_gang([1, 1, 1], function, transfer=transfer)
    assert outcomes[2] == "late"
    waited = [outcome for outcome in outcomes[:2] if type(outcome) is CollectiveTimeoutError]
    assert waited
    # The other one that waits may not have come either, when the first one's time is over.
    told = r"collective 1 of this step has waited 0\.05 s for members? ([01], )?2 of the gang"
    assert re.search(told, str(waited[0]))
    assert "all_reduce(sum) of float64[3], at test_gang.py:" in str(waited[0])


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_stall_handler_that_returns_lets_the_collective_wait_on(transfer: str) -> None:
    told: list[tuple[int, ...]] = []
    come, through = threading.Event(), threading.Event()

    def stalled(members: tuple[int, ...], _text: str) -> None:
        told.append(members)
        come.set()
        assert through.wait(60)  # it has come, before the time begins again

    def function(replica: Replica) -> Any:
        replica.barrier()
        if replica.number == 0:
            return float(replica.all_reduce("sum", 1.0, SOON))
        assert come.wait(60)
        total = float(replica.all_reduce("sum", 1.0))
        through.set()
        return total

    assert run_gang([1, 1], function, transfer=transfer, on_stalled=stalled) == [2.0, 2.0]
    assert told == [(1,)]


def test_a_replica_of_the_same_process_that_hangs_is_told_too() -> None:
    told: list[tuple[tuple[int, ...], str]] = []
    come = threading.Event()
    waits: list[LocalReplica] = []

    def stalled(members: tuple[int, ...], text: str) -> None:
        told.append((members, text))
        come.set()
        while waits[0].state is ReplicaState.WAITING:  # until it has come, before the time begins again
            os.sched_yield()

    def function(replica: Replica) -> Any:
        if replica.number == 0:
            waits.append(replica.gang._states[0])
            return float(replica.all_reduce("sum", 1.0, SOON))
        assert come.wait(60)
        return float(replica.all_reduce("sum", 1.0))

    assert run_gang([2], function, on_stalled=stalled) == [2.0, 2.0]
    assert [members for members, _ in told] == [(0,)]
    assert "for replica 1: all_reduce(sum) of float" in told[0][1]


def test_and_is_an_error_for_those_that_wait_where_nobody_listens() -> None:
    over = threading.Event()

    def function(replica: Replica) -> Any:
        if replica.number == 1:
            assert over.wait(60)
            return "late"
        try:
            replica.barrier(SOON)
        finally:
            over.set()

    outcomes = run_gang([2], function)
    assert type(outcomes[0]) is CollectiveTimeoutError
    assert outcomes[1] == "late"


# Options, and what a gang asks of its channel


def test_options_at_the_call_go_before_those_of_the_gang_field_by_field() -> None:
    gang = CommunicationOptions(bytes_per_pack=7, timeout_s=3.0)
    merged = gang.merged(CommunicationOptions(timeout_s=5.0, implementation="SHARED"))  # type: ignore[arg-type]
    assert merged == CommunicationOptions(7, 5.0, "shared")  # type: ignore[arg-type]
    assert gang.merged(None) is gang
    assert gang.merged(CommunicationOptions()) is gang
    assert CommunicationOptions().waits_s == 600.0


@pytest.mark.parametrize(
    ("fields", "cls", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "bytes_per_pack` must be 0"),
        ({"bytes_per_pack": 1.5}, TypeError, "an int, got 1.5"),
        ({"bytes_per_pack": True}, TypeError, "an int, got True"),
        ({"timeout_s": 0}, ValueError, "more than 0"),
        ({"timeout_s": float("nan")}, ValueError, "more than 0"),
        ({"timeout_s": "1"}, TypeError, "a number of seconds"),
        ({"implementation": "ring"}, ValueError, "expected one of 'auto', 'shared'"),
        ({"implementation": 3}, ValueError, "unknown implementation of collectives 3"),
    ],
)
def test_options_are_checked(fields: dict[str, Any], cls: type[Exception], text: str) -> None:
    with pytest.raises(cls, match=text):
        CommunicationOptions(**fields)


def test_a_collective_is_one_exchange() -> None:
    """Exchanges through the scheduler's process cost a round trip each."""
    board = Board(2)
    numbers: dict[int, list[int]] = {}

    def member(number: int) -> None:
        channel = QueueChannel(board, number)
        span = spans_of([2, 1])[number]
        gang = LocalGang(replicas=3, local=span, channel=channel)

        def function(replica: Replica) -> None:
            replica.all_reduce("sum", {"a": np.zeros(5), "b": 1})
            replica.all_gather(np.zeros(2))
            replica.broadcast(1)
            replica.barrier()
            replica.merge_call(lambda: 1)  # two: the answer is one of its own

        assert run_member(gang, span, function) == [None] * len(span)
        numbers[number] = channel.numbers

    threads = [threading.Thread(target=member, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]}


def test_a_gang_that_goes_on_knows_nothing_of_the_attempt_before() -> None:
    gang = LocalGang(replicas=1, local=range(1))
    gang.begin_alone()
    gang.call(0, request := CollectiveRequest("barrier", CallSite(run_gang.__code__, 0)))
    gang.abort("the step was cancelled")
    with pytest.raises(GangAborted):
        gang.call(0, request)
    gang.end_alone(failed=False)
    with pytest.raises(RuntimeError, match="outside its turn"):
        gang.call(0, request)
    gang.begin_another(lambda _members, _text: None)
    assert gang.call(0, request) is None


def test_a_gang_is_complete_or_has_a_channel() -> None:
    with pytest.raises(ValueError, match="without a channel"):
        LocalGang(replicas=3, local=range(2))
    with pytest.raises(ValueError, match="replicas range"):
        LocalGang(replicas=2, local=range(1, 1))
