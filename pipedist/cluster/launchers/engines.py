"""Engines place worker processes on their nodes, and restart them.

A worker that an engine has placed dials in, like a worker that was started by hand: protocol, ledger and
scheduler know nothing of engines.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from pipedist.cluster.launchers.supervisor_process import JoinConfig
from pipedist.errors import UsageError

LOCAL = "local"  # the address of an engine that a cluster starts for itself, on this host
GRACE_S = 3.0  # how long a worker's processes may take to end at the cluster's end; then they are killed
PLACE_S = 60.0  # how long an engine may take to place the workers, by default
CLOSE_S = 30.0  # how long an engine may take to end the workers, and then to close the connection
OnFailed = Callable[[str], None]  # called on the event loop with the reason why no worker is left


class Watchers:
    """Tasks that end with the engine.

    The errors of a run do not pass through their task group, which would wrap them.
    """

    _group: TaskGroup

    def __init__(self) -> None:
        self._is_over = False

    def start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """Start a task, which must not raise; not once the tasks are ending."""
        if not self._is_over:
            self._group.start_soon(function, *args)

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)


class Engine(ABC):
    """Places workers, inside `async with`, over a connection.

    Entering prepares, then connects. If that fails, and at the end, the workers are withdrawn and the
    connection is closed, within CLOSE_S each.
    """

    def __init__(self) -> None:
        self.host = ""  # the address of this host, as the engine's nodes reach it; known after entering
        self._stack = AsyncExitStack()
        self.watchers = Watchers()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._prepare(stack)
            stack.push_async_callback(self._end)
            self.host = await self._connect()
            await stack.enter_async_context(self.watchers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _prepare(self, stack: AsyncExitStack) -> None:  # noqa: B027 - not every engine needs it
        """Enter into `stack` what must outlast the connection."""

    @abstractmethod
    async def start(self, join: JoinConfig, on_failed: OnFailed) -> None:
        """Place the workers; return when the engine has the resources for them."""

    @abstractmethod
    async def _connect(self) -> str:
        """Connect; return the address at which the nodes reach this host."""

    @abstractmethod
    async def _withdraw(self) -> None:
        """End the workers that were placed, if any were."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connection, if any, and end what was started with it."""

    async def _end(self) -> None:
        try:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._withdraw()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._disconnect()


def require(module: str, extra: str) -> None:
    """Check that an extra's module is installed, without importing it."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # a folder of that name is not a package
        raise UsageError(
            f"`launcher: {extra}` needs the package {module}, which is not installed. "
            f"Run `pip install 'pipedist[{extra}]'` here and on every node."
        )


def address_towards(host: str) -> str:
    """Return this host's address on the route to another; send nothing."""
    import socket

    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def not_installed(text: str) -> str:
    """Return the error text if a node lacks pipedist, else ""."""
    if "No module named 'pipedist" not in text:
        return ""
    return (
        "pipedist can't be imported on a node. Install the same version there, in the environment of the "
        "engine's processes."
    )
