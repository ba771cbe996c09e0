"""The public test harness: pipedist's own tools for testing what runs under faults.

| what | for |
|---|---|
| `simulate` | runs your own spec in virtual time, with faults: `pipedist simulate` |
| `SimulatedCluster` | a cluster whose workers, network and clock are simulated |
| `Faults`, `FaultyNetwork` | which faults there are, and the network that has them |
| `VirtualTime` | the clock of such a network |
| `Simulation` | the scheduler and the workers' machines alone, from one seed |
| `Playbook` | a script of events for the scheduler, and the commands that each must cause |
| `LocalCluster` | real worker processes: kill, pause, restart, cut |
| `run_in_processes` | runs a function in several processes, and returns what came of each |
| `combinations` | makes one test of each combination of values |

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipedist.cluster.base import LocalCluster
    from pipedist.testing.combining import combinations
    from pipedist.testing.faults import Faults
    from pipedist.testing.network import FaultyNetwork
    from pipedist.testing.playbook import Playbook, PlaybookError
    from pipedist.testing.processes import ProcessesFailed, ProcessOutcome, run_in_processes
    from pipedist.testing.simulated_cluster import SimulatedCluster
    from pipedist.testing.simulation import Simulation, SimulationFailure
    from pipedist.testing.spec_simulation import SpecSimulation, simulate
    from pipedist.testing.virtual_time import VirtualTime

_HOME = {
    "Faults": "pipedist.testing.faults",
    "FaultyNetwork": "pipedist.testing.network",
    "LocalCluster": "pipedist.cluster.base",
    "Playbook": "pipedist.testing.playbook",
    "PlaybookError": "pipedist.testing.playbook",
    "ProcessOutcome": "pipedist.testing.processes",
    "ProcessesFailed": "pipedist.testing.processes",
    "SimulatedCluster": "pipedist.testing.simulated_cluster",
    "Simulation": "pipedist.testing.simulation",
    "SimulationFailure": "pipedist.testing.simulation",
    "SpecSimulation": "pipedist.testing.spec_simulation",
    "VirtualTime": "pipedist.testing.virtual_time",
    "combinations": "pipedist.testing.combining",
    "run_in_processes": "pipedist.testing.processes",
    "simulate": "pipedist.testing.spec_simulation",
}

__all__ = [
    "Faults",
    "FaultyNetwork",
    "LocalCluster",
    "Playbook",
    "PlaybookError",
    "ProcessOutcome",
    "ProcessesFailed",
    "SimulatedCluster",
    "Simulation",
    "SimulationFailure",
    "SpecSimulation",
    "VirtualTime",
    "combinations",
    "run_in_processes",
    "simulate",
]


def __getattr__(name: str) -> Any:  # what a module has, it can't say
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
