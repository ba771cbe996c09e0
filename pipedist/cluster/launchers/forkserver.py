"""The fork server, which forks workers and ends with its launcher.

It is exec'd, so it inherits no threads and locks; it is single-threaded, so forking it is safe; and it has
imported what every worker needs, and no user code, so a worker starts within milliseconds.

Nothing is left behind, whichever process is killed:

* The launcher closes the control socket or dies: the socket ends (or, if a process that the user forked
  still holds the other end, the launcher's pidfd becomes readable). The server kills all workers with
  SIGKILL, stopped ones too, removes the directory of sockets, and ends. If the server is stopped when the
  launcher's process dies, the kernel continues it (PR_SET_PDEATHSIG).
* The server dies: the kernel kills its workers (PR_SET_PDEATHSIG; the server's only thread forks them), and
  the launcher kills what these have started.
* A worker ends, however: the server kills its process group, with the processes that user code has started and
  left. The server has a group of its own too: a signal to the driver's group can't end both at once.

A worker that hangs can't reply. So each worker notes what it executes, and how long that may take, in memory
shared with the server (`pipedist.worker.progress`), which checks it while the launcher requests that. Peers
can't distinguish a stopped worker (SIGSTOP) from a dead one, but its parent can: the server kills it after
`stopped_s_max`.

The launcher and the server send each other msgpack lists, whose first item is the kind:

| to the server | |
|---|---|
| serve, directory, stopped_s_max | the first one: the directory of the launcher's sockets; see `ForkServer` |
| start, worker, incarnation, settings | fork a worker; settings: the fields of `WorkerSettings` |
| kill, worker, incarnation | SIGKILL it |
| watch, every_s or nil | kill workers whose call takes too long; nil: no longer |
| end | the launcher closes in order: the end of the stream follows |

| from the server | |
|---|---|
| started, worker, incarnation, pid, memory | memory: the server's descriptor of its `Progress`, or -1 |
| exited, worker, incarnation, pid, code or nil, signal or nil, text, running or nil, timed out | |
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

import pipedist.worker.process as worker_process
import pipedist.worker.process_setup as process_setup
from pipedist.transport.endpoints import remove_private_directory, remove_stale_directories
from pipedist.worker.boot import describe_exit, kill_group
from pipedist.worker.process import ExitCode
from pipedist.worker.process_setup import (
    FORK_SERVER_NAME,
    WorkerSettings,
    die_with,
    do_nothing,
    handle_signals,
    set_process_name,
)
from pipedist.worker.progress import CallProgress, Overdue, Stops, end_of

_READ_BYTES = 65_536
_LAUNCHER_END_S = 2.0  # how long the process of a launcher whose socket has ended may take to end
_EXIT_S_MAX = 1.0  # how long a process may take to end after it has closed its descriptors
_UNSENT_BYTES_MAX = 65_536  # messages for a launcher that reads none; beyond it no requests are read
_FLUSH_S = 1.0  # how long the last messages may take to be sent
_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class _Child:
    """A worker of this server."""

    worker: str
    incarnation: int
    pid: int
    progress: CallProgress
    memory: int  # descriptor of the memory of `progress`, which the launcher opens through /proc; -1: none
    life: int  # read end of a pipe whose write end the worker holds, and an exec closes; -1: it is closed
    stopped_at: float | None = None  # when it was stopped (SIGSTOP), None while it runs
    closed_at: float | None = None  # when it closed its end of `life`, None before
    note: str = ""  # why the server killed it
    overdue: Overdue | None = None  # the call for which it was killed, because that took too long
    was_killed: bool = False  # the server has killed it

    def close(self) -> None:
        _close_memory(self.progress, self.memory)
        if self.life >= 0:
            os.close(self.life)


class ForkServer:
    """Forks workers on request of its launcher, and reports their ends."""

    def __init__(self, control: socket.socket, launcher_pid: int) -> None:
        self.pid = os.getpid()
        self._control = control
        self._launcher_pid = launcher_pid
        self._stopped_s_max = math.inf  # how long a worker may be stopped before it is killed, seconds
        self._check_s: float | None = None  # how often to look for calls that take too long; None: never
        self._stops = Stops()
        self._directory = ""  # the directory of the launcher's sockets, removed if its process dies; "": none
        self._is_dismissed = False  # the launcher has sent "end"
        self._unpacker = msgpack.Unpacker()
        self._unsent = bytearray()
        self._gates: list[int] = []  # pipes whose end lets a worker begin, once its process id is sent
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._wake_up_end = socket.socketpair()
        self._lifeline = -1
        self._memory_kills = OutOfMemoryKills()

    def serve(self) -> None:
        """Serve until the launcher ends or dismisses the server; kill all workers."""
        self._wake_up.setblocking(False)
        self._wake_up_end.setblocking(False)
        signal.set_wakeup_fd(self._wake_up_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, do_nothing)  # the signal is read from the wake-up descriptor
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._on_child)
        # Not Linux, a sandbox forbids it, or the launcher is gone: the control socket is the only lifeline.
        with suppress(AttributeError, OSError):
            self._lifeline = os.pidfd_open(self._launcher_pid)
            self._selector.register(self._lifeline, selectors.EVENT_READ, lambda: False)
        try:
            while self._step():
                pass
        finally:
            self._kill_all()
            if self._is_dismissed or self._launcher_is_gone():
                remove_private_directory(self._directory)
            if not self._is_dismissed:  # it may have died before it could name its directory
                remove_stale_directories()

    def _launcher_is_gone(self) -> bool:
        """Return whether the launcher's process has ended, soon after its socket."""
        if self._lifeline < 0:
            return os.getppid() != self._launcher_pid
        ready, _, _ = select.select([self._lifeline], [], [], _LAUNCHER_END_S)
        return bool(ready)

    def _step(self) -> bool:
        """Wait for events and handle them; return False when the launcher is gone."""
        ready = self._selector.select(self._timeout_s())
        alive = True
        for key, _ in ready:
            alive = key.data() and alive
        self._kill_late()
        if self._check_s is not None:
            self._kill_overdue()
        return alive

    def _timeout_s(self) -> float | None:
        due = [at for child in self._children.values() if (at := self._kill_at(child)) is not None]
        if not due:
            return self._check_s if self._children else None
        timeout_s = max(0.0, min(due) - time.monotonic())
        return timeout_s if self._check_s is None else min(timeout_s, self._check_s)

    def _on_control(self) -> bool:
        if self._unsent and not self._flush():
            return False
        if len(self._unsent) > _UNSENT_BYTES_MAX:
            return True
        try:
            data = self._control.recv(_READ_BYTES)
        except BlockingIOError:  # it was writable only
            return True
        except ConnectionError:
            return False
        self._unpacker.feed(data)
        for kind, *rest in self._unpacker:
            if kind == "start":
                self._fork(*rest)
            elif kind == "kill":
                self._kill(*rest)
            elif kind == "watch":
                (self._check_s,) = rest
            elif kind == "serve":
                self._directory, self._stopped_s_max = rest
            elif kind == "end":
                self._is_dismissed = True  # and its process may die before it removes the directory
            else:
                raise ValueError(f"unknown control message: {kind!r}")
        return bool(data)

    def _on_child(self) -> bool:
        with suppress(BlockingIOError):  # it is drained
            while self._wake_up.recv(4096):
                pass
        self._reap()
        return True

    # -- children ----------------------------------------------------------------------

    def _fork(self, worker: str, incarnation: int, settings: Mapping[str, Any]) -> None:
        try:
            progress, memory = _make_progress()
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                pid = os.fork()
            except OSError:
                _close_memory(progress, memory)
                for end in ends:
                    os.close(end)
                raise
        except OSError as error:
            text = f"can't fork a worker process: {error.strerror}"
            self._send("exited", worker, incarnation, 0, None, None, text, None, False)
            return
        waits, opens, life, held = ends
        if pid == 0:
            for end in (opens, life) if memory < 0 else (opens, life, memory):
                os.close(end)
            _run_worker(self, settings, progress, waits, held)
        with suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.setpgid(pid, pid)  # here too: it may be killed before it runs
        os.close(waits)
        os.close(held)
        child = self._children[pid] = _Child(worker, incarnation, pid, progress, memory, life)
        self._selector.register(life, selectors.EVENT_READ, lambda: self._on_closed(child))
        self._gates.append(opens)
        self._send("started", worker, incarnation, pid, memory)
        self._open_gates()

    def close_in_child(self) -> None:
        """Close what belongs to the server, in a worker right after the fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, self._wake_up, self._wake_up_end):
            end.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        for gate in self._gates:
            os.close(gate)
        for child in self._children.values():
            child.close()
        self._children.clear()

    def _kill(self, worker: str, incarnation: int) -> None:
        for child in self._children.values():
            if (child.worker, child.incarnation) == (worker, incarnation):
                _kill(child)  # not reaped yet, so the pid is still its own

    def _kill_at(self, child: _Child) -> float | None:
        """Return when to kill a worker that is stopped, or has closed its descriptors without an end."""
        if child.was_killed:
            return None
        if child.stopped_at is not None:
            return child.stopped_at + self._stopped_s_max
        return None if child.closed_at is None else child.closed_at + _EXIT_S_MAX

    def _kill_late(self) -> None:
        now = time.monotonic()

        def is_late(child: _Child) -> bool:
            at = self._kill_at(child)
            return at is not None and at <= now

        if not any(map(is_late, self._children.values())):
            return
        self._reap()  # if this process was stopped too, the workers may run again, or have ended
        for child in filter(is_late, list(self._children.values())):
            if child.stopped_at is not None:
                child.note = f"stopped for {self._stopped_s_max:g} s, then killed with "
            else:
                child.note = "replaced by another program (exec), then killed with "
            _kill(child)

    def _on_closed(self, child: _Child) -> bool:
        """Note that a worker ends, or that user code has replaced its program (exec)."""
        self._close_life(child)
        child.closed_at = time.monotonic()
        return True

    def _close_life(self, child: _Child) -> None:
        if child.life >= 0:
            self._selector.unregister(child.life)
            os.close(child.life)
            child.life = -1

    def _kill_overdue(self) -> None:
        now_ns = time.monotonic_ns()
        self._stops.look(now_ns)
        for child in self._children.values():
            if child.overdue is None and child.stopped_at is None:
                child.overdue = child.progress.overdue(now_ns, self._stops)
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
                self._report_exit(child, status)

    def _report_exit(self, child: _Child, status: int) -> None:
        del self._children[child.pid]
        kill_group(child.pid)
        self._close_life(child)
        ended = os.waitstatus_to_exitcode(status)
        code, signum = (ended, None) if ended >= 0 else (None, -ended)
        text = child.note + describe_exit(ended)
        if self._memory_kills.grew() and signum == signal.SIGKILL and not child.was_killed:
            text += ": out of memory"
        running, timed_out = end_of(child.progress, child.overdue)
        child.close()
        self._send(
            "exited", child.worker, child.incarnation, child.pid, code, signum, text, running, timed_out
        )

    def _kill_all(self) -> None:
        for child in self._children.values():
            _kill(child)
        for child in list(self._children.values()):
            self._report_exit(child, os.waitpid(child.pid, 0)[1])
        until = time.monotonic() + _FLUSH_S
        while self._flush() and self._unsent and (left_s := until - time.monotonic()) > 0:
            select.select([], [self._control], [], left_s)

    def _send(self, *items: object) -> None:
        """Send a message; never wait: the launcher may be stopped."""
        self._unsent += msgpack.packb(items)
        self._flush()

    def _flush(self) -> bool:
        """Send what the socket takes; return False when the launcher is gone."""
        try:
            while self._unsent:
                del self._unsent[: self._control.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()
            return False
        self._await_control()
        self._open_gates()
        return True

    def _open_gates(self) -> None:
        while self._gates and not self._unsent:
            os.close(self._gates.pop())

    def _await_control(self) -> None:
        """Wait until the socket is writable, if messages are unsent, and readable, unless there are too many."""
        events = selectors.EVENT_WRITE if self._unsent else 0
        if len(self._unsent) <= _UNSENT_BYTES_MAX:
            events |= selectors.EVENT_READ
        if self._control in self._selector.get_map():
            self._selector.modify(self._control, events, self._on_control)


class OutOfMemoryKills:
    """Counts kills for lack of memory in this process's control group.

    SIGKILL has no sender. The kernel counts, for each control group, the processes that it has killed for lack of
    memory: a worker that was killed while the count grew was one of them.
    """

    def __init__(self, groups: Path = _CGROUPS, mount: Path = _CGROUP_MOUNT) -> None:
        self._file = _find_counter(groups, mount)
        self._count = self._read()

    def grew(self) -> bool:
        """Return whether the count has grown since the last call."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        with suppress(OSError):
            for line in self._file.read_text().splitlines() if self._file else ():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _find_counter(groups: Path, mount: Path) -> Path | None:
    """Return the file with the count; None: there are no control groups."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # "0::/path" of version 2; "4:memory:/path" of version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = mount / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = mount / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if file.is_file():
            return file
    return None


def _make_progress() -> tuple[CallProgress, int]:
    """Return memory to share with a worker, and its descriptor."""
    if not hasattr(os, "memfd_create"):
        return CallProgress(), -1  # not Linux: not shared
    memory = os.memfd_create("pipedist-progress")
    try:
        os.ftruncate(memory, CallProgress.BYTES)
        progress = CallProgress(memory)
    except OSError:
        os.close(memory)
        raise
    progress.idle()
    return progress, memory


def _close_memory(progress: CallProgress, memory: int) -> None:
    progress.close()
    if memory >= 0:
        os.close(memory)


def _kill(child: _Child) -> None:
    child.was_killed = True
    os.kill(child.pid, signal.SIGKILL)  # user code may have moved it to another group
    kill_group(child.pid)


def _run_worker(
    server: ForkServer, settings: Mapping[str, Any], progress: CallProgress, waits: int, life: int
) -> None:
    """Run a worker in this forked process; never return."""
    code: int = ExitCode.DEFECT
    try:
        die_with(server.pid)
        os.setpgid(0, 0)
        process_setup.life = life
        os.read(waits, 1)  # the launcher must know the process id before the worker joins
        os.close(waits)
        server.close_in_child()
        code = worker_process.run_process(WorkerSettings(**settings), progress)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(OSError, ValueError):  # its reader is gone
                if stream is not None:
                    stream.flush()
        # No finalisation: exit handlers of the server's modules must not run here.
        os._exit(code)


def main(arguments: Mapping[str, Any]) -> None:
    """Run the fork server, then exit."""
    set_process_name(FORK_SERVER_NAME)
    # `timeout` or `systemctl stop` signal all processes of a run. The scheduler handles that, and its workers,
    # which inherit this, finish their calls. Neither may the terminal stop them, which are in its background.
    handle_signals(do_nothing)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(arguments["control"]))
    control.set_inheritable(False)
    gc.freeze()  # a collection in a worker then does not copy the pages that it shares with the server
    ForkServer(control, int(arguments["launcher"])).serve()
    os._exit(0)  # finalisation would only make the launcher wait
