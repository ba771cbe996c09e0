"""The collectives benchmark measures what it says, with tiny sizes; no timing is judged."""

from __future__ import annotations

import pytest

from benchmarks import collectives


@pytest.mark.parametrize("name", ["pipedist", "pipedist-gang", "pipedist-threads"])
def test_systems_of_pipedist(name: str) -> None:
    found, error = collectives.measure(collectives.SYSTEMS[name], 2, smoke=True, mark="test")
    assert error == ""
    assert sorted(found) == [4 << 10, 1 << 20]


@pytest.mark.parametrize("name", ["mpi4py", "gloo"])
def test_peers(name: str) -> None:
    system = collectives.SYSTEMS[name]
    if not collectives.is_installed(system):
        pytest.skip(f"{system.needs} is not installed: make bench-peers, make bench-torch")
    found, error = collectives.measure(system, 2, smoke=True, mark="test")
    assert error == ""
    assert sorted(found) == [4 << 10, 1 << 20]


def test_goals_are_judged_by_ratios_within_a_round() -> None:
    times: collectives.Times = {
        ("pipedist", 2, collectives.LATENCY): [10.0, 40.0, 12.0],
        ("mpi4py", 2, collectives.LATENCY): [5.0, 8.0, None],
    }
    line = collectives.judge(times).splitlines()[2]
    assert line == "| pipedist / mpi4py at 4 KiB | 3.50 | 4 | yes |"
