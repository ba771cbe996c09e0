"""Which runs may go on from a journal, and with how much of it.

A run goes on from its journal if nothing that decides its results has changed: the spec (by value), the
files that it reads (by size and modification time), the platform (which may differ with `force`). Modules
of functions are compared too, but a function that was mended is no reason to refuse: it is said. With
"reuse", a run of another spec goes on with those passes of whose definition and inputs nothing has changed,
modules included.
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
from pipedist.journal.differences import differences
from pipedist.journal.history import FORMAT, Header, History, PassHistory, read_history
from pipedist.journal.writer import Journal, file_name
from pipedist.plan import PassPlan, Plan
from pipedist.plan.phases import links_of
from pipedist.runs.identity import digest_of, meaning
from pipedist.runs.pass_inputs import grows, keeps, read_later
from pipedist.runs.pass_journal import RunJournal, key_of
from pipedist.runs.spec_source import NOWHERE, Origin
from pipedist.spec import InitFile, UpdateSpec

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder

LINES_MAX = 12
"""Differences that are shown."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run's journal, and what the user should know about it.

    Args:
        journal: to be closed.
        run: the same, as the run sees it.
        notice: "" or what is resumed.
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
    origin: Origin = NOWHERE,
) -> Opened:
    """Open the journal of a run in its folder.

    Args:
        plan: of the run.
        folder: open, and locked.
        run_id: of the run, if it is a new one.
        outputs: every file that the run may leave in its folder, as for `open_folder`.
        reuse: go on with what did not change, where something has.
        force: go on also where versions or the type of processor have changed.
        origin: how its spec is loaded again.

    Raises:
        UsageError: the run that is there can't go on, because something has changed.
        JournalError: its journal is damaged, or can't be written.
    """
    history = read_history(folder.journal) if folder.found else None
    if history is None:  # nothing was there, or it was killed before its first record
        if folder.found == "other":
            folder.take_over(run_id, digest_of(meaning(plan.spec)), outputs, ())
        header = header_of(plan, folder.run_id, origin)
        journal = Journal.create(folder.journal, header)
        return Opened(journal, RunJournal(journal, None, _stamp(header)))
    if history.problems:
        raise JournalError(
            f"the journal in {folder.journal} does not add up, so nothing is resumed:\n  "
            + "\n  ".join(history.problems)
        )
    now = header_of(plan, folder.run_id, origin)
    changed, moved = changes(history.header, now), platform_changes(history.header)
    goes_on = not changed and folder.found == "unfinished"
    gone = _gone(plan, folder, history) if goes_on else None
    if goes_on and not gone and (force or not moved):
        journal = Journal.reopen(folder.journal, history)
        return Opened(journal, RunJournal(journal, history, _stamp(now)), _resumed(history, now, moved))
    if gone and not reuse:
        raise UsageError(
            f"{gone}, of the unfinished run {history.header.run}, is not there any more: --resume=reuse "
            "makes it again, and --restart everything"
        )
    if not changed and not reuse:
        raise UsageError(
            f"the run {history.header.run} in {folder.path} was begun on another platform, so "
            f"the same bits are not certain:{listed(moved)}\n"
            "  --force goes on all the same, --restart discards the run"
        )
    if not reuse:
        raise UsageError(
            f"the run {history.header.run} in {folder.path} can't be resumed, because something has changed "
            f"(there {history.header.digest[:12]}, now {now.digest[:12]}):{listed(changed)}\n"
            "  --resume=reuse goes on with what did not change, --restart discards the run"
        )
    return _reused(plan, folder, run_id, outputs, history, origin, () if force else moved)


def changes(there: Header, now: Header) -> list[str]:
    """Return what differs between two runs that decides their results, their code apart, as lines."""
    return [*differences(there.spec, now.spec), *_inputs_changed(there, now)]


def platform_changes(there: Header) -> list[str]:
    """Return in what this process's platform differs from that of a run, as phrases."""
    began = Platform(**{**there.platform, "traits": tuple(there.platform["traits"])})
    return platform_id.differences(began, Platform.here(), called="now")


def explain(plan: Plan, journal: Path) -> str:
    """Return what differs between a plan's spec and that of a journal, as lines; "" if it can't be said."""
    try:
        history = read_history(journal)
    except (UsageError, JournalError):
        return ""
    return "" if history is None else ":" + listed(differences(history.header.spec, meaning(plan.spec)))


