"""pipedist, its peers and the machine's limits, measured side by side; see docs/benchmarks.md."""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before NumPy is imported: all systems have one thread a worker
