"""The description of a run for reports: its spec, command, plan and environment.

It is written into the run's folder. Reports read it without importing the user's modules, also if the run was killed.
"""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipedist.cluster.base import usable_cores
from pipedist.core.platform_id import Platform
from pipedist.outputs.encoding import to_json
from pipedist.outputs.run_record import write_json
from pipedist.plan import Plan
from pipedist.plan.view import as_json
from pipedist.runs.spec_source import SpecSource
from pipedist.spec import per_of

FILE = "about.json"
FAILURE_FILE = "failure.json"

FAILURE_CHARS_MAX = 64 * 1024
SPEC_CHARS_MAX = 256 * 1024  # a longer spec is not kept

_PACKAGES = ("anyio", "pyzmq", "msgspec", "pyarrow", "pandas", "polars", "scipy", "torch", "jax", "cupy")


def write_about(folder: Path, plan: Plan, source: SpecSource, output: Path) -> None:
    """Write what a run is into its private folder, and forget why an earlier process failed."""
    (folder / FAILURE_FILE).unlink(missing_ok=True)
    here = Platform.here()
    write_json(
        folder / FILE,
        to_json(
            {
                "format": 1,
                "command": source.command(os.path.relpath(output), plan.workers),
                "spec": _spec_text(source),
                "spec_file": source.source,
                "environment": {
                    "pipedist": here.pipedist,
                    "python": here.python,
                    "numpy": here.numpy,
                    **_packages(),
                    "processor": here.cpu,
                    "cores": usable_cores(),
                    "system": f"{os.uname().sysname} {os.uname().release}",
                    "host": socket.gethostname(),
                },
                "plan": as_json(plan),
                "graph": plan.graph(),
                # how often a stage has a value
                "pers": {name: per_of(stage) for name, stage in plan.spec.stages.items()},
            }
        ),
    )


def write_failure(folder: Path, error: BaseException) -> None:
    """Write why a run failed into its private folder."""
    text = f"{type(error).__name__}: {error}"[:FAILURE_CHARS_MAX]
    write_json(folder / FAILURE_FILE, {"text": text, "has_advice": getattr(error, "has_advice", False)})


def _spec_text(source: SpecSource) -> str:
    try:
        text = Path(source.source).read_text() if source.source else ""
    except (OSError, ValueError):  # it was read before: it has just been moved
        return ""
    return text if len(text) <= SPEC_CHARS_MAX else ""


def _packages() -> dict[str, str]:
    """Return the versions of the packages that this process has imported."""
    found = {}
    for name in _PACKAGES:
        if sys.modules.get("zmq" if name == "pyzmq" else name) is not None:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found
