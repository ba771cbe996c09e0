"""Replicas whose functions are executed by the workers of a cluster."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.lowlevel

from pipedist.collectives.options import CommunicationOptions
from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.misuse_hints import AsyncOnly
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import CallError, LocalProtocolError
from pipedist.protocol.codec import UnsendableError, encode
from pipedist.strategy.base import BaseStrategy
from pipedist.strategy.context import require_cross_replica
from pipedist.strategy.passes import SLOT, Passes
from pipedist.strategy.references import References, require_callable
from pipedist.strategy.step_runs import STEPS_AHEAD, PendingRun, StepRuns
from pipedist.strategy.variables import CapturedVariables, Transaction, used

if TYPE_CHECKING:
    from pipedist.cluster.resolvers import ClusterResolver
    from pipedist.coordinator import Coordinator, Slots

_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")


class Cluster(Protocol):
    """What a strategy needs of a cluster (`pipedist.LocalCluster` is one)."""

    @property
    def coordinator(self) -> Coordinator:
        """What executes the calls."""
        ...


class Strategy(AsyncOnly, BaseStrategy):
    """R replicas whose calls are executed by a cluster's workers (tf.distribute.MirroredStrategy).

        async with pipedist.LocalCluster(workers=2) as cluster:
            strategy = pipedist.Strategy(cluster, replicas=4)
            y = await strategy.run(fn, args=(x,))

    Replicas are logical: neither the number of workers nor what happens to them changes a result.

    Args:
        cluster: an open cluster; strategies may share one.
        replicas: R, at least 1; None: one for each of `devices`, or else 1.
        seed: together with the function's turn, step and replica it decides what `ctx.rng` draws.
        devices: what each replica computes on, "cpu:0" or "cuda:1": `ctx.device` of its functions; None:
            the CPU.
        communication_options: of its collectives, where a call says nothing else.

    Raises:
        ValueError: `replicas` or `seed` is out of range, a device has another form, or there are more or
            fewer than replicas.
        TypeError: one of them is of another type, or `cluster` is no cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        replicas: int | None = None,
        *,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        if not hasattr(type(cluster), "coordinator") and not hasattr(cluster, "coordinator"):
            raise TypeError(
                f"a strategy needs an open cluster, such as pipedist.LocalCluster, not {cluster!r}"
            )
        checked = _devices(devices)
        if replicas is None:
            replicas = len(checked) or self._default_replicas(cluster)
        super().__init__(check_int("replicas", replicas, at_least=1), checked)
        if checked and len(checked) != self._replicas:
            raise ValueError(f"{len(checked)} devices for {self._replicas} replicas: name one for each")
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            raise TypeError(
                f"communication_options is {communication_options!r}; expected pipedist.CommunicationOptions"
            )
        self._cluster = cluster
        self._seed = check_int("seed", seed, at_least=0)
        self._communication = communication_options or CommunicationOptions()
        self._passes: Passes | None = None
        self._references = References()
        self._turn = anyio.Lock()
        """Held by the run that uses variables; others that use some wait, in the order of their calls."""
        self._left: deque[anyio.Event] = deque()
        """Set when the step of a run that was cancelled, and used variables, is over."""

    @staticmethod
    def _default_replicas(_cluster: Cluster) -> int:
        return 1

    @property
    def cluster(self) -> Cluster:
        """The cluster whose workers execute the calls."""
        return self._cluster

    @property
    def communication_options(self) -> CommunicationOptions:
        """What its collectives do where a call says nothing else."""
        return self._communication

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Where its workers come from, as it was given; None: from the cluster."""
        return None

    @property
    def _identity(self) -> bool:
        return False

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Call `fn` on every replica: see `BaseStrategy.run`."""
        require_cross_replica("Strategy.run")
        call = self._prepare(fn, args, kwargs)
        if not call.noted.variables:
            return await self._execute(call, None)
        self._forget_variables(call.noted.coordinator)
        with used(call.noted.variables):
            async with self._turn:
                while self._left:  # what a cancelled step makes, its workers keep
                    await self._left[0].wait()
                    self._left.popleft()
                return await self._execute(call, Transaction(call.noted))

    def _prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> _Call:
        """Make ready for a run; nothing is sent yet."""
        noted = CapturedVariables(self, self._open_passes().coordinator)
        function = self._references.of(fn, noted)
        return _Call(function, self._arguments(args, kwargs, noted.argument), noted)

    async def _execute(self, call: _Call, transaction: Transaction | None) -> Tree:
        with self._open_passes().using(call.function) as handle:
            try:
                if transaction is None:
                    results = await handle.call_step(call.arguments)
                else:

                    def produced(results: list[Slots]) -> Mapping[int, int]:
                        # Where they can't be joined the step has failed, and assigns nothing.
                        return transaction.commit(results) if self._can_join(results) else {}

                    results = await handle.call_step(
                        call.arguments, transaction.states, produced=produced, left=self._left
                    )
            except CallError as error:
                refuse_unsendable(error, call.arguments)
                raise
        return self._result(call, results)

    def _begin(self, fn: Callable[..., Any], args: Sequence[Any]) -> PendingRun | None:
        """Begin a run that uses no variables; None for one that does."""
        call = self._prepare(fn, args, None)
        if call.noted.variables:
            return None
        return PendingRun(
            self._open_passes().using(call.function), call.arguments, partial(self._result, call)
        )

    def _can_join(self, results: list[Slots]) -> bool:
        structures = [trees.structure(result[SLOT]) for result in results]
        return len(results) == self._replicas and all(each == structures[0] for each in structures)

    def _result(self, call: _Call, results: list[Slots]) -> Tree:
        if len(results) != self._replicas:
            raise LocalProtocolError(
                f"{call.function.label}: {len(results)} results came back for {self._replicas} replicas"
            )
        return self._joined([result[SLOT] for result in results])

    def _open_passes(self) -> Passes:
        if self._passes is None:
            self._passes = Passes(
                self._cluster.coordinator,
                self._replicas,
                self._seed,
                gang=True,
                devices=self._devices,
                communication=self._communication,
            )
        return self._passes

    def _forget_variables(self, coordinator: Coordinator) -> None:
        """Let the workers forget variables that nobody has any more."""
        while self._forgotten:
            coordinator.drop_space(self._forgotten.popleft())

    def run_steps(
        self, fn: Callable[..., Any], steps: AsyncIterable[Tree], *, ahead: int = STEPS_AHEAD
    ) -> StepRuns:
        """Call `fn` on every replica for each step, some steps ahead of the results.

            async for loss in strategy.run_steps(step_fn, dataset): ...

        The workers have their next steps before they are done with one (tf.distribute: steps_per_run).
        Results come in the order of steps. A step that uses variables begins when the one before is
        done, as it reads what that one has assigned.

        Args:
            fn: as for `run`.
            steps: the arguments: a distributed dataset, or any async iterable; of each step a tuple is
                the function's arguments, anything else its one argument.
            ahead: how many steps are begun before the first one's result is taken, at least 1.

        Returns:
            An async iterator of what `run` returns. It raises what `run` raises, when that step's turn
            has come.

        Raises:
            TypeError: `fn` can't be called, or `steps` is no async iterable.
            ValueError: `ahead` is less than 1.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.run_steps")
        require_callable(fn)
        return StepRuns(
            self._begin, lambda args: self.run(fn, args), fn, steps, check_int("ahead", ahead, at_least=1)
        )

    async def aclose(self) -> None:
        """Let the workers forget this strategy's functions; leaving the cluster does it too."""
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Strategy:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


