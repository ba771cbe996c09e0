"""A supervisor process, started and ended by an engine's process.

An engine's actor or plugin has one. It starts the supervisor of `pipedist worker` in an interpreter of its
own, which starts the worker process: so user code has a main thread of its own, and cannot harm the
engine's process.

| what ends | consequence |
|---|---|
| the parent process, however | the supervisor sees the end of its standard input, and leaves |
| the supervisor, by a signal | it is started again, up to STARTS_MAX times |
| the supervisor, by itself | no restart: it was stopped or refused, or found no scheduler |

The cluster's keys are never on disk: they are in memory that the supervisor and the worker process inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

from msgspec import Struct

from pipedist.worker import boot

STARTS_MAX = 5  # supervisors that a signal may end before their worker is given up
LAST_LINES = 5  # lines of standard error that are kept, to explain why a supervisor left
JOIN_S = 30.0  # how long the scheduler may take to reply for the first time, by default, seconds

_LINE_BYTES_MAX = 4096
_DRAIN_S = 1.0  # how long to wait for the last lines of a supervisor that has ended


class JoinConfig(Struct, frozen=True):
    """How a worker joins a cluster."""

    endpoint: str
    keys: str  # the text of a key file for workers
    threads: int = 1
    code: tuple[str, ...] = ()  # folders that are appended to the worker's `sys.path`
    join_s: float = JOIN_S  # how long the scheduler may take to reply for the first time, seconds

    def __repr__(self) -> str:
        return f"JoinConfig({self.endpoint!r}, threads={self.threads}, code={self.code!r})"


class SupervisorProcess:
    """A supervisor process on this host, until `close` or until it leaves.

    `on_left` is called with the reason, in a thread of its own, if neither `close` nor its scheduler has ended it.
    """

    def __init__(self, join: JoinConfig, on_left: Callable[[str], None] = lambda _reason: None) -> None:
        self._join = join
        self._on_left = on_left
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._lock = threading.Lock()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._left = threading.Event()
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="pipedist-supervisor-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The supervisor's process id, 0 if it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Return why the supervisor left; "": it was stopped; None: it is there."""
        return self._reason if self._left.wait(timeout_s) else None

    def close(self, grace_s: float) -> None:
        """Wait until the supervisor has ended; kill it after `grace_s`."""
        with self._lock:
            self._closing = True
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if not self._left.wait(grace_s) and process is not None:
            process.kill()  # the worker process dies with it
        self._thread.join()

    def _run(self) -> None:
        reason = "it did not start"
        try:
            with open(os.memfd_create("pipedist-keys", os.MFD_CLOEXEC), "wb", buffering=0) as file:
                keys = file.fileno()
                os.fchmod(keys, 0o600)
                file.write(self._join.keys.encode("ascii"))
                for _ in range(STARTS_MAX):
                    code = self._run_once(keys)
                    if code is None:
                        break
                    last_lines = " | ".join(tuple(self._last_lines))
                    reason = ": ".join(filter(None, (boot.describe_exit(code), last_lines))) if code else ""
                    if code >= 0:
                        break
        except Exception as error:  # nothing awaits this thread: the error is the reason
            reason = f"{type(error).__name__}: {error}"
        self._reason = "" if self._closing else reason
        self._left.set()
        if self._reason:
            self._on_left(reason)

    def _run_once(self, keys: int) -> int | None:
        """Run a supervisor; return its exit code, None if it was not started."""
        join = self._join
        arguments = {
            "parent": os.getpid(),
            "endpoint": join.endpoint,
            "keys": keys,
            "threads": join.threads,
            "code": join.code,
            "join_s": join.join_s,
        }
        with self._lock:
            if self._closing:
                return None
            process = self._process = boot.start(
                "pipedist.worker.supervisor",
                arguments,
                env=_environment(join.code),
                death_signal=signal.SIGCONT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(keys,),
            )
        reader = threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)
        reader.start()
        code = process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        reader.join(_DRAIN_S)  # a process that user code has started may hold the pipe for ever
        return code

    def _forward(self, pipe: IO[bytes]) -> None:
        """Copy lines of standard error to this process's, until the pipe ends."""
        with pipe:
            while line := pipe.readline(_LINE_BYTES_MAX):
                text = line.decode(errors="replace").rstrip("\n")
                self._last_lines.append(text)
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - for the engine's logs


def _environment(code: tuple[str, ...]) -> dict[str, str]:
    """Return the environment, with `code` after installed packages."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in path if entry and entry not in code)
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**rest, "PYTHONPATH": kept} if kept else rest
