"""What workers say: checked here, before the scheduler hears of it, and only as far as it counts.

Whoever speaks is known by its connection, never by what it says. What breaks the protocol raises
RemoteProtocolError, which costs its sender the connection; what comes for a lease that nobody holds
any more is the messages' crossing, is counted, and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from pipedist.coordinator.gang_relay import Gangs
from pipedist.coordinator.log_sinks import LogSinks
from pipedist.coordinator.passes import Passes
from pipedist.coordinator.program_distribution import Introductions
from pipedist.coordinator.rejections import Refusals
from pipedist.coordinator.store import Chunk, open_chunk
from pipedist.coordinator.worker_pool import Fleet
from pipedist.coordinator.worker_registry import Peer
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev

_DIGITS_MAX = 9
"""Of the number of a gang's member."""


class Post(Protocol):
    """Tells the scheduler what happened."""

    def __call__(self, event: Event, chunk: Chunk | None = None) -> None:
        """Have an event handled; `chunk`: the results that it is about."""


class Reception:
    """Takes in what workers say, and supervisors for them.

    Args:
        post: tells the scheduler.
        fleet: who is there, and may join.
        gangs: told what members say to each other.
        introductions: told who sees which data.
        log_sinks: told what replica functions print.
        refusals: counts what does not count.
        passes: those that are open.
    """

    def __init__(
        self,
        post: Post,
        *,
        fleet: Fleet,
        gangs: Gangs,
        introductions: Introductions,
        log_sinks: LogSinks,
        refusals: Refusals,
        passes: Passes,
    ) -> None:
        self._post = post
        self._fleet = fleet
        self._gangs = gangs
        self._introductions = introductions
        self._log_sinks = log_sinks
        self._refusals = refusals
        self._passes = passes

    def greet(self, identity: bytes, hello: msg.Hello) -> None:
        """Let a worker join, if it may; what it has kept is known before it is dealt anything.

        Raises:
            RemoteProtocolError: it can't be who it says, or offers nonsense.
        """
        self._fleet.check_name(hello)
        self._passes.offered(hello)
        self._fleet.greet(identity, hello)
        peer = self._fleet.of(hello.worker)
        if peer is None or peer.incarnation != hello.incarnation:
            self._passes.refused(hello)

    def hear(self, peer: Peer, message: msg.Message, frames: list[memoryview]) -> None:
        """Take in what a worker says.

        Raises:
            RemoteProtocolError: it may not say that.
        """
        match message:
            case msg.Results():
                self._on_results(peer, message, frames)
            case msg.Failed():
                self._on_failed(peer, message)
            case msg.Exchange():
                self._refusals.stale += not self._gangs.exchange(peer, message, frames)
            case msg.Stalled():
                self._on_stalled(peer, message)
            case msg.Cancelled(lease):
                self._post(ev.CancelConfirmed(peer.worker, peer.incarnation, lease))
            case msg.DataVisible(pass_id):
                if pass_id in self._passes.handles:
                    self._introductions.saw(peer, pass_id)
            case msg.LogLine():
                self._log_sinks.tell(peer.worker, message)
            case msg.Heartbeat():
                self._post(ev.HeartbeatReceived(peer.worker, peer.incarnation))
            case msg.Goodbye():
                self._fleet.left(replace(message, worker=peer.worker, incarnation=peer.incarnation))
            case _:
                raise RemoteProtocolError(f"a worker may not send {type(message).__name__}")

    def hear_stranger(self, identity: bytes, message: msg.Message) -> None:
        """Take in what is said by nobody who has joined: for others, only a supervisor may speak.

        Raises:
            RemoteProtocolError: it can't be who it says.
        """
        match message:
            case msg.Heartbeat(worker, incarnation) if worker not in self._fleet.names:
                self._fleet.check_name(message)
                self._fleet.heard(identity, worker, incarnation)
            case msg.Goodbye(worker) if worker not in self._fleet.names:
                self._fleet.check_name(message)
                self._fleet.left(message)
            case _:
                self._fleet.turn_away(identity)

    def _on_results(self, peer: Peer, told: msg.Results, frames: Sequence[memoryview]) -> None:
        handle = self._passes.of_lease(peer.worker, told.lease)
        chunk, size = None, 0
        if handle is not None:  # otherwise they don't count, and are not worth decoding
            chunk = open_chunk(told.lo, told.hi, frames, handle.slots, partial=handle.settings.gang)
            size = chunk.size
        who, incarnation = peer.worker, peer.incarnation
        self._post(ev.CallsDone(who, incarnation, told.lease, told.lo, told.hi, told.busy_ns, size), chunk)

    def _on_failed(self, peer: Peer, told: msg.Failed) -> None:
        handle = self._passes.of_lease(peer.worker, told.lease)
        who, incarnation = peer.worker, peer.incarnation
        failed = ev.CallFailed(who, incarnation, told.lease, told.call, aborted=told.aborted)
        if handle is not None:
            handle.raised[told.call] = told
            failed = handle.policy.judged(failed, told)
            self._gangs.failed(told)
        self._post(failed)
        self._gangs.reported(told.lease)

    def _on_stalled(self, peer: Peer, told: msg.Stalled) -> None:
        if not all(member.isdecimal() and len(member) <= _DIGITS_MAX for member in told.members):
            raise RemoteProtocolError(f"the members {told.members} of a gang")
        members = tuple(map(int, told.members))
        self._post(ev.GangStalled(peer.worker, peer.incarnation, told.lease, members, told.text))
