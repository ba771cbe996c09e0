"""Wait on a word of shared memory (futex).

`wait` and `wake` use libc's `syscall`, because Python has no wrapper for futex. If the system call is
unavailable (another processor or system, a sandbox that blocks it), `wait` sleeps for 1 ms instead: every
waiter checks its condition again anyway, so it only notices later.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}  # <asm/unistd.h>: differs between processors
_FUTEX_WAIT: Final = 0  # <linux/futex.h>; not the PRIVATE variants: other processes wait too
_FUTEX_WAKE: Final = 1
_ALL: Final = 0x7FFFFFFF
_POLL_S: Final = 0.001


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _system_call() -> Callable[..., int] | None:
    number = _SYS_FUTEX.get(platform.machine())
    if sys.platform != "linux" or number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_long
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    call.argtypes = (ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word)
    bound: Any = call
    # Probe with a call that cannot block, to see whether it is allowed.
    probe = ctypes.c_uint32(0)
    if bound(number, ctypes.addressof(probe), _FUTEX_WAKE, 0, None, None, 0) < 0:
        return None
    return lambda *arguments: bound(number, *arguments)


_futex: Final = _system_call()


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`: until a `wake`, or for `timeout_s`.

    It may return spuriously: the caller checks its condition again.
    """
    if _futex is None:
        time.sleep(min(_POLL_S, timeout_s))
        return
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    if _futex(address, _FUTEX_WAIT, expected & 0xFFFFFFFF, ctypes.addressof(timeout), None, 0) < 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            time.sleep(min(_POLL_S, timeout_s))


def wake(address: int) -> None:
    if _futex is not None:
        _futex(address, _FUTEX_WAKE, _ALL, None, None, 0)
