"""`pipedist.stream`: a plain loop over a run, whose workers end when the loop is left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import pipedist
from tests.preloaded import run_module

F = "tests.runs.functions"


def document(**stages: Any) -> dict[str, Any]:
    stages = stages or {"y": {"run": f"{F}:double"}, "t": {"reduce": "sum", "of": "y", "axis": 0}}
    return {"pipedist": 1, "name": "stream", "dataset": {"range": 40, "batch": 4}, "stages": stages}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipedist")]


def test_steps_parts_and_results() -> None:
    stream = pipedist.stream(document(), "y", "t", workers=1)
    with pytest.raises(pipedist.UsageError, match="after the last item"):
        _ = stream.result
    steps = list(stream)
    assert [int(step["t"]) for step in steps] == [2 * sum(range(at, at + 4)) for at in range(0, 40, 4)]
    assert steps[0]["y"][0].tolist() == [0, 2, 4, 6]
    assert stream.result["t"] == 2 * sum(range(40))
    assert next(stream, None) is None
    parts = list(pipedist.stream(document(), "y", workers=1, ordered=False))
    assert sorted(part.step for part in parts) == [*range(10)]
    assert threads() == []


def divide_by_zero() -> None:
    for step in pipedist.stream(document(), "t", workers=1):
        step.index / 0


def test_a_loop_that_is_left_ends_the_run() -> None:
    for step in pipedist.stream(document(), "t", workers=1):
        if step.index == 2:
            break
    assert threads() == []
    with pytest.raises(ZeroDivisionError):
        divide_by_zero()
    assert threads() == []
    with pipedist.stream(document(), "t", workers=1) as stream:
        next(stream)
        assert threads() == ["pipedist-stream"]
    assert threads() == []
    pipedist.stream(document(), "t", workers=1).close()  # before it began


def test_the_error_of_a_run_follows_the_steps_before_it() -> None:
    seen: list[int] = []
    with pytest.raises(pipedist.CallError, match="step 3, "):
        seen.extend(
            each.index for each in pipedist.stream(document(y={"run": f"{F}:fails_on_13"}), "y", workers=1)
        )
    assert seen == [0, 1, 2]
    assert threads() == []
    with pytest.raises(pipedist.SpecError):
        next(pipedist.stream({}, "y"))
    with pytest.raises(pipedist.UsageError, match="there is no stage 'z' to stream"):
        next(pipedist.stream(document(), "z", workers=1))


def test_it_blocks_a_running_loop_but_not_that_of_its_cluster() -> None:
    async def cell() -> list[int]:
        async with pipedist.LocalCluster(workers=1) as cluster:
            with pytest.raises(pipedist.UsageError, match=r"pipedist\.stream would block the event loop"):
                pipedist.stream(document(), "t", cluster=cluster)

            def read() -> list[int]:
                return [step.index for step in pipedist.stream(document(), "t", cluster=cluster)]

            assert await asyncio.to_thread(read) == [*range(10)]
        return [step.index for step in pipedist.stream(document(), "t", workers=1)]

    assert asyncio.run(cell()) == [*range(10)]


SCRIPT = """
import os, signal, time
import pipedist

def interrupt(x, pid):
    os.kill(pid, signal.SIGINT)
    time.sleep(60)

def main():
    global left
    stage = {"run": interrupt, "with": {"pid": os.getpid()}}
    spec = {"pipedist": 1, "dataset": {"range": 2, "batch": 1}, "stages": {"y": stage}}
    try:
        next(pipedist.stream(spec, "y", workers=1))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    spec["stages"] = {"y": {"run": "operator:neg"}}
    left = pipedist.stream(spec, "y", workers=1)
    print(next(left).index, flush=True)

if __name__ == "__main__":
    main()
"""


def test_ctrl_c_and_the_end_of_the_process_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_module("script", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n0\n"), ended.stderr
