"""Workers placed by Dask: a plugin starts one beside each Dask worker.

Dask starts Dask workers, and starts them again; each gets the plugin when it joins. Dask executes no call,
carries no data and retries nothing.

This module needs `distributed`: check that with `require` before importing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import dask
import distributed
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from pipedist.cluster.launchers.engines import (
    GRACE_S,
    LOCAL,
    Engine,
    OnFailed,
    address_towards,
    not_installed,
)
from pipedist.cluster.launchers.supervisor_process import JoinConfig, SupervisorProcess
from pipedist.errors import UsageError

if TYPE_CHECKING:
    from distributed import Worker

_POLL_S = 1.0  # how soon the end of Dask's scheduler is noticed


class DaskPlugin(WorkerPlugin):
    """The supervisor of one worker, as long as its Dask worker lives; reports on the topic `name` that it has left."""

    def __init__(self, name: str, join: JoinConfig) -> None:
        self.name = name
        self._join = join
        self._supervisor: SupervisorProcess | None = None

    def setup(self, worker: Worker) -> None:
        def report(reason: str) -> None:
            event = {"worker": worker.address, "reason": reason}
            worker.loop.add_callback(worker.log_event, self.name, event)

        self._supervisor = SupervisorProcess(self._join, report)

    async def teardown(self, worker: Any) -> None:
        """End the supervisor: the plugin is removed, or a Dask worker leaves."""
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.close, GRACE_S)


class DaskEngine(Engine):
    """A connection to Dask, and the workers' plugin; see `DaskCluster`."""

    def __init__(self, *, address: str | None, workers: int, place_s: float) -> None:
        super().__init__()
        self._address = address
        self._workers = workers
        self._place_s = place_s
        self._name = f"pipedist-{secrets.token_hex(8)}"
        self._cluster: Any = None
        self._client: Any = None
        self._is_registered = False
        self._left: set[str] = set()  # addresses of Dask workers whose supervisor has left

    async def start(self, join: JoinConfig, on_failed: OnFailed) -> None:
        self._client.subscribe_topic(
            self._name, lambda event: self.watchers.start(self._on_left, event[1], on_failed)
        )
        try:
            with anyio.fail_after(self._place_s):
                await self._client.wait_for_workers(1)
                self._is_registered = True
                await self._client.register_plugin(DaskPlugin(self._name, join))
                self.watchers.start(self._watch, on_failed)
        except TimeoutError:
            raise UsageError(
                f"Dask has had no worker within {self._place_s:g} s. Start some with `dask worker ADDRESS`, "
                "or wait longer (`cluster: {place_s: SECONDS}`)."
            ) from None
        except ImportError as error:
            raise UsageError(not_installed(str(error)) or f"a Dask worker lacks a module: {error}") from error

    async def _watch(self, on_failed: OnFailed) -> None:
        """Report the end of Dask's scheduler, with which the plugin is gone.

        Dask's client reconnects for `place_s` and then closes itself, without an event.
        """
        scheduler = self._client.scheduler_info()["id"]
        ended = ""
        while not ended:
            await anyio.sleep(_POLL_S)
            if self._client.status == "closed":
                ended = "has ended"
            elif self._client.scheduler_info().get("id", scheduler) != scheduler:
                ended = "is another one, which does not have the plugin"
        on_failed(f"Dask's scheduler {ended}: the workers that it placed are gone")

    async def _on_left(self, event: dict[str, str], on_failed: OnFailed) -> None:
        worker, reason = event["worker"], event["reason"]
        self._left.add(worker)
        print(f"pipedist: the worker placed by Dask on {worker} has left: {reason}", file=sys.stderr)  # noqa: T201
        try:
            present = await self._client.nthreads()
        except OSError:  # the connection is lost: `_watch` finds out whether the scheduler is
            return
        self._left.intersection_update(present)
        if len(self._left) == len(present):
            on_failed(f"the workers placed on {len(present)} Dask workers have left; the last one: {reason}")

    async def _connect(self) -> str:
        address = self._address or dask.config.get("scheduler-address", None) or LOCAL
        target: Any = address
        if address == LOCAL:
            target = self._cluster = distributed.LocalCluster(
                n_workers=self._workers,
                threads_per_worker=1,
                processes=False,  # they execute nothing: our workers are processes
                dashboard_address=None,
                asynchronous=True,
            )
            await self._cluster
        self._client = distributed.Client(
            target, asynchronous=True, set_as_default=False, timeout=self._place_s
        )
        try:
            await self._client
        except (OSError, ValueError) as error:
            raise UsageError(
                f"can't reach a Dask scheduler at {address}: {error}. Start one with `dask scheduler`, or "
                "use `address: local`."
            ) from error
        if address == LOCAL:
            return "127.0.0.1"
        host = get_address_host(self._client.scheduler.address)
        with anyio.fail_after(self._place_s):
            return await anyio.to_thread.run_sync(address_towards, host, abandon_on_cancel=True)

    async def _withdraw(self) -> None:
        if not self._is_registered or self._client.status == "closed":  # the plugin went with the scheduler
            return
        self._client.unsubscribe_topic(self._name)
        with contextlib.suppress(ValueError, OSError):  # it was not registered; the scheduler is gone
            await self._client.unregister_worker_plugin(self._name)

    async def _disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._cluster is not None:
            await self._cluster.close()
