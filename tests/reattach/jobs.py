"""Runs whose workers dialled in: the run's process is killed and resumed, the workers stay."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipedist.journal.history import read_history
from tests import preloaded
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Bounds a hang, and nothing else."""


@dataclass
class Program:
    """A process and its standard error."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()

    @property
    def said(self) -> str:
        """Its standard error until now."""
        return "".join(self.lines)

    def hears(self, pattern: str, times: int = 1) -> None:
        """Return as soon as its standard error matches."""
        with self._news:
            found = self._news.wait_for(lambda: len(re.findall(pattern, self.said)) >= times, PATIENCE_S)
        assert found, f"no {pattern!r} ({times} times) in: {self.said}"

    def ends(self) -> int:
        """Return its exit code when it has ended by itself."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.said}") from None
        self._reader.join(PATIENCE_S)
        return code


Outcome = tuple[bytes, bytes]
"""The bytes of the files of a run."""


@contextmanager
def started(*args: str, cwd: Path, module: str = "pipedist") -> Iterator[Program]:
    """Start `python -m pipedist ...`; it is gone at the end, whatever happens."""
    process = preloaded.Popen(
        [sys.executable, "-m", module, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    program = Program(process)
    try:
        yield program
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.wait(PATIENCE_S)
        program._reader.join(PATIENCE_S)
        assert process.stderr is not None
        process.stderr.close()


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as something is true that another process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@dataclass
class Job:
    """A spec with `launcher: connect`, which can be run, killed and resumed.

    Its function notes each execution in the file `calls`, and waits in the calls for which there is a
    file `hold-STEP`, until that is removed.
    """

    folder: Path
    workers: int = 1
    rejoin_s: float = 60.0
    steps: int = 12
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        (self.folder / "mine.py").write_text(FUNCTIONS)
        (self.folder / "spec.yaml").write_text(self.spec())

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def spec(self) -> str:
        return f"""
pipedist: 1
name: job
replicas: 2
cluster:
  launcher: connect
  listen: "{self.endpoint}"
  key_file: cluster.key
  workers: {self.workers}
  rejoin_s: {self.rejoin_s}
  speculation: off  # what is held takes long, and is counted
dataset: {{range: {4 * self.steps}, batch: 4}}
stages:
  y: {{run: "mine:work", with: {{folder: "{self.folder}"}}}}
  total: {{reduce: sum, of: y, axis: 0}}
  rows: {{gather: 0, of: y}}
outputs: {{total: total.json, rows: rows.npy}}
"""

    def run(self, *flags: str) -> AbstractContextManager[Program]:
        """Start the run."""
        args = ("run", "spec.yaml", "--output", "out", *flags)
        return started(*args, cwd=self.folder, module="tests.reattach.patient")

    def run_impatiently(self) -> AbstractContextManager[Program]:
        """Start the run, with a short heartbeat timeout."""
        args = (self.endpoint, str(self.rejoin_s))
        return started(*args, cwd=self.folder, module="tests.reattach.impatient")

    def worker(self, *flags: str, endpoint: str | None = None) -> AbstractContextManager[Program]:
        """Start a worker."""
        args = ("--connect", endpoint or self.endpoint, "--key-file", "cluster.key", *flags)
        return started("worker", *args, cwd=self.folder)

    def hold(self, step: int) -> Path:
        """Let calls of a step wait until the file that is returned is removed."""
        path = self.folder / f"hold-{step}"
        path.touch()
        return path

    @contextmanager
    def outlived(self, step: int) -> Iterator[Program]:
        """Give a worker whose run was killed when it had reached a step, and which has finished that."""
        held = self.hold(step)
        with self.run() as run:
            run.hears("waiting for workers")
            with self.worker() as worker:
                self.reaches(step)
                run.process.kill()
                run.ends()
                held.unlink()
                worker.hears("finished calls are kept for the resumed run")
                yield worker

    def mend(self) -> None:
        """Change the function, so that it returns other values from now on."""
        module = self.folder / "mine.py"
        module.write_text(module.read_text().replace("return np.sqrt(", "return 0 * np.sqrt("))

    def reaches(self, step: int) -> None:
        """Return as soon as the first call of a step has begun."""
        until(lambda: (step, 0) in self.calls())

    def commits(self, steps: int) -> None:
        """Return as soon as so many steps are durable."""

        def are_durable() -> bool:
            history = read_history(self.folder / "out/.pipedist/journal")
            done = history.passes.get("0/dataset") if history is not None else None
            return done is not None and done.steps >= steps

        until(are_durable)

    def calls(self) -> Counter[tuple[int, int]]:
        """Return how often each (step, replica) was executed until now."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter((int(step), int(replica)) for step, replica in map(str.split, lines))

    def outcome(self) -> Outcome:
        """Return the files."""
        return (self.folder / "out/total.json").read_bytes(), (self.folder / "out/rows.npy").read_bytes()


FUNCTIONS = """
import os
import time

import numpy as np


def work(x, folder, ctx):
    fd = os.open(os.path.join(folder, "calls"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{ctx.step} {ctx.replica_id_in_sync_group}\\n".encode())
    os.close(fd)
    while os.path.exists(os.path.join(folder, f"hold-{ctx.step}")):
        time.sleep(0.01)
    print("done")  # also where nobody hears it any more
    return np.sqrt(x + ctx.rng.random(len(x)))
"""
