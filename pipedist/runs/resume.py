"""Decides whether a run can continue from a journal, and which passes can.

A run continues from its journal if nothing that decides its results has changed: the spec (by value), its
input files (by size and modification time), and the platform (which may differ with `force`). Changed modules
of functions are reported, but do not prevent it, so that a function can be fixed and its run resumed. With
"reuse", a run continues with the passes of another spec's run whose definition, inputs and modules are
unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from pipedist._version import __version__
from pipedist.core import platform_id
from pipedist.core.platform_id import Platform
from pipedist.datasets.sources.paths import expand
from pipedist.errors import JournalError, UsageError
from pipedist.journal.history import FORMAT, Header, History, PassHistory, read_history
from pipedist.journal.writer import Journal, file_name
from pipedist.plan import PassPlan, Plan
from pipedist.plan.phases import links_of
from pipedist.runs.identity import NO_SOURCE, SpecSource, differences, digest, digest_of, listed, meaning
from pipedist.runs.pass_folds import grows, keeps
from pipedist.runs.pass_journal import RunJournal, finished_calls, key_of
from pipedist.spec import InitFile, UpdateSpec

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder


@dataclass(frozen=True, slots=True)
class OpenedJournal:
    """The open journal of a run.

    Args:
        journal: the journal; the caller closes it.
        notice: a message for the user about what is resumed, or "".
    """

    journal: Journal
    run: RunJournal
    notice: str = ""


def open_journal(
    plan: Plan,
    folder: RunFolder,
    run_id: str,
    outputs: Sequence[str],
    *,
    reuse: bool,
    force: bool = False,
    source: SpecSource = NO_SOURCE,
) -> OpenedJournal:
    """Open the journal of a run in its folder.

    Args:
        run_id: the id of the run, if it is a new one.
        outputs: all files that the run may write into its folder, as for `open_folder`.
        reuse: if something has changed, continue with the passes that it does not affect.
        force: continue even if versions or the type of processor have changed.

    Raises:
        UsageError: the run in the folder can't continue, because something has changed.
        JournalError: its journal is damaged, or can't be written.
    """
    history = read_history(folder.journal) if folder.found else None
    if history is None:  # no run, or one that was killed before its first record
        if folder.found == "other":
            folder.take_over(run_id, digest(plan.spec), outputs, ())
        header = header_of(plan, folder.run_id, source)
        journal = Journal.create(folder.journal, header)
        return OpenedJournal(journal, RunJournal(journal, None, _stamp(header)))
    if history.problems:
        raise JournalError(
            f"the journal in {folder.journal} is inconsistent, so the run can't be resumed:\n  "
            + "\n  ".join(history.problems)
            + "\nUse --restart to discard the run"
        )
    now = header_of(plan, folder.run_id, source)
    changed, moved = changes(history.header, now), platform_changes(history.header)
    can_continue = not changed and folder.found == "unfinished"
    gone = _gone(plan, folder, history) if can_continue else None
    if can_continue and not gone and (force or not moved):
        journal = Journal.reopen(folder.journal, history)
        return OpenedJournal(
            journal, RunJournal(journal, history, _stamp(now)), _resumed(history, now, moved)
        )
    if gone and not reuse:
        raise UsageError(
            f"{gone}, an output of the unfinished run {history.header.run}, does not exist any more. "
            "Use --resume=reuse to make it again, or --restart to discard the run"
        )
    if not changed and not reuse:
        raise UsageError(
            f"the run {history.header.run} in {folder.path} was started on another platform, so "
            f"its results may not be bit-identical:{listed(moved)}\n"
            "  To continue it here, use --force; to discard it, --restart"
        )
    if not reuse:
        raise UsageError(
            f"the run {history.header.run} in {folder.path} can't be resumed, because something has changed "
            f"(there {history.header.digest[:12]}, now {now.digest[:12]}):{listed(changed)}\n"
            "  To continue with the unchanged passes, use --resume=reuse; to discard the run, --restart"
        )
    return _reused(plan, folder, run_id, outputs, history, source, () if force else moved)


def changes(there: Header, now: Header) -> list[str]:
    """Return the differences of two runs that affect results, except code."""
    return [*differences(there.spec, now.spec), *_changed_inputs(there, now)]


def platform_changes(there: Header) -> list[str]:
    """Return the differences between this platform and that of a run."""
    began = Platform(**{**there.platform, "traits": tuple(there.platform["traits"])})
    return platform_id.differences(began, Platform.here(), called="now")


def explain(plan: Plan, journal: Path) -> str:
    """Return the differences between a plan's spec and a journal's, or ""."""
    there = _header_there(journal)
    return "" if there is None else ":" + listed(differences(there.spec, meaning(plan.spec)))


def since(plan: Plan, journal: Path) -> list[str]:
    """Return the inputs, modules and platform traits changed since a run."""
    there = _header_there(journal)
    if there is None:
        return []
    now = header_of(plan, "")
    modules = [name for name in now.code if there.code.get(name) != now.code[name]]
    return [
        *_changed_inputs(there, now),
        *(f"module {name} has changed" for name in modules),
        *(f"the run used {line}" for line in platform_changes(there)),
    ]


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
        + ("all" if found.complete else f"{found.steps:,}")
        + f" step{'s' * (found.complete or found.steps != 1)}"
        + (f" and {calls:,} calls" if same_code and (calls := finished_calls(found)) else "")
        for key, found in history.passes.items()
    )
    notice = f"resuming the run {history.header.run}; committed steps: {done or 'none'}"
    if history.torn:
        notice += f" (dropped {history.torn:,} bytes of an incomplete record)"
    if changed := list(differences(history.header.code, now.code)):
        modules = ", ".join(line.partition(":")[0] for line in changed)
        notice += f"\nmodule {modules} has changed; committed steps are kept as they are"
    if moved:
        notice += f"\nthe run was started with {', '.join(moved)}; committed steps are kept as they are"
    return notice


def _stamp(now: Header) -> str:
    """Return a digest that changes with the run, its platform and its code."""
    return digest_of({"run": now.run, "platform": dict(now.platform), "code": dict(now.code)})


# -- the header of a run -----------------------------------------------------------------------------


def header_of(plan: Plan, run_id: str, source: SpecSource = NO_SOURCE) -> Header:
    meant = meaning(plan.spec)
    return Header(
        format=FORMAT,
        pipedist=__version__,
        run=run_id,
        name=plan.spec.name,
        spec=meant,
        digest=digest_of(meant),
        inputs=dict(_inputs(plan)),
        code=_code(plan),
        replicas=plan.spec.replicas,
        platform=asdict(Platform.here()),
        passes={key_of(pass_): _described(plan, pass_) for pass_ in plan.passes},
        source=source.source,
        sets=source.sets,
        params=source.params,
    )


def _inputs(plan: Plan) -> Iterator[tuple[str, dict[str, list[int]]]]:
    folder = Path(plan.spec.folder)
    for name, dataset in plan.spec.datasets.items():
        if "path" in dataset.config:
            found = expand(dataset.config["path"], folder)
            yield f"datasets.{name}", {file.path: [file.size_bytes, file.mtime_ns] for file in found}
    for name, stage in plan.spec.stages.items():
        if isinstance(stage, UpdateSpec) and isinstance(stage.init, InitFile):
            file = expand(stage.init.path, folder)[0]
            yield f"stages.{name}", {file.path: [file.size_bytes, file.mtime_ns]}


def _changed_inputs(there: Header, now: Header, names: Iterable[str] | None = None) -> Iterator[str]:
    for name in dict.fromkeys((*there.inputs, *now.inputs)) if names is None else names:
        for line in differences(there.inputs.get(name, {}), now.inputs.get(name, {})):
            path, _, what = line.rpartition(": ")
            path = path.removesuffix("[0]").removesuffix("[1]")
            yield f"{name}: {path} has changed: (bytes, or modification time in ns) {what}"


def _code(plan: Plan) -> dict[str, str]:
    """Return the SHA-256 of the files of the modules that define functions."""
    import hashlib

    code = {}
    for module in sorted({name for names in _modules(plan).values() for name in names}):
        path = getattr(sys.modules.get(module), "__file__", None)
        if path is not None and Path(path).is_file():
            code[module] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return code


def _modules(plan: Plan) -> dict[str, list[str]]:
    """Return the modules of functions, by their paths in the spec."""
    modules: dict[str, list[str]] = {}
    for name in plan.spec.stages:
        state = plan.states.get(name)
        refs = [plan.functions.get(name)] + ([state.init, state.until] if state is not None else [])
        modules[f"stages.{name}"] = [
            module for ref in refs if ref is not None and ref.name for module in _modules_of(ref.name)
        ]
    for name, dataset in plan.spec.datasets.items():
        call = dataset.config.get("call")
        if isinstance(call, str):
            modules[f"datasets.{name}"] = _modules_of(call)
    return modules


def _modules_of(function: str) -> list[str]:
    """Return the module that names a function, and the one that defines it."""
    module, _, path = function.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return list(dict.fromkeys((module, getattr(found, "__module__", None) or module)))


def _described(plan: Plan, pass_: PassPlan) -> dict[str, Any]:
    """Return the journal's description of a pass.

    `needs` are the paths in the spec that affect its values."""
    spec, links, training = plan.spec, links_of(plan.spec), plan.training
    turns = [p for p in plan.passes if p.updates or p.follows]
    together = turns if pass_ in turns else [pass_]  # passes of a training complete together
    needs: dict[str, None] = dict.fromkeys(("replicas", "seed", "threads_per_replica"))
    waiting = [name for p in together for name in (p.root, *p.runs, *p.folds, *p.updates)]
    own = set(waiting)
    # updates decide the number of epochs: of the passes of a training, and of later reads of its dataset
    counted = {name for p in turns for name in (*p.runs, *p.folds)}
    if training is not None and pass_.dataset == training.dataset and pass_.phase > training.phase:
        waiting += training.updates
    while waiting:
        name = waiting.pop()
        if name in spec.datasets:
            needs[f"datasets.{name}"] = None
        elif f"stages.{name}" not in needs:
            needs[f"stages.{name}"] = None
            waiting += [other for other in (links[name].of, *links[name].waits, *links[name].reads) if other]
            if training is not None and name in counted:
                waiting += training.updates
    needs.update((f"outputs.{name}", None) for name in spec.outputs if name in own)
    modules = _modules(plan)
    return {
        "name": pass_.name,
        "dataset": pass_.dataset,
        "shape": [
            pass_.root,
            *(list(getattr(pass_, field)) for field in ("runs", "folds", "kept", "updates")),
            pass_.follows,
            pass_.gang,
        ],
        "needs": list(needs),
        "modules": sorted({module for need in needs for module in modules.get(need, ())}),
    }


# -- reuse -------------------------------------------------------------------------------------------


def _reused(
    plan: Plan,
    folder: RunFolder,
    run_id: str,
    outputs: Sequence[str],
    history: History,
    source: SpecSource,
    moved: Sequence[str],
) -> OpenedJournal:
    """Begin a run with the unchanged passes of an earlier one."""
    header = header_of(plan, run_id, source)
    taken: dict[str, PassHistory] = {}
    lines = []
    for pass_, why in _changed_passes(plan, folder, history, header, moved).items():
        found = history.passes.get(key_of(pass_))
        if why or found is None:
            because = listed(why or ["the earlier run did not reach it"])
            lines.append(f"executing again: {pass_.name}, because{because}")
        else:
            taken[key_of(pass_)] = found
            steps = "all" if found.complete else f"the first {found.steps:,}"
            lines.append(
                f"reusing {steps} steps of {pass_.name}: its definition and its inputs are unchanged"
            )
    complete = [p for p in plan.passes if key_of(p) in taken and taken[key_of(p)].complete]
    kept = [output for pass_ in complete for output in _outputs(plan, pass_).values()]
    Journal.replace(folder.journal, header, taken)
    folder.take_over(run_id, header.digest, outputs, kept)
    again = read_history(folder.journal)
    assert again is not None  # it was just written
    journal = Journal.reopen(folder.journal, again)
    journal.keep(name for found in taken.values() for name in found.files())
    return OpenedJournal(journal, RunJournal(journal, again, _stamp(header)), "\n".join(lines))


def _changed_passes(
    plan: Plan, folder: RunFolder, history: History, now: Header, moved: Sequence[str]
) -> dict[PassPlan, list[str]]:
    """Return why the committed steps of each pass can't be reused, or []."""
    why = {}
    for pass_ in plan.passes:
        found = history.passes.get(key_of(pass_))
        why[pass_] = _changed(history, now, key_of(pass_)) or [f"the run used {line}" for line in moved]
        if not why[pass_] and found is not None and (missing := _missing(plan, pass_, folder, found)):
            why[pass_] = [missing]
    turns = [pass_ for pass_ in plan.passes if pass_.updates or pass_.follows]
    for first in [pass_ for pass_ in turns if why[pass_]][:1]:
        for pass_ in turns:
            training = f"it is part of the training of {first.name}, which is executed again"
            why[pass_] = why[pass_] or [training]
    return why


