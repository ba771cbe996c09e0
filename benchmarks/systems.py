"""The systems that can be measured, and which of them are installed where."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.adapter import Adapter
from benchmarks.peers.mpi4py_names import MPIEXEC

HOME = Path(__file__).parent
PEER_PYTHON = HOME / ".venv" / "bin" / "python"
"""The interpreter that `make bench-peers` installs the peers for."""

SUBJECT = "pipedist"

Kind = Literal["subject", "peer", "hand-written", "single process"]
"""Only a "peer" can be the best peer: the others are no engines."""


@dataclass(frozen=True, slots=True)
class System:
    """One system under measurement.

    Args:
        adapter: "module:class" below `benchmarks`.
        distributions: what must be installed; the version is that of the first. None: Python itself.
        answers: the workloads that it has an answer to.
        prefix: what its process is started with, before the interpreter.
    """

    adapter: str
    kind: Kind = "peer"
    distributions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()

    def make(self) -> Adapter:
        """Return a new adapter; imports the system."""
        module, _, name = self.adapter.partition(":")
        adapter: Adapter = getattr(importlib.import_module(f"benchmarks.{module}"), name)()
        return adapter


_CALLS = ("W1", "W6", "W7")
_STREAMS = ("W2", "W3", "W3c")
_FILES = ("FN", "FP")
_APPS = ("A-onnx", "A-images", "A-words", "A-http")
_ENGINE = (*_CALLS, "W1b", *_STREAMS, "W5", "W8", "W9")

SYSTEMS: dict[str, System] = {
    SUBJECT: System(
        "pipedist_adapter:Pipedist",
        "subject",
        ("pipedist",),
        (*_CALLS, "W1s", "W1j", *_STREAMS, "W5", "W5c", "W8", "W9", *_FILES, "MEM", *_APPS),
    ),
    "pool": System("peers.multiprocessing_pool:Pool", answers=_ENGINE),
    "executor": System("peers.process_pool_executor:ProcessPool", answers=_ENGINE),
    "loky": System("peers.loky_executor:Loky", "peer", ("loky",), _ENGINE),
    "joblib": System("peers.joblib_parallel:Joblib", "peer", ("joblib",), (*_ENGINE, *_APPS)),
    "ray": System("peers.ray_core:RayTasks", "peer", ("ray",), _ENGINE),
    "ray-actors": System("peers.ray_core:RayActors", "peer", ("ray",), (*_CALLS, *_STREAMS, "W8")),
    "ray-graph": System("peers.ray_core:RayCompiledGraph", "peer", ("ray",), ("W8",)),
    "ray-data": System(
        "peers.ray_data:RayData", "peer", ("ray", "pyarrow", "pandas"), (*_STREAMS, *_FILES, *_APPS)
    ),
    "dask": System("peers.dask_distributed:Dask", "peer", ("distributed",), (*_ENGINE, *_FILES, *_APPS)),
    "ipyparallel": System("peers.ipyparallel_cluster:IPyParallel", "peer", ("ipyparallel",), _ENGINE),
    "mpi4py": System("peers.mpi4py_futures:Mpi4py", "peer", ("mpi4py",), _ENGINE, MPIEXEC),
    "zmq": System(
        "peers.zmq_blocking:ZmqBlocking",
        "hand-written",
        ("pyzmq",),
        (*_CALLS, "W1b", *_STREAMS, "W5", "W8"),
    ),
    "zmq-asyncio": System(
        "peers.zmq_asyncio:ZmqAsyncio", "hand-written", ("pyzmq",), (*_CALLS, "W1b", *_STREAMS, "W8")
    ),
    "single": System("peers.single_process:SingleProcess", "single process", ("numpy",), (*_FILES, *_APPS)),
}


@dataclass(frozen=True, slots=True)
class Installed:
    """A system that can be measured here.

    Args:
        python: the interpreter that has it.
        version: of its first distribution.
    """

    python: str
    version: str


_ASK = """\
import importlib.metadata, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "found": found}))
"""


def installed() -> dict[str, Installed]:
    """Return the systems that are installed: for this interpreter, else for the peers' own."""
    names = sorted({name for system in SYSTEMS.values() for name in system.distributions})
    pythons = [sys.executable, *([str(PEER_PYTHON)] if PEER_PYTHON.exists() else [])]
    answers: Mapping[str, dict[str, object]] = {
        python: json.loads(subprocess.check_output([python, "-c", _ASK, *names])) for python in pythons
    }
    result: dict[str, Installed] = {}
    for key, system in SYSTEMS.items():
        if system.prefix and mpiexec() is None:
            continue
        for python, answer in answers.items():
            found: Mapping[str, str] = answer["found"]  # type: ignore[assignment]
            if all(name in found for name in system.distributions):
                first = system.distributions[0] if system.distributions else None
                result[key] = Installed(python, found[first] if first else str(answer["python"]))
                break
    return result


def mpiexec() -> str | None:
    """Return the path of mpiexec, None where there is none."""
    beside = PEER_PYTHON.parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")
