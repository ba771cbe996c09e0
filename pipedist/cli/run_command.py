"""The command `pipedist run`: from a spec to its last line."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipedist.cli import exits
from pipedist.cli.interruption import Interruption
from pipedist.cli.progress import Amount, Reporter, open_reporter
from pipedist.cli.stall_guard import StallGuard
from pipedist.cli.streams import stdout_to_stderr, write_error, write_out
from pipedist.errors import PipedistError, RunCancelled, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pipedist import messages
    from pipedist.pipeline.result import Result
    from pipedist.pipeline.runs import Run
    from pipedist.spec import Spec, StageSpec

QUARANTINED_SHOWN = 5
"""Elements that were set aside and are told of on standard error."""

_REFRESH_S = 0.2
"""How often progress is looked at."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says.

    Args:
        spec: path of the spec, as typed.
        workers: number of worker processes, None for the spec's.
        cluster: where they come from, None for the spec's.
        output: folder of the outputs, None for `out/NAME`.
        sets: texts NAME=VALUE.
        resume, restart: what to do with an unfinished run in the folder.
        as_json: one JSON document instead of a table.
        verify: execute every call twice, and compare.
        key_file: of workers that dial in, in place of what the spec says; None: as the spec says.
        force: let workers in that differ.
    """

    spec: str
    workers: int | None = None
    cluster: str | None = None
    output: str | None = None
    sets: tuple[str, ...] = ()
    resume: bool | Literal["reuse"] = False
    restart: bool = False
    as_json: bool = False
    verify: bool = False
    key_file: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended.

    Args:
        spec: what ran.
        result: of a run that came to its end.
        error: why it did not, or which of its files could not be written.
        document: the run's document, None of a run that was interrupted.
        notice: what was said about the output folder before the run.
        resumable: its folder has steps that need not be done again.
    """

    spec: Spec
    result: Result | None
    error: PipedistError | None
    document: Mapping[str, object] | None
    notice: str = ""
    resumable: bool = False


def execute(options: RunOptions) -> int:
    """Execute a spec, and print its results.

    Returns:
        The exit code.

    Raises:
        SpecError: the spec can't be executed; nothing ran.
        UsageError: the options make no sense together; nothing ran.
    """
    if options.resume and options.restart:
        raise UsageError("--resume and --restart exclude each other")
    if options.output == "":  # a variable of the shell that is not set; the current folder is `.`
        raise UsageError("--output is empty: expected a folder, as --output out/NAME")

    # modules of the user may print
    def tell(text: str) -> None:
        write_error(text + "\n")

    with Interruption(tell) as interruption, StallGuard(tell) as guard, stdout_to_stderr():
        try:
            ended = asyncio.run(_run(options, interruption, guard))
        except asyncio.CancelledError:
            if interruption.exit_code is None:
                raise
            return interruption.exit_code
    if isinstance(ended.error, RunCancelled):
        again = ""
        if _has_folder(ended, options):
            again = "; --resume continues it, --restart begins it again"
        write_error(f"pipedist: {ended.error}{again}\n")
        return interruption.exit_code or exits.FAILED
    if ended.error is not None:
        exits.report(ended.error)
        if ended.result is None and ended.resumable:
            write_error(
                "what was done before is kept: when the cause is mended, --resume goes on from there, "
                "--restart begins again\n"
            )
    if ended.result is not None:
        _show(ended, ended.result, options)
        if options.verify and ended.result.restored is None:
            write_error(_verified(options))
        if ended.error is None:
            return exits.QUARANTINED if ended.result.ledger.quarantined else exits.OK
    elif options.as_json:
        _print_document(ended.document)
    return exits.FAILED


def _verified(options: RunOptions) -> str:
    """Say what `--verify` has shown, and what it can't show."""
    calls = "every call that was left to do" if options.resume else "every call"
    return (
        f"pipedist: {calls} was executed twice in a row, in one process, and gave the same. What is the "
        "same as long as a process lives (its id, its host, the order of a set) is not found so: run again "
        "with other --workers and another --output, and compare the files\n"
    )


async def _run(options: RunOptions, interruption: Interruption, guard: StallGuard) -> Ended:
    import anyio

    # the engine takes a tenth of a second to import: not before the command line is known to be good
    from pipedist.pipeline.doors import open as open_run

    reporter: Reporter | None = None

    def on_log(worker: str, log: messages.LogLine) -> None:
        if reporter is not None:
            reporter.log(worker, log)

    spec = options.spec if options.key_file is None else _keyed(options, options.key_file)
    opened = open_run(
        spec,
        cluster=options.cluster if isinstance(spec, str) else None,
        workers=options.workers,
        sets=options.sets if isinstance(spec, str) else (),
        output=options.output,
        resume=options.resume,
        restart=options.restart,
        verify=options.verify,
        on_log=on_log,
        force=options.force,
    )
    # What is imported stays until the process ends: there is nothing to collect in it, neither now nor
    # at the end, where the interpreter would look three times. Nothing of the user's is there yet.
    gc.freeze()
    opened.compile()  # it imports modules of the user's, which may take long: a signal ends the process
    with interruption.lifetime():
        async with opened as run:
            if run.notice:
                write_error(f"pipedist: {run.notice}\n")
            reporter = open_reporter(run.name)
            interruption.tell = guard.tell = reporter.line
            ended: Ended | None = None
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_watch, run, reporter, guard, name="progress")
                    cluster = run.spec.cluster
                    with interruption.watching(run, cluster.grace_s), guard.watching(run, cluster.stall_s):
                        ended = await _outcome(run)
                    tasks.cancel_scope.cancel()
            finally:
                reporter.close()
            if ended is None:
                raise RuntimeError("the run has ended, and nobody knows how")
            return ended


