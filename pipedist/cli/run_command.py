"""The command `pipedist run`: execute a spec, and print its results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from pipedist.cli import terminal
from pipedist.cli.signals import Interruption, StallReporter
from pipedist.cli.terminal import stdout_to_stderr, write_error, write_json, write_out
from pipedist.core.names import plural
from pipedist.errors import OutputError, PipedistError, RunCancelled, UsageError
from pipedist.runs.progress import REFRESH_S, ProgressTotals, Reporter, open_reporter

if TYPE_CHECKING:
    from pathlib import Path

    from anyio.abc import Process

    from pipedist.protocol import messages
    from pipedist.runs.result import Result
    from pipedist.runs.run import Run
    from pipedist.spec import Spec, StageSpec

QUARANTINED_SHOWN = 5
LIVE_END_S = 8.0  # for the pages of a run to get its last state


class RunOptions(Struct, frozen=True):
    """Options of `pipedist run`, as `pipedist.cli.app` describes them."""

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
    force_code: bool = False
    verbose: bool = False
    quiet: bool = False
    live: bool = False
    live_address: str = ""
    live_token_file: str = ""
    live_cert: str = ""
    live_key: str = ""
    trace: str | None = None


class RunOutcome(Struct, frozen=True):
    """The outcome of a run."""

    spec: Spec
    result: Result | None
    error: PipedistError | None  # why the run failed, or which output could not be written
    document: Mapping[str, Any] | None  # the results document; None if the run was interrupted
    notice: str = ""  # the notice about the output folder that was printed before the run
    resumable: bool = False  # the folder has committed steps, or finished calls


def execute(options: RunOptions) -> int:
    """Execute a spec, print its results, and return the exit code."""
    _check(options)
    began = time.monotonic()

    def show(text: str) -> None:
        write_error(text + "\n")

    # stdout_to_stderr: the user's modules may print
    with Interruption(show) as interruption, StallReporter(show) as stalls, stdout_to_stderr():
        try:
            with EngineEvents(lambda text: interruption.show(text), enabled=options.verbose):
                outcome = asyncio.run(_run(options, interruption, stalls))
        except asyncio.CancelledError:
            if interruption.exit_code is None:
                raise
            write_error("pipedist: the run was stopped before its first call\n")
            return interruption.exit_code
    if isinstance(outcome.error, RunCancelled):
        has_folder = options.output is not None or outcome.spec.outputs
        again = ". Continue it with --resume, or start again with --restart" if has_folder else ""
        ended = outcome.error if interruption.exit_code is None else "the run was interrupted"
        write_error(f"pipedist: {ended}{again}\n")
        return interruption.exit_code or terminal.FAILED
    if outcome.error is not None:
        _show_error(outcome, outcome.error)
    if outcome.result is None:
        if options.as_json:
            write_json(outcome.document)
        return terminal.FAILED
    total_s = time.monotonic() - began  # with the end of the workers and the writing of large values
    _show(outcome, outcome.result, options, total_s)
    if outcome.error is not None:
        return terminal.FAILED
    return terminal.QUARANTINED if outcome.result.ledger.quarantined else terminal.OK


def _check(options: RunOptions) -> None:
    """Raise UsageError if options contradict each other, or name files that can't be used."""
    if options.resume and options.restart:
        option = "--reuse" if options.resume == "reuse" else "--resume"
        raise UsageError(
            f"{option} and --restart exclude each other. {option} continues the run in the output folder, "
            "--restart discards it"
        )
    if options.force_code and not options.resume:
        raise UsageError(
            "--force-code needs --resume or --reuse: it keeps results of functions that have changed"
        )
    if options.verbose and options.quiet:
        raise UsageError("--verbose and --quiet exclude each other. Give one of them")
    if options.live:
        from pipedist.report.live import LiveOptions

        addresses = (options.live_address, options.live_token_file, options.live_cert, options.live_key)
        LiveOptions(*addresses).checked()
    if options.trace is not None:
        from pathlib import Path

        from pipedist.core.files import is_replaceable

        path = Path(options.trace)
        if not options.trace or path.is_dir() or not path.parent.is_dir() or not is_replaceable(path):
            raise UsageError(f"can't write --trace {options.trace!r}: give a file in a folder that exists")


def _show_error(outcome: RunOutcome, error: PipedistError) -> None:
    terminal.report(error)
    if outcome.result is None and outcome.resumable:
        again = "" if error.has_advice else f" {terminal.CONTINUE}, or start again with --restart"
        write_error(f"Committed steps and finished calls are kept.{again}\n")


