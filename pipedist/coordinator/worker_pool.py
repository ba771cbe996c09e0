"""The workers of a cluster: their processes and connections."""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import anyio
from msgspec import Struct
from msgspec.structs import replace

from pipedist.coordinator.failures import DeathOutcome
from pipedist.coordinator.launcher import Launcher, WorkerExit
from pipedist.coordinator.notices import Notices
from pipedist.coordinator.worker_registry import Peer, WorkerRegistry, differences, rejection_reason
from pipedist.core.record_format import frame_bytes
from pipedist.errors import LocalProtocolError, PipedistError, RemoteProtocolError, UsageError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.protocol.limits import MIB
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev
from pipedist.transport.router import Router
from pipedist.worker.identity import is_proven
from pipedist.worker.progress import Running

_WATCH_S = 0.1  # how often to look for calls that exceed their stage's timeout, seconds
_HEARTBEATS = 3.2  # heartbeats of a supervisor within the heartbeat timeout: the third one may be a bit late
SUPERVISORS_MAX = 8192  # supervisors that are remembered; the one that was silent longest is forgotten first
SHARED_VALUES_MAX = 1024  # kept for supervisors that dial in later; the oldest is dropped first
SHARED_BYTES_MAX = 256 * MIB  # bytes of these values; the latest value is kept in any case
CODE_DIGESTS_MAX = 1024  # copies of code folders that a worker can report
T = TypeVar("T")

OnDeath = Callable[[str, Running, bool], DeathOutcome | None]
"""Takes a worker, the call that it ran, and whether that timed out; None: it held no such lease."""


class SharedValues(Generic[T]):
    """Values by number, ascending: the latest ones."""

    def __init__(self) -> None:
        self.last = 0  # the highest number that was added
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._size_bytes = 0

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter([(number, value) for number, (value, _) in self._values.items()])

    def add(self, number: int, value: T, size_bytes: int) -> None:
        """Add a value, unless its number or a higher one was added."""
        if number <= self.last:
            return
        self.last = number
        self._values[number] = (value, size_bytes)
        self._size_bytes += size_bytes
        while len(self._values) > SHARED_VALUES_MAX or self._size_bytes > SHARED_BYTES_MAX:
            if len(self._values) == 1:
                return
            self._size_bytes -= self._values.popitem(last=False)[1][1]

    def take(self, number: int) -> T:
        """Remove and return a value; raise KeyError if it was dropped."""
        value, size_bytes = self._values.pop(number)
        self._size_bytes -= size_bytes
        return value


class _Supervisor(Struct):
    """The supervisor of a worker that dials in."""

    identity: bytes = b""  # its connection; b"" before its first heartbeat
    evicted: int = -1  # the last evicted incarnation of its worker, if that has not sent Goodbye


