"""A run as the user sees it, between `open` and its results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.abc
import anyio.to_thread
from msgspec.structs import asdict

from pipedist.cluster.base import Cluster, checked_count, usable_cores
from pipedist.cluster.factory import cluster_for
from pipedist.cluster.launchers.server import Spare
from pipedist.coordinator import LogSink
from pipedist.core.gpus import Supply
from pipedist.core.misuse_hints import AsyncOnly
from pipedist.core.names import plural
from pipedist.core.types import Tree
from pipedist.errors import OutputError, RunCancelled, UsageError
from pipedist.plan import Plan, compile_plan
from pipedist.plan.compiler import needs_gpus, supply_for
from pipedist.protocol import messages as msg
from pipedist.runs.execution import Execution
from pipedist.runs.pass_folds import tables_of
from pipedist.runs.progress import REFRESH_S, ProgressTotals, Reporter, is_interactive, open_reporter
from pipedist.runs.result import Ledger, Progress, Result
from pipedist.runs.run_files import Resume, RunFiles
from pipedist.runs.spec_source import SpecSource
from pipedist.runs.subscription import Part, Step, Stream, Subscription
from pipedist.runs.timings import Measured
from pipedist.spec import Spec, load, per_of, with_cluster

if TYPE_CHECKING:
    from pipedist.runs.diagnostics import Document

SpecLike = str | os.PathLike[str] | Mapping[str, Any] | Spec
"""A path, the same document as a dict, or a spec that was loaded already."""


class Run(AsyncOnly):
    """A run, used inside `async with pipedist.open(...)`.

    It begins with the first of `steps`, `as_completed` and `results`. Leaving the context before the run has
    ended cancels it.

    Args: as for `open`; `spare` is a fork server that was started ahead of time for a new cluster.

    Example:
        async with pipedist.open("spec.yaml") as run:
            result = await run.results()
    """

    def __init__(
        self,
        spec: SpecLike,
        *,
        cluster: Cluster | str | None = None,
        workers: int | None = None,
        params: Mapping[str, Tree] | None = None,
        sets: Sequence[str] = (),
        output: str | os.PathLike[str] | None = None,
        resume: Resume = False,
        restart: bool = False,
        verify: bool = False,
        on_log: LogSink | None = None,
        progress: bool | None = False,
        force: bool = False,
        force_code: bool = False,
        spare: Spare | None = None,
    ) -> None:
        self.id = os.urandom(8).hex()
        self._began = time.monotonic()
        if isinstance(spec, Spec) and (params or sets):
            raise UsageError(
                "`params` and `sets` can't be applied to a spec that is already loaded: pass them to `load`"
            )
        if resume not in (False, True, "reuse"):
            raise UsageError(f"`resume` must be True, False or 'reuse', got {resume!r}")
        self._spec = spec if isinstance(spec, Spec) else load(spec, params=params, sets=sets)
        self._files = RunFiles(
            output,
            SpecSource.of(spec, params, sets),
            resume=resume,
            restart=restart,
            force=force,
            force_code=force_code,
        )
        if isinstance(cluster, str):
            self._spec, cluster = with_cluster(self._spec, cluster), None
        if cluster is not None and workers is not None:
            raise UsageError("pass `cluster` or `workers`, not both: an open cluster has its own workers")
        self._given_cluster = cluster
        self._workers = workers
        self._verify = verify
        self._on_log = on_log
        self._shows_progress = is_interactive() if progress is None else progress
        self._reporter: Reporter | None = None
        self._force = force
        self._spare = spare or Spare()
        self._stack = AsyncExitStack()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._host: asyncio.Task[Any] | None = None  # the task that entered the context
        self._subscription: Subscription | None = None
        self._has_begun = False
        self._finished = anyio.Event()
        self._drained = anyio.Event()
        self._error: BaseException | None = None
        self._result: Result | None = None
        self._execution: Execution | None = None
        self._cluster: Cluster | None = None
        self._plan: Plan | None = None
        self._supply: Supply | None = None  # the GPUs of this host, if the spec needs any

    @cached_property
    def _main_scope(self) -> anyio.CancelScope:
        """Cancelled with the run; created on first use in an event loop."""
        return anyio.CancelScope()

    # -- lifetime ------------------------------------------------------------------------------

    def compile(self) -> None:
        """Import the modules that the spec names, and plan the run.

        `async with` calls it if you don't.

        Raises:
            SpecError: the spec can't be executed.
        """
        if self._plan is None:
            given = self._given_cluster
            self._plan = compile_plan(
                self._spec,
                workers=given.workers if given else self._worker_count(),
                verify=self._verify,
                supply=given.supply if given else self._supply,
            )

    async def _find_gpus(self) -> None:
        """Find the GPUs of this host, which may take half a minute, if the spec needs any."""
        if self._plan is None and self._given_cluster is None and needs_gpus(self._spec):
            self._supply = await anyio.to_thread.run_sync(
                supply_for, self._spec, self._worker_count(), abandon_on_cancel=True
            )

    async def __aenter__(self) -> Run:
        if self._tasks is not None:
            raise UsageError("a run can be entered only once: create another one with `pipedist.open`")
        self._host = asyncio.current_task()
        await self._stack.__aenter__()
        self._stack.callback(self._spare.end)
        try:
            await self._find_gpus()
            self.compile()
            self._stack.callback(self.plan.close)
            cluster = self._given_cluster
            if cluster is None:
                cluster = cluster_for(self.plan, force=self._force)
            self._plan, self.id = await self._files.open(self.plan, self.id, self._stack)
            if self._files.result is None:
                await self._open_cluster(cluster)
            self._spare.end()  # if the cluster did not take it, it is not needed
            if self._files.folder is not None:
                from pipedist.runs.diagnostics import serve_status  # only runs with a folder need it

                await self._stack.enter_async_context(
                    serve_status(self._files.folder.live, lambda: json.dumps(self.why()).encode())
                )
            self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
            _ = self._main_scope  # made in a task: `cancel` may be called outside of one
        except BaseException as error:  # also Ctrl-C while workers start
            self._files.abandon()
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if asyncio.current_task() is not self._host:  # where closing the task group would cancel the host
            self.cancel()
            self._drained.set()  # no task of the run is left
            raise UsageError(
                "a run was left in another task than the one that opened it, as happens to an async generator "
                "that a loop leaves early. Close it where it is read: `async with contextlib.aclosing(...) as items`"
            )
        if not self._finished.is_set():
            self._end(RunCancelled("the context of the run was left before the run ended"))
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        if not isinstance(error, asyncio.CancelledError):  # so that the user's own error is raised as it is
            kind = error = trace = None
        await self._stack.__aexit__(kind, error, trace)

    def _worker_count(self) -> int:
        wanted = self._spec.cluster.workers if self._workers is None else self._workers
        return usable_cores() if wanted == "auto" else checked_count(wanted)

    async def _open_cluster(self, cluster: Cluster) -> None:
        if self._shows_progress:
            self._reporter = open_reporter(self.name)
            self._stack.callback(self._reporter.close)
        if cluster is not self._given_cluster:
            await self._stack.enter_async_context(cluster)
        self._cluster = cluster
        coordinator = cluster.coordinator  # raises if the given cluster is not open
        if self._on_log is not None:
            self._stack.callback(coordinator.add_log_sink(self._on_log_line))
        if self._files.folder is not None:
            self._stack.callback(coordinator.add_log_sink(self._files.log.line, is_extra=True))
            self._stack.callback(coordinator.add_notice_sink(self._files.log.notice))

    def _on_log_line(self, worker: str, line: msg.LogLine) -> None:
        """Pass a line to the user's function, whose error ends the run."""
        try:
            if self._on_log is not None and not self._finished.is_set():
                self._on_log(worker, line)
        except BaseException as error:  # SystemExit would stop the event loop in the middle of its work
            self._end(error)
            self._main_scope.cancel()

    # -- state and results ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The spec's name."""
        return self._spec.name

    @property
    def spec(self) -> Spec:
        """The spec."""
        return self._spec

    @property
    def plan(self) -> Plan:
        """The plan: phases of passes."""
        if self._plan is None:
            raise UsageError("a run is used inside `async with pipedist.open(...)`")
        return self._plan

    @property
    def folder(self) -> Path | None:
        """The output folder, None if the run writes nothing."""
        return None if self._files.folder is None else self._files.folder.path

    @property
    def notice(self) -> str:
        """A message about the output folder for the user, or ""."""
        return self._files.notice

    @property
    def resumable(self) -> bool:
        """Whether its folder has committed steps, which `resume` skips."""
        return self._files.resumable

    def measured(self) -> Measured | None:
        """Return the measurements of this process so far, None before the run begins; call it on the event loop."""
        if self._execution is None:
            return None
        return self._execution.measurements.measured(self.id, self.name, is_over=self._finished.is_set())

    def ledger(self) -> Ledger:
        """Return how many elements are committed, quarantined and lost so far."""
        return Ledger() if self._execution is None else self._execution.ledger()

    def progress(self) -> Progress | None:
        """Return the run's progress, None before it begins.

        It can be called at any time, and does not change the run. docs/how-to/asyncio-service.md has an example.
        """
        return None if self._execution is None else self._execution.progress()

    def why(self) -> Document:
        """Return what the run waits for, by call; see docs/how-to/stalls.md.

        Returns:
            Plain JSON values. It can be called at any time, and does not change the run.
        """
        from pipedist.runs.diagnostics import document  # rarely needed

        state = "ended" if self._finished.is_set() else "running" if self._execution else "starting"
        return document(self.id, self.name, state, None if state == "ended" else self._execution)

    @property
    def silent_s(self) -> float:
        """Seconds without any progress; 0 before the run begins."""
        if self._execution is None or self._cluster is None:
            return 0.0
        return self._cluster.coordinator.silent_s

    def steps(self, *stages: str) -> Stream[Step]:
        """Stream the steps in order; a slow reader makes the run wait.

        Args:
            stages: run, reduce or gather stages of one pass, that is one read of one dataset.

        Returns:
            An async iterator of the steps; `step[NAME]` of a reduce or gather is this step's own value.
            Cancelling a wait for the next step loses no step; `aclose` ends the stream.

        Raises:
            UsageError: the stages belong to different passes, the run has begun already, or the folder
                has a finished run, which is not executed again.
            CallError: a call failed for good; the steps before it were yielded.
            FoldError, OutputError, WorkersLost, RunCancelled: as `results`.
        """
        return Stream(lambda: self._subscribe("steps", stages), self._raise_error)

    def as_completed(self, *stages: str) -> Stream[Part]:
        """Stream the values of run stages by replica and step, as they arrive.

        A slow reader makes the run wait.

        Args:
            stages: run stages of one pass, that is one read of one dataset.

        Returns:
            An async iterator of the parts, as for `steps`.

        Raises:
            UsageError: a stage is not a run stage, the stages belong to different passes, the run has begun
                already, or the folder has a finished run, which is not executed again.
            CallError: a call failed for good.
            FoldError, OutputError, WorkersLost, RunCancelled: as `results`.
        """
        return Stream(lambda: self._subscribe("parts", stages), self._raise_error)

    def _subscribe(self, kind: Literal["steps", "parts"], stages: Sequence[str]) -> Subscription:
        if self._finished.is_set():
            self._raise_error()
        if self._has_begun:
            raise UsageError("the run has already begun: open one stream, and before calling `results`")
        if (result := self._files.result) is not None:
            raise UsageError(
                f"the run {result.run_id} in the output folder is finished, so there is nothing to stream: call "
                "`results` for its results, or open it without `resume` to execute it again"
            )
        self._subscription = Subscription(kind, stages, self.plan)
        self._start()
        return self._subscription

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def results(self) -> Result:
        """Run to the end and return the results.

        Raises:
            CallError: a call failed for good.
            FoldError: components do not fit together.
            OutputError: a file can't be written, or can't hold its value. If the error occurred at the end
                of the run, its `result` has every other value and file.
            WorkersLost: no worker can be kept alive.
            RunDrained: the run was drained before its end.
            RunCancelled: the run was cancelled, or its context was left.
            Exception: an error of the dataset's own iterator, or of `on_log`.
        """
        self._start()
        if self._subscription is not None:
            self._subscription.release()
        await self._finished.wait()
        self._raise_error()
        assert self._result is not None  # because there is no error
        return self._result

    # -- stopping --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Stop issuing calls; after `cluster.grace_s`, cancel the run."""
        if self._finished.is_set():
            return
        if self._execution is None:
            self.cancel()
            return
        self._execution.drain()
        self._drained.set()  # not a new task: a signal handler's callback belongs to none

    async def _cancel_after_drain(self) -> None:
        await self._drained.wait()
        if self._finished.is_set():
            return
        with anyio.move_on_after(self._spec.cluster.grace_s) as waiting:
            await self._finished.wait()
        if waiting.cancelled_caught:
            self.cancel()

    def cancel(self) -> None:
        """End the run immediately."""
        if not self._finished.is_set():
            self._end(RunCancelled("the run was cancelled"))
        self._main_scope.cancel()

    # -- execution -------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._has_begun or self._finished.is_set():
            return
        if self._tasks is None:
            raise UsageError("a run is used inside `async with pipedist.open(...)`")
        self._has_begun = True
        if self._files.result is not None:
            self._result = self._files.result
            self._end(None)
            return
        self._tasks.start_soon(self._main, name=f"run {self.name}")
        self._tasks.start_soon(self._cancel_after_drain, name=f"end of {self.name}")
        if self._reporter is not None:
            self._tasks.start_soon(self._show_progress, self._reporter, name=f"progress of {self.name}")

    async def _show_progress(self, reporter: Reporter) -> None:
        while not self._finished.is_set():
            if (progress := self.progress()) is not None:
                reporter.update(ProgressTotals.of(progress))
            with anyio.move_on_after(REFRESH_S):
                await self._finished.wait()

    async def _main(self) -> None:
        assert self._cluster is not None  # since the run was entered
        files = self._files
        coordinator = self._cluster.coordinator
        self._execution = Execution(
            self.plan, coordinator, files.folder, self._subscription, files.journal, files.log
        )
        recorder = self._execution.measurements.recorder

        def mark(level: int, text: str) -> None:
            if level >= logging.WARNING:
                recorder.mark(text)

        stop_marks = coordinator.add_notice_sink(mark)
        files.log.event(f"run {self.id} of {self.name} begins in process {os.getpid()}; {self._ready()}")
        if self.notice:
            files.log.write(logging.INFO, self.notice)
        try:
            with self._main_scope:
                if files.is_resumed:
                    await self._cluster.gather()
                async with self._observed(self._execution):
                    await self._execution.run()
                    self._result = await self._make_result(self._execution)
        except Exception as error:
            files.add_origin(self.plan, error)
            self._end(error)
            files.fail(error)
        else:
            self._end(None)
        finally:
            stop_marks()

    @contextlib.asynccontextmanager
    async def _observed(self, execution: Execution) -> AsyncIterator[None]:
        assert self._tasks is not None  # since the run was entered
        async with AsyncExitStack() as stack:
            if "opentelemetry" in sys.modules or any(name.startswith("OTEL_") for name in os.environ):
                from pipedist.runs.observers import exporting  # few programs use OpenTelemetry

                opened = exporting(execution, self.plan, self.id, self._tasks, lambda: self._error)
                await stack.enter_async_context(opened)
            files = self._files
            if files.folder is not None:
                from pipedist.runs.observers import saving  # only runs with a folder need it

                opened = saving(execution.measurements, files.folder, self.plan, files.source, self._tasks)
                await stack.enter_async_context(opened)
            yield

    def _ready(self) -> str:
        count = 0 if self._cluster is None else self._cluster.coordinator.workers_ready
        return f"{plural(count, 'worker')} ready"

    def _log_outcome(self, error: BaseException | None) -> None:
        if isinstance(error, RunCancelled):
            self._files.log.event(str(error), logging.WARNING)
        elif error is not None:
            self._files.log.event(f"the run failed: {type(error).__name__}: {error}", logging.ERROR)
        else:
            found = self.ledger()
            self._files.log.event(
                f"the run has finished after {time.monotonic() - self._began:.1f} s: {found.committed:,} of "
                f"{found.elements:,} elements committed, {found.quarantined:,} quarantined, {found.lost:,} lost"
            )

    def log_event(self, text: str) -> None:
        """Write a warning into the log of the run, such as what it waits for."""
        self._files.log.write(logging.WARNING, text)

    def _end(self, error: BaseException | None) -> None:
        if self._execution is not None and not self._finished.is_set():
            self._log_outcome(error)
        self._error = self._error or error
        if self._reporter is not None and not self._finished.is_set():
            if (progress := self.progress()) is not None:
                self._reporter.update(ProgressTotals.of(progress))
            self._reporter.close()
        # The task that waits for it returns, and need not be cancelled: anyio keeps the frames of a cancelled task,
        # and so this run with its results, until a garbage collection.
        self._drained.set()
        self._finished.set()
        if self._subscription is not None:
            self._subscription.end()

    async def _make_result(self, execution: Execution) -> Result:
        files = self._files
        failed = execution.unwritten
        outputs = files.outputs(self.plan, failed)
        quarantine = execution.quarantine()
        quarantine_file = await files.write_quarantine(quarantine)
        results = execution.results()
        pers = {name: per_of(self._spec.stages[name]) for name in results}
        stored = await files.store(results, pers, outputs)
        parts = {**execution.timings, "total": time.monotonic() - self._began}
        result = Result(
            name=self.name,
            run_id=self.id,
            by_stage=results,
            files=outputs,
            ledger=execution.ledger(),
            timings=execution.measurements.timings(parts),
            retries=execution.retries(),
            resumed={name: asdict(found) for name, found in execution.resumed().items()},
            notice=self.notice,
            quarantined=[each.entry() for _, each in quarantine],
            quarantine_file=quarantine_file,
            stored=stored,
            pers=pers,
            tables=tables_of(self.plan, results),
        )
        await files.finish(result, failed=bool(failed))
        if failed:
            raise OutputError("\n".join(map(str, failed.values())), result=result)
        return result
