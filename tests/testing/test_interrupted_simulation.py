"""Simulations that are interrupted, killed, or started where that is not possible; in separate processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipedist.errors import CallError
from pipedist.runs.api import in_own_thread
from pipedist.testing import SpecSimulation, simulate
from tests import preloaded
from tests.testing import replica_functions as fn
from tests.testing.test_spec_simulation import spec_of

WAIT_S = 60

FUNCTIONS = """
import os, threading, time

calls = 0

def blocks_at_last(x):
    global calls
    calls += 1
    if calls > 30:
        os.write(2, b"now\\n")
        while True:
            threading.Event().wait()
    return x

def waits_in_virtual_time(x):
    os.write(2, b"now\\n")
    while True:
        time.sleep(0.1)
"""

SPEC = """
pipedist: 1
dataset: {range: 10, batch: 1}
stages:
  each: {run: "functions:FUNCTION"}
  total: {reduce: sum, of: each, axis: 0}
"""

SCRIPT = """
import asyncio, sys, threading, time
from pipedist.testing import simulate

sleep, out = time.sleep, sys.stdout

def plain():
    simulate("spec.yaml")

async def cell():
    plain()

try:
    if sys.argv[1] == "in a notebook":
        asyncio.new_event_loop().run_until_complete(cell())
    elif sys.argv[1] == "under asyncio.run":
        asyncio.run(cell())
    else:
        plain()
except KeyboardInterrupt as stop:
    for thread in threading.enumerate():
        if thread.name == "pipedist-simulation":
            thread.join()
    print("interrupted", time.sleep is sleep, sys.stdout is out)
    for error in (stop, stop.__context__):
        print(*getattr(error, "__notes__", ()))
"""


@contextmanager
def started(folder: Path, function: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a folder with a spec and its functions, and wait until it executes the function."""
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "spec.yaml").write_text(SPEC.replace("FUNCTION", function))
    (folder / "script.py").write_text(SCRIPT)
    (folder / "tmp").mkdir()
    process = preloaded.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )
    with process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "now\n"
            yield process
        finally:
            process.kill()


def left_in(folder: Path) -> list[Path]:
    return list((folder / "tmp").iterdir())


@pytest.mark.parametrize("where", ["plain", "in a notebook", "under asyncio.run"])
@pytest.mark.parametrize("function", ["blocks_at_last", "waits_in_virtual_time"])
def test_one_ctrl_c_ends_a_simulation(tmp_path: Path, function: str, where: str) -> None:
    with started(tmp_path, function, "script.py", where) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    first, *notes = out.splitlines()
    assert first == "interrupted True True"
    assert ("in blocks_at_last" in "".join(notes)) == (function == "blocks_at_last")
    assert not left_in(tmp_path)


@pytest.mark.asyncio
async def test_a_cancelled_task_starts_no_simulation() -> None:
    done: list[int] = []

    async def starts() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as asyncio.run does if Ctrl-C is pressed between two simulations
        in_own_thread(lambda: done.append(1), done.clear, "never")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(starts())
    assert not done


def test_an_interrupted_command_prints_its_findings(tmp_path: Path) -> None:
    command = ["-m", "pipedist", "simulate", "spec.yaml", "--faults", "none"]
    with started(tmp_path, "blocks_at_last", *command) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert out.splitlines()[0] == "seeds       1"  # besides the reference, which ran twice
    assert "the simulation ended while a function was blocked" in err
    assert "functions.py" in err
    assert "in blocks_at_last" in err
    assert not left_in(tmp_path)


def test_the_next_simulation_removes_the_remains_of_a_killed_one(tmp_path: Path) -> None:
    command = ["-m", "pipedist", "simulate", "spec.yaml"]
    with started(tmp_path, "blocks_at_last", *command) as process:
        process.kill()
    assert len(left_in(tmp_path)) == 1
    next_one = [sys.executable, *command, "--seeds", "1", "--costs", "each=1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    preloaded.run(next_one, cwd=tmp_path, env=environment, check=True, timeout=WAIT_S, capture_output=True)
    assert not left_in(tmp_path)


@pytest.mark.parametrize("start", [["module.py"], ["-c", "import module"]])
def test_a_module_without_a_guard_that_simulates_its_own_function(tmp_path: Path, start: list[str]) -> None:
    (tmp_path / "module.py").write_text(
        "from pipedist.testing import simulate\n"
        "def same(x):\n    return x\n"
        "STAGES = {'y': {'run': 'module:same'}, 't': {'reduce': 'sum', 'of': 'y', 'axis': 0}}\n"
        "simulate({'pipedist': 1, 'dataset': {'range': 4, 'batch': 2}, 'stages': STAGES})\n"
    )
    done = preloaded.run(
        [sys.executable, *start], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 1
    assert re.search(
        r"PlanError: (module\.py:\d+|stages\.y\.run: module:same): importing module failed", done.stderr
    )
    assert 'call it in a function, or below `if __name__ == "__main__":`' in done.stderr


def test_simulations_of_several_threads_take_turns() -> None:
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(lambda: SpecSimulation(spec_of(fn.draws), workers=2).run(7)) for _ in range(3)]
        took = {run.result().took_s for run in runs}
    assert len(took) == 1


def test_a_simulated_function_cannot_start_a_simulation() -> None:
    def simulates(shard: object) -> object:
        simulate(spec_of(fn.squares), seeds=[0])
        return shard

    error = SpecSimulation(spec_of(simulates)).check(0).error
    assert isinstance(error, CallError)
    assert "a simulated function cannot start another simulation" in str(error)
