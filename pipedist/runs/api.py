"""Entry points of the embedded API: `open` (async) and `run` (blocking).

Both start the fork server first and import the rest of pipedist afterwards, so that the two load in parallel.
For the same reason this module imports nothing heavy.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, TypedDict, TypeVar

from pipedist.cluster.launchers.server import Spare, prepare
from pipedist.core.import_guard import caller_is_waiting, reject_during_import, without_collections
from pipedist.core.misuse_hints import running_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pipedist.cluster.base import Cluster
    from pipedist.coordinator import LogSink
    from pipedist.core.types import Tree
    from pipedist.runs.result import Result
    from pipedist.runs.run import Run, SpecLike
    from pipedist.runs.run_files import Resume


class OpenOptions(TypedDict, total=False):
    """The options of `open`."""

    cluster: Cluster | str | None
    workers: int | None
    params: Mapping[str, Tree] | None
    sets: Sequence[str]
    output: str | os.PathLike[str] | None
    resume: Resume
    restart: bool
    verify: bool
    on_log: LogSink | None
    progress: bool | None
    force: bool
    force_code: bool


def open(
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
    progress: bool | None = None,
    force: bool = False,
    force_code: bool = False,
) -> Run:
    """Open a run: `async with pipedist.open(spec) as run`.

    Args:
        spec: a path, or the same document as a dict, in which a function may be a callable and a
            source may be `{"arrays": tree}`.
        cluster: an open cluster to run on; or the launcher of a new one, "NAME" or "NAME:ADDRESS" ("ray",
            "dask:tcp://10.0.0.1:8786"), which replaces the spec's; None: a new one, as the spec declares.
        workers: number of worker processes of a new cluster; None: as the spec declares.
        params: values for the spec's `params`.
        sets: the same as texts, "NAME=VALUE", as on the command line.
        output: folder for the outputs, or a URL of fsspec (`s3://bucket/run`), to which they are uploaded when they
            are complete; None: `out/NAME`, if the spec has outputs.
        resume: continue the run in the folder that was interrupted, was killed, or failed; calls in its
            journal are not executed again. Streams begin with the first step that their subscriber may not
            have finished. If the run in the folder is finished, return its results and execute nothing.
            "reuse": continue even if the spec, its inputs or its modules have changed, and execute the
            passes that depend on the changes again.
        restart: discard an unfinished run in the folder, and begin again.
        verify: execute every call twice, and fail the run if the two results differ.
        on_log: called inside the event loop with a worker's name and a line that a replica function printed, or
            a record that it logged: `stage`, `step`, `replica`, `text` (of a record: several lines, if it has a
            traceback), `level` (of `logging`; 0 if printed), `logger` (if printed: "stdout" or "stderr").
        progress: show the progress while the run is open: a bar on a terminal or in a notebook, else a few lines on
            standard error. None: show it on a terminal or in a notebook only.
        force: accept workers that run other versions or have another type of processor, and resume a run
            that was started with those.
        force_code: resume a run although modules of its functions, or files that they read, have changed:
            committed steps are kept beside new results. Return a finished run although it is stale.

    Raises:
        SpecError: the document has mistakes; all of them are listed.
        PlanError: the spec can't be executed here (raised on entering).
        UsageError: the arguments contradict each other, or the output folder is in use (raised on entering).

    Example:
        async with pipedist.open("spec.yaml", workers=4) as run:
            async for step in run.steps("scores"):
                print(step.index, step["scores"])
            result = await run.results()
    """
    reject_during_import("pipedist.open")
    spare = head_start(cluster, spec)
    try:
        with without_collections():
            from pipedist.runs.run import Run

            return Run(
                spec,
                cluster=cluster,
                workers=workers,
                params=params,
                sets=sets,
                output=output,
                resume=resume,
                restart=restart,
                verify=verify,
                on_log=on_log,
                progress=progress,
                force=force,
                force_code=force_code,
                spare=spare,
            )
    except BaseException:
        spare.end()
        raise


def run(
    spec: SpecLike,
    *,
    cluster: Cluster | str | None = None,
    workers: int | None = None,
    params: Mapping[str, Tree] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: Resume = False,
    restart: bool = False,
    verify: bool = False,
    on_log: LogSink | None = None,
    progress: bool | None = None,
    force: bool = False,
    force_code: bool = False,
) -> Result:
    """Run a spec to its end and return the results.

    It can also be called inside a running event loop, which it blocks until the run has ended. On an open cluster,
    the run executes in the cluster's event loop, so this must be called in another thread.

    Args: as for `open`.

    Raises: as `open` and `Run.results`; UsageError in the event loop of the open `cluster`.

    Example:
        result = pipedist.run("spec.yaml", workers=4, params={"rate": 0.1})
        result["total"], result.ledger.committed
    """
    reject_during_import("pipedist.run")

    async def main() -> Result:
        async with open(
            spec,
            cluster=cluster,
            workers=workers,
            params=params,
            output=output,
            resume=resume,
            restart=restart,
            verify=verify,
            on_log=on_log,
            progress=progress,
            force=force,
            force_code=force_code,
        ) as opened:
            return await opened.results()

    with head_start(cluster, spec):
        return blocking(main, cluster, "pipedist.run")


T = TypeVar("T")


def blocking(main: Callable[[], Awaitable[T]], cluster: Cluster | str | None, what: str) -> T:
    """Run a coroutine function that opens a run, and block until it returns.

    In a running event loop it runs in a new thread; with an open cluster, in the cluster's loop. `what` is the name of
    the caller in errors.
    """
    loop = loop_of(cluster, what)
    with without_collections():
        import anyio

    from pipedist.errors import PipedistError

    try:
        return _in_thread(main, loop) if loop is not None or running_loop() else anyio.run(main)
    except PipedistError as error:
        raise without_frames(error) from error.__cause__


def without_frames(error: Exception) -> Exception:
    """Return an error without the frames of pipedist that it came through, if its text is complete without them.

    The traceback in the user's program then shows the user's own frames, and those of the replica function.
    """
    from pipedist.errors import PipedistError, ProtocolError

    is_complete = isinstance(error, PipedistError) and not isinstance(error, ProtocolError)
    return error.with_traceback(None) if is_complete else error


def loop_of(cluster: Cluster | str | None, what: str) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of an open cluster, if a blocking call in this thread can wait for it; None: a new one."""
    if cluster is None or isinstance(cluster, str):
        return None
    from pipedist.errors import UsageError

    loop = cluster.loop
    if not loop.is_running():
        cause = "needs the event loop in which the cluster is open, which is not running"
    elif loop is running_loop():
        cause = "would block the event loop in which the cluster is open, and never return"
    else:
        return loop
    raise UsageError(
        f"{what} {cause}. Write in a coroutine, or in a notebook's cell:\n"
        "  async with pipedist.open(spec, cluster=cluster) as run:\n"
        "      result = await run.results()"
    )


