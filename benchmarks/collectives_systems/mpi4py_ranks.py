"""mpi4py: Allreduce in place, a rank per replica."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from benchmarks import collectives_systems as systems
from benchmarks.collectives_loop import measure


def main() -> None:
    """Start the ranks, or be one of them."""
    replicas, sizes = systems.options()
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        rank = [sys.executable, "-m", "benchmarks.collectives_systems.mpi4py_ranks", *sys.argv[1:]]
        os.execvp("mpiexec", ["mpiexec", "--oversubscribe", "-n", str(replicas), *rank])
    from mpi4py import MPI  # importing it begins MPI

    ranks = MPI.COMM_WORLD

    def make(elements: int, value: float) -> Any:
        return np.full(elements, value, np.float32)

    def reduce(vector: Any) -> Any:
        if vector[0]:  # it is in place, and the loop asks for the sum of ones three times
            vector = vector.copy()
        ranks.Allreduce(MPI.IN_PLACE, vector, MPI.SUM)
        return vector

    found = measure(sizes, replicas, make, reduce, ranks.Barrier)
    if ranks.Get_rank() == 0:
        systems.tell(found)


if __name__ == "__main__":
    main()
