"""Decides whether a run can continue from a journal, and which passes can.

A run continues from its journal if nothing that decides its results has changed: the spec (by value, without its
outputs), its input files, the modules of functions whose results are committed (which may differ with
`force_code`), and the platform (which may differ with `force`). With "reuse", a run continues with all steps of
another spec's run that the changes do not affect, see `pipedist.runs.reuse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pipedist.core.names import listed
from pipedist.errors import JournalError, UsageError
from pipedist.journal.history import DurableProgress, Header, History, read_history
from pipedist.journal.writer import Journal
from pipedist.plan import Plan
from pipedist.runs.code_modules import changed_modules
from pipedist.runs.identity import differences
from pipedist.runs.pass_folds import can_write, has_files
from pipedist.runs.pass_journal import RunJournal
from pipedist.runs.reuse import reuse_run
from pipedist.runs.run_header import (
    changed_inputs,
    changes,
    ended_ns,
    header_of,
    platform_changes,
    stamp_of,
    with_passes,
)
from pipedist.runs.spec_source import SpecSource

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder


def open_journal(
    plan: Plan,
    meant: Mapping[str, Any],
    folder: RunFolder,
    run_id: str,
    outputs: Sequence[str],
    *,
    reuse: bool,
    force: bool,
    force_code: bool,
    source: SpecSource,
) -> tuple[RunJournal, Plan, str]:
    """Open the journal of a run in its folder.

    Args:
        meant: the meaning of the spec.
        run_id: the id of the run, if it is a new one.
        outputs: all files that the run may write into its folder, as for `open_folder`.
        reuse: if something has changed, continue with what it does not affect.
        force: continue even if versions or the type of processor have changed.
        force_code: continue even if modules of functions, or files that they read, have changed.

    Returns:
        The journal, which the caller closes; the plan with its passes; and a message about what is resumed, or "".

    Raises:
        UsageError: the run in the folder can't continue, because something has changed.
        JournalError: its journal is damaged, or can't be written.
    """
    history = read_history(folder.journal) if folder.found else None
    if history is None:  # no run, or one that was killed before its first record
        return _created(plan, folder, header_of(plan, meant, run_id, source), outputs)
    if history.problems:
        raise JournalError(
            f"the journal in {folder.journal} is inconsistent, so the run can't be resumed:\n  "
            + "\n  ".join(history.problems)
            + "\nUse --restart to discard the run"
        )
    there, ended = history.header, ended_ns(folder.journal, finished=history.ended is not None)
    now = header_of(plan, meant, folder.run_id, source, there, ended)
    changed, moved = changes(there, now), platform_changes(there)
    used = list(changed_inputs(there, now, "stages."))
    if not changed and folder.found == "unfinished":
        if (
            used
            and not there.spares
            and not any(x.progress != DurableProgress(0) for x in history.passes.values())
        ):
            return _created(plan, folder, header_of(plan, meant, run_id, source), outputs)
        planned = with_passes(plan, there)
        code = [] if force_code else [*_changed_code(history, now, Path(plan.spec.code)), *used]
        gone = _gone(planned, folder, history)
        if not gone and not code and (force or not moved):
            folder.take_over(now.run, now.digest, outputs, plan.spec.outputs, plan.spec.outputs)
            journal = Journal.reopen(folder.journal, history, code=now.code)
            run = RunJournal(journal, history, stamp_of(now))
            return run, planned, _resumed(history, now, moved)
        if not reuse:
            raise _refusal(folder, history, gone, code, moved)
    elif not reuse:
        raise UsageError(
            f"the run {there.run} in {folder.path} can't be resumed, because something has changed:"
            f"{listed([*changed, *used])}\n"
            "  To continue with what that does not affect, use --reuse; to discard the run, --restart"
        )
    return reuse_run(plan, folder, replace(now, run=run_id), outputs, history, () if force else moved)


def _created(
    plan: Plan, folder: RunFolder, header: Header, outputs: Sequence[str]
) -> tuple[RunJournal, Plan, str]:
    if folder.found:
        folder.take_over(header.run, header.digest, outputs, plan.spec.outputs, ())
    return RunJournal(Journal.create(folder.journal, header), None, stamp_of(header)), plan, ""


def _refusal(
    folder: RunFolder, history: History, gone: Path | None, code: Sequence[str], moved: Sequence[str]
) -> UsageError:
    run = history.header.run
    if gone:
        return UsageError(
            f"{gone}, an output of the unfinished run {run}, is missing, and the journal does not have its "
            "values. Use --reuse to make it again, or --restart to discard the run"
        )
    if code:
        return UsageError(
            f"the run {run} in {folder.path} can't be resumed, because functions that made its committed "
            f"steps, or files that they read, have changed:{listed(code)}\n"
            "  To execute again what they made, use --reuse; to keep it beside new results, "
            "--resume --force-code; to discard the run, --restart"
        )
    return UsageError(
        f"the run {run} in {folder.path} was started on another platform, so "
        f"its results may not be bit-identical:{listed(moved)}\n"
        "  To continue it here, use --force; to discard it, --restart"
    )


def _changed_code(history: History, now: Header, code: Path) -> list[str]:
    """Return the changed modules of functions whose results are committed, as lines."""
    lines: list[str] = []
    for key, done in history.passes.items():
        if done.steps:
            modules = history.header.passes[key]["modules"]
            lines += changed_modules(done.code, now.code, modules, code)
    return list(dict.fromkeys(lines))


def explain(meant: Mapping[str, Any], journal: Path) -> str:
    """Return the differences between the meaning of a spec and a journal's, or ""."""
    there = _header_there(journal)
    return "" if there is None else ":" + listed(differences(there.spec, meant))


