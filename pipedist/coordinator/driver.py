"""The only async driver of the scheduler.

Theory of operation: everything happens on one event loop, in `_pump`. An event (a message
from a worker, a worker's exit, steps from a feed, a reader that consumed) is handled by the
scheduler at once, and the commands that come back are carried out in order; sends never
block. What must be awaited lives in tasks of the coordinator's own task group: one feeder a
pass that has a feed. Payloads stay here: inputs in the feeds, results in `ResultStore`s; the
scheduler sees their sizes.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

import anyio
import anyio.abc
import numpy as np

from pipedist import messages as msg
from pipedist.coordinator.handle import Arrival, PassHandle
from pipedist.coordinator.remote_exceptions import revive
from pipedist.coordinator.roster import Peer, Roster
from pipedist.coordinator.store import Chunk
from pipedist.coordinator.timer import Timer
from pipedist.errors import (
    CallError,
    LocalProtocolError,
    PipedistError,
    RemoteProtocolError,
    RunCancelled,
    WorkerDied,
    WorkersLost,
)
from pipedist.feeds import Feed
from pipedist.launchers.base import Launcher, WorkerExit
from pipedist.program import Program
from pipedist.scheduler import Limits, PassSettings, Scheduler
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from pipedist.transport.codec import Frame, encode
from pipedist.transport.zeromq import Router
from pipedist.version import __version__

LogSink = Callable[[str, msg.Log], None]
"""Takes a line that a replica function printed: (worker, line)."""

RouterFactory = Callable[
    [
        Callable[[bytes, msg.Message, list[memoryview]], None],
        Callable[[str], None],
        Callable[[bytes, str], None],
    ],
    Router,
]
"""Makes a router from (on_message, on_reject, on_lost)."""


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
    ) -> None:
        self.id = secrets.token_hex(8)
        self.rejected = 0
        """How many messages were refused."""
        self._router = router_factory(self._on_message, self._on_reject, self._on_lost)
        self._launcher_factory = launcher_factory
        self._launcher: Launcher | None = None
        self._workers = tuple(workers)
        self._limits = limits or Limits()
        self._dial_in = dial_in
        self._boot = boot
        self._scheduler = Scheduler(self._limits)
        self._events: deque[tuple[ev.Event, Chunk | None]] = deque()
        self._pumping = False
        self._closed = False
        self._handles: dict[int, PassHandle] = {}
        self._last_pass = 0
        self._roster = Roster()
        self._alive: set[str] = set()
        """Workers whose process was started here and has not ended."""
        self._due: dict[str, int] = {}
        """Incarnations to start when the process before has ended."""
        self._failures: dict[int, msg.Failed] = {}
        self._last_token = 0
        self._log_sinks: list[LogSink] = []
        self._failed: PipedistError | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._timer: Timer | None = None
        self._stack = AsyncExitStack()
        self._joined = anyio.Event()

    # -- lifetime --------------------------------------------------------------------------

    async def __aenter__(self) -> Coordinator:
        await self._stack.__aenter__()
        try:
            await self._stack.enter_async_context(self._router)
            self._timer = Timer(self._tick)
            self._stack.callback(self._timer.cancel)
            if self._launcher_factory is not None:
                self._launcher = self._launcher_factory(self._router.endpoint)
                self._launcher.on_exit = self._on_exit
                await self._stack.enter_async_context(self._launcher)
            self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
            for name in self._workers:
                self.post(ev.WorkerExpected(name))
        except BaseException:
            await self._stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles.values():
            handle.fail(RunCancelled("the cluster was closed"))
        self._closed = True
        for peer in self._roster:
            self._router.send(peer.identity, msg.Stop("the cluster is closed"))
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        if isinstance(error, Exception):  # it is the user's own, and leaves as it came
            kind = error = trace = None
        await self._stack.__aexit__(kind, error, trace)

    @property
    def endpoint(self) -> str:
        """Where workers dial in."""
        return self._router.endpoint

    @property
    def workers_ready(self) -> int:
        """How many workers have joined and are alive."""
        return len(self._roster)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that were started here, by name."""
        return dict(self._launcher.pids) if self._launcher is not None else {}

    def kill(self, worker: str) -> None:
        """Kill a worker's process with SIGKILL; the scheduler replaces it."""
        if self._launcher is None:
            raise LocalProtocolError("workers which dial in can't be killed from here")
        self._launcher.kill(worker)

    async def wait_ready(self, count: int) -> None:
        """Return as soon as `count` workers have joined; raise WorkersLost if they never will."""
        while self.workers_ready < count:
            if self._failed is not None:
                raise self._failed
            self._joined = anyio.Event()
            await self._joined.wait()

    # -- passes ----------------------------------------------------------------------------

    def open_pass(
        self,
        program: Program,
        *,
        name: str,
        settings: PassSettings,
        feed: Feed | None = None,
        on_arrival: Arrival | None = None,
    ) -> PassHandle:
        """Begin a pass.

        Args:
            name: for errors about calls whose stage is not known.
            feed: where its steps come from; None: `call_step` or `offer` bring them.
            on_arrival: told of results as they arrive.

        Raises:
            WorkersLost: if the cluster has failed.
        """
        if self._failed is not None:
            raise self._failed
        if self._closed or self._tasks is None:
            raise RunCancelled("the cluster is not open: use it inside `async with`")
        self._last_pass += 1
        handle = PassHandle(self.post, self._last_pass, name, program, settings, feed, on_arrival)
        self._handles[handle.id] = handle
        self.post(ev.PassOpened(handle.id, settings))
        if feed is not None:
            self._tasks.start_soon(handle.run_feed, name=f"feed of {name}")
        return handle

    def add_log_sink(self, sink: LogSink) -> Callable[[], None]:
        """Tell `sink` every line that replica functions print; returns what ends that."""
        self._log_sinks.append(sink)
        return lambda: self._log_sinks.remove(sink)

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
        finally:
            self._pumping = False
        if self._timer is not None:
            self._timer.set(self._scheduler.deadline())

    def _forget(self, pass_id: int) -> None:
        handle = self._handles.pop(pass_id, None)
        if handle is not None:
            handle.fail(RunCancelled(f"{handle.name} was closed"))

    def _tick(self) -> None:
        self.post(ev.Tick())

    def _carry_out(self, command: cmd.Command, chunk: Chunk | None) -> None:
        match command:
            case cmd.SendAssign():
                self._assign(command)
            case cmd.AcceptResults(pass_id, _, hi):
                handle = self._handles.get(pass_id)
                if handle is not None and chunk is not None:
                    chunk.hi = min(hi, chunk.hi)
                    handle.arrived(chunk)
            case cmd.StepsReady(pass_id, first, last):
                if (handle := self._handles.get(pass_id)) is not None:
                    handle.ready(first, last)
            case cmd.RequestSteps(pass_id, count):
                if (handle := self._handles.get(pass_id)) is not None:
                    handle.want(count)
            case cmd.SendBind(worker, pass_id):
                self._send(worker, msg.Bind(pass_id), self._handles[pass_id].program_frames())
            case cmd.SendUnbind(worker, pass_id):
                self._send(worker, msg.Unbind(pass_id))
            case cmd.SendCancel(worker, lease):
                self._send(worker, msg.Cancel(lease))
            case cmd.StepFailed(pass_id, step, failures):
                if (handle := self._handles.get(pass_id)) is not None:
                    handle.step_failed(step, self._call_error(handle, failures[0]))
                for failure in failures:
                    self._failures.pop(failure.token, None)
            case cmd.PassComplete(pass_id):
                if (handle := self._handles.get(pass_id)) is not None:
                    handle.completed()
            case cmd.PassQuiet(pass_id):
                if (handle := self._handles.get(pass_id)) is not None:
                    handle.went_quiet()
            case cmd.StartWorker(worker, incarnation):
                self._start_worker(worker, incarnation)
            case cmd.ExpelWorker(worker, incarnation, reason):
                self._expel(worker, incarnation, reason)
            case cmd.ClusterFailed(reason):
                self._fail_all(WorkersLost(reason))
            case cmd.DropResults():
                self.rejected += 1
            case _:
                raise LocalProtocolError(f"the coordinator knows no command {command!r}")

    def _assign(self, command: cmd.SendAssign) -> None:
        handle = self._handles[command.pass_id]
        peer = self._roster.of(command.worker)
        try:
            shards = handle.shards(command.lo, command.hi, local=peer is not None and peer.local)
            payload = encode([shards.ids, shards.locations, shards.values])
        except Exception as error:  # reading the user's data may raise anything: it ends this pass
            handle.fail(error)
            self.post(ev.PassClosed(handle.id))
            return
        head = msg.Assign(command.lease, command.pass_id, command.lo, command.hi, command.attempt)
        self._send(command.worker, head, payload)

    def _send(self, worker: str, message: msg.Message, payload: Sequence[Frame] = ()) -> None:
        peer = self._roster.of(worker)
        if peer is not None and not self._router.send(peer.identity, message, payload):
            cause = "its connection is gone"
            self._expel(peer.worker, peer.incarnation, cause)
            self.post(ev.WorkerLost(peer.worker, peer.incarnation, cause))

    def _expel(self, worker: str, incarnation: int, reason: str) -> None:
        peer = self._roster.remove(worker, incarnation)
        if peer is None:
            return
        self._router.send(peer.identity, msg.Stop(reason))
        if self._launcher is not None and worker in self._alive:
            self._launcher.kill(worker)

    def _start_worker(self, worker: str, incarnation: int) -> None:
        if self._launcher is None:
            return
        if worker in self._alive:  # it was lost to us, but its process has not ended: the next life waits
            self._due[worker] = incarnation
            self._launcher.kill(worker)
            return
        self._alive.add(worker)
        self._launcher.start(worker, incarnation)

    def _fail_all(self, error: PipedistError) -> None:
        self._failed = error
        for handle in list(self._handles.values()):
            handle.fail(error)
        self._joined.set()

    def _call_error(self, handle: PassHandle, failure: cmd.Failure) -> CallError:
        step, replica = divmod(failure.call, handle.settings.replicas)
        told = self._failures.get(failure.token)
        cause: BaseException
        if told is None:
            cause = WorkerDied(failure.worker, failure.cause)
            stage, text, trace = handle.name, f"WorkerDied: {failure.cause}", ""
        else:
            cause = revive(told.module, told.name, told.text)
            stage, text, trace = told.stage, f"{told.name}: {told.text}", told.traceback
        error = CallError(
            stage=stage,
            step=step,
            replica=replica,
            worker=failure.worker,
            attempts=failure.attempts,
            cause=text,
            remote_traceback=trace,
        )
        error.__cause__ = cause
        return error

    # -- what workers say ------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: msg.Message, frames: list[memoryview]) -> None:
        if self._closed:
            return
        if isinstance(message, msg.Hello):
            self._on_hello(identity, message)
            return
        peer = self._roster.behind(identity)
        if peer is None:
            if isinstance(message, msg.Heartbeat):
                self.post(ev.WorkerHeard(message.worker, message.incarnation))
            elif isinstance(message, msg.Goodbye):
                self._leave(message.worker, message.incarnation, message.reason)
            else:
                self._router.send(identity, msg.Stop("this incarnation is not a member"))
                self.rejected += 1
            return
        match message:
            case msg.Results(lease, lo, hi, busy_ns):
                size = sum(memoryview(f).nbytes for f in frames)
                chunk = Chunk(lo, hi, peer.worker, frames, size)
                self.post(ev.CallsDone(peer.worker, peer.incarnation, lease, lo, hi, busy_ns, size), chunk)
            case msg.Failed():
                self._last_token += 1
                self._failures[self._last_token] = message
                self.post(
                    ev.CallFailed(
                        peer.worker,
                        peer.incarnation,
                        message.lease,
                        message.call,
                        self._last_token,
                        message.retryable,
                    )
                )
            case msg.Log():
                for sink in self._log_sinks:
                    sink(peer.worker, message)
            case msg.Heartbeat():
                self.post(ev.WorkerHeard(peer.worker, peer.incarnation))
            case msg.Goodbye():
                self._leave(peer.worker, peer.incarnation, message.reason)
            case _:
                raise RemoteProtocolError(f"a worker may not send {type(message).__name__}")

    def _on_hello(self, identity: bytes, hello: msg.Hello) -> None:
        refusal = self._refusal(hello)
        if refusal:
            self._router.send(identity, msg.Refuse(refusal))
            self.rejected += 1
            return
        local = hello.boot == self._boot
        self._roster.add(Peer(identity, hello.worker, hello.incarnation, local))
        self._router.send(
            identity,
            msg.Welcome(self.id, self._limits.heard_within_s / 4, tuple(sys.path) if local else ()),
        )
        managed = hello.worker in self._workers
        self.post(ev.WorkerJoined(hello.worker, hello.incarnation, supervised=not managed))
        self._joined.set()

    def _refusal(self, hello: msg.Hello) -> str:
        """Return why a worker may not join, "" if it may."""
        if hello.worker not in self._workers and not self._dial_in:
            return f"this cluster starts its own workers and knows no {hello.worker!r}"
        if self._roster.of(hello.worker, hello.incarnation) is not None:
            return f"incarnation {hello.incarnation} of {hello.worker} has joined already"
        python = ".".join(map(str, sys.version_info[:2]))
        ours = {"protocol": msg.WIRE_VERSION, "python": python, "numpy": np.__version__}
        theirs = {
            "protocol": hello.wire,
            "python": ".".join(hello.python.split(".")[:2]),
            "numpy": hello.numpy,
        }
        ours["pipedist"], theirs["pipedist"] = __version__, hello.pipedist
        differing = [f"{k} {theirs[k]} (here {ours[k]})" for k in ours if ours[k] != theirs[k]]
        return "it runs " + ", ".join(differing) if differing else ""

    def _leave(self, worker: str, incarnation: int, reason: str) -> None:
        self._roster.remove(worker, incarnation)
        self.post(ev.WorkerLost(worker, incarnation, reason, graceful=True))

    def _on_exit(self, exit_: WorkerExit) -> None:
        if self._closed:
            return
        self._alive.discard(exit_.worker)
        self._roster.remove(exit_.worker, exit_.incarnation)
        due = self._due.pop(exit_.worker, None)
        if due is not None:
            self._start_worker(exit_.worker, due)
        self.post(ev.WorkerLost(exit_.worker, exit_.incarnation, exit_.text))

    def _on_lost(self, identity: bytes, reason: str) -> None:
        peer = self._roster.behind(identity)
        if peer is not None and not self._closed:
            self._expel(peer.worker, peer.incarnation, reason)
            self.post(ev.WorkerLost(peer.worker, peer.incarnation, reason))

    def _on_reject(self, _reason: str) -> None:
        self.rejected += 1
