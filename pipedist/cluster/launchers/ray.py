"""Workers placed by Ray: each in an actor, in a placement group.

Ray reserves resources, starts the actors, and starts them again when a node is lost. It executes no call,
carries no data and retries nothing: methods of actors are never repeated.

Ray ties the processes that it starts to the thread that starts them, so one thread makes all calls of Ray.
Ray is imported inside functions, so that a node needs only what the actor uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import anyio
from msgspec import Struct
from msgspec.structs import replace

from pipedist.cluster.launchers.engines import (
    GRACE_S,
    LOCAL,
    Engine,
    OnFailed,
    address_towards,
    not_installed,
    require,
)
from pipedist.cluster.launchers.supervisor_process import JoinConfig, SupervisorProcess
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.errors import UsageError
from pipedist.protocol.code_archive import CodeTooLarge, unpack
from pipedist.protocol.code_archive import take as take_snapshot

AUTO = "auto"  # the address of the Ray that runs on this host, or that RAY_ADDRESS names
STORE_BYTES = 100 * 2**20  # the object store of a Ray that the cluster starts: the run puts nothing into it
RESTARTS_MAX = 1000  # how often Ray starts an actor again
_REPLY_S = 10.0  # how long the address of a Ray cluster may take to accept a connection
_POLL_S = 0.5  # how soon a cancellation is noticed while Ray looks for resources

T = TypeVar("T")


class RayResources(Struct, frozen=True):
    """Resources that Ray reserves: equal bundles of resources by name."""

    workers: int
    bundle: Mapping[str, float]
    placement: str  # `pack`: on as few nodes as have the resources; `spread`: on as many


class RayActor:
    """The supervisor of one worker; methods run in threads of the actor, whose folder may have the spec's modules."""

    def __init__(self, join: JoinConfig, has_code: bool) -> None:
        code = (os.getcwd(),) if has_code else ()
        self._supervisor = SupervisorProcess(replace(join, code=code))

    def left(self) -> str | None:
        return self._supervisor.wait()

    def close(self, grace_s: float) -> None:
        self._supervisor.close(grace_s)


