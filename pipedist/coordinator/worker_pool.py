"""The workers of a cluster: their processes, where they were started here, and their connections."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

import anyio
from msgspec import Struct
from msgspec.structs import replace

from pipedist.coordinator.admission import differences, refusal
from pipedist.coordinator.launcher import Launcher, WorkerExit
from pipedist.coordinator.worker_registry import Peer, Roster
from pipedist.errors import LocalProtocolError, PipedistError, RemoteProtocolError, UsageError
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame
from pipedist.scheduler import Event
from pipedist.scheduler import events as ev
from pipedist.transport.router import Router
from pipedist.worker.identity import is_proven
from pipedist.worker.progress import Running

_WATCH_S = 0.1
"""How often it is looked for functions of stages that take longer than they may."""

_HEARTBEATS = 3.2
"""Heartbeats that a supervisor sends in the time in which it must be heard: the third may be a bit late."""

HOLDS_MAX = 1024
"""Copies of code folders that a worker can say it has."""


class Fate(Struct, frozen=True):
    """What it means for a call that its worker died.

    Args:
        stage: that ran; "" where nobody knows.
        retries, quarantine: see `events.WorkerLost`.
        timed_out: why it was ended, if that stage's function took too long, for people; "": it did not.
    """

    stage: str
    retries: int
    quarantine: bool
    timed_out: str = ""


Explain = Callable[[str, Running, bool], Fate | None]
"""Takes a worker, what it ran, and whether that took too long; None: it held no such lease."""


class Fleet:
    """Starts and ends workers, and knows who is behind which connection.

    Args:
        post: tells the scheduler.
        cluster_id: for the welcome.
        router: speaks with workers.
        names: the workers that the launcher starts; others dial in.
        dial_in: whether others may join.
        boot: this host's boot id: workers with the same one can read our files.
        heartbeat_timeout_s: how long a supervisor may be silent.
        rejoin_s: how long workers that dialled in wait for another scheduler when this one is gone.
        explain: says what a lost worker's end means for the call that it ran; see `Explain`.
        on_refuse: told who may not join or speak, and why; and what of it is the same if it happens again.
        force: let workers in that differ in what could change bits.
        threads: BLAS and OpenMP threads that all have to have, whatever `force` says; None: any.
        tell: told, for people, who was not let in, or differs.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        *,
        cluster_id: str,
        router: Router,
        names: Sequence[str],
        dial_in: bool,
        boot: str,
        heartbeat_timeout_s: float,
        rejoin_s: float = 0.0,
        explain: Explain = lambda _worker, _running, _timed_out: None,
        on_refuse: Callable[[str, str], None] = lambda _reason, _again: None,
        force: bool = False,
        threads: int | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.names = tuple(names)
        self.launcher: Launcher | None = None
        """Starts the workers; None where all dial in, and before it is open."""
        self._post = post
        self._cluster_id = cluster_id
        self._router = router
        self._explain = explain
        self._on_refuse = on_refuse
        self._dial_in = dial_in
        self._force = force
        self._threads = threads
        self._tell = tell
        self._boot = boot
        self._heartbeat_s = heartbeat_timeout_s / _HEARTBEATS
        self._rejoin_s = rejoin_s
        self._roster = Roster()
        self._started: dict[str, int] = {}
        """The incarnation of each worker whose process was started here and has not ended."""
        self._expelled: dict[str, int] = {}
        """The last incarnation that was put out of each worker that dialled in and is not gone."""
        self._due: dict[str, int] = {}
        """Incarnations to start when the process before has ended."""
        self._supervisors: dict[str, bytes] = {}
        """The connection of each supervisor that was heard, by its worker."""
        self._shared: list[tuple[msg.Share, Sequence[Frame]]] = []
        """What every supervisor gets, in order."""
        self.on_supervisor: Callable[[str], None] = lambda _worker: None
        """Told of each worker whose supervisor is heard for the first time, or over another connection."""
        self._changed = anyio.Event()
        self._error: PipedistError | None = None

    # -- who is there ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many workers have joined and are alive."""
        return len(self._roster)

    def behind(self, identity: bytes) -> Peer | None:
        """Return who speaks through a socket identity."""
        return self._roster.behind(identity)

    @property
    def peers(self) -> Iterator[Peer]:
        """All workers that have joined and are alive."""
        return iter(self._roster)

    def of(self, worker: str) -> Peer | None:
        """Return who speaks for a worker now."""
        return self._roster.of(worker)

    def is_ours(self, peer: Peer) -> bool:
        """Return whether a worker's process was started here."""
        return peer.worker in self._started and peer.local

    def reads(self, worker: str, pass_id: int) -> bool:
        """Return whether a worker reads a pass's data itself: it is on this host, or sees the same files."""
        peer = self._roster.of(worker)
        return peer is not None and (peer.local or pass_id in peer.sees)

    async def wait_for(self, count: int) -> None:
        """Return as soon as `count` workers are there.

        Raises:
            PipedistError: what `fail` was told.
        """
        while len(self._roster) < count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def wait_for_next(self, worker: str, incarnation: int) -> None:
        """Return as soon as a later incarnation of a worker is there.

        Raises:
            PipedistError: what `fail` was told.
        """
        while (peer := self._roster.of(worker)) is None or peer.incarnation <= incarnation:
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    def fail(self, error: PipedistError) -> None:
        """End every wait for workers with an error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # -- processes -----------------------------------------------------------------------------

    def start(self, worker: str, incarnation: int) -> None:
        """Start a worker's process, as soon as the one before has ended."""
        if self.launcher is None:
            raise LocalProtocolError(f"worker {worker} was to be started by a cluster without a launcher")
        if worker in self._started:  # it was lost to us, but its process is still there
            self._due[worker] = incarnation
            self.launcher.kill(worker, self._started[worker])
            return
        self._started[worker] = incarnation
        self.launcher.start(worker, incarnation)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that were started here, by name."""
        return {} if self.launcher is None else dict(self.launcher.pids)

    def kill(self, worker: str) -> None:
        """Kill a worker's process with SIGKILL; the scheduler replaces it.

        Raises:
            UsageError: no worker of that name was started here.
        """
        if self.launcher is None or worker not in self.names:
            names = self.names if self.launcher is not None else ()
            there = f"{names[0]} to {names[-1]}" if names else "none: its workers are started elsewhere"
            raise UsageError(f"no worker {worker!r} was started here; those that can be killed: {there}")
        self.launcher.kill(worker)

    def exited(self, exit_: WorkerExit) -> None:
        """Take note that a process is gone."""
        if self._started.get(exit_.worker) == exit_.incarnation:
            del self._started[exit_.worker]
            due = self._due.pop(exit_.worker, None)
            if due is not None:
                self.start(exit_.worker, due)
        peer = self._roster.remove(exit_.worker, exit_.incarnation)
        if peer is not None:
            self._router.drop(peer.identity)
        running = None if exit_.running is None else Running(*exit_.running)
        self._post_died(exit_.worker, exit_.incarnation, exit_.text, running, exit_.timed_out)

    def _post_died(
        self, worker: str, incarnation: int, cause: str, running: Running | None, timed_out: bool
    ) -> None:
        lost = ev.WorkerLost(worker, incarnation, cause)
        if running is not None:
            lost = replace(lost, running=(running.lease, running.call))
            fate = self._explain(worker, running, timed_out)
            if fate is not None:
                lost = replace(
                    lost,
                    cause=fate.timed_out or cause,
                    stage=fate.stage,
                    timed_out=bool(fate.timed_out),
                    retries=fate.retries,
                    quarantine=fate.quarantine,
                )
        self._post(lost)

    def watch(self, *, wanted: bool) -> None:
        """Have workers ended whose stages' functions take longer than they may; or not any more."""
        if self.launcher is not None:  # those that dialled in are watched by their supervisors
            self.launcher.watch(_WATCH_S if wanted else None)

    # -- connections ---------------------------------------------------------------------------

    def send(self, worker: str, message: msg.Message, payload: Sequence[Frame] = ()) -> None:
        """Say something to a worker; one that can't be reached is lost, or will be.

        Whoever watches its process says soon what it died of, and in which call: a death without one is
        blamed on a guess. A supervisor that can't be reached either falls silent, and that is noticed.
        """
        peer = self._roster.of(worker)
        if peer is None or self._router.send(peer.identity, message, payload):
            return
        if self.launcher is not None and self.is_ours(peer) and self._started[worker] == peer.incarnation:
            self.launcher.kill(worker, peer.incarnation)
        elif worker not in self._supervisors:
            self.lose(peer, "its connection is gone")

    async def dismiss(self, reason: str, grace_s: float) -> None:
        """Tell every worker to leave, and give those that dialled in time to say Goodbye.

        A connection that is closed with something unread in it may take the last word with it;
        a launcher waits for its own workers' processes anyway.
        """
        self._send_stop(reason)
        if self.launcher is None:
            with anyio.move_on_after(grace_s, shield=True):
                while len(self._roster):
                    await self._changed.wait()
            self._send_stop(reason)  # to who joined meanwhile

    def _send_stop(self, reason: str) -> None:
        for identity in (*(peer.identity for peer in self._roster), *self._supervisors.values()):
            self._router.send(identity, msg.Stop(reason))

    def share(self, payload: Sequence[Frame]) -> None:
        """Give something to every supervisor, now or when it is heard."""
        message = msg.Share(len(self._shared) + 1)
        self._shared.append((message, payload))
        for identity in self._supervisors.values():
            self._router.send(identity, message, payload)

    def turn_away(self, identity: bytes, before: int = 0) -> None:
        """Fence a worker that is no member: its next incarnation may join.

        Args:
            before: see `messages.Refuse`. A network that comes back brings all heartbeats of the time that it
                was away, each is answered, and the next incarnation is there by then.
        """
        self._router.send(identity, msg.Refuse("this incarnation is not a member", before))
        text = f"a message from connection {repr(identity)[1:]}, which is no member's"
        self._on_refuse(text, "a message of no member")

    def heard(self, identity: bytes, worker: str, incarnation: int) -> None:
        """Take note that a supervisor's worker process is there; have it ended if it was put out."""
        if self._supervisors.get(worker) != identity:
            self._supervisors[worker] = identity
            if self._dial_in:
                self._router.send(identity, self._welcome(local=False))
            for message, frames in self._shared:
                self._router.send(identity, message, frames)
            self.on_supervisor(worker)
        if incarnation <= self._expelled.get(worker, -1):
            self.turn_away(identity, before=incarnation + 1)
        else:
            self._post(ev.HeartbeatReceived(worker, incarnation))

    def lose(self, peer: Peer, cause: str) -> None:
        """Treat a worker as dead."""
        self.expel(peer.worker, peer.incarnation, cause)
        self._post(ev.WorkerLost(peer.worker, peer.incarnation, cause))

    def expel(self, worker: str, incarnation: int, reason: str) -> None:
        """End an incarnation of a worker, if it is in; the next one may join."""
        peer = self._roster.remove(worker, incarnation)
        if peer is None:
            return
        self._router.send(peer.identity, msg.Refuse(reason))
        if worker not in self.names:
            self._expelled[worker] = incarnation
        if self.launcher is not None and self._started.get(worker) == incarnation:
            self._router.drop(peer.identity)
            self.launcher.kill(worker, incarnation)

    def left(self, told: msg.Goodbye) -> None:
        """Take note that a worker has said Goodbye, or that its supervisor says it has crashed."""
        worker, incarnation = told.worker, told.incarnation
        self._expelled.pop(worker, None)
        peer = self._roster.remove(worker, incarnation)
        if peer is not None:
            self._router.drop(peer.identity)
        if told.crashed:
            running = Running(told.lease, told.call, told.stage) if told.lease or told.timed_out else None
            self._post_died(worker, incarnation, told.reason, running, told.timed_out)
        else:
            self._post(ev.WorkerLost(worker, incarnation, told.reason, graceful=True))
        self._wake()

    def check_name(self, said: msg.Hello | msg.Heartbeat | msg.Goodbye) -> None:
        """See to it that who dials in speaks in a name of its own: all workers may share one key.

        Raises:
            RemoteProtocolError: it can't prove it.
        """
        if self._dial_in and said.worker not in self.names and not is_proven(said.worker, said.proof):
            raise RemoteProtocolError(f"it speaks as {said.worker!r}, and can't prove that this is its name")

    def greet(self, identity: bytes, hello: msg.Hello) -> None:
        """Let a worker join, or say why it may not.

        Raises:
            RemoteProtocolError: this connection's worker has joined already.
        """
        known = self._roster.behind(identity)
        if known is not None:
            raise RemoteProtocolError(f"{known.worker} said Hello twice")
        managed = hello.worker in self.names
        current = self._roster.of(hello.worker)
        reason = refusal(
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
                f"{notice}, so results could differ in their last bits; `pipedist run --force` lets it in"
            )
        if reason:
            self._router.send(identity, msg.Refuse(reason))
            self._on_refuse(f"worker {hello.worker!r} of {hello.host!r}: {reason}", f"{hello.host}: {reason}")
            return
        if notice:
            notice = f"{notice}, so results may differ in their last bits (--force)"
            self._tell(f"worker {hello.worker} joins, though {notice}")
            notice = f"let in, though {notice}"
        local = hello.boot == self._boot
        if current is not None:
            self.expel(current.worker, current.incarnation, "a later incarnation has joined")
        self._roster.add(
            Peer(identity, hello.worker, hello.incarnation, local, codes=set(hello.code_digests[:HOLDS_MAX]))
        )
        self._router.send(identity, self._welcome(local=local, notice=notice))
        joined = ev.WorkerJoined(
            hello.worker, hello.incarnation, supervised=not managed, gpus=max(0.0, hello.gpus)
        )
        self._post(joined)
        self._wake()

    def _welcome(self, *, local: bool, notice: str = "") -> msg.Welcome:
        paths = tuple(map(os.fsencode, sys.path)) if local else ()
        return msg.Welcome(self._cluster_id, self._heartbeat_s, paths, self._rejoin_s, notice)
