"""What a worker process tells the kernel about itself: its name, and whom it must not outlive."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

WORKER_NAME = "pipedist-worker"
FORK_SERVER_NAME = "pipedist-fork"

_PR_SET_PDEATHSIG = 1


def set_process_name(name: str) -> None:
    """Set the name that ps and top show (at most 15 bytes). Only on Linux; a nicety elsewhere."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name[:15])
    except OSError:
        return  # no /proc: the name is for people, nothing depends on it


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone, also if it is stopped.

    The kernel watches the THREAD that started this process: it must be its process's main one.

    Args:
        parent_pid: the parent; if that is not the parent any more, this process ends here.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP); False where the system does not tell, or it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
