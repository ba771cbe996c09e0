"""A cluster of one program on every host, each with its TF_CONFIG.

The first task (chief 0, else master 0, else worker 0) schedules: its program has the coordinator. The others
serve: they have worker processes, and wait for the results that the scheduling program shares. So every
program runs the same code, as with tf.distribute's MultiWorkerMirroredStrategy, but work is executed once:
`everywhere` runs it in the scheduling program, on the workers of all, and returns its result in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from pipedist.cluster.base import Cluster, checked_count, dial_in, print_notice
from pipedist.cluster.remote import is_loopback, server_keys
from pipedist.cluster.resolvers import ClusterResolver, ClusterSpec
from pipedist.cluster.resolvers_environment import TFConfigClusterResolver
from pipedist.coordinator import Coordinator
from pipedist.coordinator.worker_pool import SharedValues
from pipedist.core.gpus import Supply
from pipedist.core.types import Tree
from pipedist.errors import RemoteError, RunCancelled, UsageError
from pipedist.protocol.codec import decode, encode
from pipedist.transport.endpoints import parse_endpoint
from pipedist.transport.keys import read_key_file, write_key_file
from pipedist.worker.identity import SILENT_S
from pipedist.worker.supervisor import Supervisor

KEY_FILE_VARIABLE = "PIPEDIST_KEY_FILE"  # has the path of the key file, if no argument does
_SCHEDULING = ("chief", "master", "worker")  # task 0 of the first of these jobs that there is schedules

_JOIN_S = 60.0
_LEAVE_S = 10.0


def open_cluster(
    resolver: ClusterResolver | None = None,
    *,
    key_file: str | os.PathLike[str] | None = None,
    workers: int = 1,
    threads_per_replica: int = 1,
    join_s: float = _JOIN_S,
    force: bool = False,
) -> TaskCluster:
    """Return the cluster that this program is part of.

    Use it with `async with pipedist.open_cluster() as cluster`.

    Args:
        resolver: has the tasks, and the one of this program; None: from TF_CONFIG in the environment. The
            cluster listens at the scheduling task's address.
        key_file: the cluster's keys, the same on every host; None: the file in the environment variable
            PIPEDIST_KEY_FILE. Not needed if the scheduling task's address is a loopback address.
        workers: the number of worker processes of each program.
        threads_per_replica: BLAS and OpenMP threads of each of them.
        join_s: how long programs wait for each other, seconds.
        force: as for `ConnectCluster`.

    Raises:
        UsageError: the resolver does not have the task of this program, a number is out of range, or there
            are no keys although other hosts can reach the address.

    Example:
        async with pipedist.open_cluster() as cluster:  # the same program on every host, with TF_CONFIG
            found = await cluster.everywhere(work)
    """
    return TaskCluster(
        TFConfigClusterResolver() if resolver is None else resolver,
        key_file=key_file,
        workers=workers,
        threads_per_replica=threads_per_replica,
        join_s=join_s,
        force=force,
    )


class TaskCluster(Cluster):
    """One program on each host, together; see `open_cluster`.

    The scheduling program uses it like any cluster. In the others it serves: leaving it waits until the
    scheduling program leaves its own. An exception, or a cancellation, leaves at once.

    Example:
        async with pipedist.open_cluster() as cluster:
            print(cluster.task_type, cluster.task_id, await cluster.everywhere(work))
    """

    def __init__(
        self,
        resolver: ClusterResolver,
        *,
        key_file: str | os.PathLike[str] | None,
        workers: int,
        threads_per_replica: int,
        join_s: float,
        force: bool,
    ) -> None:
        spec, role, index, job = _tasks_of(resolver)
        tasks = [f"{each}/{i}" for each in spec.jobs for i in spec.task_indices(each)]
        super().__init__(checked_count(workers) * len(tasks), Supply(None, (), "programs bring them"))
        self.task_type: str = role
        """The job of this program."""
        self.task_id: int = index
        """The index of this program in its job."""
        self._scheduling = f"{job}/0"
        self._missing = set(tasks)  # tasks without a heartbeat until now; in the scheduling program
        address = spec.task_address(job, 0)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"the address of {job}/0 must be HOST:PORT, got {address!r}")
        self._endpoint = f"tcp://{address}"
        try:
            parse_endpoint(self._endpoint, bind=False, has_keys=True)
        except UsageError as error:  # in a supervisor's thread, it would keep the other programs waiting
            raise UsageError(f"the address of {job}/0 is {address!r}: {error}") from None
        self._listen = f"tcp://{'127.0.0.1' if host == 'localhost' else host if is_loopback(host) else '*'}"
        self._listen += f":{port}"
        named = os.environ.get(KEY_FILE_VARIABLE, "") if key_file is None else os.fspath(key_file)
        if not named and not is_loopback(host):
            raise UsageError(
                f"the cluster needs keys: other hosts can reach {address}. Create them with `pipedist keys new`, "
                f"copy the file to every host, and set `key_file` or {KEY_FILE_VARIABLE}."
            )
        self._key_file = os.path.abspath(named) if named else ""
        self._each = workers
        self._threads = threads_per_replica
        self._join_s = join_s
        self._force = force
        self._supervisors: list[Supervisor] = []
        self._shared: SharedValues[Tree] = SharedValues()
        self._called = 0  # calls of `everywhere`
        self._turn = anyio.Lock()
        """Held by the running call of `everywhere`: results are numbered in the order of the calls."""
        self._ended = 0  # supervisors that have ended
        self._error: BaseException | None = None  # the first exception of a supervisor
        self._changed = anyio.Event()

    @property
    def is_scheduling(self) -> bool:
        """Whether this program schedules."""
        return f"{self.task_type}/{self.task_id}" == self._scheduling

    @property
    def coordinator(self) -> Coordinator:
        """The open coordinator, in the scheduling program.

        Raises:
            UsageError: the cluster is not open, or this program serves.
        """
        if self._supervisors and not self.is_scheduling:
            raise UsageError(
                f"{self.task_type}/{self.task_id} has no coordinator: {self._scheduling} schedules. Put the "
                "work into a function, and `await cluster.everywhere(function)` in every program."
            )
        return super().coordinator

    async def everywhere(self, work: Callable[[Cluster], Awaitable[Tree]]) -> Tree:
        """Run work in the scheduling program; return its result in all.

        Every program must call this equally often. Concurrent calls are executed one after the other, in their order.

        Args:
            work: called with this cluster, in the scheduling program only; returns a tree.

        Raises:
            UnsendableError: in the scheduling program: the result can't be serialized.
            RemoteError: in the others: the work has failed.
            RunCancelled: in the others: the scheduling program is gone, or the result is no longer kept: this program
                is 1,024 calls behind, or has started that late.
        """
        async with self._turn:
            self._called += 1
            return await (self._execute(work) if self.is_scheduling else self._result_of(self._called))

    async def _execute(self, work: Callable[[Cluster], Awaitable[Tree]]) -> Tree:
        try:
            made = await work(self)
            made = dict(made) if isinstance(made, Mapping) else made
            frames = encode([True, made])
        except BaseException as error:
            self.coordinator.share([False, f"{type(error).__name__}: {error}"])
            raise
        self.coordinator.share([True, made])
        return decode([memoryview(frame) for frame in frames])[1]

    async def _result_of(self, number: int) -> Tree:
        while number > self._shared.last:
            if self._all_ended():
                raise self._error or RunCancelled(
                    f"{self._scheduling} at {self._endpoint} has sent no result: it ended, never replied, or "
                    "rejected this program's workers, which print why on standard error"
                )
            await self._changed.wait()
        try:
            succeeded, value = self._shared.take(number)
        except KeyError:
            raise RunCancelled(
                f"result {number} of `everywhere` is no longer kept: this program is too far behind "
                f"{self._scheduling}. Start all programs again, at the same time."
            ) from None
        if not succeeded:
            raise RemoteError(f"{self._scheduling} failed: {value}")
        return value

    # -- lifetime --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._supervisors:
            raise UsageError("this cluster is open already: enter a shared cluster once")
        loop = asyncio.get_running_loop()
        try:
            self._key_file = self._key_file or loopback_key_file()
            read_key_file(self._key_file)  # a bad key file is reported before anything starts
            if self.is_scheduling:
                await super().__aenter__()
                self.coordinator.on_supervisor(self._on_heartbeat)
            for number in range(self._each):
                self._start(loop, number)
        except BaseException as error:  # a failed entry has no exit
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    def _start(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        def on_share(share: int, frames: list[memoryview]) -> None:
            # every supervisor receives the same, in the same order: the first one counts
            if share > self._shared.last and not self.is_scheduling:
                size_bytes = sum([frame.nbytes for frame in frames])
                loop.call_soon_threadsafe(self._on_shared, share, decode(frames), size_bytes)

        supervisor = Supervisor(
            self._endpoint,
            self._key_file,
            threads=self._threads,
            join_s=self._join_s,
            # In the scheduling program, the scheduler is in this process: it is not gone.
            rejoin_s=self._join_s if self.is_scheduling else 0.0,
            task=f"{self.task_type}/{self.task_id}",
            on_share=on_share,
        )

        def serve() -> None:
            error: BaseException | None = None
            try:
                supervisor.run()
            except BaseException as caught:  # it is raised in the event loop's thread
                error = caught
            loop.call_soon_threadsafe(self._on_ended, error)

        threading.Thread(target=serve, name=f"pipedist-supervisor-{number}", daemon=True).start()
        self._supervisors.append(supervisor)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.is_scheduling and kind is None:
                await self._wait_for_all_tasks()  # they wait for shared results, and for a Stop
            elif kind is None:
                await self._until(self._all_ended)
        finally:
            try:
                if self.is_scheduling:
                    await super().__aexit__(kind, error, trace)
            finally:
                for supervisor in self._supervisors:
                    supervisor.leave(at_once=True)
                with anyio.move_on_after(_LEAVE_S, shield=True):
                    await self._until(self._all_ended)
        if kind is None and self._error is not None:
            raise self._error

    async def _wait_for_all_tasks(self) -> None:
        """Wait for a heartbeat of every task, for `join_s`; print missing ones."""
        with anyio.move_on_after(self._join_s):
            with anyio.move_on_after(SILENT_S):
                await self._until(lambda: not self._missing)
            if self._missing:
                missing = ", ".join(sorted(self._missing))
                print_notice(f"waiting for tasks, for at most {self._join_s:g} s: {missing}")
            await self._until(lambda: not self._missing)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _all_ended(self) -> bool:
        return self._ended == len(self._supervisors)

    def _make(self, stack: AsyncExitStack) -> Coordinator:
        return dial_in(
            self._listen, server_keys(self._key_file, self._listen), force=self._force, threads=self._threads
        )

    # -- on the event loop -------------------------------------------------------------------

    def _on_heartbeat(self, worker: str) -> None:
        self._missing.discard(worker.partition(":")[0])
        self._wake()

    def _on_shared(self, number: int, value: Tree, size_bytes: int) -> None:
        self._shared.add(number, value, size_bytes)  # after a reconnection those that are kept are sent again
        self._wake()

    def _on_ended(self, error: BaseException | None) -> None:
        self._ended += 1
        if error is not None and self._error is None:
            self._error = error
            print_notice(f"a supervisor of {self.task_type}/{self.task_id} has failed: {error!r}")
        self._wake()
        if self.is_scheduling and self._all_ended():
            self._check_later()

    def _check_later(self) -> None:
        asyncio.get_running_loop().call_later(self._join_s, self._check)

    def _check(self) -> None:
        """Fail if, after others had time to join, there is no worker."""
        if self._coordinator is None:
            return
        if self._coordinator.workers_ready:
            self._check_later()
            return
        why = "see its standard error" if self._error is None else repr(self._error)
        self._coordinator.fail(
            f"all workers of {self._scheduling} have ended ({why}), and no other program "
            f"has had one for {self._join_s:g} s. Check that each task has one program."
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _tasks_of(resolver: ClusterResolver) -> tuple[ClusterSpec, str, int, str]:
    """Return the tasks, the role and index of this program, and the job whose task 0 schedules; or raise UsageError."""
    spec = resolver.cluster_spec()
    if not spec:
        raise UsageError("the cluster has no tasks. Set TF_CONFIG, or give a resolver.")
    listed = ", ".join(f"{each}: {tasks}" for each, tasks in spec.as_dict().items())
    role, index = resolver.task_type, resolver.task_id
    if role is None and index is None:
        if isinstance(resolver, TFConfigClusterResolver):
            raise UsageError(
                f'TF_CONFIG has no `task`. Set `"task": {{"type": ..., "index": ...}}` to one of {listed}.'
            )
        raise UsageError(
            f"{type(resolver).__name__} does not know the task of this program. Give it: "
            f"UnionResolver(resolver, task_type=..., task_id=...), one of {listed}."
        )
    if role is None or index is None or role not in spec.jobs or index not in spec.task_indices(role):
        raise UsageError(f"task {role}/{index} is not in the cluster: {listed}")
    job = next((each for each in _SCHEDULING if each in spec.jobs and 0 in spec.task_indices(each)), None)
    if job is None:
        raise UsageError(f"no task can schedule: {spec!r} has no chief 0, master 0 or worker 0")
    return spec, role, index, job


def loopback_key_file() -> str:
    """Return the path of this user's key file for clusters on this host; create it if it is missing.

    Every user of a host can connect to its loopback addresses, so these clusters need keys too. The file is in a
    folder that only this user can enter.
    """
    folder = os.path.join(tempfile.gettempdir(), f"pipedist-keys-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise UsageError(f"can't create the folder for keys, {folder}: {error.strerror}") from None
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise UsageError(
            f"{folder} is not a folder that only you can enter (mode 0700). Remove it, or set `key_file`."
        )
    path = os.path.join(folder, "loopback.key")
    if not os.path.exists(path):
        staged = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        write_key_file(staged)
        try:
            os.link(staged, path)
        except FileExistsError:  # another program was first: its keys are used
            pass
        finally:
            os.unlink(staged)
    return path
