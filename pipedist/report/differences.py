"""The differences of two runs: what they were made from, and their results.

Two runs are the same if their results, outputs, ledgers and quarantined elements are. Their specs, inputs, code and
versions are listed, because they explain differences, but do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from pipedist.core.names import plural
from pipedist.datasets.division import Division, permutation
from pipedist.errors import JournalError, UsageError
from pipedist.journal.history import History, read_history
from pipedist.outputs.run_record import PRIVATE, RunRecord, existing_record, read_results
from pipedist.report.data import read_json
from pipedist.report.file_differences import Chosen, Differences, Rows, compare_files, compare_trees
from pipedist.runs.about import FAILURE_FILE
from pipedist.runs.about import FILE as ABOUT
from pipedist.runs.identity import differences
from pipedist.runs.input_stamps import changed_files
from pipedist.runs.quarantine import FILE as QUARANTINE

FORMAT = 1
LINES_MAX = 20  # of a section of the text
ELEMENTS_MAX = 5  # that are listed of the rows that only one run has
POSITIONS_MAX = 2**26  # elements of a pass whose rows are compared by element if some are quarantined

_ENVIRONMENT_ONLY = ("cores", "system", "host")  # of the environment; they do not decide results
_SETTINGS = ("concurrency", "rate")  # keys of stages that decide the time of calls only


class ComparedRun(Struct, frozen=True):
    """The content of a run's folder."""

    path: Path
    record: RunRecord
    history: History | None
    about: Mapping[str, Any]
    document: Mapping[str, Any]  # empty if the run has not ended
    failure: str

    @classmethod
    def of(cls, path: Path) -> ComparedRun:
        record = existing_record(path)
        private = path / PRIVATE
        try:
            history = read_history(private / "journal")
        except (UsageError, JournalError):  # a run of another version, whose results can be compared
            history = None
        about, failure = read_json(private / ABOUT), read_json(private / FAILURE_FILE)
        document = read_results(path, path) if record.complete else {}
        return cls(path, record, history, about, document, failure.get("text", ""))

    @property
    def state(self) -> str:
        return self.record.state if self.record.state in ("finished", "failed") else "not finished"

    @property
    def ledger(self) -> Mapping[str, int]:
        if self.document:
            return dict(self.document.get("ledger", {}))
        return {} if self.history is None else self.history.ledger()

    def file_of(self, stage: str) -> Path | None:
        """Return the file that has the value of a stage; None: the value is in the document."""
        if stage in self.record.outputs:
            return self.path / self.record.outputs[stage]
        return next((self.path / PRIVATE / "values" / self.record.run).glob(f"{stage}.*"), None)


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Return the differences of the runs in two output folders, as plain JSON values.

    Raises:
        UsageError: there is no run in a folder, or its files can't be read.
    """
    there, here = ComparedRun.of(a), ComparedRun.of(b)
    notes = [
        f"{name} has {run.state if run.state != 'failed' else 'failed'}, so it has no results"
        for name, run in (("A", there), ("B", here))
        if not run.record.complete
    ]
    stages = list(dict.fromkeys((*there.document.get("results", {}), *here.document.get("results", {}))))
    results = [_stage(there, here, key) for name in stages for key in _files_of(there, here, name)]
    if QUARANTINE in there.record.files or QUARANTINE in here.record.files:
        results.append(_quarantine(there.path / QUARANTINE, here.path / QUARANTINE))
    ledger = [*_lines(there.ledger, here.ledger, "")]
    ends = [*_lines(there.state, here.state, "state"), *_lines(there.failure, here.failure, "error")]
    return {
        "format": FORMAT,
        "a": {"folder": str(a), "run": there.record.run, "state": there.state},
        "b": {"folder": str(b), "run": here.record.run, "state": here.state},
        "same": not (ledger or ends or any(not each["same"] for each in results)),
        "notes": notes + _without_journal(there, here),
        **_causes(there, here),
        "end": ends,
        "ledger": ledger,
        "results": results,
    }


def _without_journal(there: ComparedRun, here: ComparedRun) -> list[str]:
    return [
        f"the journal of {name} is missing, or of another version, so specs, inputs and code are not compared"
        for name, run in (("A", there), ("B", here))
        if run.history is None
    ]


def _lines(a: Any, b: Any, path: str) -> Iterator[str]:
    return differences(a, b, path, called=("in A", "in B"))


def _causes(there: ComparedRun, here: ComparedRun) -> dict[str, list[str]]:
    """Return what differs in what the runs were made from, as lines by kind."""
    spec: list[str] = []
    inputs: list[str] = []
    code: list[str] = []
    versions: list[str] = []
    without_effect: list[str] = []
    if there.history is not None and here.history is not None:
        a, b = there.history.header, here.history.header
        spec = [*_lines(a.spec, b.spec, "")]
        inputs = [
            *changed_files(a.inputs, b.inputs, [*dict.fromkeys((*a.inputs, *b.inputs))], called=("A", "B"))
        ]
        modules = dict.fromkeys((*a.code, *b.code))
        code = [f"module {each} differs" for each in modules if a.code.get(each) != b.code.get(each)]
        traits = (a.platform.get("traits"), b.platform.get("traits"))
        if traits[0] != traits[1]:
            versions.append("processor features differ")
    environments = [dict(run.about.get("environment", {})) for run in (there, here)]
    for name in _ENVIRONMENT_ONLY:
        pair = [each.pop(name, None) for each in environments]
        without_effect += _lines(pair[0], pair[1], name)
    # a package is listed if the run's process had imported it, which depends on more than the run
    first, second = environments
    listed = [{name: each[name] for name in first if name in second} for each in environments]
    versions += _lines(listed[0], listed[1], "")
    without_effect += _lines(_settings(there), _settings(here), "")
    return {"spec": spec, "inputs": inputs, "code": code, "versions": versions, "no_effect": without_effect}


def _settings(run: ComparedRun) -> dict[str, Any]:
    """Return what a spec sets that does not decide results."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    planned = run.about.get("plan", {})
    found: dict[str, Any] = {name: planned.get(name) for name in ("name", "workers", "outputs")}
    try:
        written = YAML(typ="safe", pure=True).load(run.about.get("spec", ""))
    except YAMLError:
        return found
    if isinstance(written, dict):
        found["cluster"] = json.loads(json.dumps(written.get("cluster", {}), default=str))
        for name, stage in (written.get("stages") or {}).items():
            kept = {key: str(stage[key]) for key in _SETTINGS if isinstance(stage, dict) and key in stage}
            if kept:
                found[f"stages.{name}"] = kept
    return found


