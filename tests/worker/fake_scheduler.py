"""A fake scheduler for tests: a Router, and a script of messages."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pipedist.cluster.launchers.local import LocalLauncher
from pipedist.coordinator.launcher import WorkerExit
from pipedist.core.types import FunctionRef
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.messages import (
    Assign,
    AssignGang,
    Bind,
    Cancelled,
    Exchange,
    Failed,
    Hello,
    LogLine,
    Message,
    Relay,
    Results,
    Stalled,
    Stop,
    Welcome,
    spans,
)
from pipedist.protocol.program import Emit, Program, ReaderConfig, StageProgram, to_frames
from pipedist.transport.endpoints import ipc_endpoint, private_directory
from pipedist.transport.keys import ServerKeys
from pipedist.transport.router import Router

M = TypeVar("M")
PATIENCE_S = 60.0

LISTEN = f"tcp://127.{1 + os.getpid() // 65_536 % 254}.{os.getpid() // 256 % 256}.{os.getpid() % 256}:0"
"""An address of this process alone, so no other process takes the port while it is closed."""


class FakeScheduler:
    """Collects the messages of workers, and sends scripted ones."""

    def __init__(self, keys: ServerKeys | None = None, listen: str = LISTEN) -> None:
        self._keys = keys
        self._listen = listen
        self.inbox: asyncio.Queue[tuple[bytes, Message, list[memoryview]]] = asyncio.Queue()
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.logs: list[LogLine] = []
        self.rejected: list[str] = []
        self.stalled: list[Stalled] = []
        self.exchanges = 0
        self.serials = 0
        self.passes = 0
        self.leases = 0

    async def __aenter__(self) -> Self:
        self._directory = private_directory()
        path = self._directory.__enter__()
        self._router = Router(
            self._listen if self._keys else ipc_endpoint(path),
            keys=self._keys,
            on_message=lambda *received: self.inbox.put_nowait(received),
            on_reject=self.rejected.append,
        )
        await self._router.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._router.__aexit__(kind, error, trace)
        self._directory.__exit__(None, None, None)

    @property
    def endpoint(self) -> str:
        return self._router.endpoint

    def send(self, identity: bytes, message: Message, payload: Sequence[Any] = ()) -> None:
        assert self._router.send(identity, message, payload)

    async def take(
        self, kind: type[M], *, aside: type | tuple[type, ...] = (LogLine, Cancelled)
    ) -> tuple[bytes, M, list[memoryview]]:
        """The next message, which must be of this kind; Logs, and answers to Cancel, are put aside."""
        while True:
            identity, message, frames = await asyncio.wait_for(self.inbox.get(), PATIENCE_S)
            if isinstance(message, kind):
                return identity, message, frames
            assert isinstance(message, aside), f"expected {kind.__name__}, got {message}"
            if isinstance(message, LogLine):
                self.logs.append(message)

    async def printed(self, count: int = 1) -> None:
        """Wait until workers have printed so many lines; whatever else they say is lost."""
        while len(self.logs) < count:
            _, message, _ = await asyncio.wait_for(self.inbox.get(), PATIENCE_S)
            if isinstance(message, LogLine):
                self.logs.append(message)

    async def exit(self) -> WorkerExit:
        return await asyncio.wait_for(self.exits.get(), PATIENCE_S)

    async def welcome(self) -> tuple[bytes, Hello]:
        identity, hello, _ = await self.take(Hello)
        self.send(identity, Welcome("c", 0.1, tuple(os.fsencode(p) for p in sys.path if p)))
        return identity, hello

    async def joins(self, launcher: LocalLauncher) -> tuple[bytes, Hello]:
        """Welcome a worker after its launcher has received its process id, over another socket."""
        identity, hello = await self.welcome()
        while launcher.pids.get(hello.worker) != hello.pid:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        return identity, hello

    def drop(self, identity: bytes) -> None:
        """Cut the connection of a peer."""
        self._router.drop(identity)

    def bind(self, identity: bytes, program: Program) -> int:
        self.passes += 1
        self.send(identity, Bind(self.passes), to_frames(program))
        return self.passes

    def assign(
        self,
        identity: bytes,
        pass_id: int,
        values: list[Any] | None = None,
        *,
        lo: int = 0,
        hi: int | None = None,
        ids: list[Any] | None = None,
        locations: list[Any] | None = None,
        states: dict[str, list[int]] | None = None,
    ) -> int:
        self.leases += 1
        if hi is None:
            hi = lo + len(values or ids or locations or ())
        payload = encode([ids, locations, values, states])
        self.send(identity, Assign(self.leases, pass_id, lo, hi, 0), payload)
        return self.leases

    def bind_all(self, identities: Sequence[bytes], program: Program) -> int:
        self.passes += 1
        for identity in identities:
            self.send(identity, Bind(self.passes), to_frames(program))
        return self.passes

    def assign_gang(
        self,
        identities: Sequence[bytes],
        pass_id: int,
        values: Sequence[Any] | None,
        *,
        step: int = 0,
        replicas: int | None = None,
        segment: str = "",
        states: dict[str, list[int]] | None = None,
        ids: list[Any] | None = None,
    ) -> dict[int, bytes]:
        """Assign one step's calls, spread over workers; returns the lease of each worker."""
        replicas = replicas or len(values or ())
        leases: dict[int, bytes] = {}
        self.serials += 1
        members = len(identities)
        for member, (identity, span) in enumerate(zip(identities, spans(replicas, members), strict=True)):
            self.leases += 1
            leases[self.leases] = identity
            lo, hi = step * replicas + span[0], step * replicas + span[1]
            own = None if values is None else list(values[slice(*span)])
            own_ids = None if ids is None else ids[slice(*span)]
            message = AssignGang(self.leases, pass_id, lo, hi, 0, self.serials, member, members, segment)
            self.send(identity, message, encode([own_ids, None, own, states]))
        return leases

    async def gang_outcomes(self, leases: dict[int, bytes], count: int) -> list[dict[str, Any] | Failed]:
        """What came of the calls of a gang, in their order; passes on what its members exchange."""
        found: dict[int, dict[str, Any] | Failed] = {}
        members = list(leases)
        failed: set[int] = set()
        reported: set[int] = set()
        while len(found) < count:
            identity, message, frames = await asyncio.wait_for(self.inbox.get(), PATIENCE_S)
            if isinstance(message, LogLine):
                self.logs.append(message)
                continue
            if isinstance(message, Stalled):
                self.stalled.append(message)
                continue
            assert isinstance(message, Exchange | Results | Failed), message
            assert leases[message.lease] == identity
            others = [lease for lease in members if lease != message.lease]
            member = members.index(message.lease)
            if isinstance(message, Exchange):
                self.exchanges += 1
                for lease in others:
                    self.send(leases[lease], Relay(lease, member, message.number, ""), frames)
                continue
            if isinstance(message, Failed):
                found[message.call] = message
                failed.add(member)
            else:
                found.update(zip(range(message.lo, message.hi), decode(frames), strict=True))
            span = range(*spans(count, len(members))[member])
            own = [call for call in found if call % count in span]
            if member not in reported and (len(own) == len(span) or member in failed):
                reported.add(member)
                text = f"member {member} failed" if member in failed else "returned"
                for lease in others:
                    self.send(leases[lease], Relay(lease, member, 0, text))
        return [found[call] for call in sorted(found)]

    async def outcomes(
        self, count: int, *, aside: type | tuple[type, ...] = (LogLine, Cancelled)
    ) -> list[dict[str, Any] | Failed]:
        """What came of the next `count` calls, in the order of their reports."""
        found: list[dict[str, Any] | Failed] = []
        while len(found) < count:
            _, message, frames = await self.take((Results, Failed), aside=aside)  # type: ignore[arg-type]
            if isinstance(message, Failed):
                found.append(message)
            else:
                entries = decode(frames)
                assert len(entries) == message.hi - message.lo
                found += entries
        return found

    def stop(self, identity: bytes) -> None:
        self.send(identity, Stop("the test is over"))


