"""Workers placed by Ray: a placement group with one bundle a worker, and an actor in each.

What Ray does: finds room, starts the actors, and starts them again where a node was lost. What it does not
do: execute calls, carry data, or try anything again; the actors' methods are never repeated.

Ray ties the processes that it starts to the thread that starts them, so one thread makes all calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import anyio

from pipedist.errors import UsageError
from pipedist.launchers.engines import (
    GRACE_S,
    LOCAL,
    ConnectedEngine,
    OnFailed,
    address_towards,
    not_installed,
    require,
)
from pipedist.launchers.hosted import Terms
from pipedist.launchers.modules import copy_modules
from pipedist.launchers.ray_host import RayHost
from pipedist.scratch_folders import ScratchFolder

RESTARTS_MAX = 1000
"""How often Ray starts an actor again."""

STORE_BYTES = 100 * 2**20
"""The object store of a Ray of the run's own: nothing of the run's goes through it."""

_LOOK_S = 0.5
"""How soon a cancel is noticed while Ray looks for room."""

_ANSWER_S = 10.0
"""How long a Ray cluster's address may take to answer."""

T = TypeVar("T")


class RayEngine(ConnectedEngine):
    """A connection to Ray, and the actors that keep the workers.

    Args:
        address: `local`: a Ray of its own on this host; `auto`: the one that runs here or that RAY_ADDRESS
            names; `HOST:PORT`, `ray://HOST:PORT`; None: like `auto`, and `local` where there is none. Where
            this process is connected to Ray already, that connection is used, and left open.
        workers: how many actors.
        cpus, gpus: what Ray sets aside for each.
        placement: `pack`: on as few nodes as there is room on; `spread`: on as many.
        place_s: how long Ray may take to have room for all of them; before, a client server to answer.
        code: the folder whose modules are sent to the nodes; None: nothing is sent.

    Raises:
        UsageError: Ray is not installed.
    """

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
        self._workers = workers
        self._bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self._placement = placement
        self._place_s = place_s
        self._code = code
        self._brings_code = False
        self._is_ours = False
        """Whether the connection is this engine's to end."""
        self._scratch = Path()
        """For a Ray of its own, and for the copy of the modules that are sent."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipedist-ray")
        self._group: Any = None
        self._actors: list[Any] = []
        self._left: list[str] = []
        """How workers left that will not come back."""

    async def start(self, terms: Terms, on_failed: OnFailed) -> None:
        """Have Ray place the actors; see `Engine.start`."""
        watchers = self.watchers
        await self._room()
        self._actors = await self._call(self._make_actors, terms)
        for number in range(self._workers):
            watchers.start(self._watch, number, on_failed)

    def _prepare(self, stack: AsyncExitStack) -> None:
        stack.callback(self._thread.shutdown, wait=False)
        scratch = ScratchFolder("ray", "/tmp")  # of sockets: a short path
        stack.callback(scratch.close)
        self._scratch = Path(scratch.path)

    async def _connect(self) -> str:
        return await self._call(self._join_or_start)

    async def _withdraw(self) -> None:
        await self._call(self._end_actors)

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

        if ray.is_initialized():
            if self._address not in (None, "auto"):
                raise UsageError(
                    f"this process is connected to Ray already, so `address: {self._address}` comes too "
                    "late: leave it out, or call ray.shutdown() before"
                )
        elif self._address == LOCAL:
            self._start_local()
        else:
            try:
                self._join(self._address or "auto")
            except ConnectionError as error:
                if self._address is not None:
                    raise UsageError(
                        f"no Ray cluster answers at {self._address}: {error}; start one (ray start --head), "
                        "or say `address: local` for one of the run's own"
                    ) from None
                self._start_local()
        return self._own_address()

    def _start_local(self) -> None:
        import ray

        self._is_ours = True
        self._address = LOCAL
        ray.init(
            address=LOCAL,
            num_cpus=self._workers * self._bundle["CPU"],
            num_gpus=self._workers * self._bundle.get("GPU", 0) or None,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._scratch / "r"),  # the paths of its sockets must be short
        )

    def _join(self, address: str) -> None:
        import ray

        if address != "auto":  # Ray itself would try for a long time
            host, _, port = address.removeprefix("ray://").rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
            except OSError as error:
                raise ConnectionError(str(error)) from error
        environment = {}
        if self._code is not None:
            copy = self._scratch / "code"
            copy.mkdir()
            copy_modules(self._code, copy)
            environment = {"working_dir": str(copy)}
        until = time.monotonic() + self._place_s
        while True:
            try:
                ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
                break
            except (
                ConnectionError
            ):  # a client server starts a process for each client, which may come to nothing
                if not address.startswith("ray://") or time.monotonic() >= until:
                    raise
        self._is_ours = True
        self._brings_code = bool(environment)

    def _own_address(self) -> str:
        import ray

        if self._address == LOCAL:
            return "127.0.0.1"
        if ray.util.client.ray.is_connected():  # this host is none of Ray's: seen from one of those
            nodes = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
            return address_towards(nodes[0])
        return str(ray.util.get_node_ip_address())

    def _make_group(self) -> Any:
        from ray.util.placement_group import placement_group

        return placement_group([self._bundle] * self._workers, strategy=self._placement.upper())

    def _make_actors(self, terms: Terms) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host = ray.remote(RayHost)
        return [
            host.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=RESTARTS_MAX,
                max_task_retries=0,
                max_concurrency=2,  # `close` while `left` waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            ).remote(terms.endpoint, terms.keys, terms.threads, self._brings_code)
            for number in range(self._workers)
        ]

    def _resources(self) -> str:
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        return ", ".join(
            f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self._bundle
        )

    def _end_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        closing = [actor.close.remote(GRACE_S) for actor in self._actors]
        if closing:  # those of lost nodes do not answer
            ray.wait(closing, num_returns=len(closing), timeout=2 * GRACE_S)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # -- on the event loop -------------------------------------------------------------------------

    async def _room(self) -> None:
        self._group = await self._call(self._make_group)
        with anyio.move_on_after(self._place_s) as looking:
            while not await self._call(self._group.wait, _LOOK_S):
                pass
        if looking.cancelled_caught:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
            raise UsageError(
                f"Ray has had no room for {self._workers} workers of {wanted} each within "
                f"{self._place_s:g} s; it has {await self._call(self._resources)}: ask for fewer "
                "(--workers), add nodes, or wait longer (`cluster: {place_s: SECONDS}`)"
            )

    async def _watch(self, number: int, on_failed: OnFailed) -> None:
        """See to it that the end of the last worker is told."""
        from ray.exceptions import RayError

        actor = self._actors[number]
        while True:
            try:
                how = await self._answer(actor.left)
                break
            except RayError:
                try:
                    await self._answer(actor.__ray_ready__)  # it has been started again
                except RayError as error:
                    text = str(error).strip()
                    how = not_installed(text) or text
                    break
        if not how:  # it was told to leave: the cluster is closed
            return
        print(f"pipedist: a worker placed by Ray has left: {how}", file=sys.stderr)  # noqa: T201
        self._left.append(how)
        if len(self._left) == self._workers:
            on_failed(f"all {self._workers} workers placed by Ray have left; the last one: {how}")

    async def _answer(self, method: Any) -> str:
        """Return what a method answers; where that is cancelled, Ray's own future is not.

        Ray Client ends its connection over a future that was.
        """
        theirs: Future[Any] = await self._call(lambda: method.remote().future())
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def tell(_future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(is_done.set)

        theirs.add_done_callback(tell)
        await is_done.wait()
        return str(theirs.result())
