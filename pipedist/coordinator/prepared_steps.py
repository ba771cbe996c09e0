"""Steps of a training loop, with one message to each worker, one back, and one event for the scheduler.

While nothing else is going on, the scheduler's next decision is known: the next step of a pass goes to the workers of
its latest gang (`Scheduler.foresee`). Such a step is sent when it is offered. Its results are collected here, and
given to their caller when all have arrived. The scheduler gets one event for all of that, after the next step was sent:
while it handles the event, workers do that step instead of waiting for it. As the workers need the processors by then,
it gets the events of some short steps together, which takes less time.

Before the scheduler handles any other event, or is asked about a lease, it gets the events of what has happened so
far, with their times (`hand_over`): the steps that are over; the offer of the step that runs, and its results that have
arrived. From then on the step is one like any other. So when a worker dies or a call fails, the scheduler decides in
the same state as if it had seen every event at once; steps that are offered while one runs take the general path too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from pipedist.coordinator.gang_relay import Segment, SegmentPool
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.results import Chunk, UnknownClass, open_chunk
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.coordinator.worker_registry import Peer
from pipedist.core.record_format import frame_bytes
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, encode
from pipedist.protocol.encoder import encode_arguments
from pipedist.scheduler import Event, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

UNSEEN_STEPS_MAX = 16  # steps that are over whose events wait for the next one
UNSEEN_S_MAX = 0.05  # how long the first of them waits, if there is a next step


class PastEvent(Struct, frozen=True):
    """An event that the scheduler has not seen, the results that came with it, and its time."""

    event: Event
    chunk: Chunk | None
    at: float


class _Report(Struct, frozen=True):
    peer: Peer
    results: msg.Results
    chunk: Chunk
    at: float


class _Members(Struct, frozen=True):
    """The workers of the latest gang; valid until the next event of another kind."""

    pass_id: int
    peers: list[Peer]
    segment: Segment | None


@dataclass(slots=True, eq=False)
class _Running:
    handle: PassHandle
    step: int
    command: cmd.SendGang
    members: _Members
    began: float
    reports: dict[int, _Report] = field(default_factory=dict)  # by member, in order of arrival


class PreparedSteps:
    """Sends the steps that the scheduler foresees, one at a time, and collects their results.

    `send_states` sends a worker the versions of states that it lacks; `post` has an event handled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: WorkerPool,
        segments: SegmentPool,
        send_states: Callable[[str, Mapping[str, Sequence[int]]], None],
        post: Callable[[PastEvent], None],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._segments = segments
        self._send_states = send_states
        self._post = post
        self._running: _Running | None = None
        self._members: _Members | None = None
        self._over: list[tuple[cmd.SendGang, PastEvent]] = []
        """The steps before, of one pass, and their events, which the scheduler has not seen."""

    @property
    def has_news(self) -> bool:
        """Whether the scheduler has not seen everything."""
        return self._running is not None or bool(self._over)

    def begin(self, handle: PassHandle, step: int) -> bool:
        """Send a step that is offered; return False if it must take the general path.

        The scheduler has seen all steps of other passes. The caller handles events that sending causes, such as the
        loss of a worker, after this.
        """
        if self._running is not None:
            return False
        record = handle.record
        asked = 0 if record is None else record.recorder.now()
        if not self._over:
            command = self._scheduler.foresee(handle.id)
        else:
            command = self._over[-1][0].following(handle.settings.replicas)
        if command is None:
            return False
        parts, (values, states) = command.parts, handle.inputs_of(step)
        first = step * len(values)
        if parts[0].lo != first or parts[-1].hi != first + len(values):
            return False
        members = self._members
        if members is None or members.pass_id != handle.id:
            members = self._find_members(command, len(values))
            if members is None:
                return False
        payloads: list[list[Frame]] = []
        try:
            versions = None if states is None else {name: list(at) for name, at in states.items()}
            for worker, _, lo, hi in parts:
                own = values[lo - first : hi - first]
                if states is None:
                    payloads.append(encode_arguments(own))
                else:
                    payloads.append(encode([None, None, own, versions]))
                    self._send_states(worker, states)
        except Exception:  # a value can't be sent: the general path raises the error
            return False
        self._running = _Running(handle, step, command, members, time.monotonic())
        where, serial, number = "", command.serial, handle.number_of(step)
        if members.segment is not None:
            where = members.segment.where
            members.segment.serials.add(serial)
        messages: list[tuple[Peer, msg.Message, list[Frame]]] = []
        for member, (worker, lease, lo, hi) in enumerate(parts):
            if record is not None:
                size = frame_bytes(payloads[member])
                record.recorder.later(record.sent, worker, lease, lo, hi, 0, size, asked, False, False)
            head = msg.AssignGang(lease, handle.id, lo, hi, 0, serial, member, len(parts), where, number)
            messages.append((members.peers[member], head, payloads[member]))
        self._pool.send_all(messages)
        over = self._over
        if len(over) >= UNSEEN_STEPS_MAX or (over and self._running.began - over[0][1].at > UNSEEN_S_MAX):
            self.report()
        return True

    def report(self, *, unless_of: int = 0) -> None:
        """Have the scheduler see the steps that are over, if there are some, and they are not of a pass."""
        if self._over and self._over[0][0].pass_id != unless_of:
            over, self._over = self._over, []
            for _, past in over:
                self._post(past)

    def _find_members(self, command: cmd.SendGang, replicas: int) -> _Members | None:
        peers = [peer for part in command.parts if (peer := self._pool.of(part.worker)) is not None]
        if len(peers) < len(command.parts):
            return None
        segment = self._segments.begin(command.serial, peers, replicas)
        self._members = members = _Members(command.pass_id, peers, segment)
        return members

    def take(self, peer: Peer, results: msg.Results, frames: Sequence[memoryview]) -> bool:
        """Take the results of a member; return False if they are not those of the step that runs.

        Raise RemoteProtocolError if they are malformed.
        """
        running = self._running
        if running is None:
            return False
        parts, reports, handle = running.command.parts, running.reports, running.handle
        member = results.lease - parts[0].lease
        if not 0 <= member < len(parts) or peer is not running.members.peers[member]:
            return False
        _, _, lo, hi = parts[member]
        if results.lo != lo or results.hi != hi or member in reports:
            return False
        try:
            chunk = open_chunk(lo, hi, frames, handle.slots, handle.required_slots)
        except UnknownClass:
            return False  # its calls have failed, which the scheduler has to see
        if (record := handle.record) is not None:
            record.recorder.later(record.returned, peer.worker, results, chunk.size)
        reports[member] = _Report(peer, results, chunk, time.monotonic())
        if len(reports) == len(parts):
            self._end(running)
        return True

    def _end(self, running: _Running) -> None:
        self._running = None
        handle, command, segment = running.handle, running.command, running.members.segment
        if segment is not None:
            segment.end(command.serial, aborted=False)
        chunks, reports = [], []
        for report in running.reports.values():
            chunks.append(report.chunk)
            reports.append((report.peer.worker, report.results.busy_ns, report.chunk.size))
        executed = ev.StepExecuted(handle.id, command.serial, tuple(reports))
        self._over.append((command, PastEvent(executed, None, time.monotonic())))
        handle.gang_arrived(chunks, running.members.peers)
        handle.ready(running.step, running.step + 1)

    def forget(self) -> None:
        """Forget who the workers of the latest gang are: another event may change it."""
        self._members = None

    def hand_over(self) -> tuple[cmd.SendGang | None, list[PastEvent]]:
        """Return the command that was executed already, if any, and the events that the scheduler has not seen."""
        over, self._over = [past for _, past in self._over], []
        running, self._running = self._running, None
        if running is None:
            return None, over
        handle, step = running.handle, running.step
        offered = ev.StepsAvailable(handle.id, step, step + 1, handle.settings.replicas)
        events = [PastEvent(offered, None, running.began)]
        for report in running.reports.values():
            peer, results, chunk = report.peer, report.results, report.chunk
            lease, lo, hi, busy_ns = results.lease, results.lo, results.hi, results.busy_ns
            done = ev.CallsDone(peer.worker, peer.incarnation, lease, lo, hi, busy_ns, chunk.size)
            events.append(PastEvent(done, chunk, report.at))
        return running.command, over + events
