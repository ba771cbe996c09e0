"""`pipedist replay` of calls that Ctrl-C ends, or whose function raises the same by itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipedist
from pipedist.errors import CallError
from pipedist.worker.boot import environment
from tests import preloaded
from tests.runs.test_replay import ROOT, F, command, written


def one_stage(function: str, **more: Any) -> str:
    stages = {"y": {"run": f"{F}:{function}", **more}, "rows": {"gather": 0, "of": "y"}}
    head = {"pipedist": 1, "code": str(ROOT), "replicas": 2, "dataset": {"range": 8, "batch": 4}}
    return json.dumps({**head, "stages": stages})


@pytest.mark.parametrize(
    ("function", "more"),
    [
        ("blocks", {}),
        ("blocks_async", {}),
        ("blocks_async", {"timeout_s": 60}),
        ("blocks_together", {"collectives": True}),
    ],
)
def test_ctrl_c_ends_a_call_and_shows_where_it_was(
    tmp_path: Path, function: str, more: dict[str, Any]
) -> None:
    pipedist.run(written(tmp_path, one_stage(function, **more)), workers=1, output=tmp_path / "out")
    with preloaded.Popen(
        [sys.executable, "-m", "pipedist", "replay", "out", "--call", "y/1/1"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(1), "PYTHONPATH": str(ROOT), "BLOCKS": "1"},
    ) as process:
        try:
            assert process.stderr is not None
            assert "here\n" in process.stderr
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "pipedist: Ctrl-C ended the call" in stderr
    assert f"in {function}\n" in stderr
    assert "never retrieved" not in stderr


def test_an_interrupt_that_the_function_raises_is_its_failure(tmp_path: Path) -> None:
    with pytest.raises(CallError):
        pipedist.run(written(tmp_path, one_stage("raises_an_interrupt")), workers=1, output=tmp_path / "out")
    done = command("out", "--call", "y/0/0", cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyboardInterrupt: the function raised it; a worker ignores Ctrl-C" in done.stderr
    assert "in raises_an_interrupt" in done.stderr
