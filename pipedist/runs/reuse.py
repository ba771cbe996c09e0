"""Continues with the steps of earlier runs that a change does not affect (`--reuse`).

The unit is the stage: a reduce or gather is reused if it, and everything that it depends on, is unchanged. If a
pass has unchanged stages and others, it is divided:

- its unchanged stages continue behind their committed steps;
- a new or changed stage begins with the first step. It reads the stored values of the nearest unchanged run below
  it, so that the run is not executed again; its pass is then in a phase after that of the run. If there are none, it
  is executed from the dataset on. If that executes every function of an incomplete pass again, the pass begins anew
  as a whole, which needs fewer calls.

A training with its held-out datasets, a gang, and a pass that quarantines elements are not divided: what one of
their stages does affects the others.

Committed steps that the new run does not continue are its spares: they stay in its journal until it ends, so that
another change, such as back to the earlier spec, finds them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, convert
from msgspec.structs import replace

from pipedist.core.files import link_or_copy
from pipedist.core.names import listed
from pipedist.journal.history import Header, History, PassHistory, read_history
from pipedist.journal.writer import Journal, file_name, log_file
from pipedist.plan import PassPlan, Plan
from pipedist.runs.code_modules import changed_modules, modules_of
from pipedist.runs.identity import differences
from pipedist.runs.input_stamps import changed_files
from pipedist.runs.pass_folds import can_write, grows, has_files, keeps
from pipedist.runs.pass_journal import RunJournal
from pipedist.runs.run_header import described, stamp_of

if TYPE_CHECKING:
    from pipedist.outputs import RunFolder

SPARES_MAX = 16  # number of spares; the oldest ones are dropped


class EarlierPass(Struct, frozen=True):
    """A pass of an earlier run that has committed steps.

    Args:
        described: its description in the header.
        spec, inputs: those of its run, as in the header; a spare has only the inputs that it depends on.
        history: with the modules that made its steps; a spare has only those that it depends on.
        is_spare: no pass of the latest run.
    """

    pass_: PassPlan
    described: Mapping[str, Any]
    spec: Mapping[str, Any]
    inputs: Mapping[str, Any]
    history: PassHistory
    is_spare: bool = False

    @property
    def key(self) -> str:
        return self.pass_.key

    def log(self, name: str) -> str:
        return log_file(self.key, name)

    def has_values(self, run: str) -> bool:
        """Return whether the values of a run stage are stored."""
        return run in self.pass_.runs and self.log(run) in self.history.logs

    def as_spare(self) -> EarlierPass:
        places = {path for paths in self.described["needs"].values() for path in paths}
        inputs = {place: stamps for place, stamps in self.inputs.items() if place in places}
        modules = self.described["modules"]
        code = {name: digest for name, digest in self.history.code.items() if name in modules}
        return replace(self, inputs=inputs, history=replace(self.history, code=code), is_spare=True)


def _sources(history: History) -> Iterator[EarlierPass]:
    header = history.header
    for key, each in header.passes.items():
        found = history.passes.get(key)
        if found is not None and found.steps + found.complete:
            yield EarlierPass(convert(each, PassPlan), each, header.spec, header.inputs, found)
    if history.ended is None:
        yield from convert(header.spares, dict[str, EarlierPass]).values()


@dataclass
class Piece:
    """A pass of the new run.

    Args:
        source: the pass whose steps it continues.
        why: why it begins with its first step, as lines.
        late: number of passes of its phase before it, each of which stores a run that the next one reads.
    """

    pass_: PassPlan
    source: EarlierPass | None = None
    why: list[str] = field(default_factory=list)
    late: int = 0


def reuse_run(
    plan: Plan,
    folder: RunFolder,
    header: Header,
    outputs: Sequence[str],
    history: History,
    moved: Sequence[str],
) -> tuple[RunJournal, Plan, str]:
    """Begin a run with the unchanged steps of earlier ones.

    Args:
        header: of the new run, without its passes.
        moved: differences of the platform, which prevent it.

    Returns:
        The journal, the plan with the passes of the new run, and a message for the user.
    """
    division = _Division(plan, folder, header, list(_sources(history)), moved)
    sources, pieces = division.sources, division.pieces()
    plan = replace(plan, phases=_phases(pieces))
    modules = modules_of(plan)
    taken: dict[str, PassHistory] = {}
    for piece in pieces:
        if piece.source is not None:
            taken[piece.pass_.key] = _taken(folder.journal, plan, piece.pass_, piece.source)
    passes = {p.key: described(plan, p, modules) for p in plan.passes}
    spares = _spares(folder.journal, sources, pieces)
    header = replace(header, passes=passes, spares=spares)
    # Up to here, files were only added to the folder. This replaces the journal, atomically.
    Journal.replace(folder.journal, header, taken)
    complete = [p for p in plan.passes if p.key in taken and taken[p.key].complete]
    done = {name for p in complete for name in (*p.folds, *p.updates)}
    written = [key for key in plan.spec.outputs if key.partition("/")[0] in done]
    folder.take_over(header.run, header.digest, outputs, plan.spec.outputs, written)
    again = read_history(folder.journal)
    assert again is not None  # it was just written
    journal = Journal.reopen(folder.journal, again, code=header.code)
    spared = (spare.history for spare in spares.values())
    journal.keep(name for found in (*taken.values(), *spared) for name in found.files())
    return RunJournal(journal, again, stamp_of(header)), plan, "\n".join(map(_line, pieces))


def _line(piece: Piece) -> str:
    name, source = piece.pass_.name, piece.source
    if source is not None:
        steps = "all" if source.history.complete else f"the first {source.history.steps:,}"
        return f"reusing {steps} steps of {name}: its definition and its inputs are unchanged"
    because = listed(piece.why or ["the earlier run did not reach it"])
    if piece.late:
        return f"executing {name} with the stored values of {piece.pass_.root}, because{because}"
    return f"executing again: {name}, because{because}"


def _phases(pieces: Sequence[Piece]) -> tuple[tuple[PassPlan, ...], ...]:
    """Return the passes by phase, and set their phases; late pieces come after the others of theirs."""
    places = sorted({(piece.pass_.phase, piece.late) for piece in pieces})
    for piece in pieces:
        piece.pass_ = replace(piece.pass_, phase=places.index((piece.pass_.phase, piece.late)))
    return tuple(tuple(p.pass_ for p in pieces if p.pass_.phase == n) for n in range(len(places)))


class _Division:
    """Divides the passes of a plan into pieces that continue, and pieces that begin."""

    def __init__(
        self, plan: Plan, folder: RunFolder, now: Header, sources: Sequence[EarlierPass], moved: Sequence[str]
    ) -> None:
        self._plan = plan
        self._spec = plan.spec
        self._folder = folder
        self._now = now
        self._modules = modules_of(plan)
        missing = {source.key: self._missing_file(source) for source in sources}
        self.sources = [source for source in sources if not missing[source.key]]
        self._missing = [f"the journal file {name} is missing" for name in missing.values() if name]
        self._moved = [f"the run used {line}" for line in moved]
        self._keys = {source.key for source in sources}
        self._used: set[str] = set()

    def pieces(self) -> list[Piece]:
        found = []
        for pass_ in self._plan.passes:
            found += self._divided(pass_) if _is_divisible(pass_, self._now.spec) else [self._whole(pass_)]
        for piece in found:  # a pass that reads values while they are made is in the phase of their pass
            for other in found:
                if piece.pass_.root in other.pass_.kept and piece.pass_.phase == other.pass_.phase:
                    piece.late = max(piece.late, other.late)
        turns = [piece for piece in found if piece.pass_.updates or piece.pass_.follows]
        for piece in turns:  # passes of a training are in one phase
            piece.late = max(each.late for each in turns)
        for first in [piece for piece in turns if piece.source is None][:1]:
            for piece in turns:
                training = f"it is part of the training of {first.pass_.name}, which is executed again"
                piece.source, piece.why = None, piece.why or [training]
        return found

    def _missing_file(self, source: EarlierPass) -> str:
        journal = self._folder.journal
        return next((name for name in sorted(source.history.files()) if not (journal / name).is_file()), "")

    def _whole(self, pass_: PassPlan) -> Piece:
        """Return a pass that is reused as a whole, without removed folds, or not at all."""
        same = ["dataset", "root", "runs", "updates", "follows", "gang", "batch"]
        same += ["phase"] if pass_.updates or pass_.follows else []

        def continues(source: EarlierPass) -> bool:
            there = source.pass_
            is_free = not source.is_spare and source.key not in self._used
            is_same = all(getattr(there, name) == getattr(pass_, name) for name in same)
            return is_free and is_same and {*pass_.folds} <= {*there.folds}

        source = next(filter(continues, self.sources), None)
        if source is None:
            return self._begun(pass_, [])
        why = [line for name in (*pass_.runs, *pass_.updates) for line in self._changes(pass_, name, source)]
        why += [line for name in pass_.folds for line in self._unusable(pass_, name, source)]
        why += [f"the values of {n} were not stored" for n in pass_.kept if not source.has_values(n)]
        if why:
            return self._begun(pass_, why)
        return Piece(replace(pass_, key=self._key_for(pass_, source)), source)

    def _begun(self, pass_: PassPlan, why: Sequence[str], late: int = 0) -> Piece:
        """Return a pass that begins with its first step."""
        return Piece(self._fresh(pass_), None, list(dict.fromkeys(why)) or self._unknown(pass_), late)

    def _unknown(self, pass_: PassPlan) -> list[str]:
        known = any({*s.pass_.runs, *s.pass_.folds} & {*pass_.runs, *pass_.folds} for s in self.sources)
        return self._missing[:1] or (["the earlier run had no such pass"] if known else [])

    def _divided(self, pass_: PassPlan, late: int = 0) -> list[Piece]:
        found = self._base(pass_)
        if found is None:
            return [self._begun(pass_, self._why(pass_), late)]
        base, folds, stored = found
        kept = [name for name in pass_.kept if name in stored]
        rest: dict[str, tuple[list[str], list[str]]] = {}
        for place, names in enumerate((pass_.folds, pass_.kept)):
            for name in names:
                if name not in folds and name not in kept:
                    root = next((run for run in self._chain(pass_, name) if run in stored), pass_.root)
                    rest.setdefault(root, ([], []))[place].append(name)
        kept += [name for name in pass_.runs if name in rest and name not in kept]
        main = self._part(pass_, pass_.root, folds, kept)
        parts = [self._part(pass_, root, *names) for root, names in rest.items()]
        again = [name for part in parts if part.root == pass_.root for name in part.runs]
        nothing_left = bool(main.runs) and {*main.runs} <= {*again} and not base.history.complete
        if nothing_left or not (main.folds or main.kept):
            return [self._begun(pass_, [line for part in parts for line in self._why(part)], late)]
        pieces = [Piece(replace(main, key=self._key_for(pass_, base)), base, late=late)]
        for part in parts:
            if part.root == pass_.root:
                pieces.append(self._begun(part, self._why(part), late))
            else:
                pieces += self._divided(part, late + 1)
        return pieces

    def _base(self, pass_: PassPlan) -> tuple[EarlierPass, list[str], list[str]] | None:
        """Return the earlier pass with the same input that is of most use, with its usable folds and runs."""
        found: list[tuple[EarlierPass, list[str], list[str]]] = []
        for source in self.sources:
            there = source.pass_
            if (there.dataset, there.root, there.batch) != (pass_.dataset, pass_.root, pass_.batch):
                continue
            is_free = source.is_spare or source.key not in self._used
            if not is_free or not _is_divisible(there, source.spec):
                continue
            stored = [n for n in pass_.runs if source.has_values(n) and not self._changes(pass_, n, source)]
            folds = [name for name in pass_.folds if not self._unusable(pass_, name, source)]
            if folds or stored:
                found.append((source, folds, stored))

        def use(each: tuple[EarlierPass, list[str], list[str]]) -> tuple[int, int, bool]:
            source, folds, stored = each
            return len(folds) + len(stored), source.history.steps, not source.is_spare

        return max(found, key=use, default=None)

    def _chain(self, pass_: PassPlan, name: str) -> list[str]:
        """Return the runs of a pass that a stage reads, the nearest one first."""
        chain = []
        while (name := self._spec.stages[name].of) in pass_.runs:
            chain.append(name)
        return chain

    def _part(self, pass_: PassPlan, root: str, folds: Sequence[str], kept: Sequence[str]) -> PassPlan:
        """Return the pass that makes some values of another one from an input."""
        needed: set[str] = set()
        for name in (*folds, *kept):
            chain = [*([name] if name in pass_.runs else []), *self._chain(pass_, name)]
            needed.update(chain[: chain.index(root)] if root in chain else chain)
        runs = tuple(name for name in pass_.runs if name in needed)
        gpus = max((getattr(self._spec.stages[name], "gpus", 0.0) for name in runs), default=0.0)
        return replace(pass_, root=root, runs=runs, folds=tuple(folds), kept=tuple(kept), gpus=gpus)

    def _key_for(self, pass_: PassPlan, source: EarlierPass) -> str:
        """Return the key of a pass that continues an earlier one; a spare stays as it is."""
        if source.is_spare:
            return self._fresh(pass_).key
        self._used.add(source.key)
        return source.key

    def _fresh(self, pass_: PassPlan) -> PassPlan:
        """Return a pass with a key that no other one has, and none of an earlier run, whose files stay."""
        keys = chain([pass_.key], (f"{pass_.phase}+{n}/{pass_.root}" for n in count(1)))
        key = next(key for key in keys if key not in self._keys)
        self._keys.add(key)
        return replace(pass_, key=key)

    # -- what has changed ------------------------------------------------------------------------------

    def _changes(self, pass_: PassPlan, name: str, source: EarlierPass) -> list[str]:
        """Return the changes that affect the values of a stage."""
        now = self._now
        wanted = now.passes[pass_.key]["needs"][name]
        why: list[str] = []
        for path in dict.fromkeys((*source.described["needs"].get(name, ()), *wanted)):
            why += differences(_at(source.spec, path), _at(now.spec, path), path)
        why += changed_files(source.inputs, now.inputs, wanted)
        modules = dict.fromkeys(m for path in wanted for m in self._modules.get(path, ()))
        why += changed_modules(source.history.code, now.code, modules, Path(self._spec.code))
        return why or self._moved

    def _unusable(self, pass_: PassPlan, name: str, source: EarlierPass) -> list[str]:
        """Return why the committed steps of a fold can't be reused."""
        if name not in source.pass_.folds:
            return [f"the earlier run had no {name} in {source.pass_.name}"]
        if why := self._changes(pass_, name, source):
            return why
        if can_write(self._plan, name, source.history, source.key):
            return []
        if not source.history.complete:
            return [f"the earlier run did not keep the values of {name}, which had no output"]
        if keeps(self._plan, name):
            return [f"a later phase now reads {name}, which the earlier run stored only in its output file"]
        if source.is_spare or not has_files(self._plan, self._folder, name):
            return [
                f"the output of {name} has another name or format, or is missing, and was too large to store"
            ]
        return []

    def _why(self, pass_: PassPlan) -> list[str]:
        """Return why the values of a pass are made again, as far as an earlier run had them."""
        return [line for name in (*pass_.folds, *pass_.kept) for line in self._why_stage(pass_, name)]

    def _why_stage(self, pass_: PassPlan, name: str) -> list[str]:
        for source in self.sources:
            if name in source.pass_.folds:
                return self._unusable(pass_, name, source)
        for source in self.sources:
            if name in source.pass_.runs:
                return self._changes(pass_, name, source) or [f"the values of {name} were not stored"]
        for source in self.sources:
            if name in source.spec["stages"] and not source.is_spare:  # the earlier run did not reach it
                return self._changes(pass_, name, source)
        return [f"{name} is new"] if self.sources else []


