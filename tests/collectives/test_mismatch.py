"""Every way in which replicas can fail to meet: the same error, with the same text, in all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pipedist.collectives.channel import WORD_BYTES, GangAborted, StallPolicy
from pipedist.collectives.member import Member
from pipedist.collectives.options import CommunicationOptions
from pipedist.errors import CollectiveMismatchError, RemoteProtocolError
from pipedist.protocol.codec import Frame
from pipedist.protocol.messages import Relay
from pipedist.worker.relay_channel import RelayBuffer, RelayChannel
from tests.collectives.gangs import TRANSFERS, Replica, run_gang

F3 = np.zeros(3, np.float32)

SPREADS = [
    (sizes, transfer)
    for sizes in ([2], [1, 1])
    for transfer in (TRANSFERS if len(sizes) > 1 else TRANSFERS[:1])
]
spread = pytest.mark.parametrize(("sizes", "transfer"), SPREADS)

Ways = dict[str, tuple[Callable[[Replica], Any], Callable[[Replica], Any], str, str]]

WAYS: Ways = {
    "kind": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_gather(F3),
        "all_reduce(sum) of float32[3]",
        "all_gather(axis=0) of float32[3]",
    ),
    "op": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_reduce("mean", F3),
        "all_reduce(sum) of float32[3]",
        "all_reduce(mean) of float32[3]",
    ),
    "shape": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_reduce("sum", F3[:1]),
        "all_reduce(sum) of float32[3]",
        "all_reduce(sum) of float32[1]",
    ),
    "rank": (
        lambda r: r.all_reduce("sum", F3[:1]),
        lambda r: r.all_reduce("sum", F3[0]),
        "all_reduce(sum) of float32[1]",
        "all_reduce(sum) of float32[]",
    ),
    "empty on one": (
        lambda r: r.all_reduce("mean", F3),
        lambda r: r.all_reduce("mean", F3[:0]),
        "all_reduce(mean) of float32[3]",
        "all_reduce(mean) of float32[0]",
    ),
    "dtype": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_reduce("sum", F3.astype(np.int32)),
        "all_reduce(sum) of float32[3]",
        "all_reduce(sum) of int32[3]",
    ),
    "python number": (
        lambda r: r.all_reduce("sum", 1),
        lambda r: r.all_reduce("sum", 1.0),
        "all_reduce(sum) of int",
        "all_reduce(sum) of float",
    ),
    "keys": (
        lambda r: r.all_reduce("sum", {"a": F3}),
        lambda r: r.all_reduce("sum", {"b": F3}),
        "all_reduce(sum) of {'a': float32[3]}",
        "all_reduce(sum) of {'b': float32[3]}",
    ),
    "structure": (
        lambda r: r.all_reduce("sum", [F3, None]),
        lambda r: r.all_reduce("sum", (F3, None)),
        "all_reduce(sum) of [float32[3], None]",
        "all_reduce(sum) of (float32[3], None)",
    ),
    "gather's ranks": (
        lambda r: r.all_gather(F3),
        lambda r: r.all_gather(F3[None]),
        "all_gather(axis=0) of float32[3]",
        "all_gather(axis=0) of float32[1, 3]",
    ),
    "gather's other sizes": (
        lambda r: r.all_gather(np.zeros((2, 3))),
        lambda r: r.all_gather(np.zeros((2, 4))),
        "all_gather(axis=0) of float64[2, 3]",
        "all_gather(axis=0) of float64[2, 4]",
    ),
    "gather's dtypes": (
        lambda r: r.all_gather(F3),
        lambda r: r.all_gather(F3.astype(np.float64)),
        "all_gather(axis=0) of float32[3]",
        "all_gather(axis=0) of float64[3]",
    ),
    "gather's axis": (
        lambda r: r.all_gather(np.zeros((3, 3)), axis=0),
        lambda r: r.all_gather(np.zeros((3, 3)), axis=1),
        "all_gather(axis=0) of float64[3, 3]",
        "all_gather(axis=1) of float64[3, 3]",
    ),
    "source": (
        lambda r: r.broadcast(F3, 0),
        lambda r: r.broadcast(F3, 1),
        "broadcast(source=0)",
        "broadcast(source=1)",
    ),
    "merge_call's function": (
        lambda r: r.merge_call(sum, F3),
        lambda r: r.merge_call(max, F3),
        "merge_call(sum) with ((*,), {})",
        "merge_call(max) with ((*,), {})",
    ),
    "merge_call's arguments": (
        lambda r: r.merge_call(max, F3),
        lambda r: r.merge_call(max, F3, key=F3),
        "merge_call(max) with ((*,), {})",
        "merge_call(max) with ((*,), {'key': *})",
    ),
    "barrier": (
        lambda r: r.barrier(),
        lambda r: r.broadcast(None),
        "barrier()",
        "broadcast(source=0)",
    ),
    "packs": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_reduce("sum", F3, CommunicationOptions(bytes_per_pack=100)),
        "all_reduce(sum) of float32[3]",
        "all_reduce(sum) of float32[3] (bytes_per_pack=100)",
    ),
    "implementation": (
        lambda r: r.all_reduce("sum", F3),
        lambda r: r.all_reduce("sum", F3, CommunicationOptions(implementation="transport")),  # type: ignore[arg-type]
        "all_reduce(sum) of float32[3]",
        "all_reduce(sum) of float32[3] (implementation=transport)",
    ),
}


@spread
@pytest.mark.parametrize("way", WAYS)
def test_different_calls(way: str, sizes: list[int], transfer: str) -> None:
    first, second, told_first, told_second = WAYS[way]

    def function(replica: Replica) -> Any:
        replica.barrier()  # so that the number is not always 1
        return (first, second)[replica.number](replica)

    outcomes = run_gang(sizes, function, transfer=transfer)
    line = r"at test_mismatch.py:\d+ in <lambda>"
    expected = (
        "collective 2 of this step differs between replicas:\n"
        f"  replica 0: {re.escape(told_first)}, {line}\n"
        f"  replica 1: {re.escape(told_second)}, {line}\n"
        "Every replica must call the same collectives, "
    )
    for outcome in outcomes:
        assert type(outcome) is CollectiveMismatchError
        assert isinstance(outcome, ValueError)
        assert re.match(expected, str(outcome)), str(outcome)
    assert str(outcomes[0]) == str(outcomes[1])
    assert outcomes[0] is not outcomes[1]


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[4], [2, 2], [3, 1], [1, 1, 1, 1]])
def test_the_text_lists_each_group_once(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        if replica.number == 2:
            return None
        if replica.number == 3:
            return replica.barrier()
        return replica.all_reduce("max", {"w": F3, "n": 1})

    outcomes = run_gang(sizes, function, transfer=transfer)
    assert outcomes[2] is None
    lines = str(outcomes[0]).splitlines()
    assert lines[0] == "collective 1 of this step was not called by every replica:"
    assert re.fullmatch(
        r"  replicas 0-1: all_reduce\(max\) of \{'[wn]': .*\}, at test_mismatch.py:\d+ in "
        r"test_the_text_lists_each_group_once.<locals>.function",
        lines[1],
    )
    assert lines[2] == "  replica 2: returned, and calls nothing more"
    assert lines[3].startswith("  replica 3: barrier(), at test_mismatch.py:")
    assert str(outcomes[0]) == str(outcomes[1]) == str(outcomes[3])


@spread
def test_another_order_is_a_mismatch(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        calls = [lambda: replica.all_reduce("sum", F3), lambda: replica.all_gather(F3)]
        return [call() for call in (calls if replica.number else calls[::-1])]

    for outcome in run_gang(sizes, function, transfer=transfer):
        assert type(outcome) is CollectiveMismatchError


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_returns_while_others_wait(sizes: list[int], transfer: str, number: int) -> None:
    def function(replica: Replica) -> Any:
        replica.barrier()
        if replica.number == number:
            return "early"
        return replica.all_reduce("sum", F3)

    outcomes = run_gang(sizes, function, transfer=transfer)
    for replica, outcome in enumerate(outcomes):
        if replica == number:
            assert outcome == "early"
        else:
            assert type(outcome) is CollectiveMismatchError
            assert f"replica {number}: returned, and calls nothing more" in str(outcome)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_raises_while_others_wait(sizes: list[int], transfer: str, number: int) -> None:
    """The step's error is that of the replica that raised; the others are aborted."""

    def function(replica: Replica) -> Any:
        replica.barrier()
        if replica.number == number:
            raise KeyError("boom")
        return replica.all_reduce("sum", F3)

    for replica, outcome in enumerate(run_gang(sizes, function, transfer=transfer)):
        assert type(outcome) is (KeyError if replica == number else GangAborted)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_raising_outweighs_returning(sizes: list[int], transfer: str) -> None:
    """Whichever is noticed first: the outcome does not depend on timing."""

    def function(replica: Replica) -> Any:
        if replica.number == 0:
            return None
        if replica.number == 2:
            raise KeyError("boom")
        return replica.all_reduce("sum", F3)

    outcomes = run_gang(sizes, function, transfer=transfer)
    assert [type(outcome) for outcome in outcomes] == [type(None), GangAborted, KeyError]


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_raising_after_a_collective_does_not_take_its_result_from_the_others(
    sizes: list[int], transfer: str
) -> None:
    """Both got their result; then both raise, and the lowest one's error is the step's, always."""

    def function(replica: Replica) -> Any:
        replica.all_reduce("sum", F3)
        raise KeyError(replica.number)

    for _ in range(50):
        outcomes = run_gang(sizes, function, transfer=transfer)
        assert [type(outcome) for outcome in outcomes] == [KeyError, KeyError]


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sizes", [[1, 1], [1, 1, 1]])
def test_one_returns_while_others_wait_with_more_than_fits_into_a_pack(
    sizes: list[int], transfer: str
) -> None:
    def step(replica: Replica) -> Any:
        if replica.number == 0:
            return "early"
        return replica.broadcast(np.zeros(5000), source=1)

    first, *others = run_gang(sizes, step, transfer=transfer, pack_bytes=4096)
    assert first == "early"
    for outcome in others:
        assert isinstance(outcome, CollectiveMismatchError)
        assert "replica 0: returned, and calls nothing more" in str(outcome)


