"""The strategy that executes functions on the workers of a cluster."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from weakref import finalize

import anyio
import anyio.lowlevel
from msgspec import Struct
from msgspec.structs import replace

from pipedist.collectives.options import CommunicationOptions
from pipedist.core import trees
from pipedist.core.arguments import check_int
from pipedist.core.misuse_hints import AsyncOnly, running_loop
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import CallError, LocalProtocolError
from pipedist.protocol.codec import UnsendableError, encode
from pipedist.protocol.program import JaxDevices
from pipedist.reduction.tree import Reduction
from pipedist.strategy.base import BaseStrategy, bytes_of
from pipedist.strategy.context import require_cross_replica
from pipedist.strategy.function_references import FunctionReferences, require_callable
from pipedist.strategy.passes import PARTIAL, SLOT, FunctionPasses
from pipedist.strategy.step_runs import STEPS_AHEAD, PendingGroup, PendingRun, StepRuns
from pipedist.strategy.variables import CapturedVariables, Transaction, used
from pipedist.values import Partial, reduce_components

if TYPE_CHECKING:
    import asyncio

    from pipedist.cluster.resolvers import ClusterResolver
    from pipedist.coordinator import Coordinator, Slots
    from pipedist.coordinator.pass_handle import States

_GROUP_BYTES_MAX: Final = 2**20  # of the arguments of steps that are sent in one message
_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")


class ClusterLike(Protocol):
    """An open cluster, such as a `pipedist.LocalCluster`."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that executes the calls."""
        ...


