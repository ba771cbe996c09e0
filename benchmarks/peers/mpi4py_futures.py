"""mpi4py.futures: this process is rank 0 of `mpiexec -n 3 python -m mpi4py.futures`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

from benchmarks.adapter import WORKERS
from benchmarks.peers.mpi4py_names import MPIEXEC
from benchmarks.peers.process_pool_executor import Executor


class Mpi4py(Executor):
    """MPIPoolExecutor(2): 3 ranks on 2 cores."""

    settings: ClassVar[Mapping[str, str]] = {
        **Executor.settings,
        "launch": "mpiexec --oversubscribe -n 3 python -m mpi4py.futures",
    }
    cold = """\
from mpi4py.futures import MPIPoolExecutor
def f(x): return x * x
if __name__ == "__main__":
    with MPIPoolExecutor(2) as pool:
        print(sum(pool.map(f, range(100), chunksize=25)))
"""
    cold_prefix = (*MPIEXEC, sys.executable, "-m", "mpi4py.futures")

    def start(self) -> None:
        from mpi4py.futures import MPIPoolExecutor  # importing it begins MPI, which W5 does for itself

        self._pool = MPIPoolExecutor(WORKERS)
        list(self._pool.map(abs, range(200)))

    def stop(self) -> None:
        self._pool.shutdown()
