"""The search for culprits: its findings, in any order of the probes' results, and its cost."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.errors import LocalProtocolError
from pipedist.scheduler.bisection import Bisection, Span
from pipedist.scheduler.commands import Cause

CAUSE = Cause("s", "ValueError: no")


def search(
    elements: int, culprits: frozenset[int], together: frozenset[int] = frozenset(), seed: int = 0
) -> tuple[Bisection, int]:
    """Run a search to its end, with results in any order; return it, and the number of probes."""
    random = Random(seed)
    search = Bisection(elements, 10**9, CAUSE)
    due = list(search.begin())
    tried = 0
    while due:
        span = due.pop(random.randrange(len(due)))
        tried += 1
        there = set(range(*span))
        if there & culprits or (together and together <= there):
            due += search.failed(span, CAUSE)
        else:
            search.passed(span)
    assert search.is_over
    return search, tried


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_elements_that_fail_alone_are_found_in_any_order(data: st.DataObject) -> None:
    elements = data.draw(st.integers(2, 200))
    culprits = data.draw(st.frozensets(st.integers(0, elements - 1), max_size=8))
    together = data.draw(st.frozensets(st.integers(0, elements - 1), min_size=2, max_size=3))
    found, tried = search(elements, culprits, together, data.draw(st.integers(0, 99)))
    assert set(found.culprits) == culprits
    assert tried <= 2 * elements - 2


@pytest.mark.parametrize("culprit", [0, 17, 511, 1023])
def test_one_culprit_of_a_thousand_costs_two_probes_per_halving(culprit: int) -> None:
    _, tried = search(1024, frozenset({culprit}))
    assert tried == 2 * math.log2(1024)


def test_healthy_elements_are_reported_as_ranges() -> None:
    found, _ = search(10, frozenset({0, 4, 5, 9}))
    assert found.healthy == ((1, 4), (6, 9))
    assert search(3, frozenset({1}))[0].healthy == ((0, 1), (2, 3))
    assert search(2, frozenset({0, 1}))[0].healthy == ()


def test_a_single_element_needs_no_probe() -> None:
    found = Bisection(1, 100, CAUSE)
    assert found.begin() == ()
    assert found.is_over
    assert found.culprits == {0: CAUSE}


def test_a_call_without_elements_has_no_culprits() -> None:
    found = Bisection(0, 100, CAUSE)
    assert found.begin() == ()
    assert found.is_over
    assert not found.culprits


def test_a_failure_without_a_cause_makes_no_culprit() -> None:
    found = Bisection(2, 100, CAUSE)
    assert list(found.begin()) == [(0, 1), (1, 2)]
    found.failed((0, 1), None)
    found.failed((1, 2), CAUSE)
    assert set(found.culprits) == {1}


def test_too_many_probes_end_the_search() -> None:
    found = Bisection(1024, 7, CAUSE)
    due: list[Span] = list(found.begin())
    while not found.is_over:
        due += found.failed(due.pop(), CAUSE)
    assert found.is_given_up
    assert found.is_over


def test_an_unexpected_probe_result_is_a_defect() -> None:
    found = Bisection(4, 100, CAUSE)
    found.begin()
    with pytest.raises(LocalProtocolError, match=r"\(0, 1\)"):
        found.passed((0, 1))