def since(plan: Plan, journal: Path) -> list[str]:
    """Return what a plan finds changed since the run of its spec in a journal: inputs, modules, platform."""
    try:
        history = read_history(journal)
    except (UsageError, JournalError):
        return []
    if history is None:
        return []
    now, there = header_of(plan, ""), history.header
    modules = [name for name in now.code if there.code.get(name) != now.code[name]]
    return [
        *_inputs_changed(there, now),
        *(f"module {name} has changed" for name in modules),
        *(f"it ran with {line}" for line in platform_changes(there)),
    ]


def listed(lines: Iterable[str]) -> str:
    """Return lines, indented; not too many of them."""
    shown = list(lines)
    rest = [f"... and {len(shown) - LINES_MAX} more"] if len(shown) > LINES_MAX else []
    return "".join(f"\n    {line}" for line in shown[:LINES_MAX] + rest)


def _resumed(history: History, now: Header, moved: Sequence[str]) -> str:
    done = ", ".join(
        f"{history.header.passes[key]['name']}: "
        + ("all" if found.complete else f"{found.steps:,}")
        + f" step{'s' * (found.complete or found.steps != 1)}"
        for key, found in history.passes.items()
    )
    notice = f"resuming the run {history.header.run}; done before: {done or 'nothing'}"
    if history.torn:
        notice += f" ({history.torn:,} bytes of a record that was not finished were dropped)"
    if changed := list(differences(history.header.code, now.code)):
        modules = ", ".join(line.partition(":")[0] for line in changed)
        notice += f"\nchanged since then: module {modules}; what was done before is kept as it is"
    if moved:
        notice += f"\nbegun with {', '.join(moved)}; what was done before is kept as it is"
    return notice


def _stamp(now: Header) -> str:
    """Return what a call's result is as good as new under: this run, with the code as it is now."""
    return digest_of({"run": now.run, "platform": dict(now.platform), "code": dict(now.code)})


# -- what a run is made of ---------------------------------------------------------------------------


def header_of(plan: Plan, run_id: str, origin: Origin = NOWHERE) -> Header:
    """Return the first record of a run's journal."""
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
        source=origin.source,
        sets=origin.sets,
        params=origin.params,
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


def _inputs_changed(there: Header, now: Header, names: Iterable[str] | None = None) -> Iterator[str]:
    for name in dict.fromkeys((*there.inputs, *now.inputs)) if names is None else names:
        for line in differences(there.inputs.get(name, {}), now.inputs.get(name, {})):
            path, _, what = line.rpartition(": ")
            yield f"{name}: {path.removesuffix('[0]').removesuffix('[1]')} has changed: {_sizes(what)}"


def _sizes(what: str) -> str:
    return f"(bytes, or modification time in ns) {what}"


def _code(plan: Plan) -> dict[str, str]:
    """Return the SHA-256 of the files of the modules that functions come from."""
    import hashlib

    code = {}
    for module in sorted({name for names in _modules(plan).values() for name in names}):
        path = getattr(sys.modules.get(module), "__file__", None)
        if path is not None and Path(path).is_file():
            code[module] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return code


def _modules(plan: Plan) -> dict[str, list[str]]:
    """Return the modules of each stage's and dataset's functions, by their paths in the spec."""
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
    """Return the module that a function is named in, and the one that it is from: packages hand on names."""
    module, _, path = function.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return list(dict.fromkeys((module, getattr(found, "__module__", None) or module)))