@spread
def test_after_a_mismatch_that_is_caught_the_gang_goes_on(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        with pytest.raises(CollectiveMismatchError):
            replica.all_reduce("sum", F3[: replica.number + 1])
        return float(replica.all_reduce("sum", 1.5))

    assert run_gang(sizes, function, transfer=transfer) == [3.0, 3.0]


BAD: dict[str, tuple[Callable[[Replica], Any], type[Exception], str]] = {
    "op": (lambda r: r.all_reduce("max2", F3), ValueError, "not a reduce op; expected one of 'sum'"),
    "op object": (lambda r: r.all_reduce(7, F3), ValueError, "7 is not a reduce op"),
    "bool": (lambda r: r.all_reduce("sum", F3 > 0), TypeError, "the value: expected numbers, got dtype"),
    "str": (lambda r: r.all_reduce("sum", {"a": {"b": "x"}}), TypeError, "leaf 'a/b': expected numbers"),
    "str array": (lambda r: r.all_reduce("sum", np.array(["a"])), TypeError, "expected numbers"),
    "complex min": (lambda r: r.all_reduce("min", F3 * 1j), TypeError, "no min"),
    "None": (lambda r: r.all_reduce("sum", None), ValueError, "a tree without leaves, None"),
    "empty list": (lambda r: r.all_reduce("sum", []), ValueError, r"a tree without leaves, \[\]"),
    "big int": (lambda r: r.all_reduce("sum", 1 << 64), OverflowError, "does not fit int64"),
    "gathered scalar": (lambda r: r.all_gather(1.5), ValueError, "a scalar has no axis"),
    "gathered 0-d": (lambda r: r.all_gather([F3, np.array(1)]), ValueError, "leaf '1': a scalar has no axis"),
    "gathered objects": (lambda r: r.all_gather(np.array([{}])), TypeError, "dtype object"),
    "gathered nothing": (lambda r: r.all_gather(()), ValueError, "without leaves"),
    "axis": (lambda r: r.all_gather({"k": F3}, axis=1), ValueError, "leaf 'k': axis 1 is out of range"),
    "axis str": (lambda r: r.all_gather(F3, axis="0"), TypeError, "`axis` must be an int, got '0'"),
    "axis bool": (lambda r: r.all_gather(F3, axis=True), TypeError, "`axis` must be an int, got True"),
    "source": (lambda r: r.broadcast(F3, source=2), ValueError, r"must be the id of a replica, 0..1, got 2"),
    "source str": (lambda r: r.broadcast(F3, source="a"), TypeError, "an int, got 'a'"),
    "function": (lambda r: r.merge_call(3), TypeError, "expects a function, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_request_is_rejected_before_any_replica_waits(name: str) -> None:
    call, cls, text = BAD[name]

    def function(replica: Replica) -> Any:
        if replica.number == 0:
            with pytest.raises(cls, match=text) as caught:
                call(replica)
            assert type(caught.value) is cls
        replica.barrier()
        return "met"

    assert run_gang([2], function) == ["met", "met"]
    assert run_gang([1, 1], function) == ["met", "met"]


@spread
def test_sizes_may_differ_along_the_axis_of_a_gather_only(sizes: list[int], transfer: str) -> None:
    def function(replica: Replica) -> Any:
        n = replica.number
        tree = {
            "rows": np.full((n, 2), n, np.int32),
            "s": np.array(["a", "bcd"][n : n + 1]),
            "b": np.array([n == 0]),
            "none": None,
        }
        columns = replica.all_gather(np.full((2, n + 1), n), axis=-1)
        return replica.all_gather(tree), columns

    for tree, columns in run_gang(sizes, function, transfer=transfer):
        assert tree["rows"].tolist() == [[1, 1]]
        assert tree["rows"].dtype == np.int32
        assert tree["s"].tolist() == ["a", "bcd"]
        assert tree["b"].tolist() == [True, False]
        assert tree["none"] is None
        assert columns.tolist() == [[0, 1, 1], [0, 1, 1]]
        assert tree["rows"].flags.writeable


def test_members_that_send_different_words_in_an_exchange_break_the_protocol() -> None:
    class Client:
        def contribute(self, lease: int, number: int, payload: Sequence[Frame]) -> None:
            assert number == 1

        def listen(self, lease: int, timeout_s: float) -> None:
            raise AssertionError("nothing is missing")

        def report_stalled(self, lease: int, members: tuple[int, ...], text: str) -> None:
            raise AssertionError("nothing is missing")

    buffer = RelayBuffer()
    buffer.put(Relay(7, 1, 1, ""), [memoryview(b"x" * WORD_BYTES)])
    member = Member(2, range(1), RelayChannel(Client(), 7, buffer, 0, 2))
    with pytest.raises(RemoteProtocolError, match="the members of a gang have sent different words"):
        member.answer(3.0, None, StallPolicy(60.0, lambda _missing: None))
