"""What `pipedist.run` and `pipedist.open` give, on real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from tests import preloaded
from tests.cluster.launchers.processes import wait_gone

F = "tests.runs.functions"


def document(*, n: int = 20, batch: int = 4, replicas: int = 2, **stages: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": replicas,
        "dataset": {"range": n, "batch": batch},
        "stages": stages,
    }


def test_run_reduces_and_gathers() -> None:
    result = pipedist.run(
        document(
            y={"run": f"{F}:double"},
            total={"reduce": "sum", "of": "y", "axis": 0},
            steps={"reduce": "max", "of": "y", "axis": 0, "per": "step"},
            rows={"gather": 0, "of": "y"},
        ),
        workers=2,
    )
    assert result["total"] == 380
    assert [int(v) for v in result["steps"]] == [6, 14, 22, 30, 38]
    assert np.array_equal(result["rows"], np.arange(20) * 2)
    assert set(result) == {"total", "steps", "rows"}
    assert result.ledger == pipedist.Ledger(elements=20, committed=20)
    assert result.files == {}


def test_two_phases_read_what_was_committed() -> None:
    result = pipedist.run(
        document(
            n=30,
            batch=7,
            y={"run": f"{F}:as_float"},
            mean={"reduce": "mean", "of": "y", "axis": 0},
            centred={"run": f"{F}:subtract", "of": "y", "with": {"mean": "${stages.mean}"}},
            fresh={"run": f"{F}:subtract", "of": "dataset", "with": {"mean": "${stages.mean}"}},
            rows={"gather": 0, "of": "centred"},
            others={"gather": 0, "of": "fresh"},
        ),
        workers=2,
    )
    x = np.arange(30).astype(np.float32) / np.float32(3)
    assert np.allclose(result["rows"], x - x.mean(), atol=1e-5)
    assert np.allclose(result["others"], np.arange(30) - x.mean(), atol=1e-5)


def test_a_class_is_made_once_in_each_worker() -> None:
    result = pipedist.run(
        document(m={"run": f"{F}:Model", "with": {"scale": 3}}, out={"gather": 0, "of": "m"}), workers=1
    )
    assert set(result["out"]["made"].tolist()) == {1}


def test_context_tells_where_a_call_stands() -> None:
    result = pipedist.run(
        document(n=9, batch=4, replicas=3, c={"run": f"{F}:context"}, out={"gather": 0, "of": "c"}),
        workers=2,
    )
    out = result["out"]
    assert out["elements"].tolist() == list(range(9))
    assert out["step"].tolist() == [0, 0, 1, 1, 2]
    assert out["replica"].tolist() == [0, 1, 0, 1, 0]
    assert set(out["replicas"].tolist()) == {3}


def test_async_functions() -> None:
    result = pipedist.run(document(y={"run": f"{F}:awaited"}, out={"gather": 0, "of": "y"}), workers=2)
    assert np.array_equal(result["out"], np.arange(20) + 1)


def test_several_datasets_and_arrays() -> None:
    spec = {
        "pipedist": 1,
        "replicas": 2,
        "datasets": {
            "a": {"range": {"start": 0, "stop": 10, "step": 2}, "batch": 3},
            "b": {"arrays": {"x": np.arange(12.0).reshape(6, 2)}, "batch": 4},
        },
        "stages": {
            "sa": {"reduce": "sum", "of": "a", "axis": 0},
            "sb": {"reduce": "sum", "of": "b", "axis": 0},
        },
    }
    result = pipedist.run(spec, workers=2)
    assert result["sa"] == 20
    assert result["sb"]["x"].tolist() == [30.0, 36.0]
    assert result.ledger.elements == 11


def test_a_reduce_of_nothing_is_null() -> None:
    result = pipedist.run(document(n=0, total={"reduce": "sum", "of": "dataset", "axis": 0}), workers=1)
    assert result["total"] is None


def test_functions_without_a_name_travel_by_value() -> None:
    offset = 5
    result = pipedist.run(document(y={"run": lambda x: x + offset}, out={"gather": 0, "of": "y"}), workers=2)
    assert np.array_equal(result["out"], np.arange(20) + 5)


SELF_RUNNING = """
import pipedist

def total(x):
    return x.sum()

