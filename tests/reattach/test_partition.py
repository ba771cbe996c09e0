"""Workers that dialled in and can't be heard for a while: declared dead, fenced, and registered anew."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import pipedist
from pipedist.scheduler import Limits
from tests.reattach.jobs import PATIENCE_S, Job, Program
from tests.reattach.test_leaving import children

pytestmark = pytest.mark.asyncio

HEARD_WITHIN_S = 2.0


class Relay:
    """Passes on what two sides say to each other over TCP, unless it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0

    def cut(self) -> None:
        """Pass nothing on; what is said meanwhile waits, as in a network that is down."""
        self._open.clear()

    def heal(self) -> None:
        """Pass everything on again."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect one who has dialled in."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._open.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        relay.heal()
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def hears(program: Program, text: str, times: int = 1) -> None:
    await until(lambda: program.said.count(text) >= times)


@asynccontextmanager
async def running(job: Job) -> AsyncIterator[tuple[pipedist.ConnectCluster, pipedist.Run]]:
    """A cluster that finds silent workers soon, and the job's run on it, which is under way."""
    cluster = pipedist.ConnectCluster(
        listen=job.endpoint,
        key_file=job.folder / "cluster.key",
        workers=2,
        limits=Limits(heard_within_s=HEARD_WITHIN_S),
    )
    async with (
        cluster,
        pipedist.open(job.folder / "spec.yaml", cluster=cluster, output=job.folder / "out") as run,
    ):
        yield cluster, run


async def test_a_partition_longer_than_the_heartbeat(tmp_path: Path) -> None:
    """Its call goes elsewhere; what it says when the network is back does not count."""
    job = Job(tmp_path)
    held = job.hold(3)
    async with running(job) as (cluster, run), relayed(job.port) as relay:
        with job.worker(endpoint=f"tcp://127.0.0.1:{relay.port}") as far:
            results = asyncio.create_task(run.results())
            await until(lambda: (3, 0) in job.calls())
            relay.cut()
            await until(lambda: cluster.coordinator.workers_ready == 0)
            with job.worker() as near:
                await hears(near, "joined cluster")
                await until(lambda: job.calls()[3, 0] == 2)
                held.unlink()
                relay.heal()
                await hears(far, "joined cluster", 2)
                result = await asyncio.wait_for(results, PATIENCE_S)
                assert "not heard for 2 s" in far.said
    assert result.ledger.lost == 0
    assert result["total"] == pytest.approx(float((tmp_path / "out" / "total.json").read_text()))
    assert set(job.calls().values()) <= {1, 2}


async def test_a_stopped_supervisor_and_worker_are_fenced_when_they_wake(tmp_path: Path) -> None:
    """Nobody on that host can say that it is stopped: the scheduler misses its heartbeat."""
    job = Job(tmp_path)
    held = job.hold(3)
    async with running(job) as (cluster, run):
        with job.worker() as far:
            results = asyncio.create_task(run.results())
            await until(lambda: (3, 0) in job.calls())
            everyone = [far.process.pid, *children(far.process.pid)]
            for pid in everyone:
                os.kill(pid, signal.SIGSTOP)
            await until(lambda: cluster.coordinator.workers_ready == 0)
            with job.worker() as near:
                await hears(near, "joined cluster")
                await until(lambda: job.calls()[3, 0] == 2)
                for pid in reversed(everyone):
                    os.kill(pid, signal.SIGCONT)
                await hears(far, "joined cluster", 2)
                held.unlink()
                result = await asyncio.wait_for(results, PATIENCE_S)
    assert result.ledger.lost == 0
    assert job.calls()[3, 0] == 2