def _changed(history: History, now: Header, key: str) -> list[str]:
    """Return the changes that affect the values of a pass.

    A pass in another phase counts as another pass, because its logs are named by phase.
    """
    there, wanted = history.header, now.passes[key]
    before = there.passes.get(key)
    if before is None or before["shape"] != wanted["shape"]:
        return ["the earlier run had no pass of these stages in this phase"]
    why: list[str] = []
    for path in dict.fromkeys((*before["needs"], *wanted["needs"])):
        why += differences(_at(there.spec, path), _at(now.spec, path), path)
    why += _changed_inputs(there, now, wanted["needs"])
    changed = [m for m in wanted["modules"] if there.code.get(m) != now.code.get(m)]
    return why + [f"module {module} has changed" for module in changed]


def _at(document: Mapping[str, Any], path: str) -> Any:
    first, _, rest = path.partition(".")
    value = document.get(first)
    return value.get(rest) if rest and isinstance(value, Mapping) else value


def _missing(plan: Plan, pass_: PassPlan, folder: RunFolder, found: PassHistory) -> str:
    """Return why the files of a pass can't be reused, or ""."""
    for name in found.files():
        if not (folder.journal / name).is_file():
            return f"the journal file {name} is missing"
    if not found.complete:
        return ""
    for output in _outputs(plan, pass_).values():
        if not folder.has(output):
            return f"the output {output} is missing or was changed"
    for name in pass_.folds:
        log = f"{file_name(key_of(pass_), name)}.log"
        if grows(plan, name) and keeps(plan, name) and log not in found.logs:
            return f"a later phase now reads {name}, which the earlier run stored only in its output file"
    return ""


def _outputs(plan: Plan, pass_: PassPlan) -> dict[str, str]:
    """Return the outputs that a pass writes, by stage."""
    return {n: plan.spec.outputs[n] for n in (*pass_.folds, *pass_.updates) if n in plan.spec.outputs}


def _gone(plan: Plan, folder: RunFolder, history: History) -> Path | None:
    """Return the first missing or changed output of a complete pass."""
    for pass_ in plan.passes:
        found = history.passes.get(key_of(pass_))
        if found is not None and found.complete:
            for name, output in _outputs(plan, pass_).items():
                if name not in history.unwritten and not folder.has(output):
                    return folder.staged(output)
    return None
