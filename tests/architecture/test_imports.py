"""`import pipedist` costs next to nothing, and names everything that is public."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pipedist


def test_every_public_name_is_there() -> None:
    assert {*pipedist.__all__, "map", "open"} == {"__version__", *pipedist._HOME}
    for name in (*pipedist.__all__, "map", "open"):
        assert getattr(pipedist, name) is not None


def test_a_star_import_does_not_shadow_the_built_in_open() -> None:
    assert "open" not in pipedist.__all__


HEAVY = frozenset(
    {
        "anyio", "asyncio", "cloudpickle", "numpy", "optree", "psutil", "pyarrow", "pydantic", "rich",
        "ruamel", "secrets", "tempfile", "click", "zmq",
    }
)  # fmt: skip
"""What takes more than a few milliseconds to import."""


SPEC = {
    "pipedist": 1,
    "dataset": {"range": 4, "batch": 2},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}


def loaded_by(code: str) -> set[str]:
    """The modules of a fresh process that has executed `code`; of other packages their first names."""
    code += "\nimport sys; print('modules', *(m for m in sys.modules if m != 'sys'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    names = done.stdout.rpartition("modules")[2].split()
    return {name if name.startswith("pipedist") else name.partition(".")[0] for name in names}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import pipedist")


def test_entry_points_import_nothing_heavy_before_they_start_the_fork_server() -> None:
    """They start a fork server first, and then import beside it."""
    entry_points = "pipedist.run, pipedist.open, pipedist.LocalCluster, pipedist.LocalCluster(workers=1)"
    assert not HEAVY & loaded_by(f"import pipedist; {entry_points}")
    assert not {*HEAVY, "dataclasses", "inspect"} & loaded_by("import pipedist.runs.api")
    assert not {*HEAVY, "dataclasses", "inspect"} & loaded_by(
        "from pipedist import cli; from pipedist.cluster.launchers import server"
    )


def test_a_run_imports_only_what_it_uses() -> None:
    loaded = loaded_by(f"import pipedist; assert pipedist.run({SPEC}, workers=1)['total'] == 6")
    # pydantic, which reads the spec, imports secrets and tempfile
    used = {"anyio", "asyncio", "numpy", "optree", "pydantic", "secrets", "tempfile", "zmq"}
    assert not loaded & (HEAVY - used)
    assert not {name for name in loaded if name.startswith(("pipedist.outputs", "pipedist.cli"))}
    assert not loaded & {
        "pipedist.scheduler.invariants",
        "pipedist.spec.schema",
        "pipedist.spec.yaml_text",
        "pipedist.transport.dealer",
        "pipedist.worker.driver",
        "pipedist.worker.process",
    }


def test_a_run_builds_validators_of_those_sections_only_that_its_spec_has() -> None:
    code = f"""
import pipedist
from pipedist.spec.datasets import CsvSource, RangeSource
from pipedist.spec.stages import ReduceSpec, RunSpec
pipedist.run({SPEC}, workers=1)
built = [each.__name__ for each in (CsvSource, RangeSource, ReduceSpec, RunSpec) if each.__pydantic_complete__]
assert built == ["RangeSource", "ReduceSpec"], built
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def count_of(code: str) -> int:
    """Return how many modules a fresh process imports that executes `code`."""
    count = "import atexit, sys; atexit.register(lambda: print('modules', len(sys.modules), flush=True))"
    done = subprocess.run(
        [sys.executable, "-c", f"{count}\n{code}"], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout.rpartition("modules")[2])


def test_a_start_imports_a_limited_number_of_modules(tmp_path: Path) -> None:
    """Imports are nearly all of the time until the first result: raise a limit only with a reason."""
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps({**SPEC, "name": "counted"}))
    command = f"import sys; sys.argv[1:] = ['run', {str(path)!r}, '--workers', '1']"
    assert count_of(f"import pipedist; pipedist.run({SPEC}, workers=1)") <= 608
    assert count_of(f"{command}; from pipedist.cli import main; main()") <= 717
    assert count_of("import pipedist.cluster.launchers.forkserver") <= 357


def test_a_start_looks_for_no_garbage() -> None:
    """What is imported stays: collections would visit it again and again."""
    code = f"""
import gc, pipedist
visited = []
def note(phase, info):
    generations = range(info["generation"] + 1) if phase == "start" else ()
    visited.extend(len(gc.get_objects(number)) for number in generations)
gc.collect()
gc.callbacks.append(note)
pipedist.run({SPEC}, workers=1)
assert gc.isenabled()
assert not gc.get_freeze_count()
assert len(gc.get_objects()) > 50_000
print("visited", sum(visited))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rpartition("visited")[2]) < 50_000


def test_frozen_objects_of_the_user_stay_frozen() -> None:
    code = f"import gc, pipedist; gc.freeze(); pipedist.run({SPEC}, workers=1); assert gc.get_freeze_count()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_worker_imports_nothing_that_it_does_not_use() -> None:
    loaded = loaded_by("import pipedist.cluster.launchers.forkserver")
    assert not loaded & (HEAVY - {"numpy", "optree", "zmq"})
    assert not {"pydantic", "pydantic_core"} & loaded, "specs are read in the driver only"
    ours = (
        "coordinator",
        "scheduler",
        "spec",
        "plan",
        "runs",
        "outputs",
        "strategy",
        "cli",
        "datasets.feeds",
    )
    assert not {name for name in loaded if name.startswith(tuple(f"pipedist.{package}" for package in ours))}


def test_a_worker_that_runs_a_spec_never_imports_pydantic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs hold plain values, so that workers need no class of the spec's models."""
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "def calls(shard, scale, ctx):\n"
        "    return sum(name.startswith(('pydantic', 'pipedist.spec')) for name in sys.modules)\n"
        "def update(state, value):\n"
        "    return state + value + calls(None, 1, None)\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 4, "batch": 2},
        "stages": {
            "calls": {
                "run": "probe:calls",
                "with": {"scale": 1},
                "timeout_s": 60,
                "collectives": {"timeout_s": 30},
            },
            "total": {"reduce": "sum", "of": "calls", "axis": None, "per": "step"},
            "state": {"update": "probe:update", "of": "total", "init": 0},
        },
        "outputs": {},
    }
    assert pipedist.run(spec, workers=2)["state"] == 0
