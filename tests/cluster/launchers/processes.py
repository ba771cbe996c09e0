"""Looking at processes from outside, bounded."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

ORPHAN_S = 20.0
"""How long a test waits for processes to be gone, which takes milliseconds: it bounds leaks, not speed.

`make chaos-workers` looks one second after the end."""


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def state_of(pid: int) -> str:
    """The kernel's letter for a process's state: R, S, T (stopped), Z; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_gone(pids: Iterable[int], within_s: float = ORPHAN_S) -> list[int]:
    """Wait until none of these processes runs; return those that still do in the end."""
    end = time.monotonic() + within_s
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready and state_of(pid) not in ("", "Z"):
            left.append(pid)
    return left


def wait_state(pid: int, letter: str, within_s: float = ORPHAN_S) -> None:
    """Wait until the kernel shows a process in this state."""
    end = time.monotonic() + within_s
    while state_of(pid) != letter:
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} is {state_of(pid)!r}, not {letter!r}")
        os.sched_yield()


def ids_in(file: Path, within_s: float = ORPHAN_S) -> list[int]:
    """Wait for a file of process ids, and return them."""
    end = time.monotonic() + within_s
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(str(file))
        time.sleep(0.01)
    return [int(word) for word in file.read_text().split()]


def children_of(pid: int) -> dict[int, str]:
    """The processes that this one started and that still run: name by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = rest.split()[:2]
        if int(parent) == pid and state != "Z":
            found[int(entry.name)] = name.partition("(")[2]
    return found
