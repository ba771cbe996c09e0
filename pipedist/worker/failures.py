"""A replica function's exception, as text that can travel."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from types import TracebackType

TEXT_CHARS_MAX = 16_384
"""The longest text of an exception; longer ones lose their middle."""

TRACEBACK_CHARS_MAX = 65_536
"""The longest formatted traceback."""

_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@dataclass(frozen=True, slots=True)
class CallFailure:
    """Why a call failed; the fields of `pipedist.messages.Failed`.

    Args:
        call: its number in the pass.
        stage: name of the stage; "" where the call's shard could not be had.
        module, name: the exception's class.
        text: `str(exception)`.
        traceback: formatted, from the user's first frame on; "" where no user code was involved.
        retryable: another attempt may help.
    """

    call: int
    stage: str
    module: str
    name: str
    text: str
    traceback: str
    retryable: bool


def describe(error: BaseException, *, call: int, stage: str, retryable: bool) -> CallFailure:
    """Return what the scheduler is told of an exception."""
    cls = type(error)
    try:
        text = str(error)
    except Exception as second:  # an exception class of the user's, whose __str__ is broken
        text = f"<{cls.__qualname__} whose text can't be made: {type(second).__name__}>"
    return CallFailure(
        call=call,
        stage=stage,
        module=cls.__module__,
        name=cls.__qualname__,
        text=_clipped(text, TEXT_CHARS_MAX),
        traceback=_clipped(_formatted(error), TRACEBACK_CHARS_MAX),
        retryable=retryable,
    )


def _formatted(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
    except Exception as second:
        return f"<the traceback can't be formatted: {type(second).__name__}>\n"


def _user_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback without pipedist's own frames at its beginning."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        tb = tb.tb_next
    return tb


def _clipped(text: str, chars_max: int) -> str:
    # A lone surrogate has no UTF-8 form, and must not keep the failure from being told.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
