"""Conversion of a replica function's exception to text that can be sent.

A traceback shows user code only: it begins with the frame of a stage's function, and is empty if no such frame was
reached. Errors that pipedist raises on purpose (data that cannot be read, a result that cannot be sent or reduced,
a function that does not exist) have no traceback: their text is complete.
"""

from __future__ import annotations

import os
import reprlib
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

import numpy as np
from msgspec import Struct

from pipedist.core import functions
from pipedist.core.remote_errors import class_names, exception_text, within_limit
from pipedist.errors import PipedistError

TEXT_CHARS_MAX = 16_384  # maximum length of an exception's text; longer texts are cut in the middle
CULPRIT_CHARS_MAX = 512  # maximum length of the text of an element's exception
TRACEBACK_CHARS_MAX = 65_536  # maximum length of a formatted traceback

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CALLERS = frozenset(
    os.path.join(_FOLDER, name)
    for name in (
        "execution.py",
        "lease_run.py",
        "mapped.py",
        "plain_calls.py",
        "progress.py",
        "stages.py",
        "waiting_calls.py",
    )
)
"""The files whose frames call user code."""

_ENDS: dict[type[BaseException], Callable[[BaseException], str]] = {
    SystemExit: lambda error: f"the function called sys.exit({getattr(error, 'code', None)!r})",
    KeyboardInterrupt: lambda error: str(error) or "the function raised it; a worker ignores Ctrl-C",
}
"""Texts for exceptions whose own text is uninformative."""

_READ_ONLY = "arrays passed to a function are read-only: change a copy, such as x.copy()\n"
"""Hint for NumPy's error about read-only arrays."""

_NOT_SENT: dict[type[BaseException], str] = {
    FileNotFoundError: "files that a function opens itself must exist there too: only the data of datasets "
    "is sent\n",
    ModuleNotFoundError: "packages that a function imports must be installed there too\n",
}
"""Hints for errors on a worker that runs on another host than the driver."""

_WITHOUT_TRACEBACK = (PipedistError, TypeError, ValueError)  # raised on purpose around user code


class CallFailure(Struct, frozen=True):
    """The failure of a call; see `pipedist.protocol.messages.Failed`."""

    call: int
    stage: str  # the first one if the call's shard could not be read
    module: str
    name: str
    text: str
    traceback: str  # from the first frame of user code on; "" if there is none
    retryable: bool
    aborted: bool = False  # the call failed only because its gang was ended
    culprits: tuple[tuple[int, str], ...] = ()
    element: int | None = None


def describe(
    error: BaseException,
    *,
    call: int,
    stage: str,
    retryable: bool,
    in_user_code: bool,
    aborted: bool = False,
    culprits: tuple[tuple[int, str], ...] = (),
) -> CallFailure:
    """Return the failure to report; `in_user_code`: a stage's function raised the error."""
    module, name = class_names(error)
    text = _ENDS.get(type(error), exception_text)(error)
    return CallFailure(
        call=call,
        stage=stage,
        module=module,
        name=name,
        text=_clipped(text, TEXT_CHARS_MAX),
        traceback=_clipped(_formatted(error, text, in_user_code), TRACEBACK_CHARS_MAX),
        retryable=retryable,
        aborted=aborted,
        culprits=culprits,
        element=_element_of(error),
    )


class _Preview(reprlib.Repr):
    """Shortens numbers, texts and collections of them; calls no method of a user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 2, 6, 60, 60

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, np.generic):
            return self.repr1(x.item(), level)
        return repr(x) if type(x) in (float, bool, type(None)) else f"<{type(x).__qualname__}>"


_ATTRIBUTE = "_pipedist_element"
_NOTE = "element "


def note_element(error: BaseException, element: int, value: object) -> None:
    """Note on an exception the number of the element for which it was raised, and a preview of its value."""
    with suppress(Exception):  # an exception class may refuse attributes; an int may be too long to be shown
        setattr(error, _ATTRIBUTE, element)
        shown = "" if isinstance(value, bytes) else f": {_Preview().repr(value)}"
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_NOTE)]
        error.__notes__ = [*notes, f"{_NOTE}{element}{shown}"]


def _element_of(error: BaseException) -> int | None:
    with suppress(Exception):
        found = vars(error).get(_ATTRIBUTE)
        return found if isinstance(found, int) and found >= 0 else None
    return None


def _formatted(error: BaseException, text: str, in_user_code: bool) -> str:
    frames = user_frames(error.__traceback__) if in_user_code else error.__traceback__
    if frames is None or (not in_user_code and isinstance(error, _WITHOUT_TRACEBACK)):
        return ""

    def formatted() -> str:
        try:
            return "".join(traceback.format_exception(type(error), error, frames))
        except BaseException as second:  # methods of a user's exception class
            return f"<the traceback cannot be formatted: {type(second).__name__}>\n"

    trace = within_limit(error, formatted, "<the traceback takes too long to format>\n")
    if type(error) in _NOT_SENT and functions.process_note:
        trace += f"{functions.process_note}; {_NOT_SENT[type(error)]}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        trace += f"{functions.how_to_install(error.name)}\n"
    return trace + _READ_ONLY * (isinstance(error, ValueError) and text.endswith("is read-only"))


def user_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from a stage's function on; None without one."""
    first = tb
    while tb is not None:
        if tb.tb_frame.f_code.co_filename in _CALLERS:
            first = tb.tb_next
        tb = tb.tb_next
    return first


def user_stack(frame: FrameType) -> list[traceback.FrameSummary]:
    """Return the stack of a thread from a stage's function on; [] without one."""
    stack = traceback.extract_stack(frame)
    callers = [index for index, line in enumerate(stack) if line.filename in _CALLERS]
    return list(stack[callers[-1] + 1 :]) if callers else []


def culprit_text(error: BaseException) -> str:
    """Return the text of an element's exception."""
    return _clipped(f"{class_names(error)[1]}: {exception_text(error)}", CULPRIT_CHARS_MAX)


def _clipped(text: str, chars_max: int) -> str:
    # A lone surrogate has no UTF-8 form; the failure must be sent anyway.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"
