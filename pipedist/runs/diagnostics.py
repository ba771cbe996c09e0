"""What a run waits for, as one document: for `Run.why`, for people, and for `pipedist why`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipedist.runs.result import Progress

if TYPE_CHECKING:
    from pipedist.runs.execution import Execution

VERSION = 1
"""Of the document."""

Document = dict[str, Any]
"""Plain JSON values; docs/stalls.md says which."""


def document(run: str, name: str, state: str, execution: Execution | None) -> Document:
    """Return what a run waits for.

    Args:
        run, name: its id, and its name.
        state: "starting", "running", "ending" (its steps are done, its files are not) or "ended".
        execution: None where it has not begun.
    """
    said: Document = {"pipedist_why": VERSION, "run": run, "name": name, "state": state}
    if execution is None:
        return said
    stall, waits = execution.waits()
    progress = execution.progress()
    told = [_told(asdict(wait)) for wait in waits]
    committing_s = execution.committing_s
    if committing_s is not None:
        text = "the disk has not confirmed what the journal was given"
        told.append({"reason": "journal", "for_s": round(committing_s, 3), "text": text})
    if state == "running" and not told:
        told.append(
            {"reason": "outputs", "for_s": None, "text": "no call is left: values and files are completed"}
        )
    scheduler = stall.scheduler
    return said | {
        "phase": progress.phase + 1,
        "phases": progress.phases,
        "elapsed_s": round(progress.elapsed_s, 3),
        "silent_s": round(scheduler.silent_s, 3),
        "passes": [_counted(progress, place) for place in range(len(progress.passes))],
        "workers": {
            "ready": scheduler.ready,
            "busy": scheduler.busy,
            "suspended": list(scheduler.suspended),
            "starting": list(scheduler.starting),
        },
        "waits": told,
    }


def _told(wait: dict[str, Any]) -> dict[str, Any]:
    del wait["pass_id"]
    if wait["reason"] != "running":
        del wait["stage"]
    if wait["for_s"] is not None:
        wait["for_s"] = round(wait["for_s"], 3)
    return wait


def _counted(progress: Progress, place: int) -> dict[str, Any]:
    count = progress.passes[place]
    steps = {"steps_done": count.steps_done, "steps_total": count.steps_total}
    return {"stages": count.name, "dataset": count.dataset, **steps, "calls_done": count.calls_done}


def lines(said: Document) -> list[str]:
    """Return a document for people."""
    if "waits" not in said:
        return [f"run {said['run']} of {said['name']}: {said['state']}"]
    workers = said["workers"]
    head = (
        f"run {said['run']} of {said['name']}: {said['state']} for {_seconds(said['elapsed_s'])}, phase "
        f"{said['phase']} of {said['phases']}; nothing has moved for {_seconds(said['silent_s'])}"
    )
    there = f"  workers: {workers['ready']} ready, {workers['busy']} of them busy"
    for what, names in (("starting", workers["starting"]), ("laid off", workers["suspended"])):
        if names:
            there += f"; {what}: {', '.join(names)}"
    return [head, there, *(f"  {_line(wait)}" for wait in said["waits"])]


def _line(wait: Document) -> str:
    reason, text = wait["reason"], wait["text"]
    lasting = "" if wait["for_s"] is None else f" for {_seconds(wait['for_s'])}"
    if "step" not in wait:
        return f"waits for {reason}{lasting}: {text}"
    where = f"{wait['stages']}: step {wait['step']}, replica {wait['replica']}"
    if wait["calls"] > 1:
        more = wait["calls"] - 1
        where += " and the call after it" if more == 1 else f" and the {more:,} calls after it"
    if wait["attempt"]:
        where += f", attempt {wait['attempt'] + 1}"
    at = f" on {wait['worker']}" if wait["worker"] else ""
    what = f"{reason}{at}{lasting}" if reason in ("running", "queued") else f"waits for {reason}{at}{lasting}"
    return f"{where}: {what}{'; ' if text else ''}{text}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"