def head_start(cluster: Cluster | str | None, spec: SpecLike | None = None) -> Spare:
    """Start the fork server if a new cluster will use it, unless the spec file does not exist."""
    is_missing = isinstance(spec, str | os.PathLike) and not os.path.exists(spec)
    return prepare() if cluster in (None, "local") and not is_missing else Spare()


def _in_thread(main: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run on an event loop in a new thread, or on one that runs in another thread; block the caller."""
    import asyncio
    import concurrent.futures
    import contextlib

    import anyio

    from pipedist.errors import RunCancelled

    outcome: list[T] = []
    cancels: list[Callable[[], object]] = []
    is_interrupted = False

    async def watched() -> None:
        # Cancel a scope, not the task: asyncio's own cancellation would break the shields of clean-up code.
        with anyio.CancelScope() as scope:
            running = asyncio.get_running_loop()
            cancels.append(lambda: running.call_soon_threadsafe(scope.cancel))
            if is_interrupted:
                scope.cancel()
            outcome.append(await main())

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        for cancel in cancels:
            with contextlib.suppress(RuntimeError):  # if the loop is closed already
                cancel()

    def work() -> None:
        if loop is None:
            anyio.run(watched)
            return
        ended = RunCancelled("the event loop of the cluster ended during the run")
        future = asyncio.run_coroutine_threadsafe(watched(), loop)
        while not concurrent.futures.wait([future], TURN_S).done:
            if loop.is_closed():
                raise ended
        if future.cancelled():
            raise ended
        future.result()

    in_own_thread(work, interrupt, "pipedist-run")
    return outcome[0]


TURN_S = 0.5  # longest delay of a Ctrl-C that did not interrupt the wait


def in_own_thread(
    work: Callable[[], T], interrupt: Callable[[], object], name: str, *, daemon: bool = False
) -> T:
    """Call a function in a new thread, and wait until it returns.

    When the wait is interrupted, for example by Ctrl-C, possibly before `work` has begun, `interrupt` is called. It
    must make `work` return soon; then the interrupting error is raised. A `daemon` thread doesn't keep the process
    alive after a second Ctrl-C.
    """
    take_cancellation()
    outcome: list[T] = []
    failure: list[BaseException] = []
    interrupted, over = threading.Event(), threading.Event()

    def carry_out() -> None:
        caller_is_waiting.set(True)
        try:
            if not interrupted.is_set():
                outcome.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            over.set()

    def wait() -> None:
        # Not `join`: after an interrupt, Python 3.11 considers the thread ended. Wait in intervals, because a
        # signal that arrives just before the wait, or in another thread, doesn't interrupt it.
        while not over.wait(TURN_S):
            if not interrupted.is_set():
                take_cancellation()

    thread = threading.Thread(target=carry_out, name=name, daemon=daemon)
    try:
        thread.start()
        wait()
    except BaseException:  # Ctrl-C: the work must not outlive its caller
        interrupted.set()
        interrupt()
        if thread.ident is not None:  # if it has not started, `work` will not be called
            wait()
        raise
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def take_cancellation() -> None:
    """Raise CancelledError if the caller's task has been cancelled.

    The caller blocks its loop, so the only cancellation that can be pending is asyncio's reaction to Ctrl-C.
    """
    import asyncio  # imported late: this module is imported before the fork server is started

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running
        return
    if getattr(task, "_must_cancel", False):
        raise asyncio.CancelledError