SPEC = {
    "pipedist": 1,
    "dataset": {"range": 10, "batch": 5},
    "stages": {"f": {"run": FUNCTION}, "t": {"reduce": "sum", "of": "f", "axis": None}},
}
"""
AT_THE_TOP = {
    "run": "pipedist.run(SPEC, workers=1)",
    "run-in-a-loop": "import asyncio\nasync def main(): pipedist.run(SPEC, workers=1)\nasyncio.run(main())",
    "open": """
import asyncio
import json
async def main():
    async with pipedist.LocalCluster(workers=1) as cluster, pipedist.open(SPEC, cluster=cluster) as run:
        await run.results()
asyncio.run(main())
""",
}


@pytest.mark.parametrize("top", AT_THE_TOP)
@pytest.mark.parametrize("imported_by", ["process", "workers"])
def test_a_module_that_runs_its_own_functions_where_it_is_imported(
    top: str, imported_by: str, tmp_path: Path
) -> None:
    """It would run itself again in every process that imports it, and one that waits for that for ever."""
    function = '"selfish:total"' if imported_by == "process" else "total"
    (tmp_path / "selfish.py").write_text(SELF_RUNNING.replace("FUNCTION", function) + AT_THE_TOP[top])
    what = ["selfish.py"] if imported_by == "process" else ["-c", "import selfish"]
    done = preloaded.run(
        [sys.executable, *what], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    expected = "asyncio.run() cannot be called" if imported_by == "process" and top != "run" else "__main__"
    assert "importing selfish failed" in done.stderr
    assert expected in done.stderr
    if expected == "__main__" and (imported_by, top) != ("workers", "run-in-a-loop"):
        assert re.search(r"selfish\.py(:|, line )\d", done.stderr)


def test_a_package_that_runs_a_function_of_its_own_where_it_is_imported(tmp_path: Path) -> None:
    """The module of the function can't be imported before its package is, and that waits for the run."""
    package = tmp_path / "selfish"
    package.mkdir()
    (package / "inner.py").write_text("def total(x):\n    return x.sum()\n")
    text = SELF_RUNNING.replace("FUNCTION", '"selfish.inner:total"') + AT_THE_TOP["run-in-a-loop"]
    (package / "__init__.py").write_text(text)
    done = preloaded.run(
        [sys.executable, "-c", "import selfish"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "selfish is still being imported, and waits for this run" in done.stderr


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pipedist, beside
        print("top")
        def square(x):
            return beside.square(x)
        result = pipedist.run({"pipedist": 1, "dataset": {"range": 100, "batch": 10},
            "stages": {"y": {"run": square}, "t": {"reduce": "sum", "of": "y", "axis": 0}}}, workers=2)
        print(int(result["t"]))
        """)
    )
    (tmp_path / "beside.py").write_text("def square(x):\n    return x * x\n")
    done = preloaded.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["top", "328350"], done.stderr


@pytest.mark.asyncio
async def test_run_works_inside_a_running_loop() -> None:
    result = pipedist.run(document(t={"reduce": "sum", "of": "dataset", "axis": 0}), workers=1)
    assert result["t"] == 190


@pytest.mark.asyncio
async def test_steps_are_streamed_in_order() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        spec = document(
            n=40,
            y={"run": f"{F}:jittered"},
            total={"reduce": "sum", "of": "y", "axis": 0},
            merged={"reduce": f"{F}:merge", "of": "parts"},
            parts={"run": f"{F}:component"},
            rows={"gather": 0, "of": "y"},
        )
        async with pipedist.open(spec, cluster=cluster) as run:
            seen = []
            async for step in run.steps("y", "total", "merged", "rows"):
                seen.append(step.index)
                parts = step["y"].components
                assert np.isclose(step["total"], sum(p.sum() for p in parts))
                assert np.array_equal(step["rows"], np.concatenate(parts))
                assert step["merged"]["order"].tolist() == [4 * step.index, 4 * step.index + 2]
            assert seen == list(range(10))
            result = await run.results()
        assert len(result["rows"]) == 40
        assert result["merged"]["order"].tolist() == list(range(0, 40, 2))


@pytest.mark.asyncio
async def test_parts_are_streamed_as_they_arrive() -> None:
    async with (
        pipedist.LocalCluster(workers=2) as cluster,
        pipedist.open(document(n=40, y={"run": f"{F}:jittered"}), cluster=cluster) as run,
    ):
        parts = [part async for part in run.as_completed("y")]
        assert sorted((p.step, p.replica) for p in parts) == [(s, r) for s in range(10) for r in (0, 1)]
        assert {p.stage for p in parts} == {"y"}


@pytest.mark.asyncio
async def test_a_cluster_is_shared_by_several_runs_at_once() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:

        async def one(amount: int) -> int:
            spec = document(
                y={"run": f"{F}:plus", "with": {"amount": amount}},
                t={"reduce": "sum", "of": "y", "axis": 0},
            )
            async with pipedist.open(spec, cluster=cluster) as run:
                return int((await run.results())["t"])

        assert await asyncio.gather(*(one(k) for k in range(4))) == [190 + 20 * k for k in range(4)]


@pytest.mark.asyncio
async def test_leaving_early_cancels_the_run_but_not_the_cluster() -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:
        async with pipedist.open(document(n=4000, y={"run": f"{F}:jittered"}), cluster=cluster) as run:
            async for step in run.steps("y"):
                assert step.index == 0
                break
        async with pipedist.open(
            document(t={"reduce": "sum", "of": "dataset", "axis": 0}), cluster=cluster
        ) as run:
            assert (await run.results())["t"] == 190


def processes_with(mark: str) -> list[int]:
    """Return the ids of living processes whose environment has a mark, whoever their parent is now."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue  # it ended meanwhile, or is somebody else's
    return found


def shared_memory() -> set[str]:
    """Return the entries of /dev/shm that are pipedist's: others on this machine have theirs."""
    return {name for name in os.listdir("/dev/shm") if "pipedist" in name}


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    shared, files = shared_memory(), len(os.listdir("/proc/self/fd"))
    pipedist.run(document(t={"reduce": "sum", "of": "dataset", "axis": 0}), workers=2)
    with pytest.raises(pipedist.CallError):
        pipedist.run(document(y={"run": f"{F}:fails_on_13"}), workers=2)
    assert wait_gone(processes_with(mark)) == []
    assert shared_memory() <= shared
    assert len(os.listdir("/proc/self/fd")) <= files
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_resume_is_refused(tmp_path: Path) -> None:
    document = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": {"y": {"run": len}}}
    with pytest.raises(pipedist.UsageError, match="`resume` must be True, False or 'reuse', got 'reused'"):
        pipedist.run(document, output=tmp_path, resume="reused")  # type: ignore[arg-type]


def test_an_empty_output_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": {"y": {"run": len}}}
    with pytest.raises(pipedist.UsageError, match="--output is empty"):
        pipedist.run(document, output="", workers=1)


def test_runs_in_two_threads_leave_the_import_path_as_it_was(tmp_path: Path) -> None:
    """The functions' folders are on it during a run, so that functions can import other modules late."""

    def spec(name: str, body: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"late_{name}.py").write_text("ROWS = [1, 2, 3, 4]\n")
        (folder / f"functions_{name}.py").write_text(
            f"def rows():\n    def read():\n        from late_{name} import ROWS\n        yield from ROWS\n"
            f"    return read()\ndef f(shard):\n    {body}\n"
        )
        document = document_of(f"functions_{name}")
        (folder / "spec.yaml").write_text(json.dumps(document))
        return folder / "spec.yaml"

    def document_of(module: str) -> dict[str, Any]:
        stages = {"y": {"run": f"{module}:f"}, "total": {"reduce": "sum", "of": "y", "axis": 0}}
        dataset = {"function": {"call": f"{module}:rows"}, "batch": 2}
        return {"pipedist": 1, "replicas": 1, "dataset": dataset, "stages": stages}

    before = list(sys.path)
    good, bad = spec("good", "return shard"), spec("bad", "raise ValueError('bad')")
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(pipedist.run, path, workers=1) for path in (good, bad)]
    assert runs[0].result()["total"] == 10
    assert isinstance(runs[1].exception(), pipedist.CallError)
    assert sys.path == before
    with pytest.raises(pipedist.PlanError):
        pipedist.run(document(y={"run": "no_such_module:f"}, rows={"gather": 0, "of": "y"}), workers=1)
    assert sys.path == before
