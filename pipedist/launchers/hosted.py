"""A worker that dials in, kept by a process of somebody else: an engine's actor or plugin.

The process that keeps it executes none of its code. It starts `pipedist worker`'s own supervisor, exec'd,
which starts the worker process: so user code has a main thread of its own, and what it does to its
process is no matter of the engine's.

| who ends | what follows |
|---|---|
| the keeping process, however | the supervisor sees the end of its lifeline (its standard input) and leaves |
| the supervisor, by a signal | it is started again, a few times |
| the supervisor, by itself | that is the end: it was told to stop, refused, or nobody answered (any more) |

The cluster's keys never touch a disk here: they are in memory that the supervisor and the worker
process inherit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from msgspec import Struct

from pipedist.worker import boot

STARTS_MAX = 5
"""Supervisors that a signal may end before their worker is given up."""

LAST_LINES = 5
"""Lines on standard error that are kept, to say why a supervisor left."""

JOIN_S = 30.0
"""How long the scheduler may take to answer for the first time, if nothing else is said, seconds."""

_LINE_BYTES_MAX = 4096
_LAST_WORDS_S = 1.0
"""How long the last lines of a supervisor that has ended are waited for."""

_LOOK_S = 0.5
"""How soon a supervisor notices at the latest that its keeper is gone, or not its parent any more."""

_STANDARD_INPUT = 0


class Terms(Struct, frozen=True):
    """How a worker joins a cluster.

    Args:
        endpoint: where the run listens.
        keys: the text of a key file for workers.
        threads: BLAS and OpenMP threads of the worker.
        code: folders that become the last entries of the worker's `sys.path`.
        join_s: how long the scheduler may take to answer for the first time, seconds.
    """

    endpoint: str
    keys: str
    threads: int = 1
    code: tuple[str, ...] = ()
    join_s: float = JOIN_S

    def __repr__(self) -> str:
        return f"Terms({self.endpoint!r}, threads={self.threads}, code={self.code!r})"


class HostedWorker:
    """A worker of this process's host, from its start until `close`, or until it leaves by itself.

    Args:
        terms: how it joins.
        on_left: told how it left, in a thread of its own; not told if it was told to leave.
    """

    def __init__(self, terms: Terms, on_left: Callable[[str], None] = lambda _how: None) -> None:
        self._terms = terms
        self._on_left = on_left
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._lock = threading.Lock()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._left = threading.Event()
        self._how = ""
        self._thread = threading.Thread(target=self._keep, name="pipedist-hosted-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The supervisor's process id, 0 where there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    def report_to(self, on_left: Callable[[str], None]) -> None:
        """Have somebody else told how it left.

        Args:
            on_left: as for the class.
        """
        self._on_left = on_left

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Return how it left, "" if it was told to; None if it has not, after `timeout_s` seconds."""
        return self._how if self._left.wait(timeout_s) else None

    def close(self, grace_s: float) -> None:
        """Have it leave, and return as soon as its processes are gone.

        Args:
            grace_s: how long it may take, seconds; then they are killed.
        """
        with self._lock:
            self._closing = True
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if not self._left.wait(grace_s) and process is not None:
            process.kill()  # the worker process dies with it
        self._thread.join()

    def _keep(self) -> None:
        how = "it did not start"
        try:
            keys = os.memfd_create("pipedist-keys", os.MFD_CLOEXEC)
            try:
                os.fchmod(keys, 0o600)
                os.write(keys, self._terms.keys.encode("ascii"))
                for _ in range(STARTS_MAX):
                    code = self._live(keys)
                    if code is None:
                        break
                    how = self._describe(code)
                    if code >= 0:
                        break
            finally:
                os.close(keys)
        except Exception as error:  # nobody can wait for a thread's exceptions: it is how the worker left
            how = f"{type(error).__name__}: {error}"
        self._how = "" if self._closing else how
        self._left.set()
        if self._how:
            self._on_left(how)

    def _live(self, keys: int) -> int | None:
        """Keep one supervisor until it has ended; return its exit code, None where it was not started."""
        terms = self._terms
        arguments = {
            "parent": os.getpid(),
            "endpoint": terms.endpoint,
            "keys": keys,
            "threads": terms.threads,
            "code": terms.code,
            "join_s": terms.join_s,
        }
        with self._lock:
            if self._closing:
                return None
            process = self._process = subprocess.Popen(
                boot.command("pipedist.launchers.hosted", arguments),
                env=_environment(terms.code),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(keys,),
            )
        listening = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        listening.start()
        code = process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        listening.join(_LAST_WORDS_S)  # what user code has started may have the pipe for ever
        return code

    def _listen(self, pipe: IO[bytes]) -> None:
        """Pass on what is said, as long as somebody may say something."""
        with pipe:
            while line := pipe.readline(_LINE_BYTES_MAX):
                text = line.decode(errors="replace").rstrip("\n")
                self._said.append(text)
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - the engine's logs have it

    def _describe(self, code: int) -> str:
        if code == 0:
            return ""
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        said = " | ".join(tuple(self._said))
        return f"{ended}: {said}" if said else ended


def _environment(code: tuple[str, ...]) -> dict[str, str]:
    """Return this process's environment, where `code` does not come before what is installed."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in path if entry and entry not in code)
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**rest, "PYTHONPATH": kept} if kept else rest


def main(arguments: Mapping[str, Any]) -> None:
    """Be the supervisor of a worker.

    Args:
        arguments: `parent`, the keeping process; `keys`, the descriptor of the memory that has the text of
            the key file; the other fields of `Terms`.
    """
    from pipedist.errors import PipedistError
    from pipedist.worker.supervisor import Supervisor

    threading.Thread(target=_leave_with, args=(int(arguments["parent"]),), daemon=True).start()
    descriptor = int(arguments["keys"])
    path = f"/dev/fd/{descriptor}"
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the scheduler's to answer
    try:
        supervisor = Supervisor(
            str(arguments["endpoint"]),
            path,
            threads=int(arguments["threads"]),
            join_s=float(arguments["join_s"]),
            inherited=(descriptor,),
            code=tuple(arguments["code"]),
        )
        code = supervisor.run()
    except PipedistError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the keeper reads it
        code = error.exit_code
    raise SystemExit(code)


def _leave(_signum: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _leave_with(parent: int) -> None:
    """Have this process leave as soon as its keeper is gone, or closes the lifeline."""
    while os.getppid() == parent:
        readable, _, _ = select.select([_STANDARD_INPUT], [], [], _LOOK_S)
        if readable:  # nobody writes into it: it has ended
            break
    os.kill(os.getpid(), signal.SIGTERM)
