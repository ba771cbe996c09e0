"""The only async driver of the scheduler.

Theory of operation: everything happens on one event loop, in `post`. An event (a message
from a worker, a worker's exit, steps from a feed, a reader that consumed) is handled by the
scheduler at once, and the commands that come back are carried out in order; nothing is ever
awaited, sends never block. Payloads stay here: inputs in the feeds, results in `ResultStore`s;
the scheduler sees their sizes.

What a worker sends is decoded and checked before the scheduler hears of it. A message that
breaks the protocol costs its sender the connection, and its calls go elsewhere. Should the
scheduler or the driver itself raise, every pass ends with that: a defect must not become a hang.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from pipedist import messages as msg
from pipedist.coordinator.dispatch import Dispatch
from pipedist.coordinator.fleet import Fate, Fleet
from pipedist.coordinator.gangs import Gangs
from pipedist.coordinator.handle import Arrival, PassHandle, SetAside
from pipedist.coordinator.introductions import Introductions
from pipedist.coordinator.log_sinks import LogSink, LogSinks
from pipedist.coordinator.offers import Offers
from pipedist.coordinator.policy import Policy
from pipedist.coordinator.refusals import Refusals
from pipedist.coordinator.remote_exceptions import call_error
from pipedist.coordinator.roster import Peer
from pipedist.coordinator.segments import Segments
from pipedist.coordinator.states import States
from pipedist.coordinator.store import Chunk, open_chunk
from pipedist.coordinator.timer import Timer
from pipedist.errors import (
    LocalProtocolError,
    PipedistError,
    RemoteProtocolError,
    RunCancelled,
    UsageError,
    WorkersLost,
)
from pipedist.feeds import Feed
from pipedist.launchers.base import Launcher, WorkerExit
from pipedist.program import Program, Tree
from pipedist.scheduler import Limits, PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.transport.codec import encode
from pipedist.transport.router import Router
from pipedist.worker.progress import Running

if TYPE_CHECKING:
    from pipedist.coordinator.stalls import Stall

RouterFactory = Callable[
    [
        Callable[[bytes, msg.Message, list[memoryview]], None],
        Callable[[str], None],
        Callable[[bytes, str], None],
    ],
    Router,
]
"""Makes a router from (on_message, on_reject, on_lost)."""


_DIGITS_MAX = 9
"""Of the number of a gang's member."""

LEAVING_S = 2.0
"""How long workers that dialled in may take to say Goodbye when the cluster is closed."""


