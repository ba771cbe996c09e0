"""Workers placed by Dask: a plugin by which every present and every future Dask worker keeps one of ours.

What Dask does: starts Dask workers, and starts them again; each gets the plugin when it joins. What it does
not do: execute calls, carry data, or try anything again.

Where the workers outlive the process of the run, its plugin stays registered, and the workers dial again. The
next process registers a plugin that takes them over inside their Dask workers, and removes the one before;
where none comes, a plugin of Dask's scheduler removes it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from typing import Any

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
from pipedist.launchers.whereabouts import Succession

_LOOK_S = 1.0
"""How soon it is noticed that Dask's scheduler is gone for good."""

_OUTLIVING = ("Dask", "tcp://HOST:8786")


class DaskEngine(ConnectedEngine):
    """A connection to Dask, and the plugin that keeps the workers.

    Args:
        address: `local`: Dask workers of its own, in this process; `tcp://HOST:PORT`, or what else a Dask
            client takes; None: the one that Dask's configuration names (DASK_SCHEDULER_ADDRESS), and
            `local` where it names none.
        workers: how many Dask workers a `local` one has; others have as many as they have.
        place_s: how long a Dask scheduler may take to answer, and to have a worker.
        outlives: its workers are to outlive this process.

    Raises:
        UsageError: Dask's `distributed` is not installed, or workers are to outlive a `local` one.
    """

    def __init__(self, *, address: str | None, workers: int, place_s: float, outlives: bool = False) -> None:
        super().__init__()
        require("distributed", "dask")
        if outlives and address == LOCAL:
            raise outliving(address, *_OUTLIVING)
        self._outlives = outlives
        self._address = address
        self._workers = workers
        self._place_s = place_s
        self._name = f"pipedist-{secrets.token_hex(8)}"
        self._cluster: Any = None
        self._client: Any = None
        self._is_registered = False
        self._keeper = ""
        """The name of the plugin of Dask's scheduler, where there is one."""
        self._left: dict[str, str] = {}
        """How our worker left, by the address of its Dask worker."""
        self.placing = ""
        """See `Engine`."""
        self.placed = 0
        """See `Engine`: as many as there were Dask workers at the start."""

    async def start(self, terms: Terms, on_failed: OnFailed, succession: Succession | None = None) -> None:
        """Have every Dask worker keep one of ours; see `Engine.start`."""
        watchers = self.watchers
        run, life = "", 0
        if succession is not None:
            self._name, run, life = succession.name, succession.run, succession.life
        self._client.subscribe_topic(
            self._name, lambda event: watchers.start(self._note, event[1], on_failed)
        )
        try:
            with anyio.fail_after(self._place_s):
                await self._client.wait_for_workers(1)
                from pipedist.launchers.dask_plugin import DaskPlugin

                self._is_registered = True
                if succession is not None:
                    await self._register_keeper(succession)
                await self._client.register_plugin(DaskPlugin(self._name, terms, run, life))
                if succession is not None:
                    await self._remove(succession.earlier)
                self.placed = len(await self._client.nthreads())
                watchers.start(self._watch, on_failed)
        except TimeoutError:
            raise UsageError(
                f"Dask has had no worker within {self._place_s:g} s: start some (dask worker ADDRESS), or "
                "wait longer (`cluster: {place_s: SECONDS}`)"
            ) from None
        except ImportError as error:
            raise UsageError(not_installed(str(error)) or f"a Dask worker lacks a module: {error}") from error

    async def dismiss(self, left: Succession) -> None:
        """End the workers that another process has left; see `Engine.dismiss`."""
        await self._remove([left.name, *left.earlier])

    async def _register_keeper(self, succession: Succession) -> None:
        from pipedist.launchers.dask_keeper import DaskKeeper

        self._keeper = _keeper_of(self._name)
        keeper = DaskKeeper(self._keeper, self._name, self._client.id, succession.rejoin_s)
        try:
            await self._client.register_plugin(keeper)
        except ValueError as error:  # it is set up to unpickle nothing
            raise UsageError(
                f"`rejoin_s` needs a plugin of Dask's scheduler, which ends the workers when nobody goes on "
                f"with the run, and that takes none: {error}"
            ) from error

    async def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(ValueError):  # there is none of that name
                await self._client.unregister_worker_plugin(name)
            with contextlib.suppress(ValueError):
                await self._client.unregister_scheduler_plugin(_keeper_of(name))

    async def _watch(self, on_failed: OnFailed) -> None:
        """See to it that the end of Dask's scheduler is told: with it go all that it knows, and our plugin.

        The client dials it again for `place_s`, and then closes itself; nothing tells of that.
        """
        scheduler = self._client.scheduler_info()["id"]
        ended = ""
        while not ended:
            await anyio.sleep(_LOOK_S)
            if self._client.status == "closed":
                ended = "has ended"
            elif self._client.scheduler_info().get("id", scheduler) != scheduler:
                ended = "is another one, which knows nothing of the run"
        on_failed(f"Dask's scheduler {ended}: its workers, and those that they kept, are gone")

    async def _note(self, told: dict[str, str], on_failed: OnFailed) -> None:
        self._left[told["worker"]] = how = told["how"]
        print(f"pipedist: the worker kept by {told['worker']} has left: {how}", file=sys.stderr)  # noqa: T201
        try:
            present = await self._client.nthreads()
        except OSError:  # the connection is lost: whether there is a scheduler is seen elsewhere
            return
        if all(worker in self._left for worker in present):
            on_failed(f"the workers kept by {len(present)} Dask workers have left; the last one: {how}")

    async def _connect(self) -> str:
        import dask
        import distributed

        address = self._address or dask.config.get("scheduler-address", None) or LOCAL
        at: Any = address
        if address == LOCAL and self._outlives:
            raise outliving(self._address, *_OUTLIVING)
        if address == LOCAL:
            at = self._cluster = distributed.LocalCluster(
                n_workers=self._workers,
                threads_per_worker=1,
                processes=False,  # they execute nothing: our workers are processes
                dashboard_address=None,
                asynchronous=True,
            )
            await self._cluster
        self._client = distributed.Client(at, asynchronous=True, set_as_default=False, timeout=self._place_s)
        try:
            await self._client
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no Dask scheduler answers at {address}: {error}; start one (dask scheduler), or say "
                "`address: local` for one of the run's own"
            ) from error
        self.placing = json.dumps(["dask", address])
        return "127.0.0.1" if address == LOCAL else self._own_address()

    def _own_address(self) -> str:
        from distributed.comm import get_address_host

        return address_towards(get_address_host(self._client.scheduler.address))

    async def _withdraw(self) -> None:
        if not self._is_registered or self._client.status == "closed":  # with its scheduler, all is gone
            return
        self._client.unsubscribe_topic(self._name)
        with contextlib.suppress(ValueError, OSError):  # it came to nothing; the scheduler is gone
            await self._client.unregister_worker_plugin(self._name)
        if self._keeper:
            with contextlib.suppress(ValueError, OSError):
                await self._client.unregister_scheduler_plugin(self._keeper)

    async def _disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._cluster is not None:
            await self._cluster.close()


def _keeper_of(plugin: str) -> str:
    """Return the name of the scheduler's plugin that belongs to a worker plugin."""
    return f"{plugin}-keeper"
