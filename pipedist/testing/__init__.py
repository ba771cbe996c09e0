"""The public test harness: tools for tests of specs, replica functions and protocols under faults.

| entry point | purpose |
|---|---|
| `simulate` | runs your own spec in virtual time, with faults: `pipedist simulate` |
| `SimulatedCluster` | a cluster whose workers, network and clock are simulated |
| `Faults`, `FaultyNetwork` | the kinds of faults and their rates, and a network that injects them |
| `VirtualTime` | the clock of such a network |
| `LocalCluster` | real worker processes: kill, pause, restart, cut |
| `check_source` | checks a reader class against the protocol of sources |
| `run_in_processes` | runs a function in several processes, and returns each outcome |
| `combinations` | generates one test for each combination of values |

The entry points run in the process of the test. A simulation also runs its driver and its workers there, one
thread at a time; `LocalCluster` and `run_in_processes` start real processes. The pytest plugin
(`pytest_plugin`) provides the same as fixtures. Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipedist.cluster.base import LocalCluster
    from pipedist.testing.faults import Faults
    from pipedist.testing.network import FaultyNetwork, VirtualTime
    from pipedist.testing.parametrize import combinations
    from pipedist.testing.processes import ProcessesFailed, ProcessOutcome, run_in_processes
    from pipedist.testing.simulated_cluster import SimulatedCluster
    from pipedist.testing.source_checks import check_source
    from pipedist.testing.spec_simulation import SimulationFailure, SpecSimulation, simulate

_HOMES = {
    "pipedist.cluster.base": ("LocalCluster",),
    "pipedist.testing.faults": ("Faults",),
    "pipedist.testing.network": ("FaultyNetwork", "VirtualTime"),
    "pipedist.testing.parametrize": ("combinations",),
    "pipedist.testing.processes": ("ProcessOutcome", "ProcessesFailed", "run_in_processes"),
    "pipedist.testing.simulated_cluster": ("SimulatedCluster",),
    "pipedist.testing.source_checks": ("check_source",),
    "pipedist.testing.spec_simulation": ("SimulationFailure", "SpecSimulation", "simulate"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Faults",
    "FaultyNetwork",
    "LocalCluster",
    "ProcessOutcome",
    "ProcessesFailed",
    "SimulatedCluster",
    "SimulationFailure",
    "SpecSimulation",
    "VirtualTime",
    "check_source",
    "combinations",
    "run_in_processes",
    "simulate",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
