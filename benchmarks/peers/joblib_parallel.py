"""joblib.Parallel with its default backend, loky."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from benchmarks import functions
from benchmarks.adapter import WINDOW, WORKERS, Function, Peer
from benchmarks.peers.multiprocessing_pool import Indexed


class Joblib(Peer):
    """joblib.Parallel(n_jobs=2)."""

    settings: ClassVar[Mapping[str, str]] = {
        "W1": "batch_size=1",
        "W1b": "batch_size='auto'",
        "W2": "batch_size=1, generators, pre_dispatch 8; arguments above 1 MB are memory-mapped (default)",
    }
    cold = """\
from joblib import Parallel, delayed
def f(x): return x * x
if __name__ == "__main__":
    print(sum(Parallel(n_jobs=2)(delayed(f)(x) for x in range(100))))
"""

    def start(self) -> None:
        self._one_by_one = Parallel(n_jobs=WORKERS, batch_size=1)
        self._one_by_one(delayed(functions.inc)(i) for i in range(200))

    def stop(self) -> None:
        get_reusable_executor().shutdown(wait=True, kill_workers=True)

    def each(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(self._one_by_one(delayed(fn)(x) for x in args))

    def bundled(self, fn: Function, args: Sequence[Any]) -> list[Any]:
        return list(Parallel(n_jobs=WORKERS, batch_size="auto")(delayed(fn)(x) for x in args))

    def windowed(
        self, fn: Function, batches: Iterable[np.ndarray], ordered: bool
    ) -> Iterator[tuple[int, Any]]:
        kind = "generator" if ordered else "generator_unordered"
        parallel = Parallel(n_jobs=WORKERS, batch_size=1, pre_dispatch=WINDOW, return_as=kind)
        yield from parallel(delayed(Indexed(fn))(item) for item in enumerate(batches))

    def step(self, fn: Function, parts: Sequence[np.ndarray]) -> list[Any]:
        return self.each(fn, parts)
