"""The doors of the embedded API: `open` for async code, `run` for everything else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipedist.cluster.launchers.server import Spare, prepare
from pipedist.core.import_guard import reject_during_import
from pipedist.runs.sync_bridge import in_own_thread

# A run needs half of pipedist: its fork server is started first, so that both load at the same time.
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pipedist.cluster.base import Cluster
    from pipedist.coordinator import LogSink
    from pipedist.core.types import Tree
    from pipedist.runs.result import Result
    from pipedist.runs.run import Resume, Run, SpecLike


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
    force: bool = False,
) -> Run:
    """Open a run: `async with pipedist.open(spec) as run`.

    Args:
        spec: a path, or the same document as a dict, in which a function may be a callable and a
            source may be `{"arrays": tree}`.
        cluster: an open cluster to run on; or one of its own instead of the spec's, "NAME" or "NAME:ADDRESS"
            ("ray", "dask:tcp://10.0.0.1:8786"); None: one of its own, as the spec says.
        workers: number of worker processes of its own cluster; None: as the spec says.
        params: values for the spec's `params`.
        sets: the same as texts, "NAME=VALUE", as on the command line.
        output: folder for the outputs; None: `out/NAME`, if the spec has outputs.
        resume: continue the run in the folder that was interrupted, was killed, or failed: what is in its
            journal is not done again. Streams begin with the first step that their subscriber may not
            have finished. Of a finished run of the same spec: give its result, and run nothing. "reuse":
            also where the spec, its inputs or its modules have changed; what hangs on that is done again.
        restart: discard an unfinished run in the folder, and begin again.
        verify: execute every call twice; one that gives two different results fails the run.
        on_log: called with a worker's name and a line (`stage`, `step`, `replica`, `text`) that a replica
            function printed or logged, inside the event loop.
        force: let workers in that dial in and run other versions, or have another type of processor, and
            resume a run that was begun so.

    Raises:
        SpecError: the document has mistakes; all of them are listed.
        PlanError: it can't be carried out here (on entering).
        UsageError: arguments that make no sense, or the output folder is in use (on entering).
    """
    reject_during_import("pipedist.open")
    spare = _head_start(spec) if cluster in (None, "local") else Spare()
    try:
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
            force=force,
            spare=spare,
        )
    except BaseException:
        spare.end()
        raise


def run(
    spec: SpecLike,
    *,
    cluster: str | None = None,
    workers: int | None = None,
    params: Mapping[str, Tree] | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: Resume = False,
    restart: bool = False,
    verify: bool = False,
    on_log: LogSink | None = None,
    force: bool = False,
) -> Result:
    """Run a spec to its end and return the results; works inside a running event loop too.

    Args: as `open`.

    Raises: as `open` and `Run.results`.
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
            force=force,
        ) as opened:
            return await opened.results()

    with _head_start(spec) if cluster in (None, "local") else Spare():
        import anyio

        return _in_thread(main) if _in_event_loop() else anyio.run(main)


def _head_start(spec: SpecLike) -> Spare:
    """Start the fork server that a run will want, unless it is clear that nothing will run."""
    if isinstance(spec, str | os.PathLike) and not os.path.exists(spec):
        return Spare()
    return prepare()


def _in_event_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(main: Callable[[], Awaitable[Result]]) -> Result:
    """Run on an event loop in a thread of its own: the caller's loop is busy with the caller."""
    import asyncio
    import contextlib

    import anyio

    outcome: list[Result] = []
    cancels: list[Callable[[], object]] = []
    is_interrupted = False

    async def watched() -> None:
        # A scope, and no task: asyncio's own cancellation would get through the shields of what closes.
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            cancels.append(lambda: loop.call_soon_threadsafe(scope.cancel))
            if is_interrupted:
                scope.cancel()
            outcome.append(await main())

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        for cancel in cancels:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                cancel()

    in_own_thread(lambda: anyio.run(watched), interrupt, "pipedist-run")
    return outcome[0]
