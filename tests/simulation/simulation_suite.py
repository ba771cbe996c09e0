"""Many simulations of the machines, one after the other."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pipedist.testing import Faults
from tests.simulation.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Size:
    """The number of simulations, and their size."""

    seeds: int
    workers: int
    calls: int


RELEASE_SIZES = (Size(22_000, 5, 40), Size(1_500, 20, 200), Size(50, 100, 1_000), Size(5, 1_000, 10_000))
"""The simulations that a release must pass, without a violation."""

COLLECT_EVENTS = 100_000
"""Number of events after which garbage is collected."""


class SimulationSuite:
    """Simulations of one size.

    Args:
        workers, calls, faults: see `Simulation`.
    """

    def __init__(self, workers: int, calls: int, faults: Faults | None = None) -> None:
        self._size = (workers, calls)
        self._faults = faults
        self.seeds = 0
        """Number of seeds so far."""
        self.events = 0
        self.cpu_s = 0.0
        self.counts: Counter[str] = Counter()
        """Number of faults so far, by kind."""

    def __str__(self) -> str:
        """Return a summary."""
        workers, calls = self._size
        faults = ", ".join(f"{kind} {n}" for kind, n in sorted(self.counts.items())) or "none"
        return (
            f"{self.seeds} seeds of {workers} workers x {calls} calls: no violation, {self.cpu_s:.1f} CPU-s, "
            f"{self.seeds / max(self.cpu_s, 1e-9):.4g} seeds/s, {self.events} events; faults: {faults}"
        )

    def run(self, seeds: Iterable[int]) -> None:
        """Run some seeds.

        Raises:
            SimulationFailure: the first violation.
        """
        workers, calls = self._size
        began = time.process_time()
        collect_at = self.events + COLLECT_EVENTS
        gc.freeze()  # imported modules need not be scanned repeatedly
        gc.disable()  # a simulation becomes garbage as a whole
        try:
            for seed in seeds:
                if self.events >= collect_at:
                    gc.collect()
                    collect_at = self.events + COLLECT_EVENTS
                simulation = Simulation(seed, workers=workers, calls=calls, faults=self._faults)
                simulation.run()
                self.seeds += 1
                self.events += simulation.events
                self.counts.update(simulation.counts)
                simulation.clear()
        finally:
            gc.enable()
            gc.unfreeze()
            self.cpu_s += time.process_time() - began
