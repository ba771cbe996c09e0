"""The fork server: a small process that forks workers, and never outlives its launcher.

It is exec'd, so it inherits no threads and locks; single-threaded, so forking it is safe; and it
has imported what every worker needs, and no user code, so a worker is there within milliseconds.

Nothing is left behind, whoever is killed:

* its launcher closes the control socket or dies: the socket ends (or, where a process that the
  user forked still holds the other end, the launcher's pidfd tells), all workers are killed with
  SIGKILL, stopped ones too, and the server ends.
  If the launcher's process did not end it in order, the directory of its sockets is removed too.
* the server dies: the kernel kills its workers (PR_SET_PDEATHSIG; the server's only thread is the
  one that forks them).

A worker that hangs can't be asked: what it executes, and how long that may take, stands in memory that
it shares with the server (`pipedist.worker.progress`), which looks while its launcher wants it to.

A worker that is stopped (SIGSTOP) can't be told from a dead one by its peers, but by its parent:
after `stopped_s_max` it is killed.
"""

from __future__ import annotations

import gc
import math
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pipedist.worker.process as worker_process
from pipedist.launchers.base import describe_exit
from pipedist.launchers.control import FrameBuffer, pack_frame
from pipedist.launchers.out_of_memory import OutOfMemoryKills
from pipedist.transport.endpoints import remove_private_directory
from pipedist.worker.forks import answer, pass_over
from pipedist.worker.kernel import FORK_SERVER_NAME, die_with, set_process_name
from pipedist.worker.process import ExitCode
from pipedist.worker.progress import Overdue, Progress, end_of
from pipedist.worker.settings import WorkerSettings

_READ_BYTES = 65_536
_LAUNCHER_END_S = 2.0
"""How long a launcher whose socket has ended may take to be dead."""


@dataclass(slots=True)
class _Child:
    """A worker of this server.

    Args:
        stopped_at: since when it is stopped, None while it runs.
        note: why it was killed here, for people.
        memory: descriptor of what `progress` is in, which the launcher opens through /proc; -1: it has none.
        overdue: what it was killed for, because it took too long.
        was_killed: by this server.
    """

    worker: str
    incarnation: int
    pid: int
    progress: Progress
    memory: int
    stopped_at: float | None = None
    note: str = ""
    overdue: Overdue | None = None
    was_killed: bool = False

    def let_go(self) -> None:
        """Close its memory, here."""
        _close(self.progress, self.memory)


