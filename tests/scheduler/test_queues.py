"""RangeSet and TodoQueue against plain sets and lists."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from pipedist.scheduler.queues import RangeSet, TodoQueue

SPAN = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1]))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard"]), SPAN), max_size=40)


@given(STEPS)
def test_a_range_set_is_a_set(steps: list[tuple[str, tuple[int, int]]]) -> None:
    ranges, model = RangeSet(), set[int]()
    for what, (lo, hi) in steps:
        if what == "add":
            ranges.add(lo, hi)
            model |= set(range(lo, hi))
        else:
            ranges.discard(lo, hi)
            model -= set(range(lo, hi))
        spans = list(ranges)
        assert {x for a, b in spans for x in range(a, b)} == model
        assert all(a < b for a, b in spans)
        assert all(a[1] < b[0] for a, b in pairwise(spans)), "ranges touch"
        assert len(ranges) == len(spans)
        for x in range(-1, 55):
            end = x
            while end in model:
                end += 1
            assert ranges.end_from(x) == end
            assert ranges.covers(x, x + 3) == {x, x + 1, x + 2}.issubset(model)
    assert ranges.covers(5, 5)


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "drop"]), SPAN, st.integers(0, 2)), max_size=40))
def test_a_todo_queue_gives_the_lowest_first(steps: list[tuple[str, tuple[int, int], int]]) -> None:
    queue, model = TodoQueue(), dict[int, int]()
    for what, (lo, hi), attempt in steps:
        if what == "put" and not model.keys() & set(range(lo, hi)):
            queue.put(lo, hi, attempt)
            model.update(dict.fromkeys(range(lo, hi), attempt))
        elif what == "take" and model:
            calls_max = max(1, hi - lo)
            taken = queue.take(calls_max)
            assert taken.lo == min(model)
            assert 0 < taken.hi - taken.lo <= calls_max
            assert all(model.pop(call) == taken.attempt for call in range(taken.lo, taken.hi))
        elif what == "drop":
            queue.drop_from(lo)
            model = {call: a for call, a in model.items() if call < lo}
        assert queue.calls == len(model)
        assert {c: t.attempt for t in queue for c in range(t.lo, t.hi)} == model
        assert [t.lo for t in queue] == sorted(t.lo for t in queue)


def test_calls_in_order_stay_one_range() -> None:
    done, todo = RangeSet(), TodoQueue()
    for call in range(10_000):
        done.add(call, call + 1)
        todo.put(call, call + 1, 0)
    assert len(done) == 1
    assert len(list(todo)) == 1