def _is_divisible(pass_: PassPlan, spec: Mapping[str, Any]) -> bool:
    quarantines = any(spec["stages"][name].get("on_error") == "quarantine" for name in pass_.runs)
    return not (pass_.updates or pass_.follows or pass_.gang or quarantines)


def _at(document: Mapping[str, Any], path: str) -> Any:
    first, _, rest = path.partition(".")
    value = document.get(first)
    return value.get(rest) if rest and isinstance(value, Mapping) else value


# -- files --------------------------------------------------------------------------------------------


def _taken(journal: Path, plan: Plan, pass_: PassPlan, source: EarlierPass) -> PassHistory:
    """Return the durable state with which a pass continues; that of a spare is copied."""
    found = source.history
    if not (pass_.updates or pass_.follows or pass_.gang):
        names = {*pass_.runs, *(name for name in pass_.folds if grows(plan, name))}
        wanted = {source.log(name) for name in names}
        found = replace(found, logs={name: end for name, end in found.logs.items() if name in wanted})
    if source.key == pass_.key:
        return found
    return _renamed(journal, found, source.key, pass_.key, shutil.copyfile)


def _spares(journal: Path, sources: Sequence[EarlierPass], pieces: Sequence[Piece]) -> dict[str, EarlierPass]:
    """Return the passes that no piece continues, or not with all stages."""
    spares: dict[str, EarlierPass] = {}
    taken = {piece.source.key: piece.pass_ for piece in pieces if piece.source is not None}
    keys = {source.key for source in sources}
    for source in sources:
        if not _is_divisible(source.pass_, source.spec):
            continue  # nothing continues a spare of it
        key, pass_ = source.key, taken.get(source.key)
        if pass_ is not None and not source.is_spare:
            if {*source.pass_.folds} <= {*pass_.folds} and {*source.pass_.runs} <= {*pass_.runs}:
                continue
            key = next(key for n in count(1) if (key := f"spare{n}/{source.pass_.root}") not in keys)
            keys.add(key)
            found = _renamed(journal, source.history, source.key, key, link_or_copy)
            source = replace(source, pass_=replace(source.pass_, key=key), history=found)
        spares[key] = source.as_spare()
    return dict(list(spares.items())[:SPARES_MAX])


def _renamed(journal: Path, found: PassHistory, old: str, new: str, copy: Any) -> PassHistory:
    """Return the state of a pass under another key; `copy` makes its files of the old ones."""

    def name(file: str) -> str:
        return file_name(new, "") + file.removeprefix(file_name(old, ""))

    for file in found.files():
        copy(journal / file, journal / name(file))
        with (journal / name(file)).open("rb") as written:
            os.fsync(written.fileno())
    parts = {
        key: replace(part, file=name(part.file)) if part.file else part for key, part in found.parts.items()
    }
    return replace(found, parts=parts, logs={name(file): end for file, end in found.logs.items()})
