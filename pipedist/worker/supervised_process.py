"""The worker process, as its supervisor starts, watches and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from msgspec.structs import asdict

from pipedist.worker import boot
from pipedist.worker.boot import describe_exit
from pipedist.worker.process_setup import WorkerSettings

END_S = 2.0  # how long the worker process may take to end after SIGKILL, or after its Goodbye
STOPPED_S_MAX = 3.0  # how long the worker process may be stopped (SIGSTOP) before it is killed


class WorkerProcess:
    """The worker process of a supervisor, from its start to its end.

    `progress`, `cache` and `proof` are descriptors of memory: the running call, finished results for the next process,
    and the proof of its name. `code` folders are appended to its `sys.path`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        progress: int,
        cache: int,
        proof: int,
        code: tuple[str, ...] = (),
        inherited: tuple[int, ...] = (),
    ) -> None:
        arguments = {
            "parent": os.getpid(),
            "progress": progress,
            "cache": cache,
            "proof": proof,
            "code": code,
            "settings": asdict(settings),
        }
        self._stopped_since: float | None = None  # when it was stopped (SIGSTOP); None while it runs
        self._closed_since: float | None = None  # when its end of the pipe `_life` was closed
        self._note = ""  # why it must be killed
        self._life, held = os.pipe()  # an exec closes the worker's end, which its copies do not have
        try:
            os.set_blocking(self._life, False)
            self._process = boot.start(
                "pipedist.worker.process",
                {**arguments, "life": held},
                env=boot.environment(settings.threads),
                death_signal=signal.SIGKILL,  # this thread ends the process before it ends
                pass_fds=(progress, cache, proof, held, *inherited),
            )
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(held)

    @property
    def code(self) -> int | None:
        """The exit code, as `Popen.returncode`; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Let it end when its call is over."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def end(self, *, grace_s: float = 0.0) -> int:
        """Kill it if it has not ended within `grace_s`, and what it has started; return its exit code."""
        if grace_s:
            self.wait(grace_s)
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        if self._life >= 0:
            boot.kill_group(self._process.pid)
            os.close(self._life)
            self._life = -1
        return code

    def is_stuck(self) -> bool:
        """Return whether it has been stopped for STOPPED_S_MAX, or another program has replaced it (exec)."""
        now = time.monotonic()
        if self._is_stopped(now):
            self._note = f"stopped for {STOPPED_S_MAX:g} s"
        elif self._is_closed(now):
            self._note = "replaced by another program (exec)"
        else:
            self._note = ""
        return bool(self._note)

    def _is_closed(self, now: float) -> bool:
        if self._closed_since is None:
            with contextlib.suppress(BlockingIOError):  # the worker holds the other end
                os.read(self._life, 1)
                self._closed_since = now
        return self._closed_since is not None and now - self._closed_since >= END_S

    def _is_stopped(self, now: float) -> bool:
        if not hasattr(os, "waitid"):  # macOS: a stopped process is not noticed
            return False
        try:
            change = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it has just ended
            return False
        if change is not None:
            self._stopped_since = now if change.si_code == os.CLD_STOPPED else None
        return self._stopped_since is not None and now - self._stopped_since >= STOPPED_S_MAX

    def describe(self, code: int) -> str:
        text = describe_exit(code)
        return f"{self._note}, then killed with {text}" if self._note else text
