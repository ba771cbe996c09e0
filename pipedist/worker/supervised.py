"""The worker process of a supervisor: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from pipedist.worker import boot
from pipedist.worker.kernel import die_with
from pipedist.worker.process import ExitCode, run_process
from pipedist.worker.progress import Progress
from pipedist.worker.settings import WorkerSettings

STOPPED_S_MAX = 3.0
"""How long it may be stopped (SIGSTOP) before it is killed; as in a local launcher."""


class Supervised:
    """A worker process, from its start to its end.

    Args:
        settings: what it is started with.
        progress: descriptor of the memory in which it notes what it executes.
        kept: of that through which finished results go to the next one.
        proof: of that which has the proof of its name: others see command lines.
        code: folders that become the last entries of its `sys.path`.
        inherited: descriptors that it gets too.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        progress: int,
        kept: int,
        proof: int,
        code: tuple[str, ...] = (),
        inherited: tuple[int, ...] = (),
    ) -> None:
        arguments = {
            "parent": os.getpid(),
            "progress": progress,
            "kept": kept,
            "proof": proof,
            "code": code,
            "settings": asdict(settings),
        }
        self._stopped_since: float | None = None
        """Since when it is stopped; None while it runs."""
        self._counts_as_dead = False
        """It was stopped for too long."""
        self._process = subprocess.Popen(
            boot.command("pipedist.worker.supervised", arguments),
            env=boot.environment(settings.threads),
            stdin=subprocess.DEVNULL,
            pass_fds=(progress, kept, proof, *inherited),
        )

    @property
    def code(self) -> int | None:
        """How it ended, as `Popen.returncode`; None while it has not."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to leave when what it runs is over."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def end(self, *, grace_s: float = 0.0) -> int:
        """See to it that it is gone, after `grace_s` at the latest; return how it ended."""
        if grace_s:
            self.wait(grace_s)
        if self._process.poll() is None:
            self._process.kill()
        return self._process.wait()

    def is_stopped(self) -> bool:
        """Whether it has been stopped for so long that it counts as dead."""
        if not hasattr(os, "waitid"):  # macOS: it is found when it goes on, or never
            return False
        told = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if told is not None:
            self._stopped_since = time.monotonic() if told.si_code == os.CLD_STOPPED else None
        since = self._stopped_since
        self._counts_as_dead = since is not None and time.monotonic() - since >= STOPPED_S_MAX
        return self._counts_as_dead

    def describe(self, code: int) -> str:
        """Return how it ended, for people.

        Args:
            code: as `Popen.returncode`.
        """
        text = describe(code)
        if self._counts_as_dead:  # else it ended by itself, stopped or not
            text = f"stopped for {STOPPED_S_MAX:g} s, then killed with {text}"
        return text


def describe(code: int) -> str:
    """Return what an exit code says, for people: "exit code 3", "signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _take_proof(file: int) -> str:
    """Return what is in the supervisor's memory; nothing that user code starts inherits it."""
    with open(file, "rb") as memory:
        return os.pread(memory.fileno(), os.fstat(memory.fileno()).st_size, 0).decode()


def main(arguments: Mapping[str, Any]) -> None:
    """Be the worker process of a supervisor.

    Args:
        arguments: `parent`, the supervisor's pid; `progress`, `kept`, `proof`, `code`, as for
            `Supervised`; `settings`, the fields of WorkerSettings.
    """
    die_with(int(arguments["parent"]))
    sys.path.extend(arguments["code"])  # a copy of the spec's own modules: none of another spec's
    os.dup2(2, 1)  # what user code writes to descriptor 1 is no output of the supervisor's
    settings = WorkerSettings(**arguments["settings"])
    proof = _take_proof(int(arguments["proof"]))
    progress = Progress(int(arguments["progress"]))
    code = run_process(settings, progress, int(arguments["kept"]), proof)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
    if isinstance(code, ExitCode):  # else user code ended it, be it with a code of these
        progress.end()
    os._exit(code)
