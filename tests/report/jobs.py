"""Runs whose reports are looked at: their replica functions, and specs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import pipedist

MARKUP = "<script>document.title = 'broken'</script>"


def rows(x: np.ndarray, folder: str, ctx: Any) -> dict[str, Any]:
    if ctx.step == 0:
        print(MARKUP)
    if ctx.step == 1 and ctx.replica_id_in_sync_group == 0:
        first = Path(folder) / "died"
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if (x == 13).any():
        raise ValueError(f"13 is {MARKUP}")
    return {"id": x, "text": np.array([MARKUP] * len(x)), "value": np.sqrt(x)}


def loss(x: dict[str, Any]) -> float:
    return float(np.sum(x["value"]))


def waits(x: np.ndarray, folder: str) -> np.ndarray:
    import time

    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return x


def finished(path: Path) -> pipedist.Result:
    """Execute a run with a death, a quarantined element, a table and a curve."""
    marks = path.parent / f"{path.name}-marks"
    marks.mkdir()
    spec = {
        "pipedist": 1,
        "name": "job",
        "replicas": 2,
        "dataset": {"range": 40, "batch": 8},
        "stages": {
            "parts": {
                "run": "tests.report.jobs:rows",
                "with": {"folder": str(marks)},
                "on_error": "quarantine",
            },
            "losses": {"run": "tests.report.jobs:loss", "of": "parts"},
            "table": {"gather": 0, "of": "parts"},
            "curve": {"reduce": "sum", "of": "losses", "axis": None, "per": "step"},
        },
        "outputs": {"table": "table.csv", "curve": "curve.npy"},
    }
    return pipedist.run(spec, workers=2, output=path)


def waiting(folder: Path) -> dict[str, Any]:
    """Return a spec whose run goes on until a file `go` is in the folder."""
    return {
        "pipedist": 1,
        "name": "waiting",
        "dataset": {"range": 8, "batch": 2},
        "stages": {
            "y": {"run": "tests.report.jobs:waits", "with": {"folder": str(folder)}},
            "out": {"gather": 0, "of": "y"},
        },
        "outputs": {"out": "out.npy"},
    }
