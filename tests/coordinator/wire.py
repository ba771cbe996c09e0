"""A coordinator without sockets: its messages are recorded, and the test sends those of workers."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from msgspec.structs import replace

from pipedist.coordinator import Coordinator, PassHandle
from pipedist.core.functions import reference
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, decode, encode
from pipedist.protocol.program import Emit, Program, StageProgram
from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.worker.identity import new_name
from pipedist.worker.process_setup import make_hello

M = TypeVar("M", bound=msg.Message)


named = functools.cache(new_name)
"""The full name of a worker that tests call "a", and its proof; the same each time."""


class Wire:
    """A router that records the messages which it sends."""

    def __init__(self, on_message: Any, **_: Any) -> None:
        self.endpoint = "nowhere"
        self.sent: list[tuple[str, msg.Message, Sequence[Frame]]] = []
        self.dropped: list[str] = []
        self.is_closed = False
        self.coordinator: Coordinator
        self._on_message = on_message

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_closed = True

    def send(self, identity: bytes, message: msg.Message, payload: Sequence[Frame] = ()) -> bool:
        self.sent.append((identity.decode(), message, payload))
        return True

    def send_all(self, messages: Sequence[tuple[bytes, msg.Message, Sequence[Frame]]]) -> list[bool]:
        return [self.send(*each) for each in messages]

    def keep(self, identity: bytes) -> None:
        return

    def release(self, identity: bytes) -> None:
        return

    def drop(self, identity: bytes, _reason: str = "") -> None:
        self.dropped.append(identity.decode())

    # -- the test's side -------------------------------------------------------------------

    def join(self, *workers: str, incarnation: int = 0) -> Wire:
        """Join workers, each over a connection named after its name and incarnation."""
        for worker in workers:
            name, proof = named(worker)
            hello = replace(make_hello(name, incarnation, proof=proof), boot="there")
            self._on_message(f"{worker}.{incarnation}".encode(), hello, [])
        return self

    def say(self, identity: str, message: msg.Message, tree: Any = None) -> None:
        """Send a message as a worker."""
        frames = [] if tree is None else [memoryview(frame) for frame in encode(tree)]
        self._on_message(identity.encode(), message, frames)

    def bring(self, identity: str, message: msg.Message, *frames: bytes) -> None:
        """Send a message as a worker, with a payload that is not decoded."""
        self._on_message(identity.encode(), message, [memoryview(frame) for frame in frames])

    def sent_to(self, identity: str, kind: type[M]) -> list[M]:
        """Return the messages of one kind that a worker was sent."""
        return [m for to, m, _ in self.sent if to == identity and isinstance(m, kind)]

    def last(self, identity: str, kind: type[M]) -> M:
        """Return the latest message of one kind that a worker was sent."""
        return self.sent_to(identity, kind)[-1]

    def payload(self, identity: str, kind: type[msg.Message]) -> Any:
        """Return the decoded payload of the latest message of one kind."""
        frames = [payload for to, m, payload in self.sent if to == identity and isinstance(m, kind)][-1]
        return decode(frames)

    def done(self, identity: str, *values: Any) -> None:
        """Send the results of a worker's latest part of a gang."""
        part = self.last(identity, msg.AssignGang)
        calls = [{"v": value} for value in values]
        self.say(identity, msg.Results(part.lease, part.lo, part.hi, 10**9), calls)

    def failed(self, identity: str, text: str, *, aborted: bool = False) -> None:
        """Report that the first call of a worker's latest part of a gang raised."""
        part = self.last(identity, msg.AssignGang)
        self.say(
            identity,
            msg.Failed(part.lease, part.lo, "s", "builtins", "ValueError", text, "", True, aborted),
        )


@asynccontextmanager
async def wired(
    limits: SchedulerLimits | None = None, router: type[Wire] | None = None
) -> AsyncIterator[Wire]:
    """Open a coordinator without workers; the test joins them."""
    wires: list[Wire] = []

    def make(**callbacks: Any) -> Any:
        wires.append((router or Wire)(**callbacks))
        return wires[0]

    coordinator = Coordinator(
        router_factory=make, launcher_factory=None, workers=(), limits=limits, dial_in=True, boot="here"
    )
    async with coordinator:
        wires[0].coordinator = coordinator
        yield wires[0]
        for worker in [peer.worker for peer in coordinator._pool]:  # no process sends Goodbye
            incarnation = coordinator._pool.of(worker).incarnation  # type: ignore[union-attr]
            coordinator._pool.on_goodbye(msg.Goodbye(worker, incarnation, "over"))


def gang_pass(wire: Wire, replicas: int = 2, **settings: Any) -> PassHandle:
    """Open a pass as `Strategy.run` does."""
    stage = StageProgram("s", reference("json:dumps"), -1, {}, collectives=True)
    program = Program(
        seed=0, replicas=replicas, reader=None, stages=(stage,), emits=(Emit("v", 0), Emit("w", 0)), gang=True
    )
    chosen = PassSettings(replicas, ordered=False, pulled=False, gang=True)
    return wire.coordinator.open_pass(program, name="p", settings=chosen, **settings)