class ForkServer:
    """Forks workers as its launcher asks, and reports their ends.

    Args:
        control: the launcher's socket.
        launcher_pid: the launcher's process.
    """

    def __init__(self, control: socket.socket, launcher_pid: int) -> None:
        self.pid = os.getpid()
        self._control = control
        self._launcher_pid = launcher_pid
        self._stopped_s_max = math.inf
        """How long a worker may be stopped before it is killed, seconds."""
        self._look_s: float | None = None
        """How often to look for functions that take too long, seconds."""
        self._directory = ""
        """Of the launcher's sockets, removed if its process dies; "" for none."""
        self._dismissed = False
        """The launcher has said that it is done."""
        self._buffer = FrameBuffer()
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._wake_up_end = socket.socketpair()
        self._lifeline = -1
        self._memory_kills = OutOfMemoryKills()

    def serve(self) -> None:
        """Serve until the launcher is gone or done; then kill what is left."""
        for end in (self._wake_up, self._wake_up_end):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_up_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)  # the wake-up descriptor is what counts
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._on_child)
        self._watch_launcher()
        try:
            while self._turn():
                pass
        finally:
            self._kill_all()
            if self._directory and not self._dismissed and self._launcher_is_gone():
                remove_private_directory(self._directory)

    def _launcher_is_gone(self) -> bool:
        """Whether the launcher's process is dead; it follows the end of its socket within milliseconds."""
        if self._lifeline < 0:
            return os.getppid() != self._launcher_pid
        ready, _, _ = select.select([self._lifeline], [], [], _LAUNCHER_END_S)
        return bool(ready)

    def _watch_launcher(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return  # not Linux: the control socket is the only lifeline
        try:
            self._lifeline = os.pidfd_open(self._launcher_pid)
        except OSError:
            return  # a sandbox forbids it, or the launcher is gone: then the control socket has ended
        self._selector.register(self._lifeline, selectors.EVENT_READ, lambda: False)

    def _turn(self) -> bool:
        """Wait for something and deal with it; return False when the launcher is gone."""
        ready = self._selector.select(self._patience_s())
        alive = True
        for key, _ in ready:
            alive = key.data() and alive
        self._kill_stopped()
        if self._look_s is not None:
            self._kill_overdue()
        return alive

    def _patience_s(self) -> float | None:
        since = [c.stopped_at for c in self._children.values() if c.stopped_at is not None]
        if not since:
            return self._look_s if self._children else None
        patience_s = max(0.0, min(since) + self._stopped_s_max - time.monotonic())
        return patience_s if self._look_s is None else min(patience_s, self._look_s)

    def _on_control(self) -> bool:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionError:
            return False
        for kind, *rest in self._buffer.feed(data):
            if kind == "start":
                self._fork(*rest)
            elif kind == "kill":
                self._kill(*rest)
            elif kind == "watch":
                (self._look_s,) = rest
            elif kind == "serve":
                self._directory, self._stopped_s_max = rest
            elif kind == "end":
                self._dismissed = True
            else:
                raise ValueError(f"the launcher sent {kind!r}, which this server does not know")
        return bool(data)

    def _on_child(self) -> bool:
        try:
            while self._wake_up.recv(4096):
                pass
        except BlockingIOError:
            pass  # emptied
        self._reap()
        return True

    # -- children ----------------------------------------------------------------------

    def _fork(self, worker: str, incarnation: int, settings: Mapping[str, Any]) -> None:
        try:
            progress, memory = _progress()
            gate: tuple[int, ...] = ()
            try:
                waits, opens = gate = os.pipe()
                pid = os.fork()
            except OSError:
                _close(progress, memory)
                for end in gate:
                    os.close(end)
                raise
        except OSError as error:
            text = f"it could not be forked: {error.strerror}"
            self._tell("exited", worker, incarnation, 0, None, None, text, None, False)
            return
        if pid == 0:
            if memory >= 0:
                os.close(memory)
            os.close(opens)
            os.read(waits, 1)  # its launcher is to know its process before it has joined
            os.close(waits)
            _be_a_worker(self, settings, progress)
        os.close(waits)
        self._children[pid] = _Child(worker, incarnation, pid, progress, memory)
        self._tell("started", worker, incarnation, pid, memory)
        os.close(opens)

    def close_in_child(self) -> None:
        """Let go of what belongs to the server: called in a worker right after the fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, self._wake_up, self._wake_up_end):
            end.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        for child in self._children.values():
            child.let_go()
        self._children.clear()

    def _kill(self, worker: str, incarnation: int) -> None:
        for child in self._children.values():
            if (child.worker, child.incarnation) == (worker, incarnation):
                _kill(child)  # not reaped yet, so the pid is still its own

    def _kill_stopped(self) -> None:
        limit = time.monotonic() - self._stopped_s_max
        if not any(_stopped_before(child, limit) for child in self._children.values()):
            return
        self._reap()  # this process may have been stopped too, or had no turn: they may run again
        for child in list(self._children.values()):
            if _stopped_before(child, limit):
                child.stopped_at = None
                child.note = f"stopped for {self._stopped_s_max:g} s, then killed with "
                _kill(child)

    def _kill_overdue(self) -> None:
        now_ns = time.monotonic_ns()
        for child in self._children.values():
            if child.overdue is None and child.stopped_at is None:
                child.overdue = child.progress.overdue(now_ns)
                if child.overdue is not None:
                    _kill(child)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.get(pid)
            if child is None:
                continue
            if os.WIFSTOPPED(status):
                child.stopped_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                child.stopped_at = None
            else:
                self._bury(child, status)

    def _bury(self, child: _Child, status: int) -> None:
        del self._children[child.pid]
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        text = child.note + describe_exit(code, signum)
        if self._memory_kills.grew() and signum == signal.SIGKILL and not child.was_killed:
            text += ": out of memory"
        running, timed_out = end_of(child.progress, child.overdue)
        child.let_go()
        self._tell(
            "exited", child.worker, child.incarnation, child.pid, code, signum, text, running, timed_out
        )

    def _kill_all(self) -> None:
        for child in self._children.values():
            _kill(child)
        for child in list(self._children.values()):
            self._bury(child, os.waitpid(child.pid, 0)[1])

    def _tell(self, *items: object) -> None:
        try:
            self._control.sendall(pack_frame(*items))
        except (BrokenPipeError, ConnectionError):
            return  # the launcher is gone; the next turn sees that


def _progress() -> tuple[Progress, int]:
    """Return memory to be shared with a worker, and the descriptor through which others can look at it.

    Raises:
        OSError: there is none.
    """
    if not hasattr(os, "memfd_create"):
        return Progress(), -1  # not Linux: nobody else looks
    memory = os.memfd_create("pipedist-progress")
    try:
        os.ftruncate(memory, Progress.BYTES)
        progress = Progress(memory)
    except OSError:
        os.close(memory)
        raise
    progress.idle()
    return progress, memory


def _close(progress: Progress, memory: int) -> None:
    progress.close()
    if memory >= 0:
        os.close(memory)


def _stopped_before(child: _Child, time_s: float) -> bool:
    return child.stopped_at is not None and child.stopped_at <= time_s


def _kill(child: _Child) -> None:
    child.was_killed = True
    os.kill(child.pid, signal.SIGKILL)


def _be_a_worker(server: ForkServer, settings: Mapping[str, Any], progress: Progress) -> None:
    """Become a worker; never returns."""
    code: int = ExitCode.DEFECT
    try:
        server.close_in_child()
        die_with(server.pid)
        code = worker_process.run_process(WorkerSettings(**settings), progress)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads it any more
        # No finalisation: exit handlers of the server's modules are not this process's to run.
        os._exit(code)


def _do_nothing(_signum: int, _frame: object) -> None:
    return


def main(arguments: Mapping[str, Any]) -> None:
    """Be the fork server.

    Args:
        arguments: `control`, the descriptor of the control socket; `launcher`, the launcher's pid.
    """
    set_process_name(FORK_SERVER_NAME)
    # What the terminal, `timeout` or `systemctl stop` send to all processes of a run is the scheduler's to
    # answer: its workers are to finish their calls. They inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer(pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher had it blocked until here
    control = socket.socket(fileno=int(arguments["control"]))
    control.set_inheritable(False)
    gc.freeze()  # a collection in a worker then leaves the pages that it shares with us alone
    ForkServer(control, int(arguments["launcher"])).serve()
    os._exit(0)  # taking the interpreter apart would only make the launcher wait
