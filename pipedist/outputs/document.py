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
    retries: Mapping[str, Mapping[str, int]] = {},
) -> Json:
    """Return the document of a run that has ended.

    Args:
        results: the value of every reduce, gather and update; not used for stages in `files`.
        files: the file of each stage that has an output.
        timings: seconds by name.
        error: the error that ended the run.
        quarantined: `{element, stage, cause}` of each quarantined element.
        retries: number of calls that were executed again, by stage and reason.

    Raises:
        OutputError: a result has no JSON form; the text names the stage and the path in its value.
    """
    values: dict[str, Json] = {}
    for stage in {**results, **files}:
        values[stage] = (
            {"file": str(files[stage].absolute())} if stage in files else to_json(results[stage], (stage,))
        )
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
    if retries:
        document["retries"] = {stage: dict(counts) for stage, counts in retries.items()}
    if quarantined:
        document["quarantined"] = [to_json(dict(entry)) for entry in quarantined]
    return document


def error_document(error: BaseException) -> Json:
    """Return `{class, message, stage, step, replica}` of the error that ended a run.

    For a failed replica call these are the class and text of the replica function's own exception, and
    `replay` is the command that executes the call again, if there is one. Other errors have no stage,
    step or replica.
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
        document |= {"stage": error.stage, "step": error.step, "replica": error.replica}
        if error.replay:
            document["replay"] = error.replay
    return document
