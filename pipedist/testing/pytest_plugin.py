"""A pytest plugin for tests of pipelines: clusters of real processes, and simulated faults.

The fixtures return context managers that the test enters itself. So they work in plain and in async
tests, with pytest-asyncio in strict and auto mode and with anyio's plugin, and do not change the mode.

    async def test_total(pipedist_cluster):
        async with pipedist_cluster(workers=3) as cluster:
            cluster.kill(1)
            ...

    def test_total_under_faults(pipedist_faults):
        with pipedist_faults(drop=0.1, seed=7) as simulated:
            assert simulated.run("total.yaml")["total"] == 45
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    config.addinivalue_line(
        "markers", f"{CLUSTER_MARKER}(workers=..., ...): default arguments of pipedist_cluster()"
    )
    config.addinivalue_line(
        "markers", f"{FAULTS_MARKER}(drop=..., seed=..., ...): default arguments of pipedist_faults()"
    )


@pytest.fixture
def pipedist_cluster(request: pytest.FixtureRequest) -> Callable[..., LocalCluster]:
    """Create clusters of real worker processes: `async with pipedist_cluster(workers=3) as cluster:`.

    Takes the arguments of `pipedist.LocalCluster`; the default is two workers.
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
def pipedist_faults(request: pytest.FixtureRequest) -> Callable[..., SimulatedRuns]:
    """Create simulations with faults: `with pipedist_faults(drop=0.1, seed=7) as simulated:`.

    Takes rates as `pipedist.testing.Faults` does, `seed` (the first one), `seeds` (the number of seeds) and
    `workers`. Without a rate, most kinds have a low one, as in `pipedist simulate`. The `with` is optional.
    """
    from pipedist.errors import UsageError  # most tests need no simulation
    from pipedist.testing.faults import Faults

    names = [*Faults().rates(), "seed", "seeds", "workers"]
    marked = _marked(request, FAULTS_MARKER, names)

    def make(**options: Any) -> SimulatedRuns:
        __tracebackhide__ = True
        if wrong := _unknown(options, names):
            raise TypeError(f"pipedist_faults() {wrong}")
        rates = {**marked, **options}
        counts: dict[str, Any] = {}
        for name, (default, least) in {"seed": (0, 0), "seeds": (1, 1), "workers": (3, 1)}.items():
            counts[name] = value = rates.pop(name, default)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"pipedist_faults: {name} must be an integer >= {least}, got {value!r}")
        seed = counts["seed"]
        return SimulatedRuns(
            Faults.of(rates) if rates else None, range(seed, seed + counts["seeds"]), counts["workers"]
        )

    return make


def _marked(request: pytest.FixtureRequest, name: str, names: Sequence[str]) -> dict[str, Any]:
    marker = request.node.get_closest_marker(name)
    if marker is None:
        return {}
    if marker.args:
        raise pytest.UsageError(f"@pytest.mark.{name} takes only keyword arguments, got {marker.args!r}")
    if wrong := _unknown(marker.kwargs, names):
        raise pytest.UsageError(f"@pytest.mark.{name} {wrong}")
    return dict(marker.kwargs)


def _unknown(options: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the error text for the first unknown argument, or ""."""
    from pipedist.core.names import did_you_mean  # pytest starts without it

    for name in options:
        if name not in names:
            hint = did_you_mean(name, names) or "."
            return f"has no argument {name!r}{hint} There are: {', '.join(names)}"
    return ""


class SimulatedRuns:
    """Runs specs in simulated clusters. Created by the fixture `pipedist_faults`.

    Args:
        faults: the rates; None: those of `pipedist simulate`.
        seeds: each spec is run once with each seed.
        workers: number of simulated workers.
    """

    def __init__(self, faults: Faults | None, seeds: range, workers: int) -> None:
        self._faults = faults
        self._seeds = seeds
        self._workers = workers
        self.injected: dict[str, int] = {}  # number of faults so far, by kind
        self._has_run = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Check that something was simulated; each `run` is complete when it returns.

        Raises:
            UsageError: the block called no `run`, so its test would pass without a fault.
        """
        __tracebackhide__ = True
        if kind is None and not self._has_run:
            from pipedist.errors import UsageError

            raise UsageError(
                "the block of pipedist_faults simulated no run, so it tested nothing. Call `run` of what `with` "
                "returns: `pipedist.run` has no faults"
            )

    def run(
        self,
        spec: SpecLike,
        *,
        params: Mapping[str, Tree] | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> Result:
        """Run a spec with the faults, once per seed, and return the last result.

        Raises:
            SimulationFailure: a run differs from the one without faults, or does not end.
            PipedistError: the run fails, with and without faults.
        """
        __tracebackhide__ = True  # a failure shows the line of the test
        from pipedist.testing.spec_simulation import SpecSimulation

        self._has_run = True
        simulation = SpecSimulation(
            spec, workers=self._workers, faults=self._faults, costs=costs, params=params
        )
        outcome = simulation.reference
        for seed in self._seeds:
            outcome = simulation.check(seed)
            for kind, count in outcome.counts.items():
                self.injected[kind] = self.injected.get(kind, 0) + count
        if outcome.result is None:
            raise outcome.error or RuntimeError("the run ended with neither a result nor an error")
        return outcome.result
