"""How MPI processes are started."""

from __future__ import annotations

from benchmarks.adapter import WORKERS

MPIEXEC = ("mpiexec", "--oversubscribe", "-n", str(WORKERS + 1))
"""One rank submits, the others work."""