def _described(plan: Plan, pass_: PassPlan) -> dict[str, Any]:
    """Return what the journal says of a pass; `needs` are the places in the spec that decide its values."""
    spec, links, training = plan.spec, links_of(plan.spec), plan.training
    turns = [p for p in plan.passes if p.updates or p.follows]
    together = turns if pass_ in turns else [pass_]  # they are complete together, or not at all
    needs: dict[str, None] = dict.fromkeys(("replicas", "seed", "threads_per_replica"))
    waiting = [name for p in together for name in (p.root, *p.runs, *p.folds, *p.updates)]
    own = set(waiting)
    # the updates decide how many epochs there are: of what takes turns, and of their dataset from then on
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
    origin: Origin,
    moved: Sequence[str],
) -> Opened:
    """Begin a run with those passes of another one that have not changed; none if it has `moved`."""
    header = header_of(plan, run_id, origin)
    taken: dict[str, PassHistory] = {}
    lines = []
    for pass_, why in _made_again(plan, folder, history, header, moved).items():
        found = history.passes.get(key_of(pass_))
        if why or found is None:
            because = listed(why or ["the run before did not come to it"])
            lines.append(f"again: {pass_.name}, because{because}")
        else:
            taken[key_of(pass_)] = found
            steps = "all" if found.complete else f"the first {found.steps:,}"
            lines.append(
                f"reused: {steps} steps of {pass_.name}: its definition and its inputs did not change"
            )
    files = plan.spec.outputs
    kept = [
        files[name]
        for pass_ in plan.passes
        if key_of(pass_) in taken and taken[key_of(pass_)].complete
        for name in (*pass_.folds, *pass_.updates)
        if name in files
    ]
    Journal.replace(folder.journal, header, taken)
    folder.take_over(run_id, header.digest, outputs, kept)
    again = read_history(folder.journal)
    if again is None:
        raise JournalError(f"the journal in {folder.journal} was written, and can't be read")
    journal = Journal.reopen(folder.journal, again)
    journal.keep(name for found in taken.values() for name in found.files())
    return Opened(journal, RunJournal(journal, again, _stamp(header)), "\n".join(lines))


def _made_again(
    plan: Plan, folder: RunFolder, history: History, now: Header, moved: Sequence[str]
) -> dict[PassPlan, list[str]]:
    """Return of each pass why what is durable of one like it can't be reused; nothing where it can."""
    why = {}
    for pass_ in plan.passes:
        found = history.passes.get(key_of(pass_))
        why[pass_] = _changed(history, now, key_of(pass_)) or [f"it ran with {line}" for line in moved]
        if not why[pass_] and found is not None and (missing := _missing(plan, pass_, folder, found)):
            why[pass_] = [missing]
    turns = [pass_ for pass_ in plan.passes if pass_.updates or pass_.follows]
    for first in [pass_ for pass_ in turns if why[pass_]][:1]:
        for pass_ in turns:
            why[pass_] = why[pass_] or [f"it takes turns with {first.name}, which is made again"]
    return why


def _changed(history: History, now: Header, key: str) -> list[str]:
    """Return what has changed of all that decides the values of a pass.

    One of another phase is another one: its logs are called after it.
    """
    there, wanted = history.header, now.passes[key]
    said = there.passes.get(key)
    if said is None or said["shape"] != wanted["shape"]:
        return ["the run before had no pass of these stages in this phase"]
    why: list[str] = []
    for path in dict.fromkeys((*said["needs"], *wanted["needs"])):
        why += differences(_at(there.spec, path), _at(now.spec, path), path)
    why += _inputs_changed(there, now, wanted["needs"])
    changed = [m for m in wanted["modules"] if there.code.get(m) != now.code.get(m)]
    return why + [f"module {module} has changed" for module in changed]


def _at(document: Mapping[str, Any], path: str) -> Any:
    first, _, rest = path.partition(".")
    value = document.get(first)
    return value.get(rest) if rest and isinstance(value, Mapping) else value


def _missing(plan: Plan, pass_: PassPlan, folder: RunFolder, found: PassHistory) -> str:
    """Return what of a pass is not there, or not any more, or ""."""
    for name in found.files():
        if not (folder.journal / name).is_file():
            return f"{name} is not as the run left it"
    if not found.complete:
        return ""
    later = read_later(plan)
    for name in (*pass_.folds, *pass_.updates):
        output = plan.spec.outputs.get(name)
        if output is not None and not folder.has(output):
            return f"{output} is not as the run left it"
    for name in pass_.folds:
        log = f"{file_name(key_of(pass_), name)}.log"
        if grows(plan, name) and keeps(plan, folder, later, name) and log not in found.logs:
            return f"a later phase reads {name}, which the run before kept in its file alone"
    return ""


def _gone(plan: Plan, folder: RunFolder, history: History) -> Path | None:
    """Return the first output of a complete pass that is not there any more."""
    for pass_ in plan.passes:
        found = history.passes.get(key_of(pass_))
        if found is not None and found.complete:
            for name in (*pass_.folds, *pass_.updates):
                output = plan.spec.outputs.get(name)
                if output is not None and name not in history.unwritten and not folder.has(output):
                    return folder.staged(output)
    return None
