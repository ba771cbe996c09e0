"""Workers placed by Ray: a placement group with one bundle a worker, and an actor in each.

What Ray does: finds room, starts the actors, and starts them again where a node was lost. What it does not
do: execute calls, carry data, or try anything again; the actors' methods are never repeated.

Ray ties the processes that it starts to the thread that starts them, so one thread makes all calls.

Where the workers outlive the process of the run, a detached actor places them instead
(`pipedist.launchers.ray_keeper`), which the next process finds by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import anyio

from pipedist.errors import UsageError
from pipedist.launchers.engines import (
    LOCAL,
    ConnectedEngine,
    OnFailed,
    address_towards,
    not_installed,
    outliving,
    require,
)
from pipedist.launchers.hosted import Terms
from pipedist.launchers.modules import copy_modules
from pipedist.launchers.ray_joining import AUTO, join, named
from pipedist.launchers.ray_keepers import end_keeper, end_keepers, find_keeper, make_keeper
from pipedist.launchers.ray_placing import Room, end_hosts, make_group, make_host
from pipedist.launchers.whereabouts import Succession
from pipedist.temp_dirs import ScratchFolder

STORE_BYTES = 100 * 2**20
"""The object store of a Ray of the run's own: nothing of the run's goes through it."""

_LOOK_S = 0.5
"""How soon a cancel is noticed while Ray looks for room."""

_NEWS_S = 2.0
"""How long a keeper waits at most for something to tell; so often it hears of this process."""

_OUTLIVING = ("Ray", "auto")

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
        outlives: its workers are to outlive this process.

    Raises:
        UsageError: Ray is not installed, or workers are to outlive a `local` one.
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
        outlives: bool = False,
    ) -> None:
        super().__init__()
        require("ray", "ray")
        if outlives and address == LOCAL:
            raise outliving(address, *_OUTLIVING)
        self._address = address
        self._outlives = outlives
        self._room = Room(workers, {"CPU": cpus, **({"GPU": gpus} if gpus else {})}, placement)
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
        self._keeper: Any = None
        """Who places the workers, where they are to outlive this process."""
        self._left: list[str] = []
        """How workers left that will not come back."""
        self.placed = workers
        """See `Engine`."""

    @property
    def placing(self) -> str:
        """What its workers are placed on, and with; see `Engine`."""
        room = self._room
        return json.dumps(["ray", self._address, room.workers, room.bundle, room.placement, self._modules()])

    async def start(self, terms: Terms, on_failed: OnFailed, succession: Succession | None = None) -> None:
        """Have Ray place the actors; see `Engine.start`."""
        watchers = self.watchers
        if succession is not None:
            await self._call(self._find_or_make_keeper, terms, succession)
            await self._wait_for_room(self._keeper_has_room)
            watchers.start(self._listen, on_failed)
            return
        await self._call(self._make_group)
        await self._wait_for_room(lambda: self._call(self._group.wait, _LOOK_S))
        await self._call(self._make_actors, terms)
        for number in range(self._room.workers):
            watchers.start(self._watch, number, on_failed)

    async def dismiss(self, left: Succession) -> None:
        """End the workers that another process has left; see `Engine.dismiss`."""
        await self._call(end_keepers, left)

    def _prepare(self, stack: AsyncExitStack) -> None:
        stack.callback(self._thread.shutdown, wait=False)
        scratch = ScratchFolder("ray", "/tmp")  # of sockets: a short path
        stack.callback(scratch.close)
        self._scratch = Path(scratch.path)

    async def _connect(self) -> str:
        return await self._call(self._join_or_start)

    async def _withdraw(self) -> None:
        try:
            await self._call(_connected, self._end_actors)
        except ConnectionError as error:
            print(f"pipedist: Ray can't be told to end the workers: {error}", file=sys.stderr)  # noqa: T201

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
        elif (address := named(self._address)) == LOCAL:
            if self._outlives:
                raise outliving(self._address, *_OUTLIVING)
            self._start_local()
        else:
            try:
                self._join(address)
            except ConnectionError as error:
                if self._address is not None or address != AUTO or self._outlives:
                    raise UsageError(
                        f"no Ray cluster answers at {address}: {error}; start one (ray start --head), or say "
                        "`address: local` for one of the run's own, without `rejoin_s`"
                    ) from None
                self._start_local()
        return self._own_address()

    def _start_local(self) -> None:
        import ray

        self._is_ours = True
        self._address = LOCAL
        ray.init(
            address=LOCAL,
            num_cpus=self._room.workers * self._room.bundle["CPU"],
            num_gpus=self._room.workers * self._room.bundle.get("GPU", 0) or None,
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
            copy.mkdir()
            copy_modules(self._code, copy)
            environment = {"working_dir": str(copy)}
        join(address, environment, self._place_s)
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

    # What is made is noted here, in this thread: whoever waits for it may be cancelled meanwhile.

    def _find_or_make_keeper(self, terms: Terms, succession: Succession) -> None:
        self._keeper = find_keeper(succession)
        if self._keeper is None:
            self._keeper = make_keeper(self._room, terms, self._brings_code, succession)

    def _make_group(self) -> None:
        self._group = make_group(self._room)

    def _make_actors(self, terms: Terms) -> None:
        for number in range(self._room.workers):
            self._actors.append(make_host(self._room, self._group, number, terms, self._brings_code))

    def _modules(self) -> str:
        """Return a digest of the modules that are sent to the nodes."""
        copy, digest = self._scratch / "code", hashlib.sha256()
        for file in sorted(copy.rglob("*.py")) if self._brings_code else ():
            for part in (os.fsencode(file.relative_to(copy)), file.read_bytes()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def _resources(self) -> str:
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        return ", ".join(
            f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in self._room.bundle
        )

    def _end_actors(self) -> None:
        if self._keeper is not None:
            end_keeper(self._keeper)
            self._keeper = None
        end_hosts(self._actors, self._group)
        self._actors, self._group = [], None

    # -- on the event loop -------------------------------------------------------------------------

    async def _wait_for_room(self, is_there: Callable[[], Awaitable[bool]]) -> None:
        """Return as soon as Ray has set the room aside.

        Args:
            is_there: waits a moment for that.

        Raises:
            UsageError: it has not in time.
        """
        with anyio.move_on_after(self._place_s) as looking:
            while not await is_there():
                pass
        if looking.cancelled_caught:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._room.bundle.items())
            raise UsageError(
                f"Ray has had no room for {self._room.workers} workers of {wanted} each within "
                f"{self._place_s:g} s; it has {await self._call(self._resources)}: ask for fewer "
                "(--workers), add nodes, or wait longer (`cluster: {place_s: SECONDS}`)"
            )

    async def _keeper_has_room(self) -> bool:
        from ray.exceptions import RayError

        try:
            return bool(await self._answer(lambda: self._keeper.has_room.remote(_LOOK_S)))
        except (RayError, ConnectionError) as error:
            text = str(error).strip()
            raise UsageError(
                not_installed(text) or f"Ray can't place what places the workers: {text}"
            ) from error

    async def _listen(self, on_failed: OnFailed) -> None:
        """See to it that the keeper hears of this process, and that the end of the last worker is told."""
        from ray.exceptions import RayError

        while True:
            try:
                known = len(self._left)
                for how in await self._answer(lambda: self._keeper.news.remote(known, _NEWS_S)):  # noqa: B023
                    self._note(how, on_failed)
            except (RayError, ConnectionError):
                if ended := await self._until_it_is_back(self._keeper):
                    on_failed(f"what placed the workers with Ray is gone: {ended}")
                    return
                self._left.clear()  # Ray has started it again, and it has placed all workers anew

    async def _watch(self, number: int, on_failed: OnFailed) -> None:
        """See to it that the end of the last worker is told."""
        from ray.exceptions import RayError

        actor = self._actors[number]
        while True:
            try:
                how = str(await self._answer(actor.left.remote))
                break
            except (RayError, ConnectionError):
                if how := await self._until_it_is_back(actor):
                    break
        self._note(how, on_failed)

    async def _until_it_is_back(self, actor: Any) -> str:
        """Return "" as soon as an actor answers that Ray has started again; otherwise why Ray does not.

        One that does not answer, on a node of which Ray does not know yet whether it is lost, is asked again.
        """
        from ray.exceptions import ActorUnavailableError, RayError

        while True:
            try:
                await self._answer(actor.__ray_ready__.remote)
            except ActorUnavailableError:
                await anyio.sleep(_LOOK_S)
            except ConnectionError as error:
                return f"the connection to Ray was lost: {error}"
            except RayError as error:
                text = str(error).strip()
                return not_installed(text) or text or type(error).__name__
            else:
                return ""

    def _note(self, how: str, on_failed: OnFailed) -> None:
        """Take note that a worker has left that will not come back."""
        self._left.append(how)
        if not how:  # it was told to leave: the cluster is closed
            return
        print(f"pipedist: a worker placed by Ray has left: {how}", file=sys.stderr)  # noqa: T201
        if len(self._left) == self._room.workers:
            on_failed(f"all {self._room.workers} workers placed by Ray have left; the last one: {how}")

    async def _answer(self, ask: Callable[[], Any]) -> Any:
        """Return what is answered; where that is cancelled, Ray's own future is not.

        Ray Client ends its connection over a future that was.

        Args:
            ask: calls a method of an actor.
        """
        theirs: Future[Any] = await self._call(_connected, lambda: ask().future())
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def tell(_future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(is_done.set)

        theirs.add_done_callback(tell)
        await is_done.wait()
        return theirs.result()


def _connected(function: Callable[[], T]) -> T:
    """Call a function of Ray; for a connection that Ray Client has lost, it has no error of its own.

    Raises:
        ConnectionError: it has lost it.
    """
    import ray

    try:
        return function()
    except Exception as error:
        if ray.is_initialized():
            raise
        raise ConnectionError(str(error).partition("\n")[0]) from error