class RayEngine(Engine):
    """A connection to Ray, and the actors with the workers; see `RayCluster`."""

    def __init__(
        self,
        *,
        address: str | None,
        workers: int,
        cpus: int,
        gpus: float,
        placement: str,
        place_s: float,
        code: Path | None,
    ) -> None:
        super().__init__()
        require("ray", "ray")
        self._address = address
        self._resources = RayResources(workers, {"CPU": cpus, **({"GPU": gpus} if gpus else {})}, placement)
        self._place_s = place_s
        self._code = code
        self._has_code = False
        self._is_ours = False  # the connection is this engine's to close
        self._scratch = Path()  # for a Ray of its own, and for the copy of the modules that are sent
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipedist-ray")
        self._group: Any = None
        self._actors: list[Any] = []
        self._left = 0  # supervisors that have left for good

    async def start(self, join: JoinConfig, on_failed: OnFailed) -> None:
        await self._call(self._make_group)
        await self._wait_for_group()
        await self._call(self._make_actors, join)
        for actor in self._actors:
            self.watchers.start(self._watch, actor, on_failed)

    def _prepare(self, stack: AsyncExitStack) -> None:
        stack.callback(self._thread.shutdown, wait=False)
        scratch = ScratchFolder("ray", "/tmp")  # Ray has sockets in it: their paths must be short
        stack.callback(scratch.close)
        self._scratch = Path(scratch.path)

    async def _connect(self) -> str:
        return await self._call(self._join_or_start)

    async def _withdraw(self) -> None:
        try:
            await self._call(_connected, self._end_actors)
        except ConnectionError as error:
            print(f"pipedist: can't end the workers that Ray has placed: {error}", file=sys.stderr)  # noqa: T201

    async def _disconnect(self) -> None:
        if self._is_ours:
            import ray

            await self._call(ray.shutdown)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in Ray's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(function, *args))

    # -- in Ray's thread -------------------------------------------------------------------------

    def _join_or_start(self) -> str:
        import ray

        address = self._address
        if address is None or address == AUTO:
            address = os.environ.get("RAY_ADDRESS") or AUTO
        if ray.is_initialized():
            if self._address not in (None, AUTO):
                raise UsageError(
                    f"`address: {self._address}` can't be used: this process is connected to Ray already. "
                    "Leave `address` out, or call ray.shutdown() before."
                )
        elif address == LOCAL:
            self._start_local()
        else:
            try:
                self._join(address)
            except ConnectionError as error:
                if self._address is not None or address != AUTO:
                    raise UsageError(
                        f"can't reach a Ray cluster at {address}: {error}. Start one with `ray start "
                        "--head`, or use `address: local`."
                    ) from None
                self._start_local()
        if self._address == LOCAL:
            return "127.0.0.1"
        if ray.util.client.ray.is_connected():  # this host is not a node of Ray
            nodes = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
            return address_towards(nodes[0])
        return str(ray.util.get_node_ip_address())

    def _start_local(self) -> None:
        import ray

        self._is_ours = True
        self._address = LOCAL
        workers, bundle = self._resources.workers, self._resources.bundle
        ray.init(
            address=LOCAL,
            num_cpus=workers * bundle["CPU"],
            num_gpus=workers * bundle.get("GPU", 0) or None,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._scratch / "r"),  # the paths of its sockets must be short
        )

    def _join(self, address: str) -> None:
        environment = {}
        if self._code is not None:
            copy = self._scratch / "code"
            copy_code(self._code, copy)
            environment = {"working_dir": str(copy)}
        _connect_to(address, environment, self._place_s)
        self._is_ours = True
        self._has_code = bool(environment)

    # Group and actors are noted in this thread: the task that waits for them may be cancelled meanwhile.

    def _make_group(self) -> None:
        self._group = make_group(self._resources)

    def _make_actors(self, join: JoinConfig) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for number in range(self._resources.workers):
            actor = ray.remote(RayActor).options(
                num_cpus=self._resources.bundle["CPU"],
                num_gpus=self._resources.bundle.get("GPU", 0),
                max_restarts=RESTARTS_MAX,
                max_task_retries=0,
                max_concurrency=2,  # `close` while `left` waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            )
            self._actors.append(actor.remote(join, self._has_code))

    def _describe_resources(self) -> str:
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        return ", ".join(
            f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self._resources.bundle
        )

    def _end_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        closing = [actor.close.remote(GRACE_S) for actor in self._actors]
        if closing:  # actors of lost nodes do not reply
            ray.wait(closing, num_returns=len(closing), timeout=2 * GRACE_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._group = [], None

    # -- on the event loop -------------------------------------------------------------------------

    async def _wait_for_group(self) -> None:
        """Return as soon as Ray has reserved the resources, or raise UsageError."""
        with anyio.move_on_after(self._place_s) as waiting:
            while not await self._call(self._group.wait, _POLL_S):
                pass
        if waiting.cancelled_caught:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._resources.bundle.items())
            raise UsageError(
                f"Ray has had no room for {self._resources.workers} workers of {wanted} each within "
                f"{self._place_s:g} s; it has {await self._call(self._describe_resources)}. Use fewer "
                "(`--workers`), add nodes, or wait longer (`cluster: {place_s: SECONDS}`)."
            )

    async def _watch(self, actor: Any, on_failed: OnFailed) -> None:
        """Wait until a supervisor has left for good; report the last one's end."""
        from ray.exceptions import RayError

        while True:
            try:
                reason = str(await self._reply(actor.left.remote))
                break
            except (RayError, ConnectionError):
                if reason := await self._wait_for_restart(actor):
                    break
        self._left += 1
        if not reason:  # the cluster is closed
            return
        print(f"pipedist: a worker placed by Ray has left: {reason}", file=sys.stderr)  # noqa: T201
        if self._left == self._resources.workers:
            on_failed(f"all {self._left} workers placed by Ray have left; the last one: {reason}")

    async def _wait_for_restart(self, actor: Any) -> str:
        """Return "" when Ray has restarted an actor, or why Ray does not.

        An actor that is unavailable is called again: Ray does not know yet whether its node is lost.
        """
        from ray.exceptions import ActorUnavailableError, RayError

        while True:
            try:
                await self._reply(actor.__ray_ready__.remote)
            except ActorUnavailableError:
                await anyio.sleep(_POLL_S)
            except ConnectionError as error:
                return f"the connection to Ray was lost: {error}"
            except RayError as error:
                text = str(error).strip()
                return not_installed(text) or text or type(error).__name__
            else:
                return ""

    async def _reply(self, call: Callable[[], Any]) -> Any:
        """Return the reply of an actor.

        A cancellation does not cancel Ray's own future: Ray Client closes its connection when one of its is cancelled.
        """
        future: Future[Any] = await self._call(_connected, lambda: call().future())
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def on_done(_future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(is_done.set)

        future.add_done_callback(on_done)
        await is_done.wait()
        return future.result()


def make_group(resources: RayResources) -> Any:
    from ray.util.placement_group import placement_group

    bundles = [dict(resources.bundle)] * resources.workers
    return placement_group(bundles, strategy=resources.placement.upper())


def copy_code(code: Path, to: Path) -> None:
    """Write the files of a code folder that may be sent to a new folder."""
    try:
        snapshot = take_snapshot(os.path.abspath(code))
    except (CodeTooLarge, OSError) as error:
        raise UsageError(f"the code can't be sent to Ray's nodes: {error}") from None
    unpack(snapshot.to_tree(), snapshot.digest, str(to))


def _connect_to(address: str, environment: Mapping[str, object], place_s: float) -> None:
    """Connect this process to a Ray cluster; `environment` is the `runtime_env` of what it starts there.

    A client server may take `place_s` to start its process for this one. ConnectionError: no Ray accepts a
    connection there; UsageError: it has another version of Ray or Python, or Ray Client is not installed.
    """
    import ray

    if address != AUTO:  # Ray itself would try for a long time
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REPLY_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ConnectionError(str(error)) from error
    until = time.monotonic() + place_s
    while True:
        try:
            ray.init(
                address=address, runtime_env=dict(environment), log_to_driver=False, logging_level="ERROR"
            )
        except ConnectionError:  # the process that a client server starts for a client may fail to start
            if not address.startswith("ray://") or time.monotonic() >= until:
                raise
        except (ImportError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise UsageError(f"can't join the Ray cluster at {address}: {str(error).strip()}") from error
        else:
            return


def _connected(function: Callable[[], T]) -> T:
    """Call a function of Ray; raise ConnectionError if Ray Client lost it."""
    import ray

    try:
        return function()
    except Exception as error:
        if ray.is_initialized():
            raise
        raise ConnectionError(str(error).partition("\n")[0]) from error
