"""A Router with an inbox, for tests with real sockets."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipedist.protocol.messages import Bind, LogLine, Message
from pipedist.protocol.wire import pack, seal
from pipedist.transport.dealer import Dealer
from pipedist.transport.endpoints import ipc_endpoint, private_directory
from pipedist.transport.keys import ClusterKeys, new_keys
from pipedist.transport.router import Router

WAIT_S = 60.0


class Inbox:
    """What a Router heard, refused and gave up."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[bytes, Message, list[memoryview]]] = asyncio.Queue()
        self.rejects: asyncio.Queue[str] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()

    async def get(self) -> tuple[bytes, Message, list[memoryview]]:
        return await asyncio.wait_for(self.messages.get(), WAIT_S)

    async def reject(self, *words: str) -> str:
        """Wait for a reject whose reason holds one of the words."""
        while True:
            reason = await asyncio.wait_for(self.rejects.get(), WAIT_S)
            if any(word in reason for word in words):
                return reason


@asynccontextmanager
async def router(
    endpoint: str | None = None, keys: ClusterKeys | None = None, **options: Any
) -> AsyncIterator[tuple[Router, Inbox]]:
    """Open a Router on ipc, or on a loopback port where there are keys."""
    inbox = Inbox()
    with private_directory() as directory:
        if endpoint is None:
            endpoint = ipc_endpoint(directory) if keys is None else "tcp://127.0.0.1:0"
        handlers = {
            "on_message": lambda *heard: inbox.messages.put_nowait(heard),
            "on_reject": inbox.rejects.put_nowait,
            "on_lost": lambda *lost: inbox.lost.put_nowait(lost),
        }
        async with Router(endpoint, keys=keys.server if keys else None, **{**handlers, **options}) as opened:
            yield opened, inbox


def identity() -> bytes:
    return secrets.token_hex(8).encode()


def dealer(
    opened: Router, keys: ClusterKeys | None = None, name: bytes | None = None, **options: Any
) -> Dealer:
    return Dealer(opened.endpoint, identity=name or identity(), keys=keys.client if keys else None, **options)


async def blocking(function: Callable[..., Any], *args: Any) -> Any:
    """Run a Dealer's blocking call beside the loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), WAIT_S)


async def is_gone(opened: Router, who: bytes) -> None:
    """Wait until the Router knows that a peer is gone: only sending tells."""
    async with asyncio.timeout(WAIT_S):
        while opened.send(who, Bind(0)):  # noqa: ASYNC110
            await asyncio.sleep(0)


def first_frame(message: Message, header: bytes = b"") -> bytes:
    """The first frame of an honest message."""
    return seal(pack(message), header)


def log(text: str = "hello") -> LogLine:
    return LogLine("stage", 0, 0, text)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def other_keys(keys: ClusterKeys) -> ClusterKeys:
    """Keys of another client, whom the server of `keys` does not know."""
    stranger = new_keys().client
    return ClusterKeys(
        type(stranger)(keys.client.server_public, stranger.public, stranger.secret), keys.server
    )
