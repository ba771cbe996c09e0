"""The live half of a replay: clusters of real worker processes, kept open and shared by the cases."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from tests.conformance.cases import Skip, StrategySpec

if TYPE_CHECKING:
    import pipedist

KINDS = frozenset({"mirrored", "one_device", "default", "central_storage"})
"""Kinds whose semantics (variables apart) is that of a `pipedist.Strategy` with as many replicas."""


class Session:
    """Opens strategies for cases; an async context manager.

    Args:
        workers: worker processes of the cluster. They never change a result, so one cluster of
            two serves every case.
    """

    def __init__(self, workers: int = 2) -> None:
        self._workers = workers
        self._stack: contextlib.AsyncExitStack | None = None
        self._cluster: pipedist.LocalCluster | None = None

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.discard()

    async def strategy(self, spec: StrategySpec | None) -> pipedist.Strategy:
        """Return a new strategy with the replicas of `spec`, on the shared cluster.

        Raises:
            Skip: this release has no such kind.
        """
        import pipedist

        if spec is None:
            spec = StrategySpec("default", 1)
        if spec.kind not in KINDS:
            raise Skip(f"strategy of a later release: {spec.kind}")
        if self._cluster is None:
            self._stack = contextlib.AsyncExitStack()
            self._cluster = await self._stack.enter_async_context(
                pipedist.LocalCluster(workers=self._workers)
            )
        return pipedist.Strategy(self._cluster, replicas=spec.replicas)

    async def discard(self) -> None:
        """Close the cluster, hanging workers included; the next case gets a fresh one."""
        stack, self._stack, self._cluster = self._stack, None, None
        if stack is not None:
            await stack.aclose()
