"""A replica function's exception, as text that can travel.

A traceback is told of the user's own code only: it begins with the frame that a stage's function
has, and there is none where no such frame was reached. What pipedist itself raises on purpose (data
that can't be read, a result that can't be sent or reduced, a function that is not there) says in its
one line what its frames could not say better.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from msgspec import Struct

from pipedist.core import functions
from pipedist.errors import PipedistError

TEXT_CHARS_MAX = 16_384
"""The longest text of an exception; longer ones lose their middle."""

TRACEBACK_CHARS_MAX = 65_536
"""The longest formatted traceback."""

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CALLERS = frozenset(os.path.join(_FOLDER, name) for name in ("execution.py", "lease_run.py", "stages.py"))
"""The files whose frames call the user's code."""

_ENDS: dict[type[BaseException], Callable[[BaseException], str]] = {
    SystemExit: lambda error: f"the function called sys.exit({getattr(error, 'code', None)!r})",
    KeyboardInterrupt: lambda error: str(error) or "the function raised it: a worker has no Ctrl-C",
}
"""What is said of exceptions whose own text says nothing."""

_READ_ONLY = "arrays that a function gets are read-only: change a copy of them, as of x.copy()\n"
"""What NumPy does not know of an array that it can't write."""

_NOT_SENT: dict[type[BaseException], str] = {
    FileNotFoundError: "a file that a function opens by itself must be there too: only what a dataset reads "
    "is sent\n",
    ModuleNotFoundError: "packages that a function imports must be installed there too\n",
}
"""What a worker on another host does not know of what is on the run's host."""

_TELLING = (PipedistError, TypeError, ValueError)
"""What is raised on purpose around the user's code: by readers, reductions and the codec."""


class CallFailure(Struct, frozen=True):
    """Why a call failed; the fields of `pipedist.protocol.messages.Failed`.

    Args:
        call: its number in the pass.
        stage: name of the stage; of the first one where the call's shard could not be had.
        module, name: the exception's class.
        text: `str(exception)`.
        traceback: formatted, from the user's first frame on; "" where there is no such frame.
        retryable: another attempt may help.
        aborted: the call did nothing wrong: its gang was ended.
    """

    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool
    aborted: bool = False


def describe(
    error: BaseException,
    *,
    call: int,
    stage: str,
    retryable: bool,
    in_user_code: bool,
    aborted: bool = False,
) -> CallFailure:
    """Return what the scheduler is told of an exception.

    Args:
        in_user_code: it came out of a stage's function.
        aborted: it is no fault of the call.
    """
    cls = type(error)
    try:
        text = _ENDS.get(cls, str)(error)
    except Exception as second:  # an exception class of the user's, whose __str__ is broken
        text = f"<{cls.__qualname__} whose text can't be made: {type(second).__name__}>"
    return CallFailure(
        call=call,
        stage=stage,
        module=cls.__module__,
        name=cls.__qualname__,
        text=_clipped(text, TEXT_CHARS_MAX),
        traceback=_clipped(_formatted(error, in_user_code), TRACEBACK_CHARS_MAX),
        retryable=retryable,
        aborted=aborted,
    )


def _formatted(error: BaseException, in_user_code: bool) -> str:
    frames = user_frames(error.__traceback__) if in_user_code else error.__traceback__
    if frames is None or (not in_user_code and isinstance(error, _TELLING)):
        return ""
    try:
        told = "".join(traceback.format_exception(type(error), error, frames))
        if type(error) in _NOT_SENT and functions.process_note():
            told += f"{functions.process_note()}; {_NOT_SENT[type(error)]}"
        return told + _READ_ONLY * (isinstance(error, ValueError) and str(error).endswith("is read-only"))
    except Exception as second:
        return f"<the traceback can't be formatted: {type(second).__name__}>\n"


def user_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that a stage's function has, None if it has none."""
    first = tb
    while tb is not None:
        if tb.tb_frame.f_code.co_filename in _CALLERS:
            first = tb.tb_next
        tb = tb.tb_next
    return first


def user_stack(frame: FrameType) -> list[traceback.FrameSummary]:
    """Return what a thread executes, from the first frame on that a stage's function has; [] without one."""
    stack = traceback.extract_stack(frame)
    callers = [place for place, line in enumerate(stack) if line.filename in _CALLERS]
    return list(stack[callers[-1] + 1 :]) if callers else []


def _clipped(text: str, chars_max: int) -> str:
    # A lone surrogate has no UTF-8 form, and must not keep the failure from being told.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
