"""What a run leaves in its folder, and what is read there of one that was finished before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipedist.runs.quarantine import FILE as QUARANTINE
from pipedist.runs.result import Ledger, Result
from pipedist.runs.resume import listed
from pipedist.spec import RunSpec, Spec

if TYPE_CHECKING:
    from pipedist.outputs import FinishedRun


def files_of(spec: Spec) -> list[str]:
    """Return every file that a run may leave in its folder."""
    stages = spec.stages.values()
    sets_aside = any(isinstance(stage, RunSpec) and stage.on_error == "quarantine" for stage in stages)
    return [*spec.outputs.values(), *([QUARANTINE] if sets_aside else [])]


def restored(spec: Spec, finished: FinishedRun) -> Result:
    """Return the result of a run that was finished before, from its document."""
    document: Any = finished.document
    notice = f"this run was finished before, in {finished.path}"
    if finished.since:
        notice += (
            f", and something has changed since:{listed(finished.since)}\n"
            "  --resume=reuse makes again what hangs on that, --restart everything"
        )
    files = {n: finished.files[o] for n, o in spec.outputs.items() if o in finished.files}
    return Result(
        name=document["name"],
        run_id=document["run"],
        by_stage={n: files.get(n, value) for n, value in document["results"].items()},
        files=files,
        ledger=Ledger(**document["ledger"]),
        timings=document["timings"],
        quarantined=document.get("quarantined", []),
        quarantine_file=finished.files.get(QUARANTINE),
        notice=notice,
        restored=document,
    )
