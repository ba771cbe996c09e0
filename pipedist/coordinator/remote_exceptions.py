"""Exceptions of replica functions, brought back to life in the caller's process.

Nothing is unpickled and nothing is imported: a class is looked up among the modules that this
process has imported by itself, and made anew from its text.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping

from pipedist import messages as msg
from pipedist.errors import CallError, RemoteError, WorkerDied
from pipedist.scheduler.commands import Failure


def call_error(failure: Failure, raised: Mapping[int, msg.Failed], *, name: str, replicas: int) -> CallError:
    """Return the error of a call that failed for good.

    Args:
        failure: what the scheduler says of it.
        raised: the latest exception of each call that raised.
        name: of the pass, where no stage is known: its worker died.
        replicas: R.
    """
    step, replica = divmod(failure.call, replicas)
    cause: BaseException
    if failure.cause is None:
        told = raised[failure.call]
        cause = revive(told.module, told.name, told.text)
        name, text, trace = told.stage or name, f"{told.name}: {told.text}", told.traceback
    else:
        cause = WorkerDied(failure.worker, failure.cause)
        text, trace = f"WorkerDied: {failure.cause}", ""
    error = CallError(
        stage=name,
        step=step,
        replica=replica,
        worker=failure.worker,
        attempts=failure.attempts,
        cause=text,
        remote_traceback=trace,
    )
    error.__cause__ = cause
    return error


def revive(module: str, name: str, text: str) -> BaseException:
    """Return an exception with the class and text of the remote one.

    Args:
        module, name: the remote class.
        text: `str(exception)` there.

    Returns:
        An instance of that class whose text is `text`; a RemoteError that names the class where
        it is not known here or can't be made from a text.
    """
    cls = getattr(sys.modules.get(module), name, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        for argument in (text, _unquoted(text)):
            try:
                error = cls(argument) if text else cls()
            except Exception:
                continue
            if str(error) == text:
                return error
    return RemoteError(f"{name}: {text}" if text else name)


def _unquoted(text: str) -> object:
    """Return the value whose repr `text` is: KeyError's text is the repr of its argument."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
