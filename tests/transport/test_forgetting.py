"""A Router forgets peers: its state does not grow with the number of identities that it has seen."""

from __future__ import annotations

import pytest
import zmq

from pipedist.protocol.messages import Bind
from pipedist.transport.config import SETTINGS, SocketSettings
from pipedist.transport.router import Router
from tests.state_size import entries
from tests.transport.sockets import WAIT_S, Inbox, dealer, first_frame, log, router
from tests.transport.test_rogues import is_served

SMALL = SocketSettings(peers_max=8, other_peers_max=4)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("peers", "settings"),
    [(400, SMALL), pytest.param(70_000, SETTINGS, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_a_router_is_flat_over_any_number_of_peers(peers: int, settings: SocketSettings) -> None:
    """Some of them are kept and released, some dropped; one stays."""
    async with router(settings=settings) as (opened, inbox):
        with dealer(opened, name=b"stays") as stays:
            await is_served(opened, inbox, stays, b"stays")
            opened.keep(b"stays")
            at_first = 0
            for number in range(peers):
                await _comes_and_goes(opened, inbox, number)
                if number == settings.other_peers_max:
                    at_first = entries(opened)
            assert entries(opened) <= at_first + 3
            assert len(opened._peers) == settings.other_peers_max + 1
            await is_served(opened, inbox, stays, b"stays")


async def _comes_and_goes(opened: Router, inbox: Inbox, number: int) -> None:
    identity = b"peer%d" % number
    peer = _CONTEXT.socket(zmq.DEALER)
    try:
        peer.routing_id = identity
        peer.rcvtimeo = round(WAIT_S * 1000)
        peer.connect(opened.endpoint)
        peer.send(first_frame(log()))
        assert (await inbox.get())[0] == identity
        if number % 4:
            opened.keep(identity)
            assert opened.send(identity, Bind(number))
        match number % 4:
            case 1:
                opened.release(identity)
            case 2:
                opened.drop(identity, "it left")
            case 3:
                opened.drop(identity)
    finally:
        peer.close(linger=0)


_CONTEXT = zmq.Context.instance()


@pytest.mark.asyncio
async def test_a_kept_peer_is_known_however_many_others_come() -> None:
    async with router(settings=SMALL) as (opened, inbox):
        with dealer(opened, name=b"silent") as silent:
            await is_served(opened, inbox, silent, b"silent")
            opened.keep(b"silent")
            for number in range(0, 80, 4):
                await _comes_and_goes(opened, inbox, number)
            assert opened.send(b"silent", Bind(1))


@pytest.mark.asyncio
async def test_a_forgotten_peer_is_a_new_one() -> None:
    async with router(settings=SMALL) as (opened, inbox):
        with dealer(opened, name=b"old") as old:
            await is_served(opened, inbox, old, b"old")
            for number in range(0, 80, 4):
                await _comes_and_goes(opened, inbox, number)
            assert not opened.send(b"old", Bind(1))
            await is_served(opened, inbox, old, b"old")