async def _run(options: RunOptions, interruption: Interruption, stalls: StallReporter) -> RunOutcome:
    import anyio

    from pipedist.runs.api import open as open_run

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
        progress=False,  # shown by the reporter of this command
        force=options.force,
        force_code=options.force_code,
    )
    opened.compile()  # imports the user's modules, which may take long: a signal ends the process
    with interruption.lifetime():
        async with LivePage(options) as live, opened as run:
            if options.live:
                await live.start(run)
            if run.notice and not options.quiet:
                write_error(f"pipedist: {run.notice}\n")
            reporter = open_reporter(run.name, quiet=options.quiet)
            interruption.show = stalls.show = reporter.line
            outcome: RunOutcome | None = None
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_watch, run, reporter, stalls, name="progress")
                    cluster = run.spec.cluster
                    with interruption.watching(run, cluster.grace_s), stalls.watching(run, cluster.stall_s):
                        outcome = await _outcome(run, as_json=options.as_json)
                    tasks.cancel_scope.cancel()
            finally:
                reporter.close()
                unwritten = None if options.trace is None else await _write_trace(run, options.trace)
            assert outcome is not None, "the run ended without an outcome"
            return replace(outcome, error=outcome.error or unwritten)


class EngineEvents(logging.Handler):
    """Shows the events of the engine while its context is open, if enabled."""

    def __init__(self, show: Callable[[str], None], *, enabled: bool) -> None:
        super().__init__()
        self._show = show
        self._enabled = enabled
        self._logger = logging.getLogger("pipedist")

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record))

    def __enter__(self) -> None:
        if self._enabled:
            self._before = (self._logger.level, self._logger.propagate)
            self._logger.addHandler(self)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False  # a module of the user may configure `logging`

    def __exit__(self, *_error: object) -> None:
        if self._enabled:
            self._logger.removeHandler(self)
            level, self._logger.propagate = self._before
            self._logger.setLevel(level)


class LivePage:
    """The process that serves the live page of a run; it ends after the run."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._process: Process | None = None

    async def __aenter__(self) -> LivePage:
        return self

    async def start(self, run: Run) -> None:
        """Start to serve the page; its address is printed on stderr."""
        import subprocess
        import sys

        import anyio

        if run.folder is None:
            raise UsageError("--live needs an output folder: add --output DIR")
        options = self._options
        command = [sys.executable, "-m", "pipedist", "watch", str(run.folder), "--web"]
        for name in ("live_address", "live_token_file", "live_cert", "live_key"):
            if getattr(options, name):
                command += [f"--{name.replace('_', '-')}", getattr(options, name)]
        self._process = await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, stderr=None, start_new_session=True
        )

    async def __aexit__(self, *_error: object) -> None:
        import anyio

        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LIVE_END_S):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
            await self._process.aclose()


async def _write_trace(run: Run, path: str) -> OutputError | None:
    """Write the trace of a run that has ended; return an error if it can't be written."""
    from pathlib import Path

    import anyio.to_thread

    from pipedist.core.files import replace_file
    from pipedist.report.trace import trace

    measured = run.measured()
    if measured is None:
        write_error(
            f"pipedist: nothing was executed, so {path} was not written. Use: pipedist report RUN --trace FILE\n"
        )
        return None
    try:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(
                lambda: replace_file(Path(path), trace([measured.compressed()])), abandon_on_cancel=False
            )
    except OSError as error:
        return OutputError(
            f"can't write the trace {path}: {error.strerror or error}. Give another --trace FILE"
        )
    return None


def _keyed(options: RunOptions, key_file: str) -> Spec:
    """Return the spec with a key file for workers that connect over TCP."""
    import os

    from pipedist.spec import load, with_cluster

    spec = load(options.spec, sets=options.sets)
    if options.cluster is not None:
        spec = with_cluster(spec, options.cluster)
    if spec.cluster.launcher != "connect":
        raise UsageError(
            "--key-file needs workers that connect over TCP. Add --cluster connect:tcp://ADDRESS:PORT"
        )
    return replace(spec, cluster=spec.cluster.model_copy(update={"key_file": os.path.abspath(key_file)}))


