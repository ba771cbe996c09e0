"""The data of a report, read from a run's folder into plain JSON values.

Everything has a limit, so that the page of a run with many calls stays small: spans are thinned as they are in the
folder, curves have at most `POINTS_MAX` points, and previews the first rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedist.coordinator.spans import thin
from pipedist.errors import UsageError
from pipedist.outputs.run_record import LIVE, PRIVATE, RunRecord, existing_record
from pipedist.plan.picture import picture
from pipedist.report.file_differences import files_in
from pipedist.report.previews import curves, preview
from pipedist.runs.about import FAILURE_FILE
from pipedist.runs.about import FILE as ABOUT
from pipedist.runs.diagnostics import query_status
from pipedist.runs.quarantine import FILE as QUARANTINE
from pipedist.runs.timings import Measured, read_timings

FORMAT = 1
SPANS_MAX = 20_000  # of each process that executed the run
BUCKETS = 160  # of the throughput over time
QUARANTINED_MAX = 200
LOG_LINES_MAX = 1_000
REPLY_S = 5.0  # for a run that is executing to say what it waits for

Data = dict[str, Any]


def collect(path: Path, *, live: bool = False) -> Data:
    """Return everything that a report of a run shows, as plain JSON values.

    Args:
        path: the output folder.
        live: without digests and previews of outputs, which a run that is executing does not have yet.

    Raises:
        UsageError: there is no run in the folder, or its files can't be read.
    """
    record = existing_record(path)
    private = path / PRIVATE
    about = read_json(private / ABOUT)
    status = _status(private / LIVE)
    document = read_json(private / "results.json") if record.complete else {}
    processes = read_timings(private / "timings")
    state = _state(record, status)
    files = [] if live else _outputs(path, record)
    failure = read_json(private / FAILURE_FILE)
    return {
        "format": FORMAT,
        "at": time.time(),
        "folder": str(path),
        "run": record.run,
        "name": processes[-1].name if processes else path.name,
        "state": state,
        "failure": failure.get("text"),
        "has_advice": failure.get("has_advice", False),
        "about": about,
        "picture": picture(about["graph"]) if "graph" in about else None,
        "status": status,
        "ledger": document.get("ledger"),
        "retries": document.get("retries", {}),
        "processes": [_process(each) for each in processes],
        "quarantine": _quarantine(path if record.complete else private / "new"),
        "outputs": files,
        "curves": [] if live else curves(path, about.get("pers", {}), document, record.outputs),
        "log": _log(private),
    }


def _state(record: RunRecord, status: Data | None) -> str:
    if status is not None:
        return "running"
    return record.state if record.state in ("finished", "failed") else "interrupted"


def read_json(path: Path) -> Data:
    try:
        found: Data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    return found


def _status(folder: Path) -> Data | None:
    reply = query_status(folder, REPLY_S)
    try:
        return None if reply is None else json.loads(reply)
    except ValueError:  # the run ended while it replied
        return None


def _process(measured: Measured) -> Data:
    spans = measured.spans
    shown: NDArray[np.void] = spans
    while len(shown) > SPANS_MAX:
        shown = thin(shown)
    return {
        "began_at": measured.began_at,
        "seconds": measured.seconds,
        "is_over": measured.is_over,
        "driver_busy_s": measured.driver_busy_s,
        "driver_memory_bytes": measured.driver_memory_bytes,
        "replicas": measured.replicas,
        "passes": [
            {"name": name, "stages": stages, "phase": phase} for name, stages, phase in measured.passes
        ],
        "workers": [_plain(each) for each in measured.workers],
        "worker_names": list(measured.worker_names),
        "stages": [_plain(each) | {"elements_per_s": each.elements_per_s} for each in measured.stages],
        "limit": measured.limit,
        "marks": [[mark.at_ns * 1e-9, mark.text] for mark in measured.marks],
        "memory": [[at * 1e-9, worker, size] for at, worker, size in measured.memory],
        "throughput": _throughput(spans, len(measured.passes), measured.seconds),
        "spans": _columns(shown),
    }


def _plain(timings: Any) -> Data:
    import msgspec

    found: Data = msgspec.to_builtins(timings)
    return found


def _throughput(spans: NDArray[np.void], passes: int, seconds: float) -> list[list[float]]:
    """Return the calls per second that returned, by pass, in BUCKETS equal parts of the time."""
    width = max(seconds, 1e-9) / BUCKETS
    done = spans[spans["outcome"] == 0]
    found = []
    for number in range(passes):
        own = done[done["pass"] == number]
        place = np.minimum((own["finished"] * 1e-9 / width).astype(np.int64), BUCKETS - 1)
        counts = np.bincount(place, weights=own["calls"], minlength=BUCKETS)
        found.append([round(float(each), 3) for each in counts / width])
    return found


def _columns(spans: NDArray[np.void]) -> Data:
    """Return the columns of spans, each as base64 of little-endian numbers; times in microseconds."""

    def packed(values: NDArray[Any], dtype: str) -> str:
        return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()

    columns = {name: packed(spans[name], "<u2") for name in ("pass", "worker")}
    columns |= {name: packed(spans[name], "u1") for name in ("outcome", "attempt")}
    columns |= {name: packed(spans[name], "<u4") for name in ("merged",)}
    columns |= {name: packed(spans[name], "<f8") for name in ("lo", "calls", "bytes_out")}
    times = ("queued", "sent", "started", "finished")
    columns |= {name: packed(spans[name] // 1000, "<f8") for name in times}
    return {"count": len(spans), **columns}


def _quarantine(folder: Path) -> Data:
    path = folder / QUARANTINE
    rows: list[Data] = []
    count = 0
    try:
        with path.open(encoding="utf-8") as file:
            for count, line in enumerate(file, 1):
                if count <= QUARANTINED_MAX:
                    row = json.loads(line)
                    rows.append({**row, "input": json.dumps(row.get("input"))[:500]})
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    return {"count": count, "rows": rows}


def _outputs(path: Path, record: RunRecord) -> list[Data]:
    if not record.complete:
        return []
    found: list[Data] = []
    stages = {file: stage for stage, file in record.outputs.items()}
    for name in record.files:
        file = path / name
        if not file.exists():
            found.append({"file": name, "stage": stages.get(name, ""), "problem": "the file is missing"})
            continue
        shown = None if name == QUARANTINE else preview(file)
        size = sum(each.stat().st_size for each in files_in(file)) if file.is_dir() else file.stat().st_size
        entry: Data = {"file": name, "stage": stages.get(name, ""), "bytes": size, "sha256": _sha256(file)}
        found.append({**entry, "preview": shown})
    return found


def _sha256(path: Path) -> str:
    """Return the digest of a file, or that of the names and digests of the files in a folder."""
    if path.is_dir():
        digests = ((str(each.relative_to(path)), _sha256(each)) for each in files_in(path))
        return hashlib.sha256(json.dumps(list(digests)).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _log(private: Path) -> Data:
    """Return the last lines of the run's log."""
    try:
        with (private / "run.log").open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - LOG_LINES_MAX * 400))
            lines = file.read().decode("utf-8", "replace").splitlines()
            if size > LOG_LINES_MAX * 400:
                del lines[:1]  # its beginning is missing
    except FileNotFoundError:
        return {"lines": [], "is_cut": False}
    kept: Sequence[str] = lines[-LOG_LINES_MAX:]
    return {"lines": list(kept), "is_cut": len(kept) < len(lines) or size > LOG_LINES_MAX * 400}
