"""What is bound and connected to: addresses of both kinds, and names."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pipedist.errors import UsageError
from pipedist.protocol.messages import LogLine
from pipedist.transport.dealer import Dealer
from pipedist.transport.keys import new_keys
from pipedist.transport.zeromq import server_socket
from pipedist.transport.zeromq.connections import plain_address

from .sockets import blocking, identity, router

LOOK = "import sys; from pipedist.transport.endpoints import Endpoint as E; print(E('', sys.argv[1]).is_ipv6)"
KNOWN = "127.0.0.1 four both\n::1 six both\n"


def needs_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return
    except OSError:
        pytest.skip("this host has no IPv6")


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_star_is_every_address_of_this_host(host: str) -> None:
    if host == "[::1]":
        needs_ipv6()
    keys, strange = new_keys(), new_keys()
    async with router("tcp://*:0", keys) as (opened, inbox):
        endpoint = f"tcp://{host}:{opened.endpoint.rpartition(':')[2]}"
        with Dealer(endpoint, identity=identity(), keys=keys.client) as worker:
            await blocking(worker.send, LogLine("s", 0, 0, ""))
            _, message, _ = await inbox.get()
            assert message == LogLine("s", 0, 0, "")
        other = type(keys.client)(keys.client.server_public, strange.client.public, strange.client.secret)
        with Dealer(endpoint, identity=identity(), keys=other):
            assert f"a peer at {host.strip('[]')} with the unknown key" in await inbox.reject("unknown")


@pytest.mark.parametrize(
    ("name", "is_ipv6"), [("four", False), ("six", True), ("both", False), ("none", False)]
)
def test_a_name_is_looked_up(tmp_path: Path, name: str, is_ipv6: bool) -> None:
    """In a mount namespace with another /etc/hosts."""
    known = tmp_path / "hosts"
    known.write_text(KNOWN)
    inside = ["sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh", str(known)]
    command = ["unshare", "-rm", *inside, sys.executable, "-c", LOOK]
    try:
        done = subprocess.run([*command, name], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout == f"{is_ipv6}\n", done.stderr


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("203.0.113.1", "203.0.113.1 is no address of this host; say one of its own, or * for all of them"),
        (
            "no-such.invalid",
            "there is no host, and no network device of this one, with the name 'no-such.invalid'",
        ),
    ],
)
async def test_an_address_of_another_host(host: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        async with router(f"tcp://{host}:5555", new_keys()):
            pytest.fail("was opened")
    assert str(caught.value) == f"can't bind tcp://{host}:5555: {told}"


def test_an_ipv4_address_is_reported_as_one() -> None:
    told = [plain_address(text) for text in ("::ffff:10.0.0.2", "10.0.0.2", "fd00::1", "::ffff:0:1")]
    assert told == ["10.0.0.2", "10.0.0.2", "fd00::1", "::ffff:0:1"]


@pytest.mark.asyncio
async def test_the_event_loop_runs_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_goes_on = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, *rest: Any, **options: Any) -> Any:
        if host == "slow.test":
            assert loop_goes_on.wait(10), "the event loop waits for the look-up"
            host = "127.0.0.1"
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.get_running_loop().call_soon(loop_goes_on.set)
    async with router("tcp://slow.test:0", new_keys()) as (opened, _):
        assert opened.endpoint.startswith("tcp://127.0.0.1:")


@pytest.mark.asyncio
async def test_a_look_up_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(server_socket, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(60))
    try:
        with pytest.raises(UsageError, match=r"looking up 'slow\.test' takes longer than 0\.01 s"):
            async with router("tcp://slow.test:5555", new_keys()):
                pass
    finally:
        is_over.set()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["localhost", "lo"])
async def test_names_of_this_host_and_of_its_network_devices_are_bound(name: str) -> None:
    async with router(f"tcp://{name}:0", keys := new_keys()) as (opened, inbox):
        assert opened.endpoint.startswith("tcp://127.0.0.1:")
        with Dealer(opened.endpoint, identity=identity(), keys=keys.client) as worker:
            await blocking(worker.send, LogLine("s", 0, 0, ""))
            await inbox.get()
