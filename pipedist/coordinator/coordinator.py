"""The only async driver of the scheduler.

Theory of operation: everything happens on one event loop, in `post`. An event (a message
from a worker, a worker's exit, steps from a feed, a reader that consumed) is handled by the
scheduler at once, and the commands that come back are carried out in order (`Orders`); nothing is
ever awaited, sends never block. Payloads stay here: inputs in the feeds, results in `ResultStore`s;
the scheduler sees their sizes.

What a worker sends is decoded and checked before the scheduler hears of it (`Reception`). A message
that breaks the protocol costs its sender the connection, and its calls go elsewhere. Should the
scheduler or the driver itself raise, every pass ends with that: a defect must not become a hang.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from pipedist.coordinator.command_executor import Orders
from pipedist.coordinator.dispatch import Dispatch
from pipedist.coordinator.gang_relay import Gangs
from pipedist.coordinator.inbound import Reception
from pipedist.coordinator.launcher import Launcher, WorkerExit
from pipedist.coordinator.log_sinks import LogSink, LogSinks
from pipedist.coordinator.pass_handle import Arrival, PassHandle, SetAside
from pipedist.coordinator.passes import Passes
from pipedist.coordinator.policy import Policy
from pipedist.coordinator.program_distribution import Introductions
from pipedist.coordinator.rejections import Refusals
from pipedist.coordinator.segments import Segments
from pipedist.coordinator.state_versions import States
from pipedist.coordinator.store import Chunk
from pipedist.coordinator.timer import Timer
from pipedist.coordinator.worker_pool import Fleet
from pipedist.core.types import Tree
from pipedist.datasets.feeds import Feed
from pipedist.errors import (
    LocalProtocolError,
    PipedistError,
    RemoteProtocolError,
    RunCancelled,
    UsageError,
    WorkersLost,
)
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import encode
from pipedist.protocol.program import Program
from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import events as ev
from pipedist.transport.router import Router

if TYPE_CHECKING:
    from pipedist.coordinator.diagnostics import Stall

RouterFactory = Callable[
    [
        Callable[[bytes, msg.Message, list[memoryview]], None],
        Callable[[str], None],
        Callable[[bytes, str], None],
    ],
    Router,
]
"""Makes a router from (on_message, on_reject, on_lost)."""

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
        threads: BLAS and OpenMP threads that workers have to have; None: any.
        tell: told, for people, which workers were not let in, or differ.
    """

    def __init__(
        self,
        *,
        router_factory: RouterFactory,
        launcher_factory: Callable[[str], Launcher] | None,
        workers: Sequence[str],
        limits: SchedulerLimits | None = None,
        dial_in: bool = False,
        boot: str,
        shared_memory: bool = False,
        rejoin_s: float = 0.0,
        force: bool = False,
        threads: int | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        limits = limits or SchedulerLimits()
        self._router = router_factory(self._on_message, self._on_reject, self._on_lost)
        self._launcher_factory = launcher_factory
        self._fleet = Fleet(
            self.post,
            cluster_id=os.urandom(8).hex(),
            router=self._router,
            names=workers,
            dial_in=dial_in,
            boot=boot,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
            rejoin_s=rejoin_s,
            explain=lambda *told: self._passes.explain(*told),
            on_refuse=self._on_reject,
            force=force,
            threads=threads,
            tell=tell,
        )
        self._refusals = Refusals(tells=dial_in)
        self._scheduler = Scheduler(limits)
        pass_of = self._scheduler.pass_of
        introductions = Introductions(self._fleet)
        self._passes = Passes(self.post, pass_of, self._fleet, introductions)
        self._states = States(self._fleet)
        self._gangs = Gangs(
            self._fleet,
            Segments(self._fleet, enabled=shared_memory),
            lambda worker, lease: pass_of(worker, lease) is not None,
        )
        self._events: deque[tuple[ev.Event, Chunk | None]] = deque()
        self._pumping = False
        self._closed = False
        self._outlived = dial_in and rejoin_s > 0
        """Workers may be there when this process is gone."""
        self._log_sinks = LogSinks()
        self._orders = Orders(
            self.post,
            self._fail_all,
            fleet=self._fleet,
            dispatch=Dispatch(self.post, self._fleet, self._states, self._gangs),
            gangs=self._gangs,
            introductions=introductions,
            refusals=self._refusals,
            passes=self._passes,
        )
        self._reception = Reception(
            self.post,
            fleet=self._fleet,
            gangs=self._gangs,
            introductions=introductions,
            log_sinks=self._log_sinks,
            refusals=self._refusals,
            passes=self._passes,
        )
        self._failed: PipedistError | None = None
        self._timer: Timer | None = None
        self._stack = AsyncExitStack()

    # -- lifetime --------------------------------------------------------------------------

    async def __aenter__(self) -> Coordinator:
        await self._stack.__aenter__()
        try:
            await self._stack.enter_async_context(self._router)
            self._stack.callback(self._gangs.close)
            self._timer = Timer(lambda: self.post(ev.Tick()))
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
        try:
            await self._fleet.dismiss("the cluster is closed", LEAVING_S)
        finally:
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
        return self._refusals.count + self._refusals.stale

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that were started here, by name."""
        return self._fleet.pids

    def kill(self, worker: str) -> None:
        """Kill a worker's process with SIGKILL; the scheduler replaces it.

        Raises:
            UsageError: no worker of that name was started here.
        """
        self._fleet.kill(worker)

    async def restart(self, worker: str) -> None:
        """Kill a worker's process, and return as soon as the next one has joined.

        Raises:
            UsageError: no worker of that name was started here.
            WorkersLost: workers die before they join.
        """
        peer = self._fleet.of(worker)
        self._fleet.kill(worker)
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
        stamp = stamp if self._outlived else ""
        policy = Policy(program, dict(retries or {}), frozenset(quarantine))
        number = self._passes.last + 1
        handle = PassHandle(
            self.post, number, name, program, settings, policy, feed, on_arrival, on_quarantine, stamp
        )
        self._passes.open(handle)
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
        from pipedist.coordinator.diagnostics import name_all  # seldom asked for

        launcher = self._fleet.launcher
        seen = (lambda _worker: None) if launcher is None else launcher.running
        return name_all(self._scheduler.why(time.monotonic()), self._passes.handles, seen)

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
                    self._passes.forget(event.pass_id)
                for command in self._scheduler.handle(event, time.monotonic()):
                    self._orders.carry_out(command, chunk)
        except Exception as error:
            defect = LocalProtocolError(f"a defect of pipedist ended the cluster: {error}")
            defect.__cause__ = error
            self._fail_all(defect)
            raise
        finally:
            self._pumping = False
        if self._timer is not None:
            self._timer.set(self._scheduler.deadline())

    def _fail_all(self, error: PipedistError) -> None:
        self._failed = self._failed or error
        self._fleet.fail(self._failed)
        self._passes.fail(error)

    # -- connections -----------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: msg.Message, frames: list[memoryview]) -> None:
        if self._closed:
            return
        try:
            peer = self._fleet.behind(identity)
            if isinstance(message, msg.Hello):
                self._reception.greet(identity, message)
            elif peer is not None:
                self._reception.hear(peer, message, frames)
            else:
                self._reception.hear_stranger(identity, message)
        except RemoteProtocolError as error:
            self._router.drop(identity, f"peer {identity.hex()}: {error}")
            self._on_lost(identity, f"it broke the protocol: {error}")

    def _on_exit(self, exit_: WorkerExit) -> None:
        if not self._closed:
            self._fleet.exited(exit_)

    def _on_lost(self, identity: bytes, reason: str) -> None:
        peer = self._fleet.behind(identity)
        if peer is not None and not self._closed:
            self._fleet.lose(peer, reason)

    def _on_reject(self, reason: str, again: str = "") -> None:
        self._refusals.note(reason, again)