def since(plan: Plan, meant: Mapping[str, Any], journal: Path) -> tuple[list[str], list[str]]:
    """Return the inputs and modules, and the platform traits, changed since a run."""
    there = _header_there(journal)
    if there is None:
        return [], []
    now = header_of(plan, meant, "", SpecSource(), there, ended_ns(journal, finished=True))
    modules = changed_modules(there.code, now.code, now.code, Path(plan.spec.code))
    moved = [f"the run used {line}" for line in platform_changes(there)]
    return [*changed_inputs(there, now, ""), *modules], moved


def _header_there(journal: Path) -> Header | None:
    """Return the header of a journal, None if it can't be read."""
    try:
        history = read_history(journal)
    except (UsageError, JournalError):
        return None
    return None if history is None else history.header


def _resumed(history: History, now: Header, moved: Sequence[str]) -> str:
    same_code = history.header.code == now.code
    done = ", ".join(
        f"{history.header.passes[key]['name']}: "
        + (
            "all steps"
            if found.complete
            else str(found.progress if same_code else DurableProgress(found.steps))
        )
        for key, found in history.passes.items()
    )
    notice = f"resuming the run {history.header.run}; durable: {done or 'nothing'}"
    if history.torn:
        notice += f" (dropped {history.torn:,} bytes of an incomplete record)"
    if changed := list(differences(history.header.code, now.code)):
        modules = ", ".join(line.partition(":")[0] for line in changed)
        notice += f"\nmodule {modules} has changed; committed steps are kept as they are"
    if moved:
        notice += f"\nthe run was started with {', '.join(moved)}; committed steps are kept as they are"
    return notice


def _gone(plan: Plan, folder: RunFolder, history: History) -> Path | None:
    """Return the first output whose committed values are neither in its file nor in the journal."""
    for pass_ in plan.passes:
        found = history.passes.get(pass_.key)
        if found is None or not found.steps:
            continue
        for name in pass_.folds:
            files = plan.spec.files_of(name)
            is_there = found.complete and has_files(plan, folder, name)
            if files and not is_there and not can_write(plan, name, found, pass_.key):
                return folder.path / next(iter(files.values()))
    return None
