"""Rogues of eight kinds beside an honest worker: none of their messages count, and both ends report it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

import pipedist
from pipedist.coordinator.inbound import LOGGER
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import encode
from pipedist.transport.config import SETTINGS, SocketSettings
from pipedist.transport.dealer import ConnectionLost, Dealer
from pipedist.transport.keys import ClusterKeys, new_keys, read_key_file
from pipedist.worker.identity import new_name
from pipedist.worker.process_setup import make_hello
from tests.transport.sockets import WAIT_S, blocking, first_frame, identity, other_keys
from tests.transport.test_rogues import raw

N = 400
ROOT = Path(__file__).parents[2]
EVIL = encode([{"y": np.full(2, 10**6)}])
SOON = SocketSettings(handshake_s=1.0)
"""For rogues without an answer; the others wait as long as a busy machine needs."""


@dataclass
class Live:
    """A cluster with one honest worker of another host, which executes calls.

    Args:
        heard: identities of the joined peers whose messages were handled.
    """

    cluster: pipedist.ConnectCluster
    keys: ClusterKeys
    heard: set[bytes]
    logs: pytest.LogCaptureFixture

    @property
    def endpoint(self) -> str:
        return self.cluster.coordinator.endpoint

    @property
    def worker(self) -> Any:
        (peer,) = self.cluster.coordinator._pool
        return peer

    def dealer(self, keys: ClusterKeys, settings: SocketSettings = SETTINGS) -> Dealer:
        return Dealer(self.endpoint, identity=identity(), keys=keys.client, settings=settings)

    async def logged(self, *words: str) -> None:
        """Wait until the scheduler's log has a line with these words."""
        async with asyncio.timeout(WAIT_S):
            while not any(all(word in text for word in words) for text in self.logs.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def live(folder: Path, logs: pytest.LogCaptureFixture) -> AsyncIterator[Live]:
    """Run a job during the block, and check its result."""
    logs.set_level(logging.WARNING, logger=LOGGER)
    key_file = folder / "cluster.key"
    document = {
        "pipedist": 1,
        "dataset": {"range": N, "batch": 2},
        "stages": {
            "y": {
                "run": "tests.acceptance.functions:patient",
                "with": {"folder": str(folder), "pause_s": 0.005},
            },
            "total": {"reduce": "sum", "of": "y", "axis": 0},
        },
        "code": str(ROOT),
    }
    async with pipedist.ConnectCluster(key_file=key_file) as cluster:
        coordinator = cluster.coordinator
        heard: set[bytes] = set()
        inbound = coordinator._inbound
        handle = inbound.handle

        def record(peer: Any, message: Any, frames: Any) -> None:
            heard.add(peer.identity)
            handle(peer, message, frames)

        inbound.handle = record  # type: ignore[method-assign]
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipedist", "worker", "--connect", coordinator.endpoint),
            *("--key-file", str(key_file)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                await coordinator.wait_ready(1)
                found = Live(cluster, ClusterKeys(read_key_file(key_file).client, None), heard, logs)
                honest = found.worker
                async with pipedist.open(document, cluster=cluster) as run:
                    results = asyncio.ensure_future(run.results())
                    try:
                        yield found
                    finally:
                        (folder / "enough").touch()
                    result = await results
            assert result["total"] == N * (N - 1) // 2
            assert result.ledger == pipedist.Ledger(N, N)
            assert found.worker == honest, "the honest worker was lost"
            assert heard == {honest.identity}, "messages of another peer were handled"
        finally:
            worker.kill()
            await worker.communicate()


WORDS = [msg.Results(lease, at, at + 1, 5) for lease in range(1, 6) for at in range(3)]
"""The numbers of all leases that the honest worker may have."""


async def speak_as(live: Live, said: msg.Hello | msg.Heartbeat | msg.Goodbye) -> str:
    """Send a message in a name over a separate connection, then results; return the rejection."""
    with live.dealer(live.keys) as rogue:
        await blocking(rogue.send, said)
        refused, _ = await blocking(rogue.recv)
        assert isinstance(refused, msg.Refuse)
        with contextlib.suppress(ConnectionLost):  # it is cut while it still speaks
            for message in WORDS:
                await blocking(rogue.send, message, EVIL)
    return refused.reason


async def no_key(live: Live, _folder: Path) -> None:
    with raw(live.endpoint, b"rogue") as rogue:
        rogue.send(first_frame(make_hello("rogue", 0)))
        with contextlib.suppress(zmq.Again):  # it may have been cut already
            rogue.send(first_frame(msg.Results(1, 0, 1, 0)))
        await live.logged("rejected")


async def unknown_key(live: Live, _folder: Path) -> None:
    refused = pytest.raises(RemoteProtocolError, match="refused this worker's key")
    with live.dealer(other_keys(live.keys)) as rogue, refused:
        await blocking(rogue.poll, WAIT_S)
    await live.logged("unknown key")


async def wrong_server_key(live: Live, _folder: Path) -> None:
    client = live.keys.client
    wrong = ClusterKeys(type(client)(new_keys().client.server_public, client.public, client.secret), None)
    with (
        live.dealer(wrong, SOON) as rogue,
        pytest.raises(RemoteProtocolError, match="key file is that of another cluster"),
    ):
        await blocking(rogue.poll, WAIT_S)
    await live.logged("rejected")


async def anothers_identity(live: Live, _folder: Path) -> None:
    """The honest worker's identity, with a valid key, while that is connected: the socket receives nothing."""
    with raw(live.endpoint, live.worker.identity, live.keys) as rogue:
        for _ in range(50):
            rogue.send(first_frame(msg.Results(1, 0, 1, 0)))


async def anothers_name(live: Live, _folder: Path) -> None:
    """A connected worker's name, with a valid key, in all messages before a join."""
    name, incarnation = live.worker.worker, live.worker.incarnation
    for proof in ("", "0" * 64, new_name(name.rpartition(":")[0])[1]):
        for said in (
            make_hello(name, incarnation, proof=proof),
            make_hello(name, incarnation + 1, proof=proof),
            msg.Heartbeat(name, incarnation, proof),
            msg.Goodbye(name, incarnation, "gone", proof=proof),
            msg.Goodbye(name, incarnation, "signal 11", crashed=True, lease=1, proof=proof),
        ):
            assert "without proof" in await speak_as(live, said)
    await live.logged(name, "without proof")


async def replay(live: Live, _folder: Path) -> None:
    """Results of a worker's leases, sent by a peer that has not joined."""
    with live.dealer(live.keys) as rogue:
        for message in WORDS:
            await blocking(rogue.send, message, EVIL)
        for _ in WORDS:
            refused, _ = await blocking(rogue.recv)
            assert isinstance(refused, msg.Refuse)
    await live.logged("which is not a member")


async def wrong_version(live: Live, _folder: Path) -> None:
    with live.dealer(live.keys) as rogue:
        name, proof = new_name("rogue")
        hello = replace(make_hello(name, 0, proof=proof), wire=msg.WIRE_VERSION + 1)
        await blocking(rogue.send, hello)
        refused, _ = await blocking(rogue.recv)
        assert isinstance(refused, msg.Refuse)
        assert f"protocol {msg.WIRE_VERSION + 1} (the run {msg.WIRE_VERSION})" in refused.reason
        await blocking(rogue.send, msg.Results(1, 0, 1, 0), EVIL)
    await live.logged("it speaks protocol")


async def no_gate(live: Live, _folder: Path) -> None:
    """Without the ZAP handler no peer can connect, with any key; connected peers stay."""
    zap = live.cluster.coordinator._router._server._zap
    assert zap is not None
    zap.close()
    for keys in (live.keys, other_keys(live.keys)):
        with live.dealer(keys, SOON) as rogue, pytest.raises((RemoteProtocolError, ConnectionLost)):
            await blocking(rogue.poll, WAIT_S)
    with raw(live.endpoint, b"rogue") as rogue:
        rogue.send(first_frame(make_hello("rogue", 0)))
        await live.logged("rejected")


Rogue = Callable[[Live, Path], Awaitable[None]]
ROGUES: tuple[Rogue, ...] = (
    no_key,
    unknown_key,
    wrong_server_key,
    anothers_identity,
    anothers_name,
    replay,
    wrong_version,
    no_gate,
)
QUICK = (unknown_key, anothers_name, replay)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "rogue",
    [
        pytest.param(rogue, id=rogue.__name__, marks=() if rogue in QUICK else pytest.mark.slow)
        for rogue in ROGUES
    ],
)
async def test_a_rogue_beside_a_run(rogue: Rogue, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with live(tmp_path, caplog) as running:
        await rogue(running, tmp_path)
        assert not any("\n" in text for text in caplog.messages)
