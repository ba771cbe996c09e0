"""The execution of the scheduler's commands on workers and passes.

Nothing here waits, and sends never block; data that must be read is read by its pass, in a thread. Before a lease,
a worker is sent what it needs once: the pass's program, the user's code if it is on another host, and the versions
of the states that the lease reads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from pipedist.coordinator.gang_relay import GangRelay
from pipedist.coordinator.inbound import Rejections
from pipedist.coordinator.notices import Notices
from pipedist.coordinator.pass_handle import PassHandle, ReadJob
from pipedist.coordinator.passes import OpenPasses
from pipedist.coordinator.results import Chunk
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.coordinator.worker_registry import VERSIONS_KEPT, Peer
from pipedist.core.record_format import frame_bytes
from pipedist.core.types import Tree
from pipedist.datasets.feeds import ElementRanges, ShardRead
from pipedist.errors import LocalProtocolError, PipedistError, WorkersLost
from pipedist.protocol import messages as msg
from pipedist.protocol.code_archive import CodeSnapshot, CodeTooLarge, take
from pipedist.protocol.codec import Frame, encode
from pipedist.protocol.encoder import encode_arguments
from pipedist.protocol.program import Shards
from pipedist.scheduler import Event
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

_Part = cmd.SendAssign | cmd.GangAssignment  # the calls [lo, hi) of a lease of a worker


class CommandExecutor:
    """Executes the scheduler's commands."""

    def __init__(
        self,
        post: Callable[[Event], None],
        fail: Callable[[PipedistError], None],  # ends every pass with an error
        rejections: Rejections,
        *,
        pool: WorkerPool,
        states: StateVersions,
        gangs: GangRelay,
        passes: OpenPasses,
        notices: Notices,
    ) -> None:
        self._post = post
        self._fail = fail
        self._rejections = rejections
        self._notices = notices
        self._pool = pool
        self._states = states
        self._programs = ProgramDistributor(pool)
        self._leases = LeaseOrder(pool)
        self._gangs = gangs
        self._handles = passes.handles
        self.sent: cmd.SendGang | None = None  # a gang that was sent before the scheduler commanded it

    def execute(self, command: cmd.Command, chunk: Chunk | None) -> None:
        """Execute one command; `chunk`: the results that came with its event."""
        match command:  # the most frequent ones first
            case cmd.AcceptResults(pass_id):
                if chunk is not None:
                    self._handles[pass_id].arrived(chunk)
            case cmd.StepsReady(pass_id, first, last):
                self._handles[pass_id].ready(first, last)
            case cmd.SendAssign(pass_id=pass_id):
                self._send_calls(self._handles[pass_id], command)
            case cmd.StashResults(serial):
                if chunk is not None:
                    self._gangs.stash(serial, chunk)
            case cmd.GangEnded():
                pass_id, stash, peers = self._gangs.end(command)
                if stash:
                    self._handles[pass_id].gang_arrived(stash, peers)
            case cmd.SendGang() if command == self.sent:
                self._gangs.begin(command)
                self.sent = None
            case cmd.SendGang(pass_id=pass_id):
                self._send_gang(self._handles[pass_id], command)
            case cmd.RequestSteps(pass_id, count):
                self._handles[pass_id].want(count)
            case cmd.SendBind(worker, pass_id):
                self._programs.bind(worker, self._handles[pass_id])
            case cmd.SendRecall():
                self._send_recall(command)
            case cmd.SendCommitted(worker, pass_id, before):
                self._pool.send(worker, msg.Committed(pass_id, before))
            case cmd.SendUnbind(worker, pass_id):
                self._pool.send(worker, msg.Unbind(pass_id))
            case cmd.SendQuota(worker, pass_id, number, calls, sharing):
                self._pool.send(worker, msg.Quota(pass_id, number, calls, sharing))
            case cmd.SendCancel(worker, lease):
                self._leases.withdraw(worker, lease)
                self._pool.send(worker, msg.Cancel(lease))
            case cmd.StepFailed(pass_id, step, failures):
                self._handles[pass_id].step_failed(step, failures[0])
            case cmd.SizeCall(pass_id, call):
                self._post(ev.CallSized(pass_id, call, self._handles[pass_id].separable(call)))
            case cmd.CallsQuarantined(pass_id):
                if elements := self._handles[pass_id].on_quarantined(command):
                    self._post(ev.ElementsQuarantined(pass_id, elements))
            case cmd.QuarantineFull(pass_id):
                self._handles[pass_id].on_quarantine_full(command)
                self._post(ev.PassClosed(pass_id))
            case cmd.PassComplete(pass_id):
                self._handles[pass_id].completed()
            case cmd.PassDrained(pass_id):
                self._handles[pass_id].on_drained()
            case cmd.StartWorker(worker, incarnation):
                self._pool.start(worker, incarnation)
            case cmd.EvictWorker(worker, incarnation, reason):
                self._pool.evict(worker, incarnation, reason)
            case cmd.ClusterFailed(reason):
                self._fail(WorkersLost(reason))
            case cmd.DropResults():  # they arrived after their lease had ended
                self._rejections.stale += 1
            case _:
                raise LocalProtocolError(f"the coordinator knows no command {command!r}")

    def _send_recall(self, command: cmd.SendRecall) -> None:
        worker, lease = command.worker, command.lease
        recall = msg.Recall(lease, command.pass_id, command.lo, command.hi)
        outgoing = self._leases.add([(worker, lease)], lambda _: self._pool.send(worker, recall))
        self._leases.ready(outgoing, [])

    def _send_calls(self, handle: PassHandle, command: cmd.SendAssign) -> None:
        worker, lease, lo, hi = command.worker, command.lease, command.lo, command.hi
        asked = 0 if handle.record is None else handle.record.recorder.now()

        def send(payloads: list[list[Frame]]) -> None:
            sent = sum([end - start for start, end in command.elements]) if command.elements else 0
            record = handle.record
            if record is not None:
                size, is_trial = frame_bytes(payloads[0]), bool(command.elements)
                record.recorder.later(
                    record.sent,
                    worker,
                    lease,
                    lo,
                    hi,
                    command.attempt,
                    size,
                    asked,
                    command.overlaps,
                    is_trial,
                )
            head = msg.Assign(lease, command.pass_id, lo, hi, command.attempt, sent, command.overlaps)
            self._pool.send(worker, head, payloads[0])

        if (command.attempt or command.twin) and not command.elements:
            for line in handle.failed.on_repeated(lo, hi, worker, command.attempt, slow=command.twin > 0):
                self._notices.add(line)
        if command.elements:
            handle.elements.divide(lo)
        self._assign(handle, [command], send, command.elements)

    def _send_gang(self, handle: PassHandle, command: cmd.SendGang) -> None:
        """Send each member its calls; if those of one can't be sent, send none."""
        segment = self._gangs.begin(command)
        pass_id, attempt, serial, parts = command.pass_id, command.attempt, command.serial, command.parts
        asked = 0 if handle.record is None else handle.record.recorder.now()
        for worker, _, lo, hi in parts if attempt else ():
            for line in handle.failed.on_repeated(lo, hi, worker, attempt, slow=False):
                self._notices.add(line)

        number = handle.number_of(parts[0].lo // handle.settings.replicas)

        def send(payloads: list[list[Frame]]) -> None:
            record = handle.record
            for member, (worker, lease, lo, hi) in enumerate(parts):
                if record is not None:
                    size = frame_bytes(payloads[member])
                    record.recorder.later(
                        record.sent, worker, lease, lo, hi, attempt, size, asked, False, False
                    )
                head = msg.AssignGang(
                    lease, pass_id, lo, hi, attempt, serial, member, len(parts), segment, number
                )
                self._pool.send(worker, head, payloads[member])

        self._assign(handle, parts, send)

    def _assign(
        self,
        handle: PassHandle,
        parts: Sequence[_Part],
        send: Callable[[list[list[Frame]]], None],
        elements: ElementRanges = (),
    ) -> None:
        """Get the data of leases, in a thread if that may block, and send them in their order."""
        requests: list[Shards | ShardRead] = []
        shards: list[Shards] = []
        has_feed = handle.has_feed
        for part in parts:
            local = not has_feed or self._pool.reads(part.worker, handle.id)
            try:
                request = handle.request(part.lo, part.hi, local=local, elements=elements)
                requests.append(request)
                if isinstance(request, Shards):
                    shards.append(request)
            except Exception as error:  # reading the user's data may raise anything
                self._not_sent(handle, part, error)
                return
        if len(shards) == len(requests) and self._leases.is_empty:  # the common case, cheaper
            payloads = self._payloads(handle, parts, shards)
            if payloads is not None:
                send(payloads)
            return
        outgoing = self._leases.add([(part.worker, part.lease) for part in parts], send)

        def read() -> list[Shards]:
            return [request() if callable(request) else request for request in requests]

        def on_read(read: list[Shards] | Exception) -> None:
            if outgoing.is_dropped:
                return
            payloads = None
            if isinstance(read, Exception):
                self._not_sent(handle, parts[0], read)
            else:
                payloads = self._payloads(handle, parts, read)
            if payloads is None:
                self._leases.drop(outgoing)
            else:
                self._leases.ready(outgoing, payloads)

        if len(shards) == len(requests):
            on_read(shards)
        else:
            handle.read(ReadJob(read, lambda: not outgoing.is_dropped, on_read))

    def _payloads(
        self, handle: PassHandle, parts: Sequence[_Part], shards: Sequence[Shards]
    ) -> list[list[Frame]] | None:
        """Send the states that leases read, and return their payloads; None if one can't be sent."""
        payloads: list[list[Frame]] = []
        for part, data in zip(parts, shards, strict=True):
            try:
                finished = handle.elements.of(part.lo, part.hi)
                others = (data.ids, data.locations, data.states, finished)
                if data.values is not None and others == (None, None, None, None):
                    payloads.append(encode_arguments(data.values))
                else:
                    payload = [data.ids, data.locations, data.values, data.states]
                    payloads.append(encode(payload if finished is None else [*payload, finished]))
                if data.states:
                    self._states.send(part.worker, data.states)
            except Exception as error:  # a value can't be serialized
                self._not_sent(handle, part, error)
                return None
        return payloads

    def _not_sent(self, handle: PassHandle, part: _Part, error: Exception) -> None:
        """Fail the pass if it has a feed, otherwise the steps of the calls."""
        if handle.has_feed:
            handle.fail(error)
            self._post(ev.PassClosed(handle.id))
        else:
            handle.failed.not_sent(part.lo, part.hi, part.lease, error)
            self._post(ev.LeaseNotSent(part.lease))


class Outgoing(Struct, eq=False):
    """Leases of one command that are not sent yet: one, or those of a gang."""

    places: list[tuple[bytes, int]]  # (connection, lease) of each worker that is a member
    send: Callable[[list[list[Frame]]], None]  # sends them, given their payloads
    payloads: list[list[Frame]] | None = None
    is_dropped: bool = False


class LeaseOrder:
    """Sends leases to each worker in the order of the scheduler's commands.

    Data of a lease may be read in a thread; later leases of the same worker are sent after it. The leases of a
    gang are sent together. Leases of workers that are gone are dropped.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._queues: dict[bytes, deque[Outgoing]] = {}  # by connection; limited by the scheduler's leases

    @property
    def is_empty(self) -> bool:
        return not self._queues

    def add(self, leases: Sequence[tuple[str, int]], send: Callable[[list[list[Frame]]], None]) -> Outgoing:
        for identity in [each for each in self._queues if self._pool.of_identity(each) is None]:
            for outgoing in [*self._queues.pop(identity)]:
                self.drop(outgoing)
        peers = [(self._pool.of(worker), lease) for worker, lease in leases]
        outgoing = Outgoing([(peer.identity, lease) for peer, lease in peers if peer is not None], send)
        for identity, _ in outgoing.places:
            self._queues.setdefault(identity, deque()).append(outgoing)
        return outgoing

    def ready(self, outgoing: Outgoing, payloads: list[list[Frame]]) -> None:
        outgoing.payloads = payloads
        self._advance([identity for identity, _ in outgoing.places])

    def withdraw(self, worker: str, lease: int) -> None:
        """Drop a lease that is not sent yet; with it, those of its gang."""
        peer = self._pool.of(worker)
        queue = () if peer is None else self._queues.get(peer.identity, ())
        for outgoing in [each for each in queue if any(number == lease for _, number in each.places)]:
            self.drop(outgoing)

    def drop(self, outgoing: Outgoing) -> None:
        outgoing.is_dropped = True
        for identity, _ in outgoing.places:
            queue = self._queues.get(identity)
            if queue is not None and outgoing in queue:
                queue.remove(outgoing)
        self._advance([identity for identity, _ in outgoing.places])

    def _advance(self, identities: list[bytes]) -> None:
        """Send what is first in the queues of all of its workers."""
        while identities:
            queue = self._queues.get(identity := identities.pop())
            if not queue:
                self._queues.pop(identity, None)
                continue
            first = queue[0]
            queues = [self._queues[each] for each, _ in first.places if each in self._queues]
            if first.payloads is None or any(each[0] is not first for each in queues):
                continue
            for each in queues:
                each.popleft()
            if self._pool.of_identity(identity) is not None:
                first.send(first.payloads)
            identities += [each for each, _ in first.places]


class ProgramDistributor:
    """Sends programs to workers, and code folders to other hosts.

    A snapshot of a folder is taken when the first worker on another host needs it, once per cluster: files that are
    written to the folder later, such as outputs, are not part of it.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._snapshots: dict[str, tuple[CodeSnapshot | None, str, Sequence[Frame]]] = {}  # by folder

    def bind(self, worker: str, handle: PassHandle) -> None:
        """Send a worker the program of a pass, and the code before it."""
        peer = self._pool.of(worker)
        if peer is None:
            return
        if not peer.local:
            for folder in handle.code:
                if folder not in peer.code_folders:
                    peer.code_folders.add(folder)
                    self._send_code(peer, folder)
        self._pool.send(worker, msg.Bind(handle.id, handle.key, not peer.local), handle.program_frames)

    def _send_code(self, peer: Peer, folder: str) -> None:
        if folder not in self._snapshots:
            self._snapshots[folder] = _snapshot_of(folder)
        snapshot, text, payload = self._snapshots[folder]
        digest = "" if snapshot is None else snapshot.digest
        if digest in peer.codes:
            payload = ()
        elif digest:
            peer.codes.add(digest)
        self._pool.send(peer.worker, msg.Code(os.fsencode(folder), digest, text), payload)


def _snapshot_of(folder: str) -> tuple[CodeSnapshot | None, str, Sequence[Frame]]:
    try:
        snapshot = take(folder)
    except CodeTooLarge as error:
        return None, str(error), ()
    except OSError as error:
        return None, f"{folder}, which can't be read: {error}", ()
    return snapshot, snapshot.text, encode(snapshot.to_tree())


class _Version(Struct, eq=False):
    """A version of a state, and its frames if it was encoded."""

    tree: Tree
    frames: list[Frame] | None


class StateVersions:
    """The latest versions of every state.

    Each is sent to a worker at most once: its `Peer` has the versions that it holds.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._last_space = 0
        self._spaces: dict[int, dict[int, _Version]] = {}  # versions of each space, oldest first

    def open_space(self) -> int:
        self._last_space += 1
        self._spaces[self._last_space] = {}
        return self._last_space

    def put(self, space: int, version: int, tree: Tree, *, is_alike: bool = False) -> None:
        """Add a version, higher than any before; only the latest VERSIONS_KEPT are kept.

        The tree's arrays must not change any more. `is_alike`: the version before had the same structure, dtypes and
        shapes, so the tree can be sent; it is encoded only for a worker that lacks it, and in a training none does.
        Raise UnsendableError, or LocalProtocolError if the space is not open or has such a version.
        """
        versions = self._spaces.get(space)
        if versions is None or any(version <= previous for previous in versions):
            kept = "is not open" if versions is None else f"has the versions {list(versions)}"
            raise LocalProtocolError(f"version {version} of state {space}, which {kept}")
        versions[version] = _Version(tree, None if is_alike else encode(tree))
        if len(versions) > VERSIONS_KEPT:
            del versions[next(iter(versions))]

    def drop(self, space: int) -> None:
        """Drop a state, here and in the workers, if it is open."""
        if self._spaces.pop(space, None) is None:
            return
        for peer in self._pool:
            if peer.held.pop(space, None) is not None:
                self._pool.send(peer.worker, msg.DropState(space))

    def close(self) -> None:
        """Drop all states here: the workers are gone."""
        self._spaces.clear()

    def send(self, worker: str, states: Mapping[str, Sequence[int]]) -> None:
        """Send a worker the versions that a lease reads and the worker lacks."""
        for name, (space, version) in states.items():
            found = self._spaces.get(space, {}).get(version)
            if found is None:
                raise LocalProtocolError(
                    f"state {name!r} is read in version {version} of space {space}, which is not kept: "
                    f"only {list(self._spaces.get(space, {}))} are"
                )
            peer = self._pool.of(worker)
            if peer is not None and version not in peer.held.get(space, ()):
                peer.hold(space, version)
                if found.frames is None:
                    found.frames = encode(found.tree)
                self._pool.send(worker, msg.StateVersion(space, version), found.frames)
