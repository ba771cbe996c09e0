"""The live half of a replay: clusters of real worker processes, kept open and shared by the cases."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from tests.conformance.cases import Skip, StrategySpec

if TYPE_CHECKING:
    import pipedist
    from pipedist.strategy.base import BaseStrategy


class Session:
    """Opens strategies for cases; an async context manager.

    Args:
        workers: worker processes of the cluster. They never change a result, so one cluster of
            two serves every case.
        jax: replay the cases of mirrored strategies on a TPUStrategy with CPU devices, and skip others.
    """

    def __init__(self, workers: int = 2, *, jax: bool = False) -> None:
        self._workers = 1 if jax else workers
        self.jax = jax
        self._stack: contextlib.AsyncExitStack | None = None
        self._cluster: pipedist.LocalCluster | None = None

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.discard()

    async def strategy(self, spec: StrategySpec | None) -> BaseStrategy:
        """Return a new strategy of the kind and with the replicas of `spec`, on the shared cluster.

        "default" (and no strategy) is what `pipedist.get_strategy()` returns.

        Raises:
            Skip: this release has no such kind.
        """
        import pipedist

        kind = "default" if spec is None else spec.kind
        if self.jax and kind != "mirrored":
            raise Skip(f"not a case of mirrored strategies: {kind}")
        if spec is None or kind == "default":
            return pipedist.get_strategy()
        if kind not in ("mirrored", "one_device", "central_storage", "multi_worker_mirrored"):
            raise Skip(f"strategy of a later release: {kind}")
        if self._cluster is None:
            self._stack = contextlib.AsyncExitStack()
            self._cluster = await self._stack.enter_async_context(
                pipedist.LocalCluster(workers=self._workers)
            )
        if kind == "one_device":
            return pipedist.OneDeviceStrategy(self._cluster)
        if kind == "central_storage":
            return pipedist.CentralStorageStrategy(self._cluster, replicas=spec.replicas)
        if kind == "multi_worker_mirrored":
            each = spec.replicas // spec.workers
            return pipedist.MultiWorkerMirroredStrategy(self._cluster, spec.workers, replicas_per_worker=each)
        if self.jax:
            return pipedist.TPUStrategy(self._cluster, platform="cpu", replicas=spec.replicas)
        return pipedist.MirroredStrategy(self._cluster, replicas=spec.replicas)

    async def discard(self) -> None:
        """Close the cluster, hanging workers included; the next case gets a fresh one."""
        stack, self._stack, self._cluster = self._stack, None, None
        if stack is not None:
            await stack.aclose()
