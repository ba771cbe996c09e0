"""Nothing is repeated in silence: a line as it happens, counts in the result and in the closing table."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.cli.rendering import render


def fails_once(shard: np.ndarray, folder: str) -> np.ndarray:
    """Raise, die and hang, each once, in steps 1, 2 and 3 of four elements."""
    for element, failure in ((5, "raise"), (9, "die"), (13, "hang")):
        marker = Path(folder) / failure
        if element in shard and not marker.exists():
            marker.touch()
            if failure == "raise":
                raise ValueError("the first attempt")
            if failure == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
    return shard


def document(folder: Path) -> dict[str, Any]:
    run = {"run": fails_once, "with": {"folder": str(folder)}, "retries": 2, "timeout_s": 2.0}
    return {
        "pipedist": 1,
        "name": "repeated",
        "dataset": {"range": 40, "batch": 4},
        "cluster": {"speculation": "off"},
        "stages": {"y": run, "out": {"gather": 0, "of": "y"}},
    }


def test_repeated_calls_have_lines_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = pipedist.run(document(tmp_path), workers=2)
    assert result["out"].tolist() == list(range(40))
    assert result.retries == {"y": {"error": 1, "death": 1, "timeout": 1}}
    assert result.document["retries"] == result.retries
    assert [stage.retries for stage in result.timings.stages] == [3], "the report shows the same number"
    died, raised, ended = sorted(
        caplog.messages, key=lambda line: ("ended" in line, "stage y, step 1" in line)
    )
    assert raised.startswith(
        "pipedist: stage y, step 1, replica 0: ValueError: the first attempt; attempt 2 begins"
    )
    assert "died: signal 9 (SIGKILL); it executed stage y, step 2, replica 0" in died
    assert "was ended: stage y, step 3, replica 0: TimeoutError: timed out after 2 s" in ended
    shown = render([], result.ledger.to_json(), {}, result.retries)
    (line,) = [line for line in shown.splitlines() if line.startswith("stage y: 3 retries (")]
    assert all(part in line for part in ("1 after an error", "1 after a worker died", "1 after a timeout"))


def test_a_run_without_failures_has_neither(caplog: pytest.LogCaptureFixture) -> None:
    spec = {
        "pipedist": 1,
        "dataset": {"range": 8, "batch": 4},
        "stages": {"out": {"gather": 0, "of": "dataset"}},
    }
    result = pipedist.run(spec, workers=1)
    assert result.retries == {}
    assert "retries" not in result.document
    assert caplog.messages == []


def test_modules_on_a_relative_import_path_are_found(tmp_path: Path) -> None:
    """As beside a notebook, where the import path begins with an empty entry."""
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep.py").write_text("def negative(x):\n    return -x\n")
    program = (
        "import sys; sys.path[0] = ''; sys.path.append('below')\n"
        "import pipedist, beside, deep\n"
        "spec = {'pipedist': 1, 'dataset': {'range': 4, 'batch': 2}, 'stages': {'y': {'run': beside.double},"
        " 'z': {'run': deep.negative, 'of': 'y'}, 'out': {'gather': 0, 'of': 'z'}}}\n"
        "print(pipedist.run(spec, workers=1)['out'].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[0, -2, -4, -6]\n", done.stderr


async def answers(element: int, folder: str) -> int:
    """Raise, and hang, each once."""
    for number, failure in ((3, "raise"), (5, "hang")):
        marker = Path(folder) / failure
        if element == number and not marker.exists():
            marker.touch()
            if failure == "raise":
                raise ConnectionError("no reply")
            await asyncio.sleep(600)
    return 2 * element


def test_attempts_within_a_call_have_lines_and_counts_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = document(tmp_path)
    spec["dataset"] = {"range": 8, "batch": 8}
    spec["stages"]["y"] = {
        "run": answers,
        "with": {"folder": str(tmp_path)},
        "per": "element",
        "timeout_s": 0.5,
        "retry": {"attempts": 3, "backoff_s": 0.01},
    }
    result = pipedist.run(spec, workers=1)
    assert result["out"].tolist() == list(range(0, 16, 2))
    assert result.retries == {"y": {"error": 1, "timeout": 1}}
    for text in ("element 3: ConnectionError: no reply", "element 5: TimeoutError: timed out after 0.5 s"):
        (line,) = [line for line in caplog.messages if text in line]
        assert line.startswith("pipedist: stage y, step 0, replica 0: element ")
        assert line.endswith("; attempt 2 begins on worker w0")


def hangs_alone(shard: np.ndarray) -> np.ndarray:
    if 5 in shard:
        time.sleep(600)
    return shard


def test_timeouts_of_single_elements_have_a_line_and_a_count_each(caplog: pytest.LogCaptureFixture) -> None:
    """One timeout of the call, then those of its elements that are tried apart."""
    spec = document(Path())
    spec["dataset"] = {"range": 8, "batch": 4}
    spec["stages"]["y"] = {"run": hangs_alone, "timeout_s": 0.3, "on_error": "quarantine"}
    result = pipedist.run(spec, workers=2)
    assert result["out"].tolist() == [0, 1, 2, 3, 4, 6, 7]
    lines = [line for line in caplog.messages if "TimeoutError: timed out after 0.3 s" in line]
    assert len(lines) > 1
    assert result.retries == {"y": {"timeout": len(lines)}}