async def _outcome(run: Run, *, as_json: bool) -> RunOutcome:
    import anyio.to_thread

    began = time.monotonic()
    try:
        finished = await run.results()
    except RunCancelled as error:
        return RunOutcome(run.spec, None, error, None)
    except PipedistError as error:
        from pipedist.outputs import run_document
        from pipedist.runs.result import Result

        partial = getattr(error, "result", None)
        result = partial if isinstance(partial, Result) else None
        timings = {"total": time.monotonic() - began} if result is None else result.timings
        document = run_document(
            run_id=run.id,
            name=run.name,
            results={} if result is None else result.by_stage,
            files={} if result is None else result.files,
            ledger=run.ledger().to_json(),
            timings={name: round(seconds, 6) for name, seconds in timings.items()},
            stored={} if result is None else result.stored,
            error=error,
        )
        return RunOutcome(run.spec, result, error, document, run.notice, run.resumable)
    document = await anyio.to_thread.run_sync(lambda: finished.document) if as_json else None
    return RunOutcome(run.spec, finished, None, document, run.notice)


async def _watch(run: Run, reporter: Reporter, stalls: StallReporter) -> None:
    while True:
        progress = run.progress()
        if progress is not None:
            reporter.update(ProgressTotals.of(progress))
        stalls.check()
        await asyncio.sleep(REFRESH_S)


def _show(outcome: RunOutcome, result: Result, options: RunOptions, total_s: float) -> None:
    total = {"total": round(total_s, 6)} if result.restored is None else {}
    if result.notice and result.notice != outcome.notice and not options.quiet:
        write_error(f"pipedist: {result.notice}\n")
    if options.as_json:
        document = outcome.document or {}
        write_json({**document, "timings": document["timings"] | total})
    else:
        from pipedist.cli.rendering import Row, render

        rows = []
        for name in outcome.spec.stages:  # results of an earlier run may have another order
            parts = [key for key in result.files if key.startswith(f"{name}/")]
            verb = verb_of(outcome.spec.stages[name])
            rows += [Row(key, verb, result.files[key], result.files[key]) for key in parts]
            if name in result and not parts:
                rows.append(Row(name, verb, result[name], result.files.get(name)))
        times: Mapping[str, float] = {} if options.quiet else result.timings.with_parts(total)
        write_out(render(rows, result.ledger.to_json(), times, result.retries, result.resumed))
    if result.quarantined:
        write_error(_quarantine_text(result, replays=options.key_file is None))
    if options.verify and result.restored is None and not options.quiet:
        calls = "every remaining call" if options.resume else "every call"
        write_error(
            f"pipedist: {calls} was executed twice in one process, with equal results. This does not detect "
            "differences between processes (process ids, host names, the order of sets). Run again with "
            "other --workers and another --output, and compare the files\n"
        )


def _quarantine_text(result: Result, *, replays: bool) -> str:
    """Return a text that lists the first quarantined elements, and the commands that replay their calls."""
    from pipedist.outputs.summary import shown

    entries = result.quarantined
    where = f", in {shown(result.quarantine_file)}" if result.quarantine_file is not None else ""
    lines = [f"pipedist: elements were quarantined ({plural(len(entries), 'entry')}{where})"]
    again = _replays(result.quarantine_file) if replays and result.quarantine_file is not None else []
    for place, entry in enumerate(entries[:QUARANTINED_SHOWN]):
        first, *more = str(entry["cause"]).splitlines() or [""]
        cause = f"{first} ..." if more else first  # the file has all of it
        lines.append(f"  element {entry['element']}, stage {entry['stage']}: {cause}")
        if place < len(again):
            lines.append(f"    to replay: {again[place]}")
    if len(entries) > QUARANTINED_SHOWN:
        lines.append("  ...")
    return "\n".join(lines) + "\n"


def _replays(listed: Path) -> list[str]:
    """Return the commands that replay the first calls listed in a quarantine file."""
    import json
    from itertools import islice

    from pipedist.runs.call_keys import CallKey

    commands = []
    with listed.open("rb") as lines:
        for line in islice(lines, QUARANTINED_SHOWN):
            entry = json.loads(line)
            element = entry["element"] if entry["alone"] else None
            commands.append(CallKey.of(entry["call"]).command(listed.parent, element))
    return commands


def verb_of(stage: StageSpec) -> str:
    """Return the operation of a stage for the table: "reduce sum", "gather 0 per step"."""
    from pipedist.spec import per_of

    verb = type(stage).__name__.removesuffix("Spec").lower()
    operation = getattr(stage, verb)
    if not isinstance(operation, str | int):
        operation = getattr(operation, "__qualname__", repr(operation))
    name = str(operation).rpartition(":")[2]  # without the module, which is in the spec
    per = per_of(stage)
    return f"{verb} {name}" if per == "run" else f"{verb} {name} per {per}"
