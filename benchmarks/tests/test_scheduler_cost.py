"""The measurement of the scheduler measures what it says, in a tiny size; no time is looked at."""

from __future__ import annotations

import pytest

from benchmarks.scheduler_cost import measure, table


@pytest.mark.parametrize(("call_s", "bundled"), [(0.1, False), (0.001, True)])
def test_it_measures_busy_workers(call_s: float, bundled: bool) -> None:
    row = measure(10, 2_000, call_s)
    assert row.workers == 10
    assert (row.calls_per_lease > 2) == bundled
    assert 0 < row.bytes_per_call < 2_000
    assert table([row]).count("\n") == 2
