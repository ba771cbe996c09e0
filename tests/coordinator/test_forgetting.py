"""The coordinator's state does not grow with the number of workers and supervisors that dialled in."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import zmq
from msgspec.structs import replace

from pipedist.coordinator import Coordinator, worker_pool
from pipedist.coordinator.results import key_of
from pipedist.protocol import messages as msg
from pipedist.protocol.limits import LIMITS
from pipedist.protocol.wire import pack, seal, unpack, unseal
from pipedist.transport.config import SocketSettings
from pipedist.transport.endpoints import ipc_endpoint, private_directory
from pipedist.transport.router import Router
from pipedist.worker.identity import new_name
from pipedist.worker.process_setup import make_hello
from tests.coordinator.wire import Wire, wired
from tests.state_size import entries

HELLO = replace(
    make_hello("", 0), boot="there", cached=(f"{key_of('run', [])}:3-9",), code_digests=("0" * 64,)
)


class Deaf(Wire):
    """Records nothing."""

    def send(self, *_: object) -> bool:
        return True

    def drop(self, *_: object) -> None:
        return


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("workers", "supervisors_max"),
    [(1_000, 64), pytest.param(70_000, None, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_a_coordinator_is_flat_over_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int, supervisors_max: int | None
) -> None:
    """Workers are refused, evicted, replaced, crash and leave, each under another name."""
    if supervisors_max is not None:
        monkeypatch.setattr(worker_pool, "SUPERVISORS_MAX", supervisors_max)
        monkeypatch.setattr("pipedist.scheduler.membership.GONE_WORKERS_KEPT", supervisors_max)
    async with wired(router=Deaf) as wire:
        coordinator = wire.coordinator
        half, all_ = [
            (_come_and_go(wire, workers // 2 * half, workers // 2 * (half + 1)), entries(coordinator))[1]
            for half in (0, 1)
        ]
        assert all_ < half + 10
        assert coordinator.workers_ready == 0


def _come_and_go(wire: Wire, first: int, last: int) -> None:
    for number in range(first, last):
        name, proof = new_name(f"host:{number}")
        worker, supervisor = f"w{number}", f"s{number}"
        hello = replace(HELLO, worker=name, proof=proof, gpus=number / 7)
        wire.say(supervisor, msg.Heartbeat(name, 0, proof))
        if number % 5 == 0:
            hello = replace(hello, python="2.7")
        wire.say(worker, hello)
        wire.say(f"{supervisor}.again", msg.Heartbeat(name, 0, proof))  # it has reconnected
        match number % 5:
            case 1:
                peer = wire.coordinator._pool.of(name)
                assert peer is not None
                wire.coordinator._pool.lose(peer, "its connection is gone")
            case 2:
                wire.say(f"{worker}.1", replace(hello, incarnation=1))
                wire.say(f"{worker}.1", msg.Goodbye(name, 1, "it leaves"))
            case 3:
                wire.say(f"{supervisor}.again", msg.Goodbye(name, 0, "signal 11", crashed=True, proof=proof))
            case 4:
                wire.coordinator._on_lost(worker.encode(), "it broke the protocol")


@pytest.mark.asyncio
async def test_workers_that_come_back_again_and_again_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real sockets: each is evicted, and comes back under another identity and name."""
    monkeypatch.setattr(worker_pool, "SUPERVISORS_MAX", 4)
    settings = SocketSettings(peers_max=8, other_peers_max=4)
    routers: list[Router] = []
    with private_directory() as folder, zmq.Context() as context:

        def make(**callbacks: object) -> Router:
            routers.append(Router(ipc_endpoint(folder), keys=None, settings=settings, **callbacks))  # type: ignore[arg-type]
            return routers[0]

        opened = Coordinator(
            router_factory=make, launcher_factory=None, workers=(), dial_in=True, boot="here"
        )
        async with opened as coordinator:
            for number in range(100):
                name, proof = new_name(f"host:{number}")
                receive = partial(asyncio.to_thread, _converse, context, coordinator.endpoint)
                beat = msg.Heartbeat(name, 0, proof)
                assert await receive(b"s%d" % number, beat) is msg.Welcome
                hello = replace(HELLO, worker=name, proof=proof, cached=())
                assert await receive(b"w%d" % number, hello) is msg.Welcome
                peer = coordinator._pool.of(name)
                assert peer is not None
                coordinator._pool.lose(peer, "no heartbeat")
                assert await receive(b"r%d" % number, beat) is msg.Welcome  # its supervisor has reconnected
            assert len(routers[0]._peers) <= settings.peers_max + settings.other_peers_max
            assert coordinator.rejected == 100  # heartbeats of evicted incarnations


def _converse(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes, message: msg.Message
) -> type[msg.Message]:
    """Send a message over a new connection, and return the kind of the first reply."""
    peer = context.socket(zmq.DEALER)
    try:
        peer.routing_id = name
        peer.rcvtimeo = 60_000
        peer.connect(endpoint)
        peer.send(seal(pack(message), b""))
        return type(unpack(unseal(memoryview(peer.recv_multipart()[0]), LIMITS)[0]))
    finally:
        peer.close(linger=0)
