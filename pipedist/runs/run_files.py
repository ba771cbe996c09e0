"""The files of a run: its output folder, with the journal and the log, and the copy of it behind a URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread

from pipedist.core.types import Tree
from pipedist.errors import (
    CallError,
    FoldError,
    JournalError,
    OutputError,
    QuarantineError,
    RunCancelled,
    UsageError,
)
from pipedist.plan import Plan
from pipedist.runs.pass_folds import tables_of
from pipedist.runs.quarantine import FILE as QUARANTINE
from pipedist.runs.quarantine import QuarantinedElement, write_file
from pipedist.runs.result import Result, files_of, restored
from pipedist.runs.run_log import FILE as LOG_FILE
from pipedist.runs.run_log import RunLog
from pipedist.runs.spec_source import SpecSource

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder
    from pipedist.outputs.remote_folder import RemoteFolder
    from pipedist.runs.pass_journal import RunJournal

Resume = bool | Literal["reuse"]
"""True: continue the run in the folder; "reuse": continue with the passes that have not changed."""

_IN_PYTHON = (
    'In Python: resume=True, resume="reuse", restart=True, force=True, force_code=True, output=FOLDER'
)


class RunFiles:
    """The output folder of a run with its journal and log, and the URL that its results are uploaded to.

    A run that writes nothing has no folder; its events go to `logging` only.

    Args:
        output: the folder, or a URL; None: `out/NAME`, if the spec has outputs, or a run there is continued.
        source: where the spec came from.
        resume, restart, force, force_code: as for `pipedist.open`.
    """

    def __init__(
        self,
        output: str | os.PathLike[str] | None,
        source: SpecSource,
        *,
        resume: Resume,
        restart: bool,
        force: bool,
        force_code: bool,
    ) -> None:
        if output == "":  # an unset variable of a shell; the current folder is `.`
            raise UsageError("--output is empty. Give a folder, such as --output out/NAME")
        self.source = source
        self.folder: RunFolder | None = None
        self.journal: RunJournal | None = None
        self.log = RunLog(None)
        self.result: Result | None = None  # of the finished run found in the folder; nothing is executed
        self._output = None if output is None else Path(output)
        self._url = output if isinstance(output, str) and "://" in output else ""
        self._remote: RemoteFolder | None = None
        self._resume = resume
        self._restart = restart
        self._force = force
        self._force_code = force_code
        self._journal_notice = ""

    async def open(self, plan: Plan, run_id: str, stack: AsyncExitStack) -> tuple[Plan, str]:
        """Open the folder until `stack` is closed, if the run has one.

        Returns:
            The plan of the run, with what its journal keeps of an earlier run, and its id, which such a run keeps.
        """
        try:
            return await self._open(plan, run_id, stack)
        except (UsageError, JournalError) as error:
            error.add_note(_IN_PYTHON)  # its text may name options; the command line prints no notes
            raise

    async def _open(self, plan: Plan, run_id: str, stack: AsyncExitStack) -> tuple[Plan, str]:
        spec = plan.spec
        path = Path("out") / spec.name if self._output is None else self._output
        if self._url:
            from pipedist.outputs.remote_folder import RemoteFolder  # rarely needed

            self._remote = RemoteFolder(self._url)
            path = self._remote.staging
        if self._output is None and not (spec.outputs or self._resume or self._restart):
            return plan, run_id  # the run writes nothing
        from pipedist.outputs import FinishedRun, open_folder  # most embedded runs write no files
        from pipedist.runs.identity import digest_of, meaning
        from pipedist.runs.resume import explain, open_journal, since

        outputs, meant = files_of(spec), meaning(spec)  # it may read arrays of gigabytes
        opened = open_folder(
            path,
            run_id=run_id,
            spec_hash=digest_of(meant),
            outputs=outputs,
            stages=spec.outputs,
            options={key: sink.options_text for key, sink in spec.sinks.items() if sink.options_text},
            resume=self._resume,
            restart=self._restart,
            accept=self._force_code,
            explain=lambda folder: explain(meant, folder),
            since=lambda folder: since(plan, meant, folder),
            command=self.source.command(self._url or ("" if self._output is None else str(self._output))),
        )
        if isinstance(opened, FinishedRun):
            tables = tables_of(plan, opened.document["results"])
            self.result = await anyio.to_thread.run_sync(restored, spec, opened, tables)
            await self._upload(opened.run_id, list(opened.files))  # it may not be complete
            return plan, opened.run_id
        self.folder = stack.enter_context(opened)
        self.journal, plan, self._journal_notice = open_journal(
            plan,
            meant,
            opened,
            run_id,
            outputs,
            reuse=self._resume == "reuse",
            force=self._force,
            force_code=self._force_code,
            source=self.source,
        )
        stack.callback(self.journal.close)
        self.log = RunLog(opened.timings.parent / LOG_FILE, appends=self.journal.is_resumed)
        stack.push_async_callback(self.log.aclose)
        return plan, opened.run_id

    @property
    def notice(self) -> str:
        """A message about the folder for the user, or ""."""
        notice = self._journal_notice or ("" if self.folder is None else self.folder.notice)
        if self._remote is None:
            return notice
        remote = self._remote
        where = f"the results go to {remote.url} when they are complete; the journal is in {remote.staging}"
        return "\n".join(filter(None, [notice, where]))

    @property
    def is_resumed(self) -> bool:
        """Whether the journal has calls of an earlier process."""
        return self.journal is not None and self.journal.is_resumed

    @property
    def resumable(self) -> bool:
        """Whether the journal has committed steps, which a resumed run skips."""
        if self.folder is None or self.journal is None or not self.journal.holds_steps:
            return False
        with contextlib.suppress(OSError):
            return self.folder.journal.exists()  # the user may have removed the folder
        return True

    def abandon(self) -> None:
        """Mark the folder of a run that could not begin as failed, unless a run there can be resumed.

        A run there that was not continued stays as it is: its journal may have committed steps.
        """
        if self.folder is not None and not self.resumable and (self.journal or not self.folder.found):
            with contextlib.suppress(OutputError):
                self.folder.fail(resumable=False)

    # -- the end of a run ----------------------------------------------------------------------------

    def add_origin(self, plan: Plan, error: Exception) -> None:
        """Add the function of a value that can't be reduced, and the command that replays the call.

        A replay needs a folder, and a spec that a later process can load.
        """
        from pipedist.runs.call_keys import is_reduced, origin_of, replay_of  # errors are rare

        if isinstance(error, CallError) and is_reduced(plan, error.stage):
            error.origin = origin_of(plan, error.stage)
        if (
            isinstance(error, CallError | FoldError | QuarantineError)
            and self.folder is not None
            and self.source.source
        ):
            error.replay = replay_of(plan, error, self.folder.path)

    def fail(self, error: Exception) -> None:
        """Write into the folder why the run failed; a run that was cancelled stays unfinished, and can be resumed."""
        # After an error of the journal, committed steps are valid.
        if self.folder is None or isinstance(error, RunCancelled | JournalError):
            return
        from pipedist.runs.about import write_failure  # imported already

        with contextlib.suppress(OutputError):  # the run then stays unfinished
            self.folder.fail(resumable=self.resumable)
            write_failure(self.folder.timings.parent, error)

    def outputs(self, plan: Plan, failed: Mapping[str, OutputError]) -> dict[str, Path]:
        """Return the final path of each output, except those that could not be written."""
        if self.folder is None:
            return {}
        names = (name for name in plan.spec.outputs if name.partition("/")[0] not in failed)
        return {name: self.folder.final(plan.spec.outputs[name]) for name in names}

    async def write_quarantine(self, quarantined: list[tuple[str, QuarantinedElement]]) -> Path | None:
        """Write the file of quarantined elements, and return its final path; None: there is none."""
        if self.folder is None or not quarantined:
            return None
        await anyio.to_thread.run_sync(write_file, self.folder.staged(QUARANTINE), quarantined)
        return self.folder.final(QUARANTINE)

    async def store(
        self, results: Mapping[str, Tree], pers: Mapping[str, str], files: Mapping[str, Path]
    ) -> Mapping[str, Any]:
        """Write values into the folder: all for a later `resume`, and large ones that are in no file for the document.

        Returns:
            References to the latter, by stage.
        """
        if self.folder is None:
            return {}
        from pipedist.outputs import store_large
        from pipedist.runs.saved_values import write_values

        written = {key.partition("/")[0] for key in files}
        inline = {name: value for name, value in results.items() if name not in written}
        folder = self.folder.values

        def write() -> Mapping[str, Any]:
            stored = store_large(inline, folder, {name: pers[name] for name in inline})
            write_values(folder, results, stored)
            return stored

        return await anyio.to_thread.run_sync(write)

    async def finish(self, result: Result, *, failed: bool) -> None:
        """Replace the files of the run before with those of this one, and upload them; `failed`: some are missing."""
        if (folder := self.folder) is None:
            return
        written = await anyio.to_thread.run_sync(lambda: folder.finish(result.document, failed=failed))
        if not failed:
            await self._upload(folder.run_id, list(written))

    async def _upload(self, run_id: str, names: list[str]) -> None:
        if self._remote is not None:
            await anyio.to_thread.run_sync(self._remote.upload, run_id, names)
