"""The strategy whose replicas are cores of TPUs, or other JAX devices (tf.distribute: TPUStrategy).

Each worker process owns the devices of its host, and executes the replicas of its host as one compiled program
(`pipedist.worker.jax_program`). The driver neither imports jax nor opens a device.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pipedist.core import gpus
from pipedist.core.arguments import check_int
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import UsageError
from pipedist.protocol.program import JaxDevices
from pipedist.strategy.context import require_cross_replica
from pipedist.strategy.function_references import require_callable
from pipedist.strategy.passes import PASSES_MAX
from pipedist.strategy.replicated import ClusterLike, PreparedCall, Strategy
from pipedist.strategy.step_runs import STEPS_AHEAD, PendingRun, StepRuns
from pipedist.strategy.variables import CapturedVariables

if TYPE_CHECKING:
    from pipedist.cluster.resolvers_tpu import DeviceAssignment, TPUClusterResolver

PLATFORMS: Final = ("tpu", "gpu", "cpu")
_FORCED: Final = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")
_FILES: Final = "/dev/accel[0-9]*"


class TPUStrategy(Strategy):
    """Replicas on TPU cores, or other JAX devices, as one compiled program per host (tf: TPUStrategy).

    A replica function is traced and compiled by JAX, once for each structure, shapes and dtypes of its arguments: it
    uses `jax.numpy`, its collectives become those of XLA, and `ctx.replica_id_in_sync_group` and `ctx.step` are traced.
    Results are NumPy arrays, as with other strategies. On the same number and kind of devices their bits are the same
    from run to run; XLA may sum in another order on another number of devices.

    Args:
        cluster: an open cluster, with one worker per host.
        tpu_cluster_resolver: knows the hosts and their cores; None: `TPUClusterResolver("local")` where that is needed.
        steps_per_run: number of steps that `run_steps` executes in one dispatch, at least 1; None: 1.
        device_assignment: the core of each replica; None: all cores, in order.
        platform: "tpu", "gpu" or "cpu"; None: "tpu".
        replicas: R; None: those of `device_assignment`, or else one per core of the platform. With "cpu", these are as
            many per worker as XLA_FLAGS=--xla_force_host_platform_device_count=N gives, or 1.

    Raises:
        UsageError: jax is not installed, or the platform has no devices here.
        ValueError: an argument is out of range, or R is not a multiple of the number of workers.
        TypeError: an argument has another type.

    Example:
        strategy = pipedist.TPUStrategy(cluster, platform="cpu", replicas=8)
        losses = await strategy.run(step, args=(batch,))
    """

    _groups_steps: ClassVar = False  # its workers have a loop of their own for that: `steps_per_run`

    def __init__(
        self,
        cluster: ClusterLike,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        *,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
        platform: str | None = None,
        replicas: int | None = None,
    ) -> None:
        from pipedist.cluster import resolvers_tpu as slices  # needed by this strategy only

        if tpu_cluster_resolver is not None and not isinstance(
            tpu_cluster_resolver, slices.TPUClusterResolver
        ):
            raise TypeError(
                f"tpu_cluster_resolver is {tpu_cluster_resolver!r}; expected a pipedist.TPUClusterResolver"
            )
        if device_assignment is not None and not isinstance(device_assignment, slices.DeviceAssignment):
            raise TypeError(
                f"device_assignment is {device_assignment!r}; expected a pipedist.DeviceAssignment"
            )
        if platform is not None and platform not in PLATFORMS:
            raise ValueError(f"platform is {platform!r}; expected one of {', '.join(PLATFORMS)}")
        self._steps_per_run = (
            1 if steps_per_run is None else check_int("steps_per_run", steps_per_run, at_least=1)
        )
        self._resolver = tpu_cluster_resolver
        self._assignment = device_assignment
        self._check_cluster(cluster)
        hosts: int = getattr(cluster, "workers", 1)
        if importlib.util.find_spec("jax") is None:
            raise UsageError(
                "a TPUStrategy needs jax, which is not installed here. Its workers import it: "
                "pip install 'pipedist[jax]'"
            )
        resolver = tpu_cluster_resolver or slices.TPUClusterResolver("local")
        cores = resolver.get_tpu_system_metadata().num_cores
        kind = platform or "tpu"
        if platform is None and not cores and not glob.glob(_FILES):
            raise UsageError(
                "this host has no TPU: no variable of a TPU VM is set, and there is no /dev/accel0. Choose "
                "platform='gpu', or platform='cpu', with replicas=N CPU devices"
            )
        if kind == "cpu" and not (tpu_cluster_resolver and cores):
            forced = _FORCED.search(os.environ.get("XLA_FLAGS", ""))
            cores = hosts * (int(forced[1]) if forced else 1)
        elif kind == "gpu":
            cores = hosts * len(gpus.found().gpus)
            if not cores:
                raise UsageError(f"this host has no GPU: {gpus.found().how}. Choose platform='cpu'")
        if device_assignment is not None:
            count = device_assignment.num_replicas
            if replicas not in (None, count):
                raise ValueError(f"replicas is {replicas}, but device_assignment has {count}")
            ordinals = tuple(device_assignment.tpu_ordinal(replica) for replica in range(count))
        else:
            count, ordinals = cores if replicas is None else check_int("replicas", replicas, at_least=1), ()
        if count % min(hosts, count):
            raise ValueError(
                f"{count} replicas on {hosts} workers: each worker needs the same number of them"
            )
        each = count // min(hosts, count)
        names = [f"{kind}:{at}" for at in ordinals or (replica % each for replica in range(count))]
        super().__init__(cluster, count, devices=names)
        self._jax = JaxDevices(kind, ordinals, count // each)
        # `ctx.step` of each function's next step
        self._next_steps: OrderedDict[FunctionRef, int] = OrderedDict()

    @property
    def cluster_resolver(self) -> TPUClusterResolver | None:
        """The resolver given to the strategy, or None."""
        return self._resolver

    @property
    def device_assignment(self) -> DeviceAssignment | None:
        """The core of each replica, as given, or None."""
        return self._assignment

    @property
    def steps_per_run(self) -> int:
        """The number of steps that `run_steps` executes in one dispatch."""
        return self._steps_per_run

    def run_steps(
        self, fn: Callable[..., Any], steps: AsyncIterable[Tree], *, ahead: int = STEPS_AHEAD
    ) -> StepRuns:
        """Call `fn` on every replica for each step, `steps_per_run` steps in one dispatch.

        The results are those of single steps, and in their order. The steps of a dispatch that have one structure, and
        the same shapes, are one loop on the devices.

        Args:
            fn, steps: as for `Strategy.run_steps`.
            ahead: limit of steps that are started before the result of the first is taken, at least 1; these are at
                least two dispatches.

        Returns:
            An async iterator of the results of `run`.

        Raises:
            TypeError, ValueError, RuntimeError: as for `Strategy.run_steps`.
        """
        if self._steps_per_run == 1:
            return super().run_steps(fn, steps, ahead=ahead)
        require_cross_replica("Strategy.run_steps")
        require_callable(fn)
        groups = max(2, check_int("ahead", ahead, at_least=1) // self._steps_per_run)
        if not hasattr(type(steps), "__aiter__"):
            return super().run_steps(fn, steps, ahead=ahead)  # raises its TypeError
        grouped = _groups(aiter(steps), self._steps_per_run)
        return _GroupedRuns(
            partial(self._begin_dispatch, fn),
            lambda _group: None,
            partial(self._run_dispatch, fn),
            grouped,
            groups,
        )

    # -- calls: a replica's call gets [number of the first step, arguments of each step] --------

    def _payload(self, call: PreparedCall) -> list[Tree]:
        count = call.steps
        rows = [own if count else [own] for own in call.arguments]
        first = self._next_steps.pop(call.function, 0)
        self._next_steps[call.function] = first + (count or 1)
        while len(self._next_steps) > PASSES_MAX:
            self._next_steps.popitem(last=False)
        return [[first, own] for own in rows]

    def _components_of(self, call: PreparedCall, results: list[Tree]) -> list[Tree]:
        return results if call.steps else [result[0] for result in results]

    def _prepare_dispatch(self, fn: Callable[..., Any], group: Sequence[Sequence[Any]]) -> PreparedCall:
        captured = CapturedVariables(self, self._open_passes().coordinator)
        function = self._references.of(fn, captured)
        rows = [self._arguments(args, None, captured.argument) for args in group]
        arguments: list[Tree] = [list(own) for own in zip(*rows, strict=True)]
        return PreparedCall(function, arguments, captured, steps=len(group))

    def _begin_dispatch(self, fn: Callable[..., Any], args: Sequence[Any]) -> PendingRun | None:
        return self._begin_call(self._prepare_dispatch(fn, args[0]))

    async def _run_dispatch(self, fn: Callable[..., Any], args: Sequence[Any]) -> Tree:
        return await self._run_call(self._prepare_dispatch(fn, args[0]))


async def _groups(steps: AsyncIterator[Tree], size: int) -> AsyncIterator[Tree]:
    group: list[Tree] = []
    async for step in steps:
        group.append(step if type(step) is tuple else (step,))
        if len(group) == size:
            yield (group,)
            group = []
    if group:
        yield (group,)


class _GroupedRuns(StepRuns):
    """The results of runs whose results are lists, one by one."""

    _rest: list[Tree] | None = None

    async def __anext__(self) -> Tree:
        """Return the next step's result."""
        if not self._rest:
            self._rest = list(await super().__anext__())
        return self._rest.pop(0)
