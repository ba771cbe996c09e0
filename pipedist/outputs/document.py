"""The results document of a run: printed by `--json`, kept in the output folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedist.core.types import Tree
from pipedist.errors import CallError
from pipedist.outputs.encoding import Json, to_json

FORMAT = 1
"""The document's version."""

_CAUSE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)


def run_document(
    *,
    run_id: str,
    name: str,
    results: Mapping[str, Tree],
    files: Mapping[str, Path],
    ledger: Mapping[str, int],
    timings: Mapping[str, float],
    error: BaseException | None = None,
    quarantined: Sequence[Mapping[str, Any]] = (),
) -> Json:
    """Return the document of a run that has ended.

    Args:
        run_id: id of the run.
        name: name of the spec.
        results: the value of every reduce, gather and update; not used for stages in `files`.
        files: the file of each stage that has an output.
        ledger: elements, committed, quarantined, lost.
        timings: seconds by name.
        error: the error that ended the run.
        quarantined: `{element, stage, cause}` of each quarantined element.

    Raises:
        OutputError: a result has no JSON form; the text names the stage and the path in its value.
    """
    values: dict[str, Json] = {}
    for stage in [*results, *(stage for stage in files if stage not in results)]:
        if stage in files:
            values[stage] = {"file": str(files[stage].absolute())}
        else:
            values[stage] = to_json({stage: results[stage]})[stage]
    document: dict[str, Json] = {
        "format": FORMAT,
        "run": run_id,
        "name": name,
        "results": values,
        "ledger": dict(ledger),
        "timings": to_json(dict(timings)),
    }
    if error is not None:
        document["error"] = error_document(error)
    if quarantined:
        document["quarantined"] = [to_json(dict(entry)) for entry in quarantined]
    return document


def error_document(error: BaseException) -> Json:
    """Return `{class, message, stage, step, replica}` of the error that ended a run.

    For a failed replica call these are the class and text of the replica function's own exception, and
    `replay` is the command that executes the call again, if there is one. Other errors have no stage,
    step or replica.
    """
    if not isinstance(error, CallError):
        return {
            "class": type(error).__name__,
            "message": str(error),
            "stage": None,
            "step": None,
            "replica": None,
        }
    found = _CAUSE.fullmatch(error.cause)
    replay: dict[str, Json] = {"replay": error.replay} if error.replay else {}
    return {
        "class": found[1] if found else type(error).__name__,
        "message": (found[2] or "") if found else error.cause,
        "stage": error.stage,
        "step": error.step,
        "replica": error.replica,
        **replay,
    }
