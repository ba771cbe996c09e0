"""The differences of two runs: what they were made from, and their results.

Two runs are the same if their results, outputs, ledgers and quarantined elements are. Their specs, inputs, code and
versions are listed, because they explain differences, but do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pipedist.datasets.division import Division, permutation
from pipedist.errors import JournalError, UsageError
from pipedist.journal.history import History, read_history
from pipedist.outputs.run_record import PRIVATE, RunRecord, existing_record, read_results
from pipedist.report.data import read_json
from pipedist.report.file_differences import Differences, compare_files, compare_trees
from pipedist.runs.about import FAILURE_FILE
from pipedist.runs.about import FILE as ABOUT
from pipedist.runs.identity import changed_files, differences
from pipedist.runs.quarantine import FILE as QUARANTINE

FORMAT = 1
LINES_MAX = 20  # of a section of the text

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
        results.append(_entry("", QUARANTINE, *_files(there.path / QUARANTINE, here.path / QUARANTINE)))
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


def _files(a: Path, b: Path) -> tuple[str, Differences]:
    missing = [f"{name} has no {path.name}" for name, path in (("A", a), ("B", b)) if not path.exists()]
    if len(missing) == 1:
        return missing[0], Differences()
    return "", compare_files(a, b) if not missing else Differences()


def _files_of(there: ComparedRun, here: ComparedRun, stage: str) -> list[str]:
    """Return what to compare of a stage: its value, or the parts of it that have files."""
    keys = dict.fromkeys((*there.record.outputs, *here.record.outputs))
    return [key for key in keys if key.startswith(f"{stage}/")] or [stage]


def _stage(there: ComparedRun, here: ComparedRun, stage: str) -> dict[str, Any]:
    for name, run in (("A", there), ("B", here)):
        if stage.partition("/")[0] not in run.document.get("results", {}):
            return _entry(stage, "", f"{name} has no value", Differences())
    a, b = there.file_of(stage), here.file_of(stage)
    if a is not None and b is not None:
        problem, found = _files(a, b)
        shown = str(a.relative_to(there.path)) if stage in there.record.outputs else ""
    elif a is None and b is None:
        shown, problem = "", ""
        found = compare_trees(there.document["results"][stage], here.document["results"][stage])
    else:
        return _entry(
            stage, "", "its value has a file in one of the runs only, so it is not compared", Differences()
        )
    entry = _entry(stage, shown, problem, found)
    if found.row >= 0:
        entry["first"] |= _place(there, here, stage, found)
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


def _place(there: ComparedRun, here: ComparedRun, stage: str, found: Differences) -> dict[str, Any]:
    """Return step, replica and element of a row, as far as the spec's contract decides them."""
    if there.history is None or here.history is None:
        return {}
    a, b = there.history.header, here.history.header
    stage = stage.partition("/")[0]
    spec = a.spec["stages"].get(stage, {})
    if spec.get("per") in ("step", "epoch"):
        return {spec["per"]: found.row}
    contract = ("replicas", "seed", "datasets")
    if spec.get("gather") != 0 or any(a.spec[name] != b.spec[name] for name in contract):
        return {}
    pass_ = next((each for each in a.passes.values() if stage in each["folds"]), None)
    if pass_ is None or there.ledger.get("quarantined") or here.ledger.get("quarantined"):
        return {}
    name = pass_["dataset"]
    planned = there.about.get("plan", {}).get("datasets", {}).get(name, {})
    length, dataset = planned.get("elements_per_epoch"), a.spec["datasets"][name]
    if not length or pass_["batch"] != dataset["batch"]:
        return {}
    division = Division(length, dataset["batch"], a.replicas, dataset["drop_remainder"])
    whole = min(length, division.steps_per_epoch * division.batch)
    if found.rows != (whole * dataset["epochs"],) * 2:  # the rows are not one for each element
        return {}
    epoch, position = divmod(found.row, whole)
    step = epoch * division.steps_per_epoch + position // division.batch
    replica = position % division.batch // -(-division.rows(step) // a.replicas)
    index = (
        int(permutation(a.spec["seed"], name, epoch, length)[position]) if dataset["shuffle"] else position
    )
    return {"step": step, "replica": replica, "element": epoch * length + index}


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
    if entry["differing"]:
        texts.append(
            f"{entry['differing']:,} of {min(a, b):,} rows differ" if (a, b) != (1, 1) else "differs"
        )
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
        where = f"{row} ({place})" if row and place else row or place
        where = ", ".join(filter(None, (where, first["path"])))
        yield f"    first{' at ' if where else ''}{where}: {first['a']} in A, {first['b']} in B"