def program(
    *functions: str | FunctionRef,
    replicas: int = 1,
    form: str = "shard",
    kwargs: dict[str, Any] | None = None,
    reader: ReaderConfig | None = None,
    emits: tuple[Emit, ...] | None = None,
    chain: bool = False,
    threads: int = 1,
    code: tuple[str, ...] = (),
    gang: bool = False,
    collectives: bool | None = None,
    communication: tuple[int, float | None, str] = (0, None, "auto"),
) -> Program:
    """A program whose stages s0, s1, ... are these functions, each of the shard, or in a chain."""
    stages = tuple(
        StageProgram(
            f"s{i}",
            f if isinstance(f, FunctionRef) else FunctionRef(label=f, name=f),
            i - 1 if chain else -1,
            kwargs or {},
            form,  # type: ignore[arg-type]
            gang if collectives is None else collectives,
        )
        for i, f in enumerate(functions)
    )
    if emits is None:
        emits = (Emit("y", len(stages) - 1),)
    return Program(
        seed=7,
        replicas=replicas,
        reader=reader,
        stages=stages,
        emits=emits,
        code=code,
        threads=threads,
        gang=gang,
        communication=communication,
    )


def stages(*functions: str, collectives: Sequence[bool]) -> tuple[StageProgram, ...]:
    """Stages s0, s1, ..., each of the shard, some with collectives."""
    return tuple(
        StageProgram(f"s{i}", FunctionRef(label=f, name=f), -1, {}, "shard", meets)
        for i, (f, meets) in enumerate(zip(functions, collectives, strict=True))
    )
