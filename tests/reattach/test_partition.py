"""Workers that dialled in and can't be heard for a while: declared dead, fenced, and registered anew."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.reattach.jobs import PATIENCE_S, Job, Outcome, Program
from tests.reattach.test_leaving import children

pytestmark = pytest.mark.asyncio


class Relay:
    """Forwards TCP bytes between two sides, unless it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._is_broken = False
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    def cut(self) -> None:
        """Forward nothing; bytes wait meanwhile, as in a network that is down."""
        self._open.clear()

    def heal(self) -> None:
        """Pass everything on again."""
        self._open.set()

    def break_off(self) -> None:
        """End every connection, and each new one at once, for good."""
        self._is_broken = True
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client."""
        try:
            if self._is_broken:
                raise ConnectionResetError
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers += [writer, back]
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
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await asyncio.sleep(0.01)


async def hears(program: Program, text: str, times: int = 1) -> None:
    await until(lambda: program.said.count(text) >= times)


@pytest.mark.slow
async def test_a_partition_longer_than_the_heartbeat(tmp_path: Path, undisturbed: Outcome) -> None:
    """Its call is reassigned; its messages after the partition do not count."""
    job = Job(tmp_path)
    held = job.hold(3)
    with job.run_impatiently() as run:
        await hears(run, "waiting for workers")
        async with relayed(job.port) as relay:
            with job.worker(endpoint=f"tcp://127.0.0.1:{relay.port}") as far, ExitStack() as stack:
                await until(lambda: (3, 0) in job.calls())
                near = stack.enter_context(job.worker())
                await hears(near, "joined cluster")
                relay.cut()
                await until(lambda: job.calls()[3, 0] >= 2)
                relay.heal()
                await hears(far, "joined cluster", 2)
                assert "evicted by the driver" in far.said
                held.unlink()
                await until(lambda: run.process.poll() is not None)
                assert run.ends() == 0, run.said
                assert "0 elements lost" in run.said
                assert near.ends() == far.ends() == 0, far.said
    assert job.outcome() == undisturbed


@pytest.mark.slow
async def test_a_partition_longer_than_a_worker_waits(tmp_path: Path, undisturbed: Outcome) -> None:
    """The worker gives up, and reports why, although the scheduler is alive, and continues without it."""
    job = Job(tmp_path, rejoin_s=1.0)
    held = job.hold(3)
    with job.run_impatiently() as run:
        await hears(run, "waiting for workers")
        async with relayed(job.port) as relay:
            endpoint = f"tcp://127.0.0.1:{relay.port}"
            with job.worker(endpoint=endpoint) as far, ExitStack() as stack:
                await until(lambda: (3, 0) in job.calls())
                near = stack.enter_context(job.worker())
                await hears(near, "joined cluster")
                relay.break_off()
                await until(lambda: job.calls()[3, 0] >= 2)
                await until(lambda: far.process.poll() is not None)
                assert far.ends() == 1
                assert f"the driver at {endpoint} is gone, and none has come back within 1 s" in far.said
                held.unlink()
                await until(lambda: run.process.poll() is not None)
                assert run.ends() == 0, run.said
                assert "0 elements lost" in run.said
                assert near.ends() == 0, near.said
    assert job.outcome() == undisturbed


@pytest.mark.slow
async def test_a_stopped_supervisor_and_worker_are_fenced_when_they_wake(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    """No process on that host can report that it is stopped: the scheduler misses its heartbeat."""
    job = Job(tmp_path)
    held = job.hold(3)
    with job.run_impatiently() as run, ExitStack() as stack:
        await hears(run, "waiting for workers")
        far = stack.enter_context(job.worker())
        await until(lambda: (3, 0) in job.calls())
        near = stack.enter_context(job.worker())
        await hears(near, "joined cluster")
        everyone = [far.process.pid, *children(far.process.pid)]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: job.calls()[3, 0] >= 2)
        for pid in reversed(everyone):
            os.kill(pid, signal.SIGCONT)
        await hears(far, "joined cluster", 2)
        held.unlink()
        assert run.ends() == 0, run.said
        assert "0 elements lost" in run.said
        assert near.ends() == far.ends() == 0, far.said
    assert job.outcome() == undisturbed