class Strategy(AsyncOnly, BaseStrategy):
    """R replicas whose calls a cluster's workers execute (tf: Strategy).

    Replicas are logical: the number of workers and their failures never change a result.

    Args:
        cluster: an open cluster; strategies may share one.
        replicas: R, at least 1; None: one for each of `devices`, or else 1.
        seed: `ctx.rng` is derived from it, the number of the function, the step and the replica.
        devices: the device of each replica, as "cpu:0" or "cuda:1": `ctx.device` in its functions; None:
            the CPU.
        communication_options: options of collectives whose calls have none.

    Raises:
        ValueError: `replicas` or `seed` is out of range, a device has another form, or the number of
            devices is not the number of replicas.
        TypeError: an argument has another type, or `cluster` is not a cluster.

    Example:
        async with pipedist.LocalCluster(workers=2) as cluster:
            strategy = pipedist.Strategy(cluster, replicas=4)
            async for x in strategy.distribute_dataset(pipedist.Dataset.range(10).batch(4)):
                y = await strategy.run(lambda x: x * x, args=(x,))
                total = await strategy.reduce("sum", y, axis=0)
    """

    _groups_steps: ClassVar = True  # whether `run_steps` may send several steps in one message

    def __init__(
        self,
        cluster: ClusterLike,
        replicas: int | None = None,
        *,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        self._check_cluster(cluster)
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
        self._passes: FunctionPasses | None = None
        self._jax: JaxDevices | None = None
        self._references = FunctionReferences()
        # Held by the run that uses variables; others wait in order. The run yields to the loop when it awaits its step
        self._variables_lock = anyio.Lock(fast_acquire=True)
        self._cancelled_steps: deque[anyio.Event] = deque()  # steps of cancelled runs with variables

    @classmethod
    def _check_cluster(cls, cluster: ClusterLike) -> None:
        if not hasattr(type(cluster), "coordinator") and not hasattr(cluster, "coordinator"):
            raise TypeError(
                f"a strategy needs an open cluster, such as pipedist.LocalCluster, not {cluster!r}"
            )

    @staticmethod
    def _default_replicas(_cluster: ClusterLike) -> int:
        return 1

    @property
    def cluster(self) -> ClusterLike:
        """The cluster whose workers execute the calls."""
        return self._cluster

    @property
    def communication_options(self) -> CommunicationOptions:
        """Options of collectives whose calls have none."""
        return self._communication

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver given to the strategy; None if it has none."""
        return None

    async def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tree:
        """Call `fn` on every replica.

        `fn` runs in worker processes, on copies of the objects that it captures. Changes to them are lost;
        only its return value and assignments to `pipedist.Variable`s are kept.

        If `run` is cancelled, the workers still execute the step, and its results are discarded; the next
        run that uses variables starts after it. To end a step that hangs, end its workers with
        `LocalCluster.restart`.

        Args:
            fn: a replica function, sync or async; if it has a parameter named `ctx`, it also gets the
                ReplicaContext.
            args, kwargs: its arguments; each replica gets its own component of each PerReplica, and a copy
                of everything else. Arrays are read-only in the function.

        Returns:
            The result, in its structure, with every leaf a PerReplica; None stays None.

        Raises:
            TypeError: `fn` is not callable, `kwargs` is not a mapping, or an argument can't be sent to
                workers (UnsendableError, which names its path).
            ValueError: `args` is neither tuple nor list; the number of components of an argument is not the
                number of replicas; or the replicas returned different structures (the text shows two).
            CallError: `fn` raised; `__cause__` is the exception of the lowest replica that failed.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.run")
        return await self._run_call(self._prepare(fn, args, kwargs))

    async def _run_reduced(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reduction: Reduction | None,
    ) -> Tree:
        require_cross_replica("Strategy.compile")
        call = self._prepare(fn, args, kwargs)
        if reduction is not None and not (reduction.axis is None or self._identity or self._jax is not None):
            return await self._run_call(replace(call, reduction=reduction))
        result = await self._run_call(call)
        return result if reduction is None else await self.reduce(reduction.op, result, reduction.axis)

    def _run_call(self, call: PreparedCall) -> Awaitable[Tree]:
        return self._run_with_variables(call) if call.captured.variables else self._step(call)

    async def _run_with_variables(self, call: PreparedCall) -> Tree:
        """Run a step after those before it that use variables; it commits its assignments as a whole."""
        while self.unused_spaces:
            call.captured.coordinator.states.drop(self.unused_spaces.popleft())
        with used(call.captured.variables):
            async with self._variables_lock:
                while self._cancelled_steps:  # they still change the workers' copies
                    await self._cancelled_steps[0].wait()
                    self._cancelled_steps.popleft()
                transaction = Transaction(call.captured)

                def produced(results: list[Slots]) -> Mapping[int, int]:
                    # If the results can't be joined the step has failed, and assigns nothing.
                    return transaction.commit(results) if self._can_join(results) else {}

                left = self._cancelled_steps
                return await self._step(call, transaction.states, produced=produced, left=left)

    async def _step(self, call: PreparedCall, states: States | None = None, **options: Any) -> Tree:
        """Execute a step; `options` are those of `PassHandle.call_step`."""
        passes = self._open_passes()
        entry = passes.enter(call.function, call.reduction)
        try:
            return self._result(call, await entry.handle.call_step(self._payload(call), states, **options))
        except CallError as error:
            self._check_sendable(call, error)
            raise
        finally:
            passes.leave(entry)

    def _prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> PreparedCall:
        captured = CapturedVariables(self, self._open_passes().coordinator)
        function = self._references.of(fn, captured)
        return PreparedCall(function, self._arguments(args, kwargs, captured.argument), captured)

    @staticmethod
    def _check_sendable(call: PreparedCall, error: CallError) -> None:
        """Raise UnsendableError, with its path, if an argument can't be sent."""
        if isinstance(error.__cause__, UnsendableError):
            for args, kwargs in call.arguments:
                encode({"args": args, "kwargs": kwargs})

    def _begin(self, fn: Callable[..., Any], args: Sequence[Any]) -> PendingRun | None:
        """Start a run that uses no variables; return None if it uses some."""
        return self._begin_call(self._prepare(fn, args, None))

    def _begin_group(self, fn: Callable[..., Any], group: Sequence[tuple[Any, ...]]) -> PendingGroup | None:
        """Start runs of several steps at once; return None if they must be started one by one."""
        calls = [self._prepare(fn, args, None) for args in group]
        function = calls[0].function
        if any(call.captured.variables or call.function != function for call in calls):
            return None
        using = self._open_passes().using(function)
        if not using.may_group or sum(bytes_of(call.arguments) for call in calls) > _GROUP_BYTES_MAX:
            return None

        values: list[Tree] = [list(own) for own in zip(*[call.arguments for call in calls], strict=True)]
        return PendingGroup(
            using,
            values,
            len(calls),
            lambda place, results: self._result(calls[place], results),
            lambda place, number: self._step(calls[place], number=number),
        )

    def _begin_call(self, call: PreparedCall) -> PendingRun | None:
        if call.captured.variables:
            return None
        using = self._open_passes().using(call.function)
        return PendingRun(using, self._payload(call), partial(self._result, call))

    def _payload(self, call: PreparedCall) -> list[Tree]:
        """Return the value of each replica's call, as the stage's function gets it."""
        return call.arguments

    def _can_join(self, results: list[Slots]) -> bool:
        structures = [
            trees.structure(result[SLOT] if SLOT in result else result[PARTIAL][0]) for result in results
        ]
        return len(results) == self._replicas and all(each == structures[0] for each in structures)

    def _result(self, call: PreparedCall, results: list[Slots]) -> Tree:
        if len(results) != self._replicas:
            raise LocalProtocolError(
                f"{call.function.label}: got {len(results)} results of {self._replicas} replicas"
            )
        if call.reduction is not None:
            each = [Partial(slots[PARTIAL]) if PARTIAL in slots else slots[SLOT] for slots in results]
            return reduce_components(call.reduction, each)
        each = self._components_of(call, [result[SLOT] for result in results])
        if not call.steps:
            return self._joined(each)
        return [self._joined(list(components)) for components in zip(*each, strict=True)]

    def _components_of(self, call: PreparedCall, results: list[Tree]) -> list[Tree]:
        """Return the replicas' results from those of their calls."""
        return results

    def _open_passes(self) -> FunctionPasses:
        if self._passes is None:
            self._passes = FunctionPasses(
                self._cluster.coordinator,
                self._replicas,
                self._seed,
                gang=True,
                devices=self._devices,
                communication=self._communication,
                jax=self._jax,
            )
            if (loop := running_loop()) is not None:  # a cluster may serve any number of strategies
                finalize(self, _release_later, loop, self._passes, self.unused_spaces).atexit = False
        return self._passes

    def run_steps(
        self, fn: Callable[..., Any], steps: AsyncIterable[Tree], *, ahead: int = STEPS_AHEAD
    ) -> StepRuns:
        """Call `fn` on every replica for each step, several steps in advance.

            async for loss in strategy.run_steps(step_fn, dataset): ...

        Workers receive their next steps before they finish one (tf.distribute: steps_per_run); several short
        steps are one message. Results are those of `run`, in the order of steps. A step that uses variables starts
        after the previous step, whose assignments it reads. If a step of several in one message raises or calls a
        collective, it is executed again, alone, and so are those after it.

        Args:
            fn: as for `run`.
            steps: a distributed dataset, or any async iterable of arguments: a tuple holds the arguments of
                one step, any other value is its only argument.
            ahead: limit of steps that are started before the result of the first is taken, at least 1.

        Returns:
            An async iterator of the results of `run`. It raises the exceptions of `run` at the step that
            failed.

        Raises:
            TypeError: `fn` is not callable, or `steps` is not an async iterable.
            ValueError: `ahead` is less than 1.
            RuntimeError: called inside a replica function.
        """
        require_cross_replica("Strategy.run_steps")
        require_callable(fn)
        ahead = check_int("ahead", ahead, at_least=1)
        begin_group = partial(self._begin_group, fn) if self._groups_steps else lambda _group: None
        return StepRuns(partial(self._begin, fn), begin_group, partial(self.run, fn), steps, ahead)

    async def aclose(self) -> None:
        """Unload this strategy's functions from the workers; leaving the cluster does that too."""
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Strategy:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


class PreparedCall(Struct, frozen=True):
    """A run that is ready to be sent."""

    function: FunctionRef
    arguments: list[Tree]
    captured: CapturedVariables
    reduction: Reduction | None = None  # that workers apply to the results; None: they stay per replica
    steps: int = 0  # the arguments of each replica are a list, with those of each step; 0: of one step alone


def _devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return checked devices; an empty tuple for None."""
    if devices is None:
        return ()
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices is {devices!r}; expected a list, one per replica: ['cuda:0', 'cuda:1']")
    for device in devices:
        if not isinstance(device, str):
            raise TypeError(f"a device is {device!r} of type {type(device).__name__}; expected a str")
        if not _DEVICE.fullmatch(device):
            raise ValueError(
                f"{device!r} is not a device; expected a kind and a number, such as 'cpu:0' or 'cuda:1'"
            )
    if not devices:
        raise ValueError("devices is empty: name one for each replica, or omit it")
    return tuple(devices)


def _release_later(
    loop: asyncio.AbstractEventLoop, passes: FunctionPasses, unused_spaces: deque[int]
) -> None:
    """Drop what a strategy has on its cluster, in the cluster's loop: a finalizer may run in any thread."""

    def release() -> None:
        passes.close()
        while unused_spaces:
            passes.coordinator.states.drop(unused_spaces.popleft())

    with contextlib.suppress(RuntimeError):  # the loop is closed, and the cluster with it
        loop.call_soon_threadsafe(release)
