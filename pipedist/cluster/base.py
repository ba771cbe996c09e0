"""Clusters: a coordinator with its workers, inside `async with`.

This module imports next to nothing: an entry point starts the fork server before it loads the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipedist.cluster.launchers.server import prepare
from pipedist.core import gpus as accelerators
from pipedist.core.gpus import Supply
from pipedist.core.import_guard import reject_during_import, without_collections
from pipedist.core.misuse_hints import AsyncOnly, require_loop, running_loop
from pipedist.errors import UsageError
from pipedist.transport.config import SharedMemory

if TYPE_CHECKING:
    import asyncio

    from pipedist.coordinator import Coordinator
    from pipedist.scheduler import SchedulerLimits
    from pipedist.transport.keys import ServerKeys

WORKERS_MAX = 4096

DESCRIPTORS = 32  # open files of a driver that has no local workers
DESCRIPTORS_OF_WORKER = 10  # sockets, a pidfd, ledgers and shared memory: 9 on average with 100 workers
DESCRIPTORS_OF_USER = 256  # open files that the raised limit leaves to the user's program


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checked_count(workers: object) -> int:
    """Return a number of workers, or raise UsageError."""
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"`workers` must be an integer from 1 to {WORKERS_MAX}, got {workers!r}")
    return workers


def allow_descriptors(workers: int) -> None:
    """Raise the soft limit of open files if the driver of local workers needs more.

    Without a descriptor for a new connection, ZeroMQ aborts the process; a usual limit is 1024.

    Raises:
        UsageError: the hard limit is too low.
    """
    needed = DESCRIPTORS + DESCRIPTORS_OF_WORKER * workers
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < needed:
        raise UsageError(
            f"{workers} workers need about {needed:,} open files, and the limit of this process is {hard:,}: use fewer "
            "workers, or raise the hard limit (`ulimit -Hn`)"
        )
    wanted = min(hard, 2 * needed + DESCRIPTORS_OF_USER)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))


class Cluster(AsyncOnly, ABC):
    """A coordinator with its workers, as long as `async with` lasts."""

    def __init__(self, workers: int, supply: Supply) -> None:
        self._workers = checked_count(workers)
        self._supply = supply
        self._stack = AsyncExitStack()
        self._coordinator: Coordinator | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        if self._coordinator is not None:
            raise UsageError("this cluster is open already: enter a shared cluster once")
        reject_during_import(type(self).__name__)
        async with AsyncExitStack() as stack:
            await self._prepare(stack)
            with without_collections():
                made = self._make(stack)
            self._coordinator = await stack.enter_async_context(made)
            self._loop = running_loop()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._coordinator = None
        await self._stack.__aexit__(kind, error, trace)

    async def _prepare(self, stack: AsyncExitStack) -> None:
        """Enter into `stack` what the coordinator needs, before it is made."""

    @abstractmethod
    def _make(self, stack: AsyncExitStack) -> Coordinator:
        """Return the coordinator, not entered; enter what it needs into `stack`."""

    async def gather(self) -> None:
        """Wait for workers that may have cached results of a resumed run."""
        return

    async def ready(self, count: int | None = None) -> None:
        """Return as soon as `count` workers have joined; None: all that are expected.

        Raises:
            WorkersLost: workers die before they join, or all have left.
        """
        await self.coordinator.wait_ready(self._workers if count is None else count)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of this open cluster.

        Raises:
            UsageError: the cluster is not open, or is open in another event loop.
        """
        if self._coordinator is None:
            raise UsageError(f"a cluster is used inside `async with {type(self).__name__}(...) as cluster:`")
        require_loop(self._loop)
        return self._coordinator

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop in which this cluster is open; UsageError if it is not open."""
        if self._coordinator is None or self._loop is None:
            raise UsageError(f"a cluster is used inside `async with {type(self).__name__}(...) as cluster:`")
        return self._loop

    @property
    def workers(self) -> int:
        """The number of workers that are expected."""
        return self._workers

    @property
    def supply(self) -> Supply:
        """The GPUs that its workers own."""
        return self._supply


def dial_in(
    listen: str,  # `tcp://ADDRESS:PORT`; port `*` is any free port
    keys: ServerKeys,
    limits: SchedulerLimits | None = None,
    *,
    force: bool = False,
    rejoin_s: float = 0.0,
    threads: int | None = None,  # BLAS and OpenMP threads that workers must have; None: not checked
) -> Coordinator:
    """Return a coordinator, not entered, whose workers all dial in; `force`, `rejoin_s`: as for `ConnectCluster`."""
    from pipedist.coordinator import Coordinator
    from pipedist.transport.router import Router
    from pipedist.worker.process_setup import boot_id

    return Coordinator(
        router_factory=partial(Router, listen, keys=keys),
        launcher_factory=None,
        workers=(),
        limits=limits,
        dial_in=True,
        boot=boot_id(),
        force=force,
        notify=print_notice,
        rejoin_s=rejoin_s,
        threads=threads,
    )


def print_notice(text: str) -> None:
    """Print a line for the user on standard error."""
    print(text, file=sys.stderr)  # noqa: T201


class LocalCluster(Cluster):
    """Worker processes on this host, as long as `async with` lasts.

    Args:
        workers: the number of workers; None: the number of cores that this process may use.
        threads_per_replica: BLAS and OpenMP threads of each worker.
        limits: the scheduler's bounds.
        shared_memory: False: arrays travel through sockets only, with the same results. This is so anyway
            if the system has no sealed memory, or the environment variable PIPEDIST_SHARED_MEMORY is 0.
        gpus_per_worker: the number of GPUs of this machine that each worker owns, and sees exclusively; a
            fraction such as 0.5: workers share one. If there are too few, the last workers own none. 0: all
            workers see what this process sees, and own none.

    Raises:
        UsageError: a number is out of range; (on entering) there are too few GPUs for one worker, the limit of open
            files is too low, or the cluster is open already.

    Example:
        async with pipedist.LocalCluster(workers=4) as cluster:  # serves any number of runs
            async with pipedist.open("spec.yaml", cluster=cluster) as run:
                result = await run.results()
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        threads_per_replica: int = 1,
        limits: SchedulerLimits | None = None,
        shared_memory: bool = True,
        gpus_per_worker: float = 0,
    ) -> None:
        count = checked_count(usable_cores() if workers is None else workers)
        super().__init__(count, Supply((0.0,) * count, (), "the cluster was made without gpus_per_worker"))
        self._gpus_each = checked_gpus(gpus_per_worker)
        self._visible: tuple[str, ...] | None = None if self._gpus_each else ()
        """CUDA_VISIBLE_DEVICES of each worker; () without `gpus_per_worker`, None: not divided yet."""
        self._names = tuple(f"w{i}" for i in range(self._workers))
        self._threads = threads_per_replica
        self._limits = limits
        self._shared_memory = SharedMemory.of_cluster(self._workers) if shared_memory else None

    async def __aenter__(self) -> Self:
        allow_descriptors(self._workers)
        with prepare(self._threads):
            return await super().__aenter__()

    async def _prepare(self, stack: AsyncExitStack) -> None:
        if self._visible is None:  # it may take half a minute
            import anyio.to_thread  # few clusters need it

            await anyio.to_thread.run_sync(self._divide, abandon_on_cancel=True)

    def _divide(self) -> None:
        each, found = self._gpus_each, accelerators.found()
        if len(found.gpus) < each:
            raise UsageError(
                f"`gpus_per_worker` is {each:g}, but this machine has {len(found.gpus)} GPUs: {found.how}"
            )
        self._visible = tuple(map(",".join, accelerators.owned(found.gpus, each, self._workers)))
        self._supply = accelerators.supply(found, each, self._workers)

    @property
    def supply(self) -> Supply:
        """The GPUs that its workers own."""
        if self._visible is None:
            self._divide()
        return self._supply

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        from pipedist.cluster.launchers.local import LocalLauncher
        from pipedist.coordinator import Coordinator
        from pipedist.transport.endpoints import ipc_endpoint, private_directory
        from pipedist.transport.router import Router
        from pipedist.worker.process_setup import boot_id

        owned = zip(self._visible or (), self.supply.owned or (), strict=True)
        gpus = dict(zip(self._names, owned, strict=True)) if self._visible else {}
        endpoint = ipc_endpoint(stack.enter_context(private_directory()))
        return Coordinator(
            router_factory=partial(Router, endpoint, keys=None, shared_memory=self._shared_memory),
            launcher_factory=lambda at: LocalLauncher(at, threads=self._threads, gpus=gpus),
            workers=self._names,
            limits=self._limits,
            boot=boot_id(),
            shared_memory=self._shared_memory is not None,
        )

    @property
    def names(self) -> Sequence[str]:
        """The workers' names."""
        return self._names

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of living workers, by name."""
        return self.coordinator.pids

    def kill(self, worker: int | str) -> None:
        """Kill a worker process with SIGKILL; it is replaced.

        Args:
            worker: its number or its name.

        Raises:
            UsageError: there is no such worker, or the cluster is not open.
        """
        self.coordinator.kill(_name(worker))

    def pause(self, worker: int | str) -> None:
        """Stop a worker process (SIGSTOP) until `resume`.

        It is killed if that takes too long.

        Args:
            worker: its number or its name.

        Raises:
            UsageError: there is no such worker, or it is not alive.
        """
        self._signal(worker, signal.SIGSTOP)

    def resume(self, worker: int | str) -> None:
        """Continue a worker process that was stopped (SIGCONT).

        Args:
            worker: its number or its name.

        Raises:
            UsageError: there is no such worker, or it is not alive.
        """
        self._signal(worker, signal.SIGCONT)

    def cut(self, worker: int | str) -> None:
        """Cut the connection to a worker.

        Its messages are dropped, and it is replaced.

        Args:
            worker: its number or its name.

        Raises:
            UsageError: there is no such worker, or it has not joined.
        """
        self.coordinator.cut(_name(worker))

    async def restart(self, worker: int | str) -> None:
        """Kill a worker process, and return as soon as the next one has joined.

        Args:
            worker: its number or its name.

        Raises:
            UsageError: there is no such worker.
            WorkersLost: workers die before they join.
        """
        await self.coordinator.restart(_name(worker))

    def _signal(self, worker: int | str, number: signal.Signals) -> None:
        name = _name(worker)
        pid = self.pids.get(name)
        if pid is None:
            raise UsageError(f"worker {name!r} is not alive: {', '.join(self.pids) or 'none'} are")
        with contextlib.suppress(ProcessLookupError):  # it has just ended: the launcher reports that
            os.kill(pid, number)


def checked_gpus(each: float) -> float:
    """Return a number of GPUs per worker, or raise UsageError."""
    if each != 0 and (
        isinstance(each, bool)
        or not isinstance(each, int | float)
        or not (0 < each < 1 or each in range(1, accelerators.GPUS_MAX + 1))
    ):
        raise UsageError(
            f"`gpus_per_worker` must be 0, an integer up to {accelerators.GPUS_MAX}, or a fraction, "
            f"got {each!r}"
        )
    return each


def _name(worker: int | str) -> str:
    return f"w{worker}" if isinstance(worker, int) else worker
