"""Priority for the measured processes on a shared Linux machine.

With the kernel's autogrouping, `nice` weighs processes only within one session: what competes on
the machine are sessions. So the autogroup of each measured process is given nice -20.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def boosted(mark: str) -> Iterator[None]:
    """Raise, while the block lasts, the priority of processes that have `mark` in their environment.

    Args:
        mark: "NAME=VALUE".

    Raises:
        PermissionError: this user may not; root may.
    """
    if os.geteuid() != 0:
        raise PermissionError("--boost raises priorities, which only root may do")
    over = threading.Event()
    thread = threading.Thread(target=_look, args=(mark.encode() + b"\0", over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _look(mark: bytes, over: threading.Event) -> None:
    while not over.wait(_LOOK_EVERY_S):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
                _raise_priority(pid, mark)


def _raise_priority(pid: str, mark: bytes) -> None:
    with open(f"/proc/{pid}/environ", "rb") as environment:
        if mark not in environment.read():
            return
    with open(f"/proc/{pid}/autogroup", "r+", encoding="ascii") as autogroup:
        if "nice 0" in autogroup.read():
            autogroup.seek(0)
            autogroup.write("-20")
