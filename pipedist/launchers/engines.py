"""What an engine is: a system that places worker processes on its nodes, and brings them back.

A worker that an engine has placed dials in, like one that was started by hand: the protocol, the ledger and
the scheduler know nothing of engines.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import anyio

from pipedist.errors import UsageError
from pipedist.launchers.hosted import Terms
from pipedist.launchers.whereabouts import Succession

LOCAL = "local"
"""The address that stands for an engine of the run's own, on this host."""

GRACE_S = 3.0
"""How long a worker's processes may take to leave when the cluster is closed; then they are killed."""

PLACE_S = 60.0
"""How long an engine may take to have room for the workers, if nothing else is said."""

CLOSE_S = 30.0
"""How long an engine may take to end the workers, and then the connection."""

OnFailed = Callable[[str], None]
"""Told why no worker of an engine is there any more, nor will be."""


class Engine(Protocol):
    """Places workers, inside `async with`: entering connects to it.

    Leaving ends its workers, and whatever was started for the run.
    """

    @property
    def host(self) -> str:
        """This host's address, as the engine's nodes reach it."""
        ...

    @property
    def placing(self) -> str:
        """What its workers are placed on, and with; known after entering.

        Only those for which it is the same are as good as new ones.
        """
        ...

    @property
    def placed(self) -> int:
        """How many workers it has placed, or taken over."""
        ...

    async def start(self, terms: Terms, on_failed: OnFailed, succession: Succession | None = None) -> None:
        """Place the workers; return as soon as the engine has room for them.

        Args:
            terms: how they join.
            on_failed: called on the event loop.
            succession: they outlive this process, and those of the processes before it are taken over;
                None: they end with it.

        Raises:
            UsageError: there is no room in time, or pipedist is not installed where they are placed.
        """
        ...

    async def dismiss(self, left: Succession) -> None:
        """End the workers that a process of the run has left, and those before it; nobody wants them."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def outliving(address: str | None, engine: str, example: str) -> UsageError:
    """Return what to say where workers are to outlive the run, and the engine would not.

    Args:
        address: what was said; None: nothing, and no engine was found.
        engine: its name.
        example: an address of one that does.
    """
    said = "`address: local`" if address == LOCAL else "no `address`, where no other one is found"
    return UsageError(
        f"`rejoin_s` with {said}: that {engine} is the run's own and ends with its process, and the workers "
        f"with it; name one that is there without the run (`address: {example}`), or leave `rejoin_s` out"
    )


class Watchers:
    """Tasks that end with the engine. No error of the run passes through them: a task group would wrap it."""

    def __init__(self) -> None:
        self._group = anyio.create_task_group()
        self._is_over = False

    def start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """Begin a task, which must not raise; nothing begins any more once they end."""
        if not self._is_over:
            self._group.start_soon(function, *args)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)


class ConnectedEngine(ABC):
    """What engines have in common that are reached over a connection: how one is entered and left.

    Entering prepares, then connects; where that fails, and at the end, the workers are withdrawn and the
    connection is ended, within CLOSE_S each, whatever has happened before.
    """

    def __init__(self) -> None:
        self.host = ""
        """This host's address, as the engine's nodes reach it; known after entering."""
        self._stack = AsyncExitStack()
        self._watchers: Watchers | None = None

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            self._prepare(self._stack)
            self._stack.push_async_callback(self._end)
            self.host = await self._connect()
            self._watchers = await self._stack.enter_async_context(Watchers())
        except BaseException:
            await self._stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def watchers(self) -> Watchers:
        """Tasks that end with the engine.

        Raises:
            UsageError: it is not entered.
        """
        if self._watchers is None:
            raise UsageError("an engine is used inside `async with`")
        return self._watchers

    def _prepare(self, stack: AsyncExitStack) -> None:  # noqa: B027 - not every engine needs anything
        """Enter into `stack` what must be there before the connection, and longer than it."""

    @abstractmethod
    async def _connect(self) -> str:
        """Connect, and return this host's address, as the engine's nodes reach it."""

    @abstractmethod
    async def _withdraw(self) -> None:
        """End the workers that were placed, if any were."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """End the connection, as far as it came to be, and what was started with it."""

    async def _end(self) -> None:
        try:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._withdraw()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._disconnect()


def require(module: str, extra: str) -> None:
    """See to it that an extra is installed, without importing it.

    Args:
        module: what is imported.
        extra: its name among pipedist's extras, and that of the launcher.

    Raises:
        UsageError: it is not.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # a folder of that name is no package
        raise UsageError(
            f"the launcher {extra} needs the package {module}: pip install 'pipedist[{extra}]', "
            "here and on every node"
        )


def address_towards(host: str) -> str:
    """Return this host's address on the way to another one; nothing is sent."""
    import socket

    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def not_installed(text: str) -> str:
    """Return what to do about an engine's error if it says that its node lacks pipedist; else ""."""
    if "No module named 'pipedist" not in text:
        return ""
    return (
        "pipedist can't be imported on a node: install the same version there, in the environment that "
        "the engine's processes run in"
    )