# -- results ------------------------------------------------------------------------------------------


def _files(a: Path, b: Path, chosen: Chosen | None = None) -> tuple[str, Differences]:
    missing = [f"{name} has no {path.name}" for name, path in (("A", a), ("B", b)) if not path.exists()]
    return " and ".join(missing), Differences() if missing else compare_files(a, b, chosen)


def _files_of(there: ComparedRun, here: ComparedRun, stage: str) -> list[str]:
    """Return what to compare of a stage: its value, or the parts of it that have files."""
    keys = dict.fromkeys((*there.record.outputs, *here.record.outputs))
    return [key for key in keys if key.startswith(f"{stage}/")] or [stage]


def _stage(there: ComparedRun, here: ComparedRun, stage: str) -> dict[str, Any]:
    for name, run in (("A", there), ("B", here)):
        if stage.partition("/")[0] not in run.document.get("results", {}):
            return _entry(stage, "", f"{name} has no value", Differences())
    a, b = there.file_of(stage), here.file_of(stage)
    if (a is None) != (b is None):
        return _entry(
            stage, "", "its value has a file in one of the runs only, so it is not compared", Differences()
        )
    shown = str(a.relative_to(there.path)) if a is not None and stage in there.record.outputs else ""

    def compared(chosen: Chosen | None = None) -> tuple[str, Differences]:
        if a is None or b is None:
            values = [run.document["results"][stage] for run in (there, here)]
            return "", compare_trees(values[0], values[1], chosen)
        return _files(a, b, chosen)

    order = _order(there, here, stage)
    problem, found = compared(None if order is None else order.chosen)
    if order is not None and order.lengths != found.rows:  # the rows are not one for each element
        if order.chosen is not None:
            problem, found = compared()
        order = None
    entry = _entry(stage, shown, problem, found)
    if order is not None and order.chosen is not None:
        entry = _with_only(entry, order.only)
    if found.row >= 0:
        entry["first"] |= _place(there, here, stage, found.row, order)
    return entry


def _entry(stage: str, file: str, problem: str, found: Differences) -> dict[str, Any]:
    values = msgspec.to_builtins(found)
    first = {name: values.pop(name) for name in ("row", "path")}
    a, b = values.pop("first")
    texts = {name: str(values[name]) for name in ("max_abs", "max_rel") if values[name] == float("inf")}
    return {
        "stage": stage,
        "file": file,
        "same": not problem and found.is_empty,
        **values,
        "rows": list(found.rows),
        **texts,  # JSON has no infinity
        "problem": problem or found.problem,
        "first": {**first, "a": a, "b": b} if found.row >= 0 else None,
    }


