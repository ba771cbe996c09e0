"""Runs in a notebook that a real kernel executes: progress, output of functions, reprs, an interrupt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'pipedist[test]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'pipedist[test]'")

SETUP = """
import os, signal, time
import numpy as np, pipedist

def double(x):
    print("got", x.tolist())
    return x * 2

def interrupting(x, kernel):
    if x[0] == 0:
        os.kill(kernel, signal.SIGINT)
    time.sleep(0.01)
    return x

def job(function, count=8, **arguments):
    stages = {"y": {"run": function, "with": arguments}, "all": {"gather": 0, "of": "y"}}
    return {"pipedist": 1, "name": "job", "replicas": 2, "dataset": {"range": count, "batch": 4}, "stages": stages}
"""
CELLS = (
    SETUP,
    "pipedist.run(job(double), workers=1)",
    "async with pipedist.open(job(double), workers=1, progress=False) as run:\n"
    "    result = await run.results()\n"
    "run.plan",
    "result.ledger",
    "pipedist.PerReplica([{'a': 1, 'b': '<b>'}, {'a': 2, 'b': 'c'}])",
    "try:\n"
    "    pipedist.run(job(interrupting, 4_000, kernel=os.getpid()), workers=1)\n"
    "except KeyboardInterrupt:\n"
    "    print('interrupted')",
    "pipedist.run(job(double), workers=1, progress=False)['all'].tolist()",
)


def executed(folder: Path, cells: Sequence[str] = CELLS) -> list[list[Any]]:
    """Execute the cells in one kernel, and return the outputs of each."""
    from nbformat import v4

    notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in cells])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, str(folder / name))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        client = nbclient.NotebookClient(
            notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    return [cell.outputs for cell in notebook.cells]


def page_of(outputs: list[Any], kind: str = "execute_result") -> str:
    (found,) = (output["data"]["text/html"] for output in outputs if output["output_type"] == kind)
    assert isinstance(found, str)
    return found


def printed(outputs: list[Any]) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def test_a_notebook_shows_runs(tmp_path: Path) -> None:
    outputs = executed(tmp_path)
    _, ran, opened, ledger, values, interrupted, after = outputs

    bar = page_of(ran, "display_data")
    assert "4 of 4 calls" in bar, "the last state stays"
    assert "100%" in bar
    assert "[y 0 0 w0] got [0, 1]\n" in printed(ran), "the output of functions is under the cell"
    assert "8 elements, 8 committed" in ran[-1]["data"]["text/plain"]
    assert "[0, 2, 4, 6, 8, 10, 12, 14]" in page_of(ran)

    kinds = [output["output_type"] for output in opened if output["output_type"] != "stream"]
    assert kinds == ["execute_result"], "its progress is off"
    assert "<svg" in page_of(opened)
    assert "committed" in page_of(ledger)
    assert "&lt;b&gt;" in page_of(values)

    assert printed(interrupted) == "interrupted\n"
    assert after[-1]["data"]["text/plain"] == "[0, 2, 4, 6, 8, 10, 12, 14]"