class WorkerPool(WorkerRegistry):
    """The members, and all workers' processes and connections. For other parameters, see `Coordinator`."""

    def __init__(
        self,
        post: Callable[[Event], None],
        *,
        cluster_id: str,
        router: Router,
        names: Sequence[str],
        dial_in: bool,
        boot: str,
        heartbeat_timeout_s: float,  # how long a supervisor may be silent, seconds
        rejoin_s: float = 0.0,
        on_death: OnDeath = lambda _worker, _running, _timed_out: None,
        on_leave: Callable[[str, int], None] = lambda _worker, _incarnation: None,  # worker, incarnation
        on_reject: Callable[[str, str], None] = lambda _reason, _repeated: None,  # reason, repeated part
        force: bool = False,
        threads: int | None = None,
        notify: Callable[[str], None] = lambda _text: None,
        notices: Notices | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.launcher: Launcher | None = None  # None if all workers dial in, and before it is open
        self._post = post
        self._cluster_id = cluster_id
        self._router = router
        self._on_death = on_death
        self._on_leave = on_leave
        self._on_reject = on_reject
        self._dial_in = dial_in
        self._force = force
        self._threads = threads
        self._notify = notify
        self._notices = notices or Notices()
        self._boot = boot
        self._heartbeat_s = heartbeat_timeout_s / _HEARTBEATS
        self._rejoin_s = rejoin_s
        self._started: dict[str, int] = {}  # incarnation of each worker started here that is alive
        self._due: dict[str, int] = {}  # incarnations to start when the previous process has ended
        self._supervisors: OrderedDict[str, _Supervisor] = OrderedDict()  # by worker; longest silent first
        self._shared: SharedValues[Sequence[Frame]] = SharedValues()  # for every supervisor, in order
        self.on_supervisor: Callable[[str], None] = lambda _worker: None  # at the first heartbeat
        self._changed = anyio.Event()
        self._error: PipedistError | None = None

    # -- members -----------------------------------------------------------------------------

    def was_started_here(self, peer: Peer) -> bool:
        return peer.worker in self._started and peer.local

    def reads(self, worker: str, pass_id: int) -> bool:
        """Return whether a worker is on this host, or sees a pass's files."""
        peer = self.of(worker)
        return peer is not None and (peer.local or pass_id in peer.sees)

    def forget_pass(self, pass_id: int) -> None:
        for peer in self:
            peer.sees.discard(pass_id)

    async def wait_for(self, count: int) -> None:
        """Wait until `count` workers have joined; raise the error of `fail`."""
        while len(self) < count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def restart(self, worker: str) -> None:
        """Kill a worker's process, which may not have joined yet, and wait until the next one has joined."""
        peer = self.of(worker)
        before = max(self._started.get(worker, -1), -1 if peer is None else peer.incarnation)
        self.kill(worker)
        await self.wait_for_next(worker, before)

    async def wait_for_next(self, worker: str, incarnation: int) -> None:
        """Wait until a later incarnation has joined; raise the error of `fail`."""
        while (peer := self.of(worker)) is None or peer.incarnation <= incarnation:
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    def fail(self, error: PipedistError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # -- processes -----------------------------------------------------------------------------

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker's process, as soon as the previous one has ended."""
        if self.launcher is None:
            raise LocalProtocolError(f"worker {worker} can't be started: this cluster has no launcher")
        if worker in self._started:  # its connection is lost, but its process still runs
            self._due[worker] = incarnation
            self.launcher.kill(worker, self._started[worker])
        else:
            self._started[worker] = incarnation
            self.launcher.start(worker, incarnation)

    @property
    def pids(self) -> dict[str, int]:
        return {} if self.launcher is None else dict(self.launcher.pids)

    def kill(self, worker: str) -> None:
        """Kill a worker's process with SIGKILL; the scheduler replaces it. UsageError: it was not started here."""
        if self.launcher is None or worker not in self.names:
            names = self.names if self.launcher is not None else ()
            known = f"{names[0]} to {names[-1]}" if names else "none: its workers are started elsewhere"
            raise UsageError(f"no worker {worker!r} was started here. Workers that can be killed: {known}.")
        self.launcher.kill(worker)

    def on_exit(self, exit_: WorkerExit) -> None:
        """Report the end of a process, and start the next one if it is due."""
        if self._started.get(exit_.worker) == exit_.incarnation:
            del self._started[exit_.worker]
            if (due := self._due.pop(exit_.worker, None)) is not None:
                self.start(exit_.worker, due)
        if (peer := self._remove(exit_.worker, exit_.incarnation)) is not None:
            self._router.drop(peer.identity)
        running = None if exit_.running is None else Running(*exit_.running)
        self._post_death(exit_.worker, exit_.incarnation, exit_.text, running, exit_.timed_out, peer)

    def _post_death(
        self,
        worker: str,
        incarnation: int,
        cause: str,
        running: Running | None,
        timed_out: bool,
        member: Peer | None,
    ) -> None:
        lost = ev.WorkerLost(worker, incarnation, cause)
        line = f"worker {worker} died: {cause}"
        if running is not None:
            lost = replace(lost, running=(running.lease, running.call))
            outcome = self._on_death(worker, running, timed_out)
            if outcome is not None:
                if outcome.timed_out:
                    line = f"worker {worker} was ended: {outcome.place}: {outcome.timed_out}"
                else:
                    line = f"{line}; it executed {outcome.place}"
                lost = replace(
                    lost,
                    cause=outcome.timed_out or cause,
                    stage=outcome.stage,
                    timed_out=bool(outcome.timed_out),
                    retries=outcome.retries,
                    quarantine=outcome.quarantine,
                )
        if member is not None:  # the end of an evicted worker is expected
            self._notices.add(line)
        self._post(lost)

    def watch(self) -> None:
        """Have the launcher kill workers on a timeout of a call from now on, also of one that is cancelled."""
        if self.launcher is not None:  # supervisors watch dialled-in workers
            self.launcher.watch(_WATCH_S)

    # -- connections ---------------------------------------------------------------------------

    def send(self, worker: str, message: msg.Message, payload: Sequence[Frame] = ()) -> None:
        """Send a message to a worker; an unreachable one is lost now or soon.

        The launcher or supervisor of the process soon reports the cause of its death, and the call that it ran;
        without that report, the culprit could only be guessed. If a supervisor is unreachable too, the heartbeat
        timeout detects that.
        """
        peer = self.of(worker)
        if peer is not None:
            self.send_to(peer, message, payload)

    def send_to(self, peer: Peer, message: msg.Message, payload: Sequence[Frame] = ()) -> None:
        """Send a message to a worker that has joined; see `send`."""
        if not self._router.send(peer.identity, message, payload):
            self._unreachable(peer)

    def send_all(self, messages: Sequence[tuple[Peer, msg.Message, Sequence[Frame]]]) -> None:
        """Send messages to different workers that have joined, so that they begin at the same time."""
        sent = self._router.send_all([(peer.identity, message, frames) for peer, message, frames in messages])
        if not all(sent):
            for (peer, _, _), reached in zip(messages, sent, strict=True):
                if not reached:
                    self._unreachable(peer)

    def _unreachable(self, peer: Peer) -> None:
        worker = peer.worker
        is_running = peer.local and self._started.get(worker) == peer.incarnation
        if self.launcher is not None and is_running:
            self.launcher.kill(worker, peer.incarnation)
        elif worker not in self._supervisors or not self._supervisors[worker].identity:
            self.lose(peer, "its connection is gone")

    async def stop_all(self, reason: str, grace_s: float) -> None:
        """Send Stop to every worker, and wait for Goodbye of dialled-in ones.

        Closing a connection with unread bytes in it may lose the last message. A launcher waits for the
        processes of its own workers in any case.
        """
        self._send_stop(reason)
        if self.launcher is None:
            with anyio.move_on_after(grace_s, shield=True):
                while len(self):
                    await self._changed.wait()
            self._send_stop(reason)  # to workers that have joined meanwhile

    def _send_stop(self, reason: str) -> None:
        for peer in (*self, *self._supervisors.values()):
            self._router.send(peer.identity, msg.Stop(reason))

    def share(self, payload: Sequence[Frame]) -> None:
        """Send a value to every supervisor, now or on its first heartbeat if it is kept."""
        message = msg.Share(self._shared.last + 1)
        self._shared.add(message.number, payload, frame_bytes(payload))
        for supervisor in self._supervisors.values():
            self._router.send(supervisor.identity, message, payload)

    def reject(self, identity: bytes, before: int = 0) -> None:
        """Reject a message of no member; its next incarnation may join.

        When a network recovers, it delivers all heartbeats of the outage; each one is rejected, and by then the
        incarnation `before` (see `messages.Refuse`) may have joined.
        """
        self._router.send(identity, msg.Refuse("this incarnation is not a member", before))
        text = f"a message from connection {repr(identity)[1:]}, which is not a member"
        self._on_reject(text, "a message of no member")

    def on_heartbeat(self, identity: bytes, worker: str, incarnation: int) -> None:
        """Handle a supervisor's heartbeat; have an evicted worker ended."""
        supervisor = self._supervisor(worker)
        if supervisor.identity != identity:
            self._router.release(supervisor.identity)
            self._router.keep(identity)
            supervisor.identity = identity
            if self._dial_in:
                self._router.send(identity, self._welcome(local=False))
            for number, frames in self._shared:
                self._router.send(identity, msg.Share(number), frames)
            self.on_supervisor(worker)
        if incarnation <= supervisor.evicted:
            self.reject(identity, before=incarnation + 1)
        else:
            self._post(ev.HeartbeatReceived(worker, incarnation))

    def _supervisor(self, worker: str) -> _Supervisor:
        found = self._supervisors.setdefault(worker, _Supervisor())
        self._supervisors.move_to_end(worker)
        if len(self._supervisors) > SUPERVISORS_MAX:
            _, silent = self._supervisors.popitem(last=False)
            self._router.release(silent.identity)
        return found

    def lose(self, peer: Peer, cause: str) -> None:
        """Evict a worker, and report it to the scheduler as lost."""
        self.evict(peer.worker, peer.incarnation, cause)
        self._post(ev.WorkerLost(peer.worker, peer.incarnation, cause))

    def evict(self, worker: str, incarnation: int, reason: str) -> None:
        """Remove an incarnation of a worker, if it is a member."""
        peer = self._remove(worker, incarnation)
        if peer is None:
            return
        self._notices.add(f"worker {worker} is lost: {reason}")
        self._router.send(peer.identity, msg.Refuse(reason))
        if worker not in self.names:
            self._supervisor(worker).evicted = incarnation
        if self.launcher is not None and self._started.get(worker) == incarnation:
            self._router.drop(peer.identity)
            self.launcher.kill(worker, incarnation)

    def _remove(self, worker: str, incarnation: int) -> Peer | None:
        peer = self.remove(worker, incarnation)
        if peer is not None:
            self._router.release(peer.identity)
            self._on_leave(worker, incarnation)
        return peer

    def on_goodbye(self, goodbye: msg.Goodbye) -> None:
        """Remove a worker that leaves, or that has crashed."""
        worker, incarnation = goodbye.worker, goodbye.incarnation
        if worker in self._supervisors:
            self._supervisors[worker].evicted = -1
        if (peer := self._remove(worker, incarnation)) is not None:
            self._router.drop(peer.identity)
        if goodbye.crashed:
            is_known = goodbye.lease or goodbye.timed_out
            running = Running(goodbye.lease, goodbye.call, goodbye.stage) if is_known else None
            self._post_death(worker, incarnation, goodbye.reason, running, goodbye.timed_out, peer)
        else:
            if peer is not None:
                self._notices.add(f"worker {worker} left: {goodbye.reason}", logging.INFO)
            self._post(ev.WorkerLost(worker, incarnation, goodbye.reason, graceful=True))
        self._wake()

    def check_name(self, message: msg.Hello | msg.Heartbeat | msg.Goodbye) -> None:
        """Raise RemoteProtocolError if a dialled-in peer's name is not proven; all may share one key."""
        dials_in = self._dial_in and message.worker not in self.names
        if dials_in and not is_proven(message.worker, message.proof):
            raise RemoteProtocolError(f"it uses the name {message.worker!r} without proof")

    def on_hello(
        self, identity: bytes, hello: msg.Hello, *, on_admit: Callable[[], None] = lambda: None
    ) -> None:
        """Let a worker join, or reject it with the reason; `on_admit`: called before it joins, may refuse."""
        if (known := self.of_identity(identity)) is not None:
            raise RemoteProtocolError(f"{known.worker} sent Hello twice")
        managed = hello.worker in self.names
        current = self.of(hello.worker)
        reason = rejection_reason(
            hello,
            started=self._started,
            managed=managed,
            dial_in=self._dial_in,
            current=current,
            threads=self._threads,
        )
        notice = "" if reason else differences(hello, managed=managed)
        if notice and not self._force:
            reason = (
                f"{notice}, so results could differ in their last bits; `pipedist run --force` accepts it"
            )
        if reason:
            self._router.send(identity, msg.Refuse(reason))
            self._on_reject(f"worker {hello.worker!r} of {hello.host!r}: {reason}", f"{hello.host}: {reason}")
            return
        if notice:
            notice = f"{notice}, so results may differ in their last bits (--force)"
            self._notify(f"worker {hello.worker} joins, though {notice}")
            notice = f"accepted, though {notice}"
        on_admit()
        local = hello.boot == self._boot
        if current is not None:
            self.evict(current.worker, current.incarnation, "a later incarnation has joined")
        codes = set(hello.code_digests[:CODE_DIGESTS_MAX])
        peer = Peer(
            identity, hello.worker, hello.incarnation, local, pid=hello.pid, host=hello.host, codes=codes
        )
        self.add(peer)
        self._router.keep(identity)
        self._router.send(identity, self._welcome(local=local, notice=notice))
        self._notices.add(f"worker {hello.worker} joined, on {hello.host}", logging.INFO)
        gpus = max(0.0, hello.gpus)
        self._post(ev.WorkerJoined(hello.worker, hello.incarnation, supervised=not managed, gpus=gpus))
        self._wake()

    def _welcome(self, *, local: bool, notice: str = "") -> msg.Welcome:
        paths = [os.fsencode(os.path.abspath(entry)) for entry in sys.path] if local else ()
        return msg.Welcome(self._cluster_id, self._heartbeat_s, tuple(paths), self._rejoin_s, notice)