@dataclass(frozen=True, slots=True)
class _Call:
    """A run that is ready to be sent."""

    function: FunctionRef
    arguments: list[Tree]
    noted: CapturedVariables


def _devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return devices as they are kept, if they are any.

    Raises:
        TypeError: it is no list of texts.
        ValueError: one has another form than "cpu" or "cuda:1", or there is none.
    """
    if devices is None:
        return ()
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices is {devices!r}; expected a list, one a replica: ['cuda:0', 'cuda:1']")
    for device in devices:
        if not isinstance(device, str):
            raise TypeError(f"a device is {device!r} of type {type(device).__name__}; expected a text")
        if not _DEVICE.fullmatch(device):
            raise ValueError(
                f"{device!r} is no device: expected a kind and a number, such as 'cpu:0', 'cuda:1'"
            )
    if not devices:
        raise ValueError("devices is empty: name one for each replica, or leave it out")
    return tuple(devices)


def refuse_unsendable(error: CallError, arguments: Sequence[Tree]) -> None:
    """Where a step could not be sent: raise the UnsendableError of its first argument that can't be.

    There is none where it was a result that can't be sent.
    """
    if isinstance(error.__cause__, UnsendableError):
        for args, kwargs in arguments:
            encode({"args": args, "kwargs": kwargs})
