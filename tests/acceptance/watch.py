"""Observe a process: its memory, descriptors, and remains."""

from __future__ import annotations

import os
from pathlib import Path

KIB = 1024
MIB = 1024 * KIB


def rss_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    return 0


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    return 0


def descriptors(pid: int | str = "self") -> int:
    """Return the number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


SEGMENTS = ("pipedist", "psm_", "wnsm_")
"""Prefixes of the segments that this project, or Python's shared memory, might leave."""


def shared_memory() -> set[str]:
    """Return the segments in /dev/shm, of all users."""
    folder = Path("/dev/shm")
    found = folder.iterdir() if folder.is_dir() else ()
    return {path.name for path in found if path.name.startswith(SEGMENTS) and path.is_file()}


def session(sid: int) -> dict[int, str]:
    """Return the processes of a session that still run: name by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, of = rest.split()[:4]
            if int(of) == sid and state != "Z":
                found[int(entry.name)] = name.partition("(")[2]
    return found
