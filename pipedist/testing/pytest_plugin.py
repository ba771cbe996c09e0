"""A pytest plugin for tests of what runs on pipedist: clusters of real processes, and simulated faults.

The fixtures return context managers, which a test enters itself: so they work in plain and in async
tests, under pytest-asyncio in strict and auto mode and under anyio's plugin, and change none of them.

    async def test_total(pipedist_cluster):
        async with pipedist_cluster(workers=3) as cluster:
            cluster.kill(1)
            ...

    def test_total_under_faults(faults):
        with faults(drop=0.1, seed=7) as simulated:
            assert simulated.run("total.yaml")["total"] == 45
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from pipedist.cluster.base import LocalCluster
    from pipedist.core.types import Tree
    from pipedist.runs.result import Result
    from pipedist.runs.run import SpecLike
    from pipedist.testing.faults import Faults

CLUSTER_MARKER = "pipedist_cluster"
FAULTS_MARKER = "pipedist_faults"


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        f"{CLUSTER_MARKER}(workers=..., ...): what pipedist_cluster() gets if the test says nothing",
    )
    config.addinivalue_line(
        "markers", f"{FAULTS_MARKER}(drop=..., seed=..., ...): what faults() gets if the test says nothing"
    )


@pytest.fixture
def pipedist_cluster(request: pytest.FixtureRequest) -> Callable[..., LocalCluster]:
    """Make clusters of real worker processes: `async with pipedist_cluster(workers=3) as cluster:`.

    Takes what `pipedist.LocalCluster` takes; two workers if nothing is said.
    """
    from pipedist.cluster.base import LocalCluster  # most tests need no cluster

    names = list(signature(LocalCluster).parameters)
    marked = _marked(request, CLUSTER_MARKER, names)

    def make(**options: Any) -> LocalCluster:
        __tracebackhide__ = True
        if wrong := _unknown(options, names):
            raise TypeError(f"pipedist_cluster() {wrong}")
        return LocalCluster(**{"workers": 2, **marked, **options})

    return make


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Callable[..., SimulatedRuns]:
    """Make simulations with faults: `with faults(drop=0.1, seed=7) as simulated:`, or without `with`.

    Takes rates as `pipedist.testing.Faults` does, `seed` (one), `seeds` (how many, from `seed` on) and
    `workers`.
    """
    from pipedist.errors import UsageError  # most tests need no simulation
    from pipedist.testing.faults import Faults

    names = [*Faults().rates(), "seed", "seeds", "workers"]
    marked = _marked(request, FAULTS_MARKER, names)

    def make(**options: Any) -> SimulatedRuns:
        __tracebackhide__ = True
        if wrong := _unknown(options, names):
            raise TypeError(f"faults() {wrong}")
        told = {**marked, **options}
        counts: dict[str, Any] = {}
        for name, (usual, least) in {"seed": (0, 0), "seeds": (1, 1), "workers": (3, 1)}.items():
            counts[name] = value = told.pop(name, usual)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"faults: {name} is {value!r}; expected an int from {least} on")
        seed = counts["seed"]
        return SimulatedRuns(Faults.of(told), range(seed, seed + counts["seeds"]), counts["workers"])

    return make


def _marked(request: pytest.FixtureRequest, name: str, names: Sequence[str]) -> dict[str, Any]:
    marker = request.node.get_closest_marker(name)
    if marker is None:
        return {}
    if marker.args:
        raise pytest.UsageError(f"@pytest.mark.{name} takes keyword arguments alone, not {marker.args!r}")
    if wrong := _unknown(marker.kwargs, names):
        raise pytest.UsageError(f"@pytest.mark.{name} {wrong}")
    return dict(marker.kwargs)


def _unknown(options: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return what is said of the first argument that is none of `names`; "" if all are."""
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            return f"has no argument {name!r}{hint} There are: {', '.join(names)}"
    return ""


class SimulatedRuns:
    """Runs specs in simulated clusters. Made by the fixture `faults`.

    Args:
        faults: how often each kind happens.
        seeds: each spec is run once with each.
        workers: simulated workers.
    """

    def __init__(self, faults: Faults, seeds: range, workers: int) -> None:
        self._faults = faults
        self._seeds = seeds
        self._workers = workers
        self.injected: dict[str, int] = {}
        """Faults that have happened until now, by kind."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open: each `run` is complete when it returns."""

    def run(
        self,
        spec: SpecLike,
        *,
        params: Mapping[str, Tree] | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> Result:
        """Run a spec with the faults, and return its result: that of the last seed.

        Raises:
            SimulationFailure: a run differs from the one without faults, or does not end.
            PipedistError: the run fails, with and without faults.
        """
        __tracebackhide__ = True  # of a test that fails, what the test says is of interest
        from pipedist.testing.spec_simulation import SpecSimulation

        simulation = SpecSimulation(
            spec, workers=self._workers, faults=self._faults, costs=costs, params=params
        )
        played = simulation.reference
        for seed in self._seeds:
            played = simulation.check(seed)
            for kind, count in played.counts.items():
                self.injected[kind] = self.injected.get(kind, 0) + count
        if played.result is None:
            raise played.error or RuntimeError("a run has ended with neither a result nor an error")
        return played.result
