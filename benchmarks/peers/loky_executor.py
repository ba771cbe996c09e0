"""loky's reusable executor."""

from __future__ import annotations

import loky

from benchmarks.adapter import WORKERS
from benchmarks.peers.process_pool_executor import Executor


class Loky(Executor):
    """loky.get_reusable_executor(max_workers=2)."""

    cold = """\
from loky import get_reusable_executor
def f(x): return x * x
if __name__ == "__main__":
    pool = get_reusable_executor(max_workers=2)
    print(sum(pool.map(f, range(100), chunksize=25)))
    pool.shutdown()
"""

    def start(self) -> None:
        self._pool = loky.get_reusable_executor(max_workers=WORKERS)
        list(self._pool.map(abs, range(200)))

    def stop(self) -> None:
        loky.get_reusable_executor(max_workers=WORKERS).shutdown(wait=True, kill_workers=True)