class Coordinator:
    """Drives the scheduler over one router and one launcher.

    Args:
        router_factory: makes the router, given the callbacks.
        launcher_factory: makes the launcher, given the router's endpoint; None where all
            workers dial in.
        workers: names of the workers that the launcher starts.
        limits: the scheduler's.
        dial_in: whether workers that were not started here may join.
        boot: this host's boot id: workers with the same one can read our files.
        shared_memory: whether workers that were started here may share memory with each other.
        rejoin_s: how long workers that dialled in wait for another scheduler when this one is gone.
        force: let workers in whose versions or processors could change bits.
        tell: told, for people, which workers were not let in, or differ.
    """

    def __init__(
        self,
        *,
        router_factory: RouterFactory,
        launcher_factory: Callable[[str], Launcher] | None,
        workers: Sequence[str],
        limits: Limits | None = None,
        dial_in: bool = False,
        boot: str,
        shared_memory: bool = False,
        rejoin_s: float = 0.0,
        force: bool = False,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        limits = limits or Limits()
        self._router = router_factory(self._on_message, self._on_reject, self._on_lost)
        self._launcher_factory = launcher_factory
        self._fleet = Fleet(
            self.post,
            cluster_id=os.urandom(8).hex(),
            router=self._router,
            names=workers,
            dial_in=dial_in,
            boot=boot,
            heard_within_s=limits.heard_within_s,
            rejoin_s=rejoin_s,
            explain=self._explain,
            on_refuse=self._on_reject,
            force=force,
            tell=tell,
        )
        self._introductions = Introductions(self._fleet)
        self._refusals = Refusals(tells=dial_in)
        self._stale = 0
        self._scheduler = scheduler = Scheduler(limits)
        self._states = States(self._fleet)
        self._gangs = Gangs(
            self._fleet,
            Segments(self._fleet, enabled=shared_memory),
            lambda worker, lease: scheduler.pass_of(worker, lease) is not None,
        )
        self._dispatch = Dispatch(self.post, self._fleet, self._states, self._gangs)
        self._events: deque[tuple[ev.Event, Chunk | None]] = deque()
        self._pumping = False
        self._closed = False
        self._handles: dict[int, PassHandle] = {}
        self._offers = Offers()
        self._outlived = dial_in and rejoin_s > 0
        """Workers may be there when this process is gone."""
        self._last_pass = 0
        self._log_sinks = LogSinks()
        self._failed: PipedistError | None = None
        self._timer: Timer | None = None
        self._stack = AsyncExitStack()

    # -- lifetime --------------------------------------------------------------------------

    async def __aenter__(self) -> Coordinator:
        await self._stack.__aenter__()
        try:
            await self._stack.enter_async_context(self._router)
            self._stack.callback(self._gangs.close)
            self._timer = Timer(self._tick)
            self._stack.callback(self._timer.cancel)
            if self._launcher_factory is not None:
                launcher = self._launcher_factory(self._router.endpoint)
                launcher.on_exit = self._on_exit
                self._fleet.launcher = await self._stack.enter_async_context(launcher)
            for name in self._fleet.names:
                self.post(ev.WorkerExpected(name))
        except BaseException:
            self._closed = True
            await self._stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fail_all(RunCancelled("the cluster was closed"))
        await self._fleet.dismiss("the cluster is closed", LEAVING_S)
        self._closed = True
        await self._stack.__aexit__(kind, error, trace)

    @property
    def endpoint(self) -> str:
        """Where workers dial in."""
        return self._router.endpoint

    @property
    def workers_ready(self) -> int:
        """How many workers have joined and are alive."""
        return len(self._fleet)

    @property
    def rejected(self) -> int:
        """How many messages, results and workers were refused."""
        return self._refusals.count + self._stale

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that were started here, by name."""
        launcher = self._fleet.launcher
        return dict(launcher.pids) if launcher is not None else {}

    def kill(self, worker: str) -> None:
        """Kill a worker's process with SIGKILL; the scheduler replaces it.

        Raises:
            UsageError: no worker of that name was started here.
        """
        launcher = self._fleet.launcher
        if launcher is None or worker not in self._fleet.names:
            names = self._fleet.names if launcher is not None else ()
            there = f"{names[0]} to {names[-1]}" if names else "none: its workers are started elsewhere"
            raise UsageError(f"no worker {worker!r} was started here; those that can be killed: {there}")
        launcher.kill(worker)

    async def restart(self, worker: str) -> None:
        """Kill a worker's process, and return as soon as the next one has joined.

        Raises:
            UsageError: no worker of that name was started here.
            WorkersLost: workers die before they join.
        """
        peer = self._fleet.of(worker)
        self.kill(worker)
        await self._fleet.wait_for_next(worker, -1 if peer is None else peer.incarnation)

    def cut(self, worker: str) -> None:
        """Lose the connection to a worker: nothing that it sends is heard any more; it is replaced.

        Raises:
            UsageError: no worker of that name has joined.
        """
        peer = self._fleet.of(worker)
        if peer is None:
            raise UsageError(f"no worker {worker!r} has joined; only a connection that is there can be cut")
        self._router.drop(peer.identity)
        self._on_lost(peer.identity, "its connection was cut")

    async def wait_ready(self, count: int) -> None:
        """Return as soon as `count` workers have joined.

        Raises:
            WorkersLost: they die before they join.
            RunCancelled: the cluster was closed.
        """
        await self._fleet.wait_for(count)

    def share(self, tree: Tree) -> None:
        """Give a tree to every program whose supervisor dials in, now or later.

        Raises:
            UnsendableError: it can't be sent; the text names the place.
        """
        self._fleet.share(encode(tree))

    def on_supervisor(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called with the name of each worker whose supervisor is heard."""
        self._fleet.on_supervisor = tell

    def fail(self, reason: str) -> None:
        """End every pass with WorkersLost, now and later: no worker is there any more, nor will be."""
        self._fail_all(WorkersLost(reason))

    # -- passes ----------------------------------------------------------------------------

    def open_pass(
        self,
        program: Program,
        *,
        name: str,
        settings: PassSettings,
        retries: Mapping[str, int] | None = None,
        quarantine: Collection[str] = (),
        feed: Feed | None = None,
        on_arrival: Arrival | None = None,
        on_quarantine: SetAside | None = None,
        stamp: str = "",
    ) -> PassHandle:
        """Begin a pass.

        Args:
            name: for errors about calls whose stage is not known.
            retries: by stage, how often a call that raised there is tried again; 0 for others.
            quarantine: stages; of calls that failed there for good, the guilty elements are set aside.
            feed: where its steps come from, executed by `PassHandle.run_feed`; None: from `call_step`.
            on_arrival: told of results as they arrive.
            on_quarantine: told of elements that are set aside, before their step is visible.
            stamp: of the run, the pass and its code: workers keep results until `PassHandle.settle`, and
                what one has kept under the same stamp and program is not executed again; "": they do not.

        Raises:
            WorkersLost: the cluster has failed.
            RunCancelled: the cluster is not open.
            UnsendableError: the program can't be sent; the text names the place.
        """
        if self._failed is not None:
            raise self._failed
        if self._timer is None:
            raise RunCancelled("the cluster is not open: use it inside `async with`")
        number = self._last_pass + 1
        stamp = stamp if self._outlived else ""
        policy = Policy(program, dict(retries or {}), frozenset(quarantine))
        handle = PassHandle(
            self.post, number, name, program, settings, policy, feed, on_arrival, on_quarantine, stamp
        )
        self._last_pass = number
        self._handles[number] = handle
        if policy.is_timed:
            self._fleet.watch(wanted=True)
        self.post(ev.PassOpened(number, settings))
        for kept in self._offers.of_pass(handle.key, number):
            self.post(kept)
        return handle

    def open_space(self) -> int:
        """Return the number of a new state: a value that calls read, version by version."""
        return self._states.open_space()

    def put_state(self, space: int, version: int, tree: Tree) -> None:
        """Keep a version of a state; the latest two can be read.

        Args:
            version: higher than any before.
            tree: the value; its arrays must not change any more.

        Raises:
            UnsendableError: the value can't be sent; the text names the place.
            LocalProtocolError: the space is not open, or has a version that is not lower.
        """
        self._states.put(space, version, tree)

    def drop_space(self, space: int) -> None:
        """Forget a state, here and in the workers."""
        self._states.drop(space)

    def why(self) -> Stall:
        """Say what everything waits for, call by call."""
        from pipedist.coordinator.stalls import name_all  # seldom asked for

        launcher = self._fleet.launcher
        seen = (lambda _worker: None) if launcher is None else launcher.running
        return name_all(self._scheduler.why(time.monotonic()), self._handles, seen)

    @property
    def silent_s(self) -> float:
        """For how long nothing has come back, been offered or been taken, seconds."""
        return self._scheduler.silent_s(time.monotonic())

    def add_log_sink(self, sink: LogSink) -> Callable[[], None]:
        """Tell `sink` every line that replica functions print, of all passes.

        While there is no sink, lines go to `sys.stderr`, each led by the call that it comes from.
        A sink that raises is told nothing more, and the event loop's exception handler is told.

        Returns:
            What ends it; harmless twice.
        """
        return self._log_sinks.add(sink)

    # -- the pump --------------------------------------------------------------------------

    def post(self, event: ev.Event, chunk: Chunk | None = None) -> None:
        """Let the scheduler handle an event, now, or after the one that is being handled."""
        if self._closed:
            return
        self._events.append((event, chunk))
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                event, chunk = self._events.popleft()
                if isinstance(event, ev.PassClosed):
                    self._forget(event.pass_id)
                for command in self._scheduler.handle(event, time.monotonic()):
                    self._carry_out(command, chunk)
        except Exception as error:
            defect = LocalProtocolError(f"a defect of pipedist ended the cluster: {error}")
            defect.__cause__ = error
            self._fail_all(defect)
            raise
        finally:
            self._pumping = False
        if self._timer is not None:
            self._timer.set(self._scheduler.deadline())

    def _forget(self, pass_id: int) -> None:
        handle = self._handles.pop(pass_id, None)
        if handle is not None:
            self._introductions.forget(pass_id)
            handle.closed(RunCancelled(f"{handle.name} was closed"))
            if handle.policy.is_timed and not any(x.policy.is_timed for x in self._handles.values()):
                self._fleet.watch(wanted=False)

    def _tick(self) -> None:
        self.post(ev.Tick())

    def _carry_out(self, command: cmd.Command, chunk: Chunk | None) -> None:
        match command:
            case cmd.StashResults(serial):
                if chunk is not None:
                    self._gangs.stash(serial, chunk)
            case cmd.GangEnded():
                pass_id, stash, peers = self._gangs.end(command)
                if stash:
                    self._handles[pass_id].gang_arrived(stash, peers)
            case cmd.AcceptResults(pass_id):
                if chunk is not None:
                    self._handles[pass_id].arrived(chunk)
            case cmd.StepsReady(pass_id, first, last):
                self._handles[pass_id].ready(first, last)
            case cmd.SendGang(pass_id=pass_id):
                self._dispatch.gang(self._handles[pass_id], command)
            case cmd.SendAssign(pass_id=pass_id):
                self._dispatch.lease(self._handles[pass_id], command)
            case cmd.RequestSteps(pass_id, count):
                self._handles[pass_id].want(count)
            case cmd.SendBind(worker, pass_id):
                self._introductions.bind(worker, self._handles[pass_id])
            case cmd.SendRecall(worker, lease, pass_id, lo, hi):
                self._fleet.send(worker, msg.Recall(lease, pass_id, lo, hi))
            case cmd.SendSettled(worker, pass_id, before):
                self._fleet.send(worker, msg.Settled(pass_id, before))
            case cmd.SendUnbind(worker, pass_id):
                self._fleet.send(worker, msg.Unbind(pass_id))
            case cmd.SendCancel(worker, lease):
                self._fleet.send(worker, msg.Cancel(lease))
            case cmd.StepFailed(pass_id, step, failures):
                handle = self._handles[pass_id]
                replicas = handle.settings.replicas
                error = call_error(failures[0], handle.raised, name=handle.name, replicas=replicas)
                handle.step_failed(step, error)
            case cmd.SizeCall(pass_id, call):
                self.post(ev.CallSized(pass_id, call, self._handles[pass_id].separable(call)))
            case cmd.CallsQuarantined(pass_id):
                self._handles[pass_id].set_aside(command)
            case cmd.PassComplete(pass_id):
                self._handles[pass_id].completed()
            case cmd.PassQuiet(pass_id):
                self._handles[pass_id].went_quiet()
            case cmd.StartWorker(worker, incarnation):
                self._fleet.start(worker, incarnation)
            case cmd.ExpelWorker(worker, incarnation, reason):
                self._fleet.expel(worker, incarnation, reason)
            case cmd.ClusterFailed(reason):
                self._fail_all(WorkersLost(reason))
            case cmd.DropResults():
                self._stale += 1
            case _:
                raise LocalProtocolError(f"the coordinator knows no command {command!r}")

    def _fail_all(self, error: PipedistError) -> None:
        self._failed = self._failed or error
        self._fleet.fail(self._failed)
        for handle in list(self._handles.values()):
            handle.fail(error)

    # -- what workers say ------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: msg.Message, frames: list[memoryview]) -> None:
        if self._closed:
            return
        try:
            peer = self._fleet.behind(identity)
            if isinstance(message, msg.Hello):
                self._greet(identity, message)
            elif peer is not None:
                self._on_word(peer, message, frames)
            else:
                self._on_stranger(identity, message)
        except RemoteProtocolError as error:
            self._router.drop(identity, f"peer {identity.hex()}: {error}")
            self._on_lost(identity, f"it broke the protocol: {error}")

    def _greet(self, identity: bytes, hello: msg.Hello) -> None:
        """Let a worker join, if it may; what it has kept is known before it is dealt anything."""
        self._fleet.check_name(hello)
        passes = {handle.key: handle.id for handle in self._handles.values() if handle.key}
        for kept in self._offers.take(hello, passes):
            self.post(kept)
        self._fleet.greet(identity, hello)
        peer = self._fleet.of(hello.worker)
        if peer is None or peer.incarnation != hello.incarnation:
            self._offers.forget(hello.worker, hello.incarnation)

    def _on_word(self, peer: Peer, message: msg.Message, frames: list[memoryview]) -> None:
        match message:
            case msg.Results():
                self._on_results(peer, message, frames)
            case msg.Failed():
                self._on_failed(peer, message)
            case msg.Exchange():
                self._stale += not self._gangs.exchange(peer, message, frames)
            case msg.Stalled():
                self._on_stalled(peer, message)
            case msg.Cancelled(lease):
                self.post(ev.CancelHeard(peer.worker, peer.incarnation, lease))
            case msg.Sees(pass_id):
                if pass_id in self._handles:
                    self._introductions.saw(peer, pass_id)
            case msg.Log():
                self._log_sinks.tell(peer.worker, message)
            case msg.Heartbeat():
                self.post(ev.WorkerHeard(peer.worker, peer.incarnation))
            case msg.Goodbye():
                self._fleet.left(replace(message, worker=peer.worker, incarnation=peer.incarnation))
            case _:
                raise RemoteProtocolError(f"a worker may not send {type(message).__name__}")

    def _on_stranger(self, identity: bytes, message: msg.Message) -> None:
        """A supervisor speaks for a worker that dialled in; from others nothing counts."""
        match message:
            case msg.Heartbeat(worker, incarnation) if worker not in self._fleet.names:
                self._fleet.check_name(message)
                self._fleet.heard(identity, worker, incarnation)
            case msg.Goodbye(worker) if worker not in self._fleet.names:
                self._fleet.check_name(message)
                self._fleet.left(message)
            case _:
                self._fleet.turn_away(identity)

    def _handle_of(self, peer: Peer, lease: int) -> PassHandle | None:
        return self._handle_of_worker(peer.worker, lease)

    def _handle_of_worker(self, worker: str, lease: int) -> PassHandle | None:
        pass_id = self._scheduler.pass_of(worker, lease)
        return None if pass_id is None else self._handles.get(pass_id)

    def _on_results(self, peer: Peer, told: msg.Results, frames: list[memoryview]) -> None:
        handle = self._handle_of(peer, told.lease)
        chunk, size = None, 0
        if handle is not None:  # otherwise they don't count, and are not worth decoding
            chunk = open_chunk(told.lo, told.hi, frames, handle.slots, partial=handle.settings.gang)
            size = chunk.size
        who, incarnation = peer.worker, peer.incarnation
        self.post(ev.CallsDone(who, incarnation, told.lease, told.lo, told.hi, told.busy_ns, size), chunk)

    def _on_failed(self, peer: Peer, told: msg.Failed) -> None:
        handle = self._handle_of(peer, told.lease)
        who, incarnation = peer.worker, peer.incarnation
        failed = ev.CallFailed(who, incarnation, told.lease, told.call, aborted=told.aborted)
        if handle is not None:
            handle.raised[told.call] = told
            failed = handle.policy.judged(failed, told)
            self._gangs.failed(told)
        self.post(failed)
        self._gangs.reported(told.lease)

    def _explain(self, worker: str, running: Running, timed_out: bool) -> Fate | None:
        handle = self._handle_of_worker(worker, running.lease)
        return None if handle is None else handle.ended(running, timed_out=timed_out)

    def _on_stalled(self, peer: Peer, told: msg.Stalled) -> None:
        if not all(member.isdecimal() and len(member) <= _DIGITS_MAX for member in told.members):
            raise RemoteProtocolError(f"the members {told.members} of a gang")
        members = tuple(map(int, told.members))
        self.post(ev.GangStalled(peer.worker, peer.incarnation, told.lease, members, told.text))

    def _on_exit(self, exit_: WorkerExit) -> None:
        if not self._closed:
            self._fleet.exited(exit_)

    def _on_lost(self, identity: bytes, reason: str) -> None:
        peer = self._fleet.behind(identity)
        if peer is not None and not self._closed:
            self._fleet.lose(peer, reason)

    def _on_reject(self, reason: str) -> None:
        self._refusals.note(reason)
