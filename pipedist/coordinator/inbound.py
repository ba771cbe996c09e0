"""Messages from workers: checked, then passed on to their receivers.

A sender is identified by its connection, never by the content of a message. A message that breaks the protocol
raises RemoteProtocolError, which costs its sender the connection. A message for a lease that has ended is
expected, because messages cross on their way: it is counted, and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from pipedist.coordinator.gang_relay import GangRelay
from pipedist.coordinator.notices import LOGGER, Notices, as_line
from pipedist.coordinator.passes import OpenPasses
from pipedist.coordinator.results import Chunk, FailedElement, UnknownClass, open_chunk
from pipedist.coordinator.spans import SpanEnd
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.coordinator.worker_registry import Peer
from pipedist.errors import RemoteProtocolError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import decode
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev

_REASONS_MAX = 8  # distinct reasons that are logged; after that, the total is logged each time it doubles
_DIGITS_MAX = 9  # maximum digits of the number of a gang's member
LogSink = Callable[[str, msg.LogLine], None]  # gets each line or record of a replica function: (worker, line)


class Post(Protocol):
    """Posts an event to the scheduler."""

    def __call__(self, event: Event, chunk: Chunk | None = None) -> None:
        """Have an event handled; `chunk`: the results that it reports."""


class Inbound:
    """Handles the messages of workers, and of their supervisors."""

    def __init__(
        self,
        post: Post,
        *,
        pool: WorkerPool,
        gangs: GangRelay,
        log_sinks: LogSinks,
        rejections: Rejections,
        passes: OpenPasses,
        notices: Notices,
    ) -> None:
        self._post = post
        self._pool = pool
        self._gangs = gangs
        self._log_sinks = log_sinks
        self._rejections = rejections
        self._passes = passes
        self._notices = notices

    def handle(self, peer: Peer, message: msg.Message, frames: list[memoryview]) -> None:
        match message:
            case msg.Results():
                self._on_results(peer, message, frames)
            case msg.Elements():
                self._on_elements(peer, message, frames)
            case msg.Failed():
                self._on_failed(peer, message)
            case msg.Exchange():
                if not self._gangs.exchange(peer, message, frames):
                    self._rejections.stale += 1
            case msg.Stalled():
                self._on_stalled(peer, message)
            case msg.Cancelled(lease):
                for handle in self._passes.handles.values():
                    if handle.record is not None:
                        record = handle.record
                        record.recorder.later(record.ended, peer.worker, lease, SpanEnd.CANCELLED)
                self._post(ev.CancelConfirmed(peer.worker, peer.incarnation, lease))
            case msg.QuotaMet(pass_id, calls):
                self._post(ev.QuotaConfirmed(peer.worker, peer.incarnation, pass_id, calls))
            case msg.DataVisible(pass_id):
                if pass_id in self._passes.handles:
                    peer.sees.add(pass_id)
            case msg.Retried(pass_id):
                if pass_id in self._passes.handles:
                    self._notices.add(self._passes.handles[pass_id].failed.on_retried(message, peer.worker))
            case msg.LogLine():
                self._log_sinks.emit(peer.worker, message)
            case msg.Heartbeat():
                self._post(ev.HeartbeatReceived(peer.worker, peer.incarnation))
            case msg.Goodbye():
                self._pool.on_goodbye(replace(message, worker=peer.worker, incarnation=peer.incarnation))
            case _:
                raise RemoteProtocolError(f"a worker may not send {type(message).__name__}")

    def handle_unregistered(self, identity: bytes, message: msg.Message) -> None:
        """Handle a Hello, or a message of no member: only a supervisor may send one."""
        match message:
            case msg.Hello():
                self._pool.check_name(message)
                self._pool.on_hello(identity, message, on_admit=lambda: self._passes.add_cached(message))
            case msg.Heartbeat(worker, incarnation) if worker not in self._pool.names:
                self._pool.check_name(message)
                self._pool.on_heartbeat(identity, worker, incarnation)
            case msg.Goodbye(worker) if worker not in self._pool.names:
                self._pool.check_name(message)
                self._pool.on_goodbye(message)
            case _:
                self._pool.reject(identity)

    def _on_results(self, peer: Peer, results: msg.Results, frames: Sequence[memoryview]) -> None:
        lease, lo, hi = results.lease, results.lo, results.hi
        handle = self._passes.of_lease(peer.worker, lease)
        chunk, size = None, 0
        if handle is not None:  # otherwise the scheduler drops them: they need no decoding
            try:
                chunk = open_chunk(lo, hi, frames, handle.slots, handle.required_slots)
            except UnknownClass as error:
                for call in range(lo, hi):
                    if self._passes.of_lease(peer.worker, lease) is not handle:
                        return  # it has ended, so these calls too; or they were not calls of this lease
                    self._on_failed(peer, handle.failed.unreadable(call, lease, error))
                return
            size = chunk.size
            record = handle.record
            if record is not None:
                record.recorder.later(record.returned, peer.worker, results, size)
        elif (handle := self._passes.of_cancelled(peer.worker, lease)) is not None:
            handle.arrived_late(open_chunk(lo, hi, frames, handle.slots, handle.required_slots))
        self._post(ev.CallsDone(peer.worker, peer.incarnation, lease, lo, hi, results.busy_ns, size), chunk)

    def _on_elements(self, peer: Peer, message: msg.Elements, frames: Sequence[memoryview]) -> None:
        place = (peer.worker, message.lease)
        handle = self._passes.of_lease(*place) or self._passes.of_cancelled(*place)
        if handle is None:
            self._rejections.stale += 1
            return
        results = decode(frames)
        if type(results) is not list or not all(
            type(each) is list and len(each) == 4 and [type(each[at]) for at in (0, 1, 3)] == [int, int, str]
            for each in results
        ):
            raise RemoteProtocolError(f"the results of elements of call {message.call} are malformed")
        for stage, element, result, failure in results:
            if not failure:
                handle.elements.add(message.call, stage, element, result)
            elif handle.policy.is_final(stage):
                handle.elements.add(message.call, stage, element, FailedElement(failure))

    def _on_failed(self, peer: Peer, failed: msg.Failed) -> None:
        handle = self._passes.of_lease(peer.worker, failed.lease)
        event = ev.CallFailed(
            peer.worker, peer.incarnation, failed.lease, failed.call, aborted=failed.aborted
        )
        if handle is not None:
            if handle.record is not None:
                handle.record.recorder.later(handle.record.raised, peer.worker, failed)
            handle.failed.on_raised(failed)
            event = handle.policy.apply(event, failed)
            self._gangs.failed(failed)
        self._post(event)
        self._gangs.reported(failed.lease)

    def _on_stalled(self, peer: Peer, stalled: msg.Stalled) -> None:
        if not all(member.isdecimal() and len(member) <= _DIGITS_MAX for member in stalled.members):
            raise RemoteProtocolError(f"malformed members of a gang: {stalled.members}")
        members = tuple(map(int, stalled.members))
        self._post(ev.GangStalled(peer.worker, peer.incarnation, stalled.lease, members, stalled.text))


class Rejections:
    """Counts rejections; if `verbose`, logs reasons at a limited rate."""

    def __init__(self, *, verbose: bool) -> None:
        self.count = 0
        self.stale = 0  # messages for leases that have ended: expected, so not logged
        self._verbose = verbose
        self._logged: set[str] = set()

    def add(self, reason: str, repeated: str = "") -> None:
        """Count a rejection, and log it; `reason` may contain text of a peer.

        `repeated` is the part of it that stays the same on a repetition, as for a worker that is restarted again and
        again, each time with another name; "": all of it.
        """
        repeated = repeated or reason
        self.count += 1
        is_new = repeated not in self._logged and len(self._logged) < _REASONS_MAX
        has_doubled = self.count > _REASONS_MAX and self.count.bit_count() == 1
        if self._verbose and (is_new or has_doubled):
            if is_new:
                self._logged.add(repeated)
            logging.getLogger(LOGGER).warning(
                "pipedist: rejected (%d so far): %s", self.count, as_line(reason)
            )


class LogSinks:
    """Routes the output of replica functions to sinks, else to `logging` or `sys.stderr`."""

    def __init__(self) -> None:
        self._sinks: dict[int, LogSink] = {}  # by number: one function may be added twice
        self._extra: set[int] = set()  # numbers of sinks besides which lines are still shown
        self._added = 0

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: LogSink, *, is_extra: bool = False) -> Callable[[], None]:
        """Add a sink; return a function that removes it, and may be called twice."""
        self._added += 1
        number = self._added
        self._sinks[number] = sink
        if is_extra:
            self._extra.add(number)

        def remove() -> None:
            self._sinks.pop(number, None)
            self._extra.discard(number)

        return remove

    def emit(self, worker: str, line: msg.LogLine) -> None:
        """Pass a line to every sink; remove a sink that raises."""
        if len(self._sinks) == len(self._extra):
            _show(worker, line)
        for number, sink in tuple(self._sinks.items()):
            try:
                sink(worker, line)
            except Exception as error:  # the other sinks still get their line, and the run its results
                self._sinks.pop(number, None)  # it may have removed itself
                self._extra.discard(number)
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"the log sink {sink!r} raised, and was removed", "exception": error}
                )


def _show(worker: str, line: msg.LogLine) -> None:
    """Pass a record to this process's `logging` if it has handlers, and write any other line to stderr."""
    head = f"[{line.stage} {line.step} {line.replica} {worker}]"
    if line.level and (logger := _nearest_logger(line.logger)).hasHandlers():
        # not `isEnabledFor`, which keeps each level, and a peer could send any number of them
        if line.level >= max(logger.getEffectiveLevel(), logger.manager.disable + 1):
            logger.handle(logger.makeRecord(line.logger, line.level, "", 0, "%s %s", (head, line.text), None))
    elif sys.stderr is not None:
        with suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write("".join(f"{head} {each}\n" for each in line.text.splitlines() or [""]))


def _nearest_logger(name: str) -> logging.Logger:
    """Return the logger of this name, or its nearest ancestor; loggers are never freed, so none is created."""
    while name:
        found = logging.root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return logging.root
