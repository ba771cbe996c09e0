"""The training with many parameters measures what it says, in a tiny size; no time is looked at."""

from __future__ import annotations

from benchmarks.training import measure


def test_it_measures_a_training() -> None:
    measured = measure(1_000, 5)
    assert measured.wall_s > 0
    assert 10e6 < measured.peak_bytes < 1e9
    assert measured.disk_bytes > 4_000