def _keyed(options: RunOptions, key_file: str) -> Spec:
    """Return the spec with workers that dial in with these keys."""
    import os
    from dataclasses import replace

    from pipedist.spec import load, with_cluster

    spec = load(options.spec, sets=options.sets)
    if options.cluster is not None:
        spec = with_cluster(spec, options.cluster)
    if spec.cluster.launcher != "connect":
        raise UsageError("--key-file is for workers that dial in: say --cluster connect:tcp://ADDRESS:PORT")
    return replace(spec, cluster=spec.cluster.replaced(key_file=os.path.abspath(key_file)))


async def _outcome(run: Run) -> Ended:
    began = time.monotonic()
    try:
        finished = await run.results()
    except RunCancelled as error:
        return Ended(run.spec, None, error, None)
    except PipedistError as error:
        from pipedist.outputs import run_document
        from pipedist.pipeline.result import Result

        made = getattr(error, "result", None)
        result = made if isinstance(made, Result) else None
        timings = {"total": time.monotonic() - began} if result is None else result.timings
        document = run_document(
            run_id=run.id,
            name=run.name,
            results={} if result is None else result.by_stage,
            files={} if result is None else result.files,
            ledger=run.ledger().to_json(),
            timings={name: round(seconds, 6) for name, seconds in timings.items()},
            error=error,
        )
        return Ended(run.spec, result, error, document, run.notice, run.resumable)
    return Ended(run.spec, finished, None, finished.document, run.notice)


async def _watch(run: Run, reporter: Reporter, guard: StallGuard) -> None:
    while True:
        progress = run.progress()
        if progress is not None:
            reporter.update(Amount.of(progress))
        guard.look()
        await asyncio.sleep(_REFRESH_S)


def _show(ended: Ended, result: Result, options: RunOptions) -> None:
    if result.notice and result.notice != ended.notice:
        write_error(f"pipedist: {result.notice}\n")
    if options.as_json:
        _print_document(ended.document)
    else:
        from pipedist.cli.table import Row, render

        rows = [
            Row(name, verb_of(ended.spec.stages[name]), result[name], result.files.get(name))
            for name in ended.spec.stages  # a result of an earlier run may have another order
            if name in result
        ]
        write_out(render(rows, result.ledger.to_json(), result.timings))
    if result.quarantined:
        write_error(_quarantine_text(result, replays=options.key_file is None))


def _quarantine_text(result: Result, *, replays: bool) -> str:
    """Return what is said of the elements that were set aside: the first few, and where all of them are.

    Args:
        replays: their calls can be executed again, from the folder of the run.
    """
    from pipedist.cli.table import shown

    entries = result.quarantined
    count = "1 entry" if len(entries) == 1 else f"{len(entries):,} entries"
    where = f", in {shown(result.quarantine_file)}" if result.quarantine_file is not None else ""
    lines = [f"pipedist: elements were set aside ({count}{where})"]
    again = _replays(result.quarantine_file) if replays and result.quarantine_file is not None else []
    for place, entry in enumerate(entries[:QUARANTINED_SHOWN]):
        lines.append(f"  element {entry['element']}, stage {entry['stage']}: {entry['cause']}")
        if place < len(again):
            lines.append(f"    again: {again[place]}")
    if len(entries) > QUARANTINED_SHOWN:
        lines.append("  ...")
    return "\n".join(lines) + "\n"


def _replays(listed: Path) -> list[str]:
    """Return the commands that execute the first calls of a list of elements set aside again, alone."""
    import json  # only where something was set aside
    from itertools import islice

    from pipedist.pipeline.call_keys import CallKey

    commands = []
    with listed.open("rb") as lines:
        for line in islice(lines, QUARANTINED_SHOWN):
            said = json.loads(line)
            element = said["element"] if said["alone"] else None
            commands.append(CallKey.of(said["call"]).command(listed.parent, element))
    return commands


def _has_folder(ended: Ended, options: RunOptions) -> bool:
    return options.output is not None or bool(ended.spec.outputs)


def _print_document(document: Mapping[str, object] | None) -> None:
    import json  # only for --json

    write_out(json.dumps(document, allow_nan=False) + "\n")  # ASCII: it survives any terminal


def verb_of(stage: StageSpec) -> str:
    """Return what a stage does, for the table: "reduce sum", "gather 0 per step"."""
    verb = type(stage).__name__.removesuffix("Spec").lower()
    what = getattr(stage, verb)
    what = what if isinstance(what, str | int) else getattr(what, "__qualname__", repr(what))
    what = str(what).rpartition(":")[2]  # the function's own name: its module is in the spec
    per = getattr(stage, "per", "run")
    return f"{verb} {what}" if per == "run" else f"{verb} {what} per {per}"
