"""What accompanies a run until its end: measurements that are saved into its folder, spans and metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.abc
import anyio.to_thread

from pipedist.outputs import RunFolder
from pipedist.plan import Plan
from pipedist.runs import telemetry
from pipedist.runs.about import write_about
from pipedist.runs.execution import Execution
from pipedist.runs.identity import digest
from pipedist.runs.spec_source import SpecSource
from pipedist.runs.timings import (
    INTERVAL_S,
    SAVING_S_MAX,
    Measurements,
    next_number,
    pause_after,
    write_timings,
)


@contextlib.asynccontextmanager
async def exporting(
    execution: Execution,
    plan: Plan,
    run_id: str,
    tasks: anyio.abc.TaskGroup,
    cause: Callable[[], BaseException | None],
) -> AsyncIterator[None]:
    """Make spans and metrics of a run with OpenTelemetry, if wanted; `cause` returns why it was cancelled."""
    opened = await anyio.to_thread.run_sync(telemetry.open_providers) if telemetry.is_wanted() else None
    if opened is None:
        yield
        return
    providers, is_own = opened
    attributes = {
        "pipedist.run.id": run_id,
        "pipedist.spec.digest": digest(plan.spec),
        "pipedist.workers": plan.workers,
    }
    measured = execution.measurements
    observer = telemetry.Telemetry(
        providers, is_own=is_own, name=plan.spec.name, attributes=attributes, measured=measured
    )
    error: BaseException | None = None
    scope = anyio.CancelScope()

    async def update_regularly() -> None:
        with scope:
            while True:
                await anyio.sleep(telemetry.UPDATE_S)
                observer.update()

    tasks.start_soon(update_regularly, name=f"telemetry of {plan.spec.name}")
    try:
        yield
    except BaseException as raised:
        error = cause() or raised
        raise
    finally:
        scope.cancel()
        observer.end(error, execution.ledger().to_json())
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(observer.close)


@contextlib.asynccontextmanager
async def saving(
    measurements: Measurements, folder: RunFolder, plan: Plan, source: SpecSource, tasks: anyio.abc.TaskGroup
) -> AsyncIterator[None]:
    """Write the measurements of a run into its folder, now and then and at the end."""
    files, name = folder.timings, plan.spec.name
    await anyio.to_thread.run_sync(write_about, files.parent, plan, source, folder.path)
    number = await anyio.to_thread.run_sync(next_number, files)
    writing = anyio.Lock()
    scope = anyio.CancelScope()

    async def write(*, is_over: bool) -> float:
        async with writing:
            began = time.monotonic()
            measured = measurements.measured(folder.run_id, name, is_over=is_over)
            await anyio.to_thread.run_sync(write_timings, files, number, measured)
            return time.monotonic() - began

    async def write_regularly() -> None:
        pause_s = INTERVAL_S
        with scope, contextlib.suppress(OSError):  # a full disk ends only this
            while True:
                await anyio.sleep(pause_s)
                pause_s = pause_after(await write(is_over=False))

    tasks.start_soon(write_regularly, name=f"measurements of {name}")
    try:
        yield
    finally:
        scope.cancel()
        with anyio.move_on_after(SAVING_S_MAX, shield=True), contextlib.suppress(OSError):
            await write(is_over=True)
