"""The only async driver of the scheduler.

Theory of operation: everything happens on one event loop, in `post`. The scheduler handles an event (a message
from a worker, a worker's exit, steps from a feed, steps consumed by a reader) at once, and its commands are
executed in order (`CommandExecutor`); nothing is awaited, and sends never block. Payloads stay here: inputs in
the feeds, results in `ResultStore`s; the scheduler sees their sizes.

A message from a worker is decoded and checked before the scheduler handles it (`Inbound`). A message that breaks
the protocol costs its sender the connection, and its calls are assigned to other workers. If the scheduler or
the driver itself raises, every pass ends with that error: a defect must not become a hang.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from pipedist.coordinator.failures import FailurePolicy
from pipedist.coordinator.gang_relay import GangRelay, SegmentPool
from pipedist.coordinator.inbound import Inbound, LogSink, LogSinks, Rejections
from pipedist.coordinator.launcher import Launcher, WorkerExit
from pipedist.coordinator.measurements import PassRecord
from pipedist.coordinator.notices import Notices, NoticeSink
from pipedist.coordinator.outbound import CommandExecutor, StateVersions
from pipedist.coordinator.pass_handle import Arrival, OnQuarantine, PassHandle
from pipedist.coordinator.passes import OpenPasses
from pipedist.coordinator.prepared_steps import PastEvent, PreparedSteps
from pipedist.coordinator.results import Chunk
from pipedist.coordinator.worker_pool import WorkerPool
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

LEAVING_S = 2.0  # how long dialled-in workers may take to say Goodbye when the cluster is closed


class Coordinator:
    """Drives the scheduler over one router and one launcher."""

    def __init__(
        self,
        *,
        router_factory: Callable[..., Router],  # returns the router, given its callbacks
        launcher_factory: Callable[[str], Launcher] | None,  # from the router's endpoint; None: all dial in
        workers: Sequence[str],  # names of the workers that the launcher starts
        limits: SchedulerLimits | None = None,
        dial_in: bool = False,  # whether workers that were not started here may join
        boot: str,  # this host's boot id: workers with the same one can read our files
        shared_memory: bool = False,  # whether workers that were started here may share memory
        rejoin_s: float = 0.0,  # how long dialled-in workers wait for the next scheduler, seconds
        force: bool = False,  # accept workers whose versions or processors could change bits
        threads: int | None = None,  # BLAS and OpenMP threads that all workers must have; None: any
        notify: Callable[[str], None] = lambda _text: None,  # line about an accepted worker that differs
    ) -> None:
        limits = limits or SchedulerLimits()
        notices = self._notices = Notices()
        self._router = router_factory(
            on_message=self._on_message, on_reject=self._on_reject, on_lost=self._on_lost
        )
        self._launcher_factory = launcher_factory
        self._pool = WorkerPool(
            self.post,
            cluster_id=os.urandom(8).hex(),
            router=self._router,
            names=workers,
            dial_in=dial_in,
            boot=boot,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
            rejoin_s=rejoin_s,
            on_death=lambda *death: self._passes.on_death(*death),
            on_leave=lambda *gone: self._passes.on_leave(*gone),
            on_reject=self._on_reject,
            force=force,
            threads=threads,
            notify=notify,
            notices=notices,
        )
        self._rejections = Rejections(verbose=dial_in)
        self._scheduler = Scheduler(limits)
        pass_of = self._scheduler.pass_of
        self._passes = OpenPasses(self.post, self._scheduler, self._pool)
        self.states = StateVersions(self._pool)
        segments = SegmentPool(self._pool, enabled=shared_memory)
        self._gangs = GangRelay(
            self._pool, segments, lambda worker, lease: pass_of(worker, lease) is not None
        )
        self._prepared = PreparedSteps(self._scheduler, self._pool, segments, self.states.send, self._post)
        self._events: deque[PastEvent] = deque()
        self._pumping = False
        self._is_defective = False  # the scheduler raised: it handles no further event
        self._closed = False
        self._may_resume = dial_in and rejoin_s > 0  # workers may outlive this process, and rejoin the next
        self._log_sinks = LogSinks()
        self._executor = CommandExecutor(
            self.post,
            self._fail_all,
            self._rejections,
            pool=self._pool,
            states=self.states,
            gangs=self._gangs,
            passes=self._passes,
            notices=notices,
        )
        self._inbound = Inbound(
            self.post,
            pool=self._pool,
            gangs=self._gangs,
            log_sinks=self._log_sinks,
            rejections=self._rejections,
            passes=self._passes,
            notices=notices,
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
                self._pool.launcher = await self._stack.enter_async_context(launcher)
            for name in self._pool.names:
                self.post(ev.WorkerExpected(name))
        except BaseException:
            self._closed = True
            await self._stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail_all(RunCancelled("the cluster was closed"))
        try:
            await self._pool.stop_all("the cluster is closed", LEAVING_S)
        finally:
            self._closed = True
            self.states.close()  # strategies that are collected later have nothing to drop
            await self._stack.__aexit__(kind, error, trace)

    @property
    def endpoint(self) -> str:
        return self._router.endpoint

    @property
    def workers_ready(self) -> int:
        return len(self._pool)

    @property
    def rejected(self) -> int:
        """How many messages, results and workers were rejected."""
        return self._rejections.count + self._rejections.stale

    @property
    def pids(self) -> dict[str, int]:
        return self._pool.pids

    def kill(self, worker: str) -> None:
        self._pool.kill(worker)

    async def restart(self, worker: str) -> None:
        await self._pool.restart(worker)

    def cut(self, worker: str) -> None:
        """Cut the connection to a worker: it is replaced."""
        peer = self._pool.of(worker)
        if peer is None:
            raise UsageError(f"no worker {worker!r} has joined, so it has no connection to cut")
        self._router.drop(peer.identity)
        self._on_lost(peer.identity, "its connection was cut")

    async def wait_ready(self, count: int) -> None:
        await self._pool.wait_for(count)

    def share(self, tree: Tree) -> None:
        """Send a tree to every program whose supervisor dials in, now or later."""
        self._pool.share(encode(tree))

    def on_supervisor(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the worker on a supervisor's first heartbeat."""
        self._pool.on_supervisor = callback

    def fail(self, reason: str) -> None:
        """End every pass, now and later: there is no worker, and none will join."""
        self._fail_all(WorkersLost(reason))

    # -- passes ----------------------------------------------------------------------------

    def open_pass(
        self,
        program: Program,
        *,
        name: str,  # for errors of calls whose stage is unknown
        settings: PassSettings,
        retries: Mapping[str, int] | None = None,  # by stage, for a call that raised; 0 for other stages
        quarantine: Collection[str] = (),  # stages whose culprits are quarantined after the last retry
        feed: Feed | None = None,  # run by `PassHandle.run_feed`; None: `PassHandle.call_step`
        on_arrival: Arrival | None = None,
        on_quarantine: OnQuarantine | None = None,  # called before their step is visible
        stamp: str = "",
        record: PassRecord | None = None,
    ) -> PassHandle:
        """Open a pass; raise WorkersLost, RunCancelled if the cluster is not open, or UnsendableError.

        `stamp` identifies the run, the pass and its code: workers cache results until `PassHandle.settle`, and calls
        whose results a worker has cached under the same stamp and program are not executed again; "": no caching.
        """
        if self._failed is not None:
            raise self._failed
        if self._timer is None:
            raise RunCancelled("the cluster is not open: use it inside `async with`")
        stamp = stamp if self._may_resume else ""
        policy = FailurePolicy(program, dict(retries or {}), frozenset(quarantine))
        number = self._passes.last + 1
        handle = PassHandle(
            self.post, number, name, program, settings, policy, feed, on_arrival, on_quarantine, stamp, record
        )
        handle.begin_prepared = self._begin_prepared
        self._passes.open(handle)
        return handle

    def why(self) -> Stall:
        self._hand_over()
        from pipedist.coordinator.diagnostics import name_all  # few runs need it

        launcher = self._pool.launcher
        seen = (lambda _worker: None) if launcher is None else launcher.running
        return name_all(self._scheduler.why(time.monotonic()), self._passes.handles, seen, self._pool.of)

    @property
    def silent_s(self) -> float:
        """Seconds since a result arrived, or a step was offered or consumed."""
        return self._scheduler.silent_s(time.monotonic())

    def add_log_sink(self, sink: LogSink, *, is_extra: bool = False) -> Callable[[], None]:
        """Have `sink` called with every line that replica functions print or log.

        While there is no sink, a `logging` record goes to the logger of the same name of this process if that has a
        handler, and any other line to `sys.stderr`, each with its call; also while all sinks are `is_extra`. A sink
        that raises is removed, and its exception is passed to the event loop's exception handler. Returns a function
        that removes the sink; it may be called twice.
        """
        return self._log_sinks.add(sink, is_extra=is_extra)

    def add_notice_sink(self, sink: NoticeSink) -> Callable[[], None]:
        """Have `sink` called with each line about a worker or a retry; return what removes it."""
        self._notices.sinks.append(sink)
        return lambda: self._notices.sinks.remove(sink)

    # -- the pump --------------------------------------------------------------------------

    def post(self, event: ev.Event, chunk: Chunk | None = None) -> None:
        """Have the scheduler handle an event, after the present one if any."""
        if self._is_defective and not self._closed and isinstance(event, ev.PassClosed):
            self._passes.close(event.pass_id)
        self._post(PastEvent(event, chunk, time.monotonic()))

    def _post(self, past: PastEvent) -> None:
        if self._closed or self._is_defective:
            return
        self._events.append(past)
        if not self._pumping:
            self._pump()

    def _pump(self) -> None:
        """Handle the events that wait."""
        self._pumping = True
        try:
            while self._events:
                past = self._events.popleft()
                event, chunk = past.event, past.chunk
                if type(event) is not ev.StepExecuted:
                    self._prepared.forget()
                    if self._prepared.has_news:
                        self._executor.sent, earlier = self._prepared.hand_over()
                        self._events.appendleft(past)
                        self._events.extendleft(reversed(earlier))
                        continue
                if isinstance(event, ev.PassClosed):
                    self._passes.close(event.pass_id)
                for command in self._scheduler.handle(event, past.at):
                    self._executor.execute(command, chunk)
        except Exception as error:
            defect = LocalProtocolError(f"a defect of pipedist ended the cluster: {error}")
            defect.__cause__ = error
            self._is_defective = True
            self._events.clear()
            self._fail_all(defect)
            raise
        finally:
            self._pumping = False
        self._passes.settle()
        if self._timer is not None:
            self._timer.set(self._scheduler.deadline())

    def _begin_prepared(self, handle: PassHandle, step: int) -> bool:
        """Send an offered step if the scheduler need not see it first; return False if it must."""
        if self._pumping or self._closed or self._is_defective:
            return False
        self._prepared.report(unless_of=handle.id)
        self._pumping = True  # a worker that can't be reached is lost only when the step is sent
        try:
            return self._prepared.begin(handle, step)
        finally:
            self._pumping = False
            if self._events:
                self._pump()

    def _hand_over(self) -> None:
        """Have the scheduler see all that has happened in a prepared step."""
        if self._prepared.has_news:
            self._executor.sent, past = self._prepared.hand_over()
            self._events.extend(past)
            if not self._pumping:
                self._pump()

    def _fail_all(self, error: PipedistError) -> None:
        self._failed = self._failed or error
        self._pool.fail(self._failed)
        self._passes.fail(error)

    # -- connections -----------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: msg.Message, frames: list[memoryview]) -> None:
        if self._closed:
            return
        try:
            peer = self._pool.of_identity(identity)
            if (
                peer is not None
                and type(message) is msg.Results
                and self._prepared.take(peer, message, frames)
            ):
                return
            if self._prepared.has_news and type(message) is not msg.LogLine:
                self._hand_over()
            if peer is None or isinstance(message, msg.Hello):
                self._inbound.handle_unregistered(identity, message)
            else:
                self._inbound.handle(peer, message, frames)
        except RemoteProtocolError as error:
            self._router.drop(identity, f"peer {identity.hex()}: {error}")
            self._on_lost(identity, f"it broke the protocol: {error}")

    def _on_exit(self, exit_: WorkerExit) -> None:
        if not self._closed:
            self._hand_over()
            self._pool.on_exit(exit_)

    def _on_lost(self, identity: bytes, reason: str) -> None:
        peer = self._pool.of_identity(identity)
        if peer is not None and not self._closed:
            self._hand_over()
            self._pool.lose(peer, reason)

    def _on_reject(self, reason: str, repeated: str = "") -> None:
        self._rejections.add(reason, repeated)


class Timer:
    """One re-armable timer on the running loop.

    Every event moves it, but it seldom fires. So it is re-armed only to fire earlier; a later time is checked when it
    rings.
    """

    def __init__(self, fire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._at = math.inf

    def set(self, at: float | None) -> None:
        """Fire at a time of `time.monotonic`; None: never."""
        self._at = math.inf if at is None else at
        if self._at < self._rings_at:
            self._arm()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._rings_at = self._at
        self._handle = self._loop.call_later(max(0.0, self._at - time.monotonic()), self._ring)

    def _ring(self) -> None:
        rung, self._rings_at = self._rings_at, math.inf
        self._handle = None
        if self._at <= rung:
            self._at = math.inf
            self._fire()
        elif self._at < math.inf:
            self._arm()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._rings_at = self._at = math.inf
