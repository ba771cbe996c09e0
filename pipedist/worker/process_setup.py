"""Settings and set-up of a worker process: its name, parent, signals, copies and Hello.

A function that calls `os.fork` is left by two processes. The copy has the worker's connection, and the memory in
which the parent process reads the running call. It would report the call too, go on with the next one, and stay
when the worker ends. So a copy ends when it leaves the function; it takes part in no collectives, and prints to
the process's stderr. Its signal handlers are reset: `terminate()` of a `multiprocessing.Process` ends it, however
soon it is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from pipedist.core.platform_id import Platform, kernel_boot
from pipedist.protocol.messages import WIRE_VERSION, Hello


class WorkerSettings(Struct, frozen=True):
    """The settings with which a worker process is started."""

    endpoint: str
    worker: str
    incarnation: int  # the number of earlier processes with this name
    key_file: str = ""  # path of the CURVE keys; "": the endpoint needs none
    threads: int = 1  # BLAS and OpenMP threads that the environment was set to
    join_s: float = 30.0  # maximum time until the scheduler replies
    verbose: bool = False  # report on stderr that the worker has joined, or waits
    visible: str | None = None  # value of CUDA_VISIBLE_DEVICES; None: inherited
    gpus: float = 0.0  # the number of GPUs that the worker owns; a fraction: it shares one
    code_root: str = ""  # folder for copies of the scheduler's code folders; "": a temporary one
    task: str = ""  # role and index of the program that it belongs to, "worker/1"; "": none


# -- name and parent ---------------------------------------------------------------------

WORKER_NAME = "pipedist-worker"
FORK_SERVER_NAME = "pipedist-fork"

_PR_SET_PDEATHSIG = 1


def set_process_name(name: str) -> None:
    """Set the name that ps and top show (at most 15 bytes) on Linux."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name[:15])
    except OSError:
        return  # no /proc: only people read the name


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process, even a stopped one, after its parent.

    The kernel watches the THREAD that started this process: it must not end before its process. If the
    parent has ended already, this process ends here.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


# -- heap --------------------------------------------------------------------------------

_REUSED_BYTES = 31 << 20  # just below the limit to which glibc raises its thresholds


def keep_freed_pages() -> None:
    """Make arrays of up to 31 MiB reuse the pages of freed ones.

    glibc maps each block above a threshold (at first 128 KiB) anew, and returns the top of its heap to the kernel
    when it exceeds twice the threshold: each new array of some hundred KiB then costs one page fault for every
    4 KiB. The threshold rises to the size of the largest mapped block that was ever freed, so freeing one untouched
    block raises it. At most 62 MiB of freed memory stay with the process.
    """
    np.empty(_REUSED_BYTES, np.uint8)


# -- signals and copies ------------------------------------------------------------------

_HANDLED = (signal.SIGTERM, signal.SIGHUP)  # a request to workers and supervisors, or without effect

is_copy = False  # whether this process is a copy of a worker
life = -1  # write end of a pipe that ends with this program: its parent process sees an exec; -1: none
_forking = threading.local()  # `mask`: the signals that this thread had blocked before it began to fork


def handle_signals(handler: Callable[[int, FrameType | None], object]) -> dict[signal.Signals, Any]:
    """Handle SIGTERM and SIGHUP, unless they are ignored (`nohup`); return the previous handlers."""
    numbers = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal without effect; a child process does not inherit this, unlike SIG_IGN."""


def detect_copies() -> None:
    """Set `is_copy` in copies that are made of this process from now on."""
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_become_copy)


def _hold_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _become_copy() -> None:
    global is_copy, life
    is_copy = True
    if life >= 0:
        with contextlib.suppress(OSError):  # user code has closed it
            os.close(life)
        life = -1
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


def end_copy(stage: str) -> None:
    """End this copy of a worker, which has left the function of a stage. Never returns."""
    error = sys.exc_info()[1]
    outcome = "returned" if error is None else f"raised {type(error).__name__}: {error}"
    text = f"a process that the function made with os.fork {outcome}: it ends here; let it call os._exit"
    try:
        # Not through a stream: its lock may belong to a thread that the copy does not have.
        os.write(2, f"pipedist worker: stage {stage}: {text}\n".encode())
    finally:
        os._exit(1)


# -- Hello -------------------------------------------------------------------------------


def make_hello(worker: str, incarnation: int, **fields: Any) -> Hello:
    process: dict[str, Any] = {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "boot": boot_id(),
        "wire": WIRE_VERSION,
    }
    return Hello(worker=worker, incarnation=incarnation, **process, **asdict(Platform.here()), **fields)


def boot_id() -> str:
    """Return an id that is equal for processes that see the same files.

    Containers of one host share the kernel, but not the files. Without a kernel boot id (macOS), it is the host name.
    """
    if boot := kernel_boot():
        with contextlib.suppress(OSError):
            root = os.stat("/")
            return f"{boot} {os.readlink('/proc/self/ns/mnt')} {root.st_dev}:{root.st_ino}"
    return os.uname().nodename
