"""The results document of a run: printed by `--json`, kept in the output folder.

In a run with an output folder, a value of more than INLINE_BYTES_MAX has a file in `.pipedist/values/RUN/`, and the
document has a reference: `file`, an absolute path, and for arrays `dtype` and `shape`. The file is a `.npy` or
`.npz`, with the values of steps or epochs stacked, or a `.json` if the value has other leaves than arrays and
numbers, or too many of them. A table by key is a `.csv`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import CallError, OutputError, QuarantineError
from pipedist.outputs.encoding import Json, is_keyed_table, text, to_json
from pipedist.outputs.formats import open_sink
from pipedist.outputs.run_record import writing

FORMAT = 1

INLINE_BYTES_MAX = 2**16  # bytes of the arrays of a value, or of its JSON, that a document has inline

MEMBERS_MAX = 64  # arrays of one `.npz`

_CAUSE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)


def run_document(
    *,
    run_id: str,
    name: str,
    results: Mapping[str, Tree],
    files: Mapping[str, Path],
    ledger: Mapping[str, int],
    timings: Mapping[str, float],
    stored: Mapping[str, Json] = {},
    error: BaseException | None = None,
    quarantined: Sequence[Mapping[str, Any]] = (),
    retries: Mapping[str, Mapping[str, int]] = {},
    measurements: Mapping[str, Json] = {},
    resumed: Mapping[str, Mapping[str, int]] = {},
) -> Json:
    """Return the document of a run that has ended.

    Args:
        results: the value of every reduce, gather and update; not used for stages in `files`.
        files: the file of each stage that has an output, or of STAGE/PATH, a part of its value.
        timings: seconds by name.
        stored: references to large values, by stage, made by `store_large`.
        error: the error that ended the run.
        quarantined: `{element, stage, cause}` of each quarantined element.
        retries: number of attempts of calls that did not count, by stage and reason.
        measurements: timings by stage and worker.
        resumed: number of steps, calls and elements that were taken from the journal, by pass.

    Raises:
        OutputError: a result has no JSON form; the text names the stage and the path in its value.
    """
    values: dict[str, Json] = {}
    parts: dict[str, dict[str, Json]] = {}
    for key, file in files.items():
        stage, _, part = key.partition("/")
        if part:
            parts.setdefault(stage, {})[part] = {"file": str(file.absolute())}
    for stage in dict.fromkeys([*results, *(key.partition("/")[0] for key in files)]):
        if stage in files:
            values[stage] = {"file": str(files[stage].absolute())}
        elif stage in parts:
            values[stage] = parts[stage]
        else:
            values[stage] = stored[stage] if stage in stored else to_json(results[stage], (stage,))
    document: dict[str, Json] = {
        "format": FORMAT,
        "run": run_id,
        "name": name,
        "results": values,
        "ledger": dict(ledger),
        "timings": to_json(dict(timings)),
    }
    if measurements:
        document["measurements"] = dict(measurements)
    if error is not None:
        document["error"] = error_document(error)
    if retries:
        document["retries"] = {stage: dict(counts) for stage, counts in retries.items()}
    if resumed:
        document["resumed"] = {name: dict(counts) for name, counts in resumed.items()}
    if quarantined:
        document["quarantined"] = [to_json(dict(entry)) for entry in quarantined]
    return document


def store_large(results: Mapping[str, Tree], folder: Path, pers: Mapping[str, str]) -> dict[str, Json]:
    """Write values above INLINE_BYTES_MAX to files in a folder, and return references, by stage.

    Args:
        folder: created with the first file.
        pers: the scope of each stage: run, epoch or step.

    Raises:
        OutputError: a file can't be written, or a value has no JSON form.
    """
    return {
        name: _stored(folder / name, value, None if pers[name] == "run" else value)
        for name, value in results.items()
        if not isinstance(value, Path) and _is_large(name, value)
    }


def _is_large(name: str, value: Tree) -> bool:
    if is_keyed_table(value) and value.nbytes > INLINE_BYTES_MAX:
        return True
    return _array_bytes(value) > INLINE_BYTES_MAX or len(text(to_json(value, (name,)))) > INLINE_BYTES_MAX


def _array_bytes(value: Tree) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in trees.flatten(value)[0])


def _stored(path: Path, value: Tree, series: Sequence[Tree] | None) -> Json:
    """Write a value, or the `series` of values that it is, in the first format that fits."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    leaves = len(trees.flatten(series[0] if series else value)[0])
    has_arrays = leaves <= MEMBERS_MAX and _array_bytes(value) > INLINE_BYTES_MAX
    endings = (".csv",) if is_keyed_table(value) else (".npy", ".npz", ".json") if has_arrays else (".json",)
    for ending in endings:
        sink = open_sink(path.with_suffix(ending), shape="run" if series is None else "per", gather=False)
        try:
            for one in [value] if series is None else series:
                sink.append(one)
            return _reference(sink.finish())
        except OutputError:
            if ending == endings[-1]:
                raise
        finally:
            sink.abort()
    raise AssertionError("the last format raises its own error")


def _reference(path: Path) -> Json:
    if path.suffix in (".json", ".csv"):
        return {"file": str(path)}
    from pipedist.outputs.array_files import members

    found = dict(members(path))
    if path.suffix == ".npy":
        dtype, shape = found[""]
        return {"file": str(path), "dtype": dtype, "shape": [*shape]}
    dtypes = {name: dtype for name, (dtype, _) in found.items()}
    return {"file": str(path), "dtype": dtypes, "shape": {n: [*shape] for n, (_, shape) in found.items()}}


def error_document(error: BaseException) -> Json:
    """Return `{class, message, stage, step, replica}` of the error that ended a run.

    For a failed replica call these are the class and text of the replica function's own exception. For it, and
    for too many failed elements, `replay` is the command that executes the (first) call again, if there is one.
    Other errors have no stage, step or replica.
    """
    document: dict[str, Json] = {
        "class": type(error).__name__,
        "message": str(error),
        "stage": None,
        "step": None,
        "replica": None,
    }
    if isinstance(error, CallError):
        found = _CAUSE.fullmatch(error.cause)
        document["message"] = error.cause
        if found:
            document |= {"class": found[1], "message": found[2] or ""}
    elif isinstance(error, QuarantineError):
        document["message"] = error.args[0]
    if isinstance(error, CallError | QuarantineError):
        document |= {"stage": error.stage, "step": error.step, "replica": error.replica}
        if error.replay:
            document["replay"] = error.replay
    return document
