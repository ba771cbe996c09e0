"""The order of loads and stores in memory that processes share.

Python has no memory fences. Its plain stores are ordered as the processor orders them: x86-64 keeps the order of
stores, that of loads, and that of a load and a later store (TSO), and lets only a load overtake an earlier store.
Other processors (aarch64) keep none of them. A message that one process sends and another receives orders all that
came before it, because both call the kernel; a flag in shared memory does not, and needs a fence on both sides.
"""

from __future__ import annotations

import platform
import threading
from typing import Final

IS_TSO: Final = platform.machine() in ("x86_64", "AMD64")

_local = threading.local()


def fence() -> None:
    """Order the loads and stores of this thread before the call with those after it (full fence).

    Releasing and then taking a lock is a release followed by an acquire in every implementation of
    Python's locks (POSIX semaphores, PyMutex), and these two keep their order: together a full fence
    on aarch64 as on x86-64, where one locked instruction is one by itself.
    """
    try:
        lock = _local.lock
    except AttributeError:
        lock = _local.lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire(False)


def fence_unless_tso() -> None:
    """Order all loads and stores before the call with the stores after it, and loads with loads.

    It may be called at any time, also by a weak reference's callback that interrupts `fence`: the lock is not shared.
    """
    if not IS_TSO:
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire(False)