def _with_only(entry: dict[str, Any], only: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of rows that were compared by element, with those that only one run has."""
    return entry | {"only": only, "same": entry["same"] and not any(each["rows"] for each in only.values())}


def _quarantine(a: Path, b: Path) -> dict[str, Any]:
    """Compare the lines of quarantined elements, by element."""
    problem, found = _files(a, b)
    if problem or found.problem or found.is_empty:
        return _entry("", QUARANTINE, problem, found)
    lines = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (a, b)]
    keys = [[(each["dataset"], each["stage"], each["element"]) for each in run] for run in lines]
    both = {*keys[0]} & {*keys[1]}
    there, here = (np.array([key in both for key in run], np.bool_) for run in keys)
    chosen = (np.flatnonzero(there), np.flatnonzero(here))
    if [keys[0][row] for row in chosen[0]] != [keys[1][row] for row in chosen[1]]:  # another order
        return _entry("", QUARANTINE, problem, found)
    problem, found = _files(a, b, chosen)
    if found.row >= 0:
        found.row = int(chosen[0][found.row])
    elements = [np.array([key[2] for key in run], np.int64) for run in keys]
    only = {"a": _only(elements[0][~there]), "b": _only(elements[1][~here])}
    return _with_only(_entry("", QUARANTINE, problem, found), only)


class _Order:
    """The element of each row of a gather in two runs, as the spec's contract decides it.

    A place is the number of an element in the order in which the steps have them, through all epochs. Rows of
    quarantined elements are missing.
    """

    def __init__(
        self,
        division: Division,
        epochs: int,
        permute: Callable[[int], Rows] | None,
        quarantined: Sequence[set[int]],
    ) -> None:
        self._division = division
        self._permute = permute
        self._whole = min(division.length, division.steps_per_epoch * division.batch)  # elements of an epoch
        count = self._whole * epochs
        self.lengths = (count, count)
        self.chosen: Chosen | None = None
        """The rows of the elements that both runs have; None: those of all elements."""
        self._places: Rows | None = None
        if not any(quarantined):
            return
        elements = np.concatenate([self._elements(epoch) for epoch in range(epochs)])
        there, here = (np.isin(elements, [*each], invert=True) for each in quarantined)
        self.lengths = (int(there.sum()), int(here.sum()))
        self._places = np.flatnonzero(there & here)
        rows_a, rows_b = (np.cumsum(each) - 1 for each in (there, here))
        self.chosen = (rows_a[self._places], rows_b[self._places])
        self.only = {
            name: _only(elements[alone]) for name, alone in (("a", there & ~here), ("b", here & ~there))
        }

    def _elements(self, epoch: int) -> Rows:
        length = self._division.length
        order = np.arange(self._whole) if self._permute is None else self._permute(epoch)[: self._whole]
        return order + epoch * length

    def of(self, row: int) -> dict[str, int]:
        """Return step, replica and element of a row that was compared, and its numbers if both differ."""
        place, rows = row, {}
        if self.chosen is not None and self._places is not None:
            place = int(self._places[row])
            rows = {"row": int(self.chosen[0][row]), "row_b": int(self.chosen[1][row])}
        division = self._division
        epoch, position = divmod(place, self._whole)
        step = epoch * division.steps_per_epoch + position // division.batch
        replica = position % division.batch // -(-division.rows(step) // division.replicas)
        index = position if self._permute is None else int(self._permute(epoch)[position])
        return {**rows, "step": step, "replica": replica, "element": epoch * division.length + index}


def _only(elements: Rows) -> dict[str, Any]:
    """Return the number of rows that only one run has, and the first of their elements."""
    return {"rows": len(elements), "elements": elements[:ELEMENTS_MAX].tolist()}


def _order(there: ComparedRun, here: ComparedRun, stage: str) -> _Order | None:
    """Return the order of the rows of a gather, as far as the spec's contract decides it."""
    if there.history is None or here.history is None:
        return None
    a, b = there.history.header, here.history.header
    stage = stage.partition("/")[0]
    contract = ("replicas", "seed", "datasets")
    if a.spec["stages"].get(stage, {}).get("gather") != 0 or any(a.spec[x] != b.spec[x] for x in contract):
        return None
    histories = (there.history, here.history)
    passes = [
        next(((key, each) for key, each in history.header.passes.items() if stage in each["folds"]), None)
        for history in histories
    ]
    if passes[0] is None or passes[1] is None:
        return None
    pass_ = passes[0][1]
    name = pass_["dataset"]
    lengths = {
        run.about.get("plan", {}).get("datasets", {}).get(name, {}).get("elements_per_epoch")
        for run in (there, here)
    }
    length, dataset = next(iter(lengths)), a.spec["datasets"][name]
    if len(lengths) > 1 or not length or pass_["batch"] != dataset["batch"]:
        return None
    quarantined = [
        {*history.passes[found[0]].quarantined} if found is not None and found[0] in history.passes else set()
        for history, found in zip(histories, passes, strict=True)
    ]
    if any(quarantined) and length * dataset["epochs"] > POSITIONS_MAX:
        return None
    division = Division(length, dataset["batch"], a.replicas, dataset["drop_remainder"])
    seed = a.spec["seed"]
    permute = (lambda epoch: permutation(seed, name, epoch, length)) if dataset["shuffle"] else None
    return _Order(division, dataset["epochs"], permute, quarantined)


def _place(
    there: ComparedRun, here: ComparedRun, stage: str, row: int, order: _Order | None
) -> dict[str, int]:
    """Return step, replica and element of a row, as far as they are known."""
    if there.history is None or here.history is None:
        return {}
    per = there.history.header.spec["stages"].get(stage.partition("/")[0], {}).get("per")
    if per in ("step", "epoch"):
        return {per: row}
    return {} if order is None else order.of(row)


# -- text ---------------------------------------------------------------------------------------------

_TITLES = {
    "notes": "",
    "spec": "spec",
    "inputs": "inputs",
    "code": "code",
    "versions": "versions",
    "no_effect": "no effect on results",
    "end": "end",
    "ledger": "ledger",
}


def as_text(found: Mapping[str, Any]) -> str:
    """Return the differences as text, grouped."""
    lines = [
        f"{name.upper()}: {found[name]['folder']} (run {found[name]['run']}, {found[name]['state']})"
        for name in ("a", "b")
    ]
    for section, title in _TITLES.items():
        if found[section]:
            lines += [title] if title else []
            shown = found[section][:LINES_MAX]
            lines += [f"  {line}" if title else line for line in shown]
            rest = len(found[section]) - len(shown)
            lines += [f"  ... and {rest} more"] if rest else []
    if found["results"]:
        lines.append("results")
    for entry in found["results"]:
        lines += _of_entry(entry)
    return "\n".join([*lines, "The runs have the same results." if found["same"] else "The runs differ."])


def _of_entry(entry: Mapping[str, Any]) -> Iterator[str]:
    name = " ".join(
        filter(None, (entry["stage"], f"({entry['file']})" if entry["stage"] and entry["file"] else ""))
    )
    texts = [entry["problem"]] if entry["problem"] else []
    a, b = entry["rows"]
    if a != b:
        texts.append(f"{a:,} rows in A, {b:,} in B")
    only = entry.get("only", {"a": {"rows": 0}, "b": {"rows": 0}})
    texts += [_only_in(name.upper(), each) for name, each in only.items() if each["rows"]]
    if entry["differing"]:
        both = min(a - only["a"]["rows"], b - only["b"]["rows"])
        texts.append(f"{entry['differing']:,} of {both:,} rows differ" if (a, b) != (1, 1) else "differs")
    if entry["nan"]:
        texts.append(f"{entry['nan']:,} number{'s are' if entry['nan'] != 1 else ' is'} NaN in one run only")
    if entry["max_abs"]:
        sizes = [
            each if isinstance(each, str) else f"{each:.3g}" for each in (entry["max_abs"], entry["max_rel"])
        ]
        texts.append(f"max abs {sizes[0]}, max rel {sizes[1]}")
    yield f"  {name or entry['file']}: {'same' if entry['same'] else ', '.join(texts)}"
    first = entry["first"]
    if first is not None:
        kinds = ("epoch", "step", "replica", "element")
        place = ", ".join(f"{kind} {first[kind]}" for kind in kinds if kind in first)
        row = "" if (a, b) == (1, 1) else f"row {first['row']}"
        if first.get("row_b", first["row"]) != first["row"]:
            row += f" in A, {first['row_b']} in B"
        where = f"{row} ({place})" if row and place else row or place
        where = ", ".join(filter(None, (where, first["path"])))
        yield f"    first{' at ' if where else ''}{where}: {first['a']} in A, {first['b']} in B"


def _only_in(run: str, only: Mapping[str, Any]) -> str:
    elements = ", ".join(map(str, only["elements"])) + ", ..." * (only["rows"] > len(only["elements"]))
    what = "element" if only["rows"] == 1 else "elements"
    return f"{plural(only['rows'], 'row')} only in {run} ({what} {elements})"
