"""The workers that have joined, and the rules for joining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from pipedist.core import platform_id
from pipedist.core.platform_id import Platform
from pipedist.protocol import messages as msg

VERSIONS_KEPT = 2  # per state, here and in workers: a retried step may read the previous one


class Peer(Struct, frozen=True, eq=False):
    """An incarnation of a worker that has joined, and its connection."""

    identity: bytes
    worker: str
    incarnation: int
    local: bool  # it shares this host's files
    pid: int = 0  # its process id on its host; 0: unknown
    host: str = ""
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)  # versions by space
    sees: set[int] = field(default_factory=set)  # passes whose data files it sees, too
    codes: set[str] = field(default_factory=set)  # digests of its copies of code folders
    code_folders: set[str] = field(default_factory=set)  # those it was sent a Code for

    def hold(self, space: int, version: int) -> None:
        """Record a version of a state that it holds; it keeps the highest ones."""
        self.held[space] = tuple(sorted({*self.held.get(space, ()), version})[-VERSIONS_KEPT:])


class WorkerRegistry:
    """The peers that have joined; at most one incarnation of each worker."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Peer] = {}
        self._by_worker: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def add(self, peer: Peer) -> None:
        self._by_identity[peer.identity] = peer
        self._by_worker[peer.worker] = peer

    def of_identity(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def of(self, worker: str, incarnation: int | None = None) -> Peer | None:
        """Return the peer of a worker; if an incarnation is given, only that one."""
        peer = self._by_worker.get(worker)
        if peer is None or (incarnation is not None and peer.incarnation != incarnation):
            return None
        return peer

    def remove(self, worker: str, incarnation: int) -> Peer | None:
        """Remove and return this incarnation of a worker, if it is registered."""
        peer = self.of(worker, incarnation)
        if peer is not None:
            del self._by_identity[peer.identity]
            del self._by_worker[worker]
        return peer


def rejection_reason(
    hello: msg.Hello,
    *,
    started: Mapping[str, int],  # the incarnation of each worker that was started here and is alive
    managed: bool,  # the name is one of the workers that are started here
    dial_in: bool,
    current: Peer | None,  # the peer of that name that has joined before
    threads: int | None = None,  # that it must have, because they change bits; None: any
) -> str:
    """Return why a worker may not join, whatever its platform; "" if it may."""
    if managed and started.get(hello.worker) != hello.incarnation:
        return f"incarnation {hello.incarnation} of {hello.worker} was not started by this cluster"
    if not managed and not dial_in:
        return f"this cluster starts its own workers, and {hello.worker!r} is none of them"
    if current is not None and current.incarnation == hello.incarnation:
        return f"incarnation {hello.incarnation} of {hello.worker} has joined already"
    if current is not None and current.incarnation > hello.incarnation:
        return f"a later incarnation of {hello.worker} has joined: {current.incarnation}"
    if hello.wire != msg.WIRE_VERSION:
        return f"it speaks protocol {hello.wire} (the run {msg.WIRE_VERSION})"
    if threads is not None and hello.threads != threads:
        return f"it runs with --threads {hello.threads} (the run: threads_per_replica: {threads})"
    return ""


def differences(hello: msg.Hello, *, managed: bool) -> str:
    """Return the differences of a platform that could change bits, or ""; `managed`: it is on our processor."""
    theirs = Platform(hello.python, hello.numpy, hello.pipedist, hello.cpu, hello.traits)
    differing = platform_id.differences(theirs, Platform.here(), called="the run", same_processor=managed)
    return "it runs " + ", ".join(differing) if differing else ""
