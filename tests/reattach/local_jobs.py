"""Runs with local workers and `rejoin_s`: the run's process is killed and resumed, the workers stay."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.reattach.jobs import PATIENCE_S, ROOT, Job, until


@dataclass
class LocalRun:
    """The process of a run; what it and its workers say on standard error is in a file.

    Not in a pipe: workers that live on would keep that open.
    """

    process: subprocess.Popen[bytes]
    told: Path

    @property
    def said(self) -> str:
        """All that was said until now."""
        return self.told.read_text()

    def hears(self, pattern: str, times: int = 1) -> None:
        """Return as soon as it was said so."""
        until(lambda: len(re.findall(pattern, self.said)) >= times)

    def has(self, workers: int) -> None:
        """Return as soon as so many workers are there, and their supervisors know of the run."""

        until(lambda: len(self.named("has joined")) >= workers <= len(self.named("is heard of")))

    def named(self, said: str) -> set[str]:
        """Return the workers of which this was said."""
        return set(re.findall(rf"(\S+) {said}\n", self.said))

    def ends(self) -> int:
        """Return its exit code when it has ended by itself."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end; it said: {self.said}") from None


@dataclass
class LocalJob(Job):
    """A spec with `launcher: local`; see `Job`.

    Args:
        sockets: the folder in which its private directories are.
        rejoin_s: None: the spec does not say it.
        module: what is executed as pipedist.
    """

    sockets: Path = field(default_factory=Path)
    runs: set[int] = field(default_factory=set)
    rejoin_s: float | None = 60.0  # type: ignore[assignment] # a job whose workers dial in always says it
    module: str = "tests.reattach.patient"

    def spec(self) -> str:
        said = "" if self.rejoin_s is None else f"  rejoin_s: {self.rejoin_s}\n"
        start, end = super().spec().index("  launcher:"), super().spec().index("  speculation:")
        return super().spec()[:start] + f"  workers: {self.workers}\n{said}" + super().spec()[end:]

    @contextmanager
    def start(self, *flags: str) -> Iterator[LocalRun]:
        """Start the run; its own process is gone at the end."""
        count = len(list(self.folder.glob("said-*")))
        told = self.folder / f"said-{count}"
        with told.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module, "run", "spec.yaml", "--output", "out", *flags],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,  # a shell gives a job a process group of its own too
            )
        self.runs.add(process.pid)
        try:
            yield LocalRun(process, told)
        finally:
            process.kill()
            process.wait(PATIENCE_S)

    def kill_at(self, step: int, *flags: str) -> None:
        """Run until a step is executed by somebody, kill the run as a shell does, and let that go on.

        All workers are there by then, and what they execute is of this step or a later one.
        """
        held = [self.hold(each) for each in range(step, self.steps)]
        with self.start(*flags) as run:
            self.reaches(step)
            run.has(self.workers)
            os.killpg(run.process.pid, signal.SIGKILL)
            assert run.ends() == -signal.SIGKILL
        for each in held:
            each.unlink()

    @property
    def environment(self) -> dict[str, str]:
        """What its processes have in their environment, and no others."""
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.sockets),
        }

    def alive(self) -> dict[int, str]:
        """Return the processes of this job that are there, and their names."""
        mark = f"TMPDIR={self.sockets}".encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "comm").read_text().strip()
        return found

    def supervisors(self) -> set[int]:
        """Return the supervisors that are there: they lead sessions of their own, as a run does here."""
        found = set()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                if os.getsid(pid) == pid and pid not in self.runs:
                    found.add(pid)
        return found

    def leaves_nothing(self) -> None:
        """Return as soon as no process, and nothing in the folders that they share, is there."""
        until(lambda: not self.left())

    def left(self) -> list[object]:
        """Return the processes that are there, and what is in the folder of sockets."""
        return [*self.alive().items(), *self.sockets.iterdir()]


@contextmanager
def local_job(
    folder: Path, workers: int = 2, rejoin_s: float | None = 60.0, steps: int = 12
) -> Iterator[LocalJob]:
    """Give a job; whatever becomes of it, nothing of it is left at the end."""
    with TemporaryDirectory(dir="/tmp") as sockets:  # paths of sockets are short
        job = LocalJob(folder, workers=workers, rejoin_s=rejoin_s, steps=steps, sockets=Path(sockets))
        try:
            yield job
        finally:
            for pid in job.alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda: not job.alive())
