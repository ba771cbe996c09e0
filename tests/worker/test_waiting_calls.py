"""Waits between attempts, shares of limits, and elements: the parts of calls that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from pipedist import RetryAfter
from pipedist.core.remote_errors import rebuild_exception
from pipedist.core.types import FunctionRef
from pipedist.protocol.program import StageProgram
from pipedist.worker.stages import CallHeld
from pipedist.worker.waiting_calls import (
    WorkerShare,
    batched,
    count_elements,
    each_element,
    element_at,
    pause_s,
    unlike,
)


def stage(**keys: Any) -> StageProgram:
    return StageProgram("y", FunctionRef("m:f"), -1, {}, **keys)


def test_the_wait_doubles_with_a_jitter_that_depends_on_the_call_only() -> None:
    retries = stage(attempts=20, backoff_s=1.0)
    waits = [pause_s(retries, OSError(), attempt, (7, "y", 3)) for attempt in range(1, 19)]
    assert waits == [pause_s(retries, OSError(), attempt, (7, "y", 3)) for attempt in range(1, 19)]
    assert all(wait is not None and 0.5 <= wait / min(60.0, 2.0**n) < 1.5 for n, wait in enumerate(waits))
    assert len({pause_s(retries, OSError(), 1, (7, "y", element)) for element in range(50)}) == 50
    assert pause_s(retries, OSError(), 20, (7, "y", 3)) is None


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),  # a ConnectionError
        (KeyError(), False),
        (RetryAfter(3), True),
        (RetryAfter(4000), False),
        (SystemExit(), False),
    ],
)
def test_exceptions_are_named_by_their_classes_or_base_classes(error: BaseException, again: bool) -> None:
    retries = stage(attempts=2, retry_on=("builtins.TimeoutError", "ConnectionError"))
    assert (pause_s(retries, error, 1, ()) is not None) == again


def test_a_wait_that_a_function_names_has_no_jitter_and_survives_a_process() -> None:
    assert pause_s(stage(attempts=2, backoff_s=9.0), RetryAfter(1.5), 1, ()) == 1.5
    again = rebuild_exception("pipedist.errors", "RetryAfter", str(RetryAfter(1.5)))
    assert isinstance(again, RetryAfter)
    assert again.seconds == 1.5
    with pytest.raises(ValueError, match="`seconds` must be 0 or more, got -1"):
        RetryAfter(-1)


def ignored(_index: int, _error: BaseException) -> None:
    """Note no failure."""


@pytest.mark.asyncio
async def test_a_worker_has_its_share_of_the_places() -> None:
    share = WorkerShare(stage(concurrency=8))
    share.use(2, 3)
    running = most = 0

    async def execute(_index: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    both = (each_element(range(10), share, execute, ignored, all_of_them=True) for _ in range(2))
    assert await asyncio.gather(*both) == [[], []]
    assert most == 2


@pytest.mark.asyncio
async def test_a_share_that_changes_lets_calls_begin_at_once_and_interrupts_none() -> None:
    share, begun, end = WorkerShare(stage(concurrency=8)), [], asyncio.Event()
    share.use(0, 1)

    async def execute(index: int) -> None:
        begun.append(index)
        await end.wait()

    calls = asyncio.create_task(each_element(range(10), share, execute, ignored, all_of_them=True))
    for calls_max, running in ((0, 0), (3, 3), (7, 7), (2, 7)):
        share.use(calls_max, 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (len(begun), share.running) == (running, running)
    share.use(0, 0)
    end.set()
    with pytest.raises(CallHeld):
        await calls
    assert len(begun) == 7


@pytest.mark.asyncio
async def test_an_even_rate_is_that_of_the_share_now() -> None:
    share = WorkerShare(stage(calls_per_s=0.01))
    waiting = [asyncio.create_task(share.turn()) for _ in range(3)]
    for sharing in (1, 1_000, 1):
        share.use(0, sharing)
        await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False]
    share.use(0, 0)
    held = await asyncio.gather(*waiting[1:], return_exceptions=True)
    assert [type(error) for error in held] == [CallHeld, CallHeld]


@pytest.mark.asyncio
async def test_calls_begin_at_even_intervals_and_are_not_saved_up() -> None:
    share = WorkerShare(stage(calls_per_s=200.0))
    share.use(0, 2)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        began, times = loop.time(), []

        async def turn(times: list[float] = times) -> None:
            await share.turn()
            times.append(loop.time())

        await asyncio.gather(*(turn() for _ in range(6)))
        assert all(at - began >= 0.01 * n - 0.001 for n, at in enumerate(times))
        await asyncio.sleep(0.03)  # without calls: the next ones do not make up for it


@pytest.mark.asyncio
async def test_no_element_begins_after_a_failure_and_those_before_it_are_over() -> None:
    begun: list[int] = []

    async def execute(index: int) -> None:
        begun.append(index)
        await asyncio.sleep(0.02 * (3 - index) if index < 3 else 0)
        if index in (1, 2):
            raise ValueError(index)

    failed = await each_element(
        range(9), WorkerShare(stage(concurrency=3)), execute, ignored, all_of_them=False
    )
    assert [index for index, _ in failed] == [1, 2]
    assert begun == [0, 1, 2]


def test_a_batch_is_divided_and_put_together() -> None:
    batch = {"a": np.arange(3), "b": ["x", "y", "z"], "c": (np.eye(3),)}
    assert count_elements(batch) == 3
    element = element_at(batch, 1)
    assert (element["a"], element["b"], element["c"][0].tolist()) == (1, "y", [0, 1, 0])
    again = batched([element_at(batch, n) for n in range(3)])
    assert again["a"].tolist() == [0, 1, 2]
    assert again["b"].tolist() == ["x", "y", "z"]
    assert np.array_equal(again["c"][0], np.eye(3))
    with pytest.raises(ValueError, match="of different lengths"):
        count_elements({"a": np.arange(3), "b": np.arange(2)})
    with pytest.raises(ValueError, match="without arrays or lists"):
        count_elements(3)


@pytest.mark.parametrize(
    ("results", "what", "this", "that"),
    [
        ([0.5, 1, 0.5], "the value", "int64", "float64"),
        (["a", 1, "abc"], "the value", "int64", "text"),
        ([2, True, 3], "the value", "bool", "int64"),
        ([{"n": 0.5}, {"n": 2**53 + 1}, {"n": 2.5}], "`n`", "int64", "float64"),
        ([b"abc", "a", b"a"], "the value", "text", "bytes"),
        ([0.5, None, 1.5], "the value", "missing or None", "float64"),
        (
            [{"a": 1, "b": {"c": 1}}, {"a": 1, "b": {}}, {"a": 1, "b": {"c": 1}}],
            "`b/c`",
            "missing or None",
            "int64",
        ),
        ([{"a": 1}, {"a": 1, "b": "x"}, {"a": 1}], "`b`", "text", "missing or None"),
        (["a", np.array(["a"]), "b"], "the value", "text[1]", "text"),
        ([np.ones(2), np.ones(2, ">f8"), np.ones(2)], "the value", ">f8[2]", "float64[2]"),
        (
            [{"a": [1]}, {"a": (1,)}, {"a": [1]}],
            "the structure",
            "{'a': (*,)}",
            "{'a': [*]}",
        ),
    ],
)
def test_a_result_that_differs_from_most_is_a_failure_of_its_element(
    results: list[Any], what: str, this: str, that: str
) -> None:
    for rows, at, other in ((results, 1, 6), ([results[1], results[0], results[2]], 0, 7)):
        [(position, error)] = unlike(rows, [6, 7, 8])
        assert position == at
        said = f"{what} is {this} in that of element {6 + at}, and {that} in that of element {other}"
        assert said in str(error)


def test_different_lengths_are_no_reason_where_they_are_kept() -> None:
    alike = {"a": np.ones(2), "rows": [{"n": 1}], "b": 1}
    other = {"a": np.ones(3), "rows": [{"n": 1}, {"n": 2}], "b": "x"}
    [(_, error)] = unlike([alike, alike, other], [6, 7, 8], is_ragged=True)
    assert "`b` is text in that of element 8, and int64 in that of element 6" in str(error)
    [(_, error)] = unlike([alike, alike, {**alike, "rows": 3}], [6, 7, 8], is_ragged=True)
    assert "`rows` is int64 in that of element 8, and a list of records in that of element 6" in str(error)


@pytest.mark.parametrize(("other", "is_hinted"), [(np.ones(3), True), (1.0, False)])
def test_ragged_is_recommended_only_where_it_helps(other: Any, is_hinted: bool) -> None:
    [(_, error)] = unlike([np.ones(2), np.ones(2), other], [6, 7, 8])
    assert ("ragged" in str(error)) is is_hinted


def test_texts_of_all_lengths_are_alike() -> None:
    rows = [np.array(["a"]), np.array(["bcd"])]
    assert not unlike(rows, [0, 1])
    assert batched(rows).tolist() == [["a"], ["bcd"]]
