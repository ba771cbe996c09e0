"""Work in a thread of its own: its caller waits for it, and ends it where the wait is interrupted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from pipedist.core.import_guard import caller_is_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TURN_S = 0.5
"""The longest that a Ctrl-C which the wait didn't notice is kept waiting."""


def in_own_thread(
    work: Callable[[], T], interrupt: Callable[[], object], name: str, *, daemon: bool = False
) -> T:
    """Do something in a thread of its own, and return when it is over.

    Args:
        work: what is done.
        interrupt: called where the wait is interrupted, by Ctrl-C for one, maybe before `work` has begun:
            lets it come to its end soon.
        name: the thread's.
        daemon: whether the process may end without it, after a second Ctrl-C.

    Raises:
        BaseException: what `work` raised; or what interrupted the wait, when `work` is over.
    """
    _take_cancellation()
    outcome: list[T] = []
    failure: list[BaseException] = []
    interrupted, over = threading.Event(), threading.Event()

    def carry_out() -> None:
        caller_is_waiting.set(True)
        try:
            if not interrupted.is_set():
                outcome.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            over.set()

    def wait() -> None:
        # Not `join`: interrupted, Python 3.11 takes the thread for ended from then on. And in turns: a
        # signal that comes just before the wait, or to another thread, doesn't end it.
        while not over.wait(TURN_S):
            if not interrupted.is_set():
                _take_cancellation()

    thread = threading.Thread(target=carry_out, name=name, daemon=daemon)
    try:
        thread.start()
        wait()
    except BaseException:  # Ctrl-C: the work must not go on without its caller, however far it is
        interrupted.set()
        interrupt()
        if thread.ident is not None:  # None: interrupted before it began, so it will find nothing to do
            wait()
        raise
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _take_cancellation() -> None:
    """Raise the cancellation that the caller's task would be told of where it awaits something.

    It is what asyncio makes of a Ctrl-C, and nothing else: the loop is busy with the caller.
    """
    import asyncio  # the doors are imported before anything else

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running
        return
    if getattr(task, "_must_cancel", False):
        raise asyncio.CancelledError
