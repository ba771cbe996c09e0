"""Exceptions of user code as text, and exceptions of other processes rebuilt in this one.

The methods of an exception class (`__str__`, `__init__`) may be user code: they may raise anything, return
anything, or never return. They run within a time limit, and their failures become part of the text.

Nothing is unpickled or imported: a class is looked up among the modules that this process has already
imported, and instantiated with the text of the remote exception.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TypeVar

from pipedist.errors import RemoteError

T = TypeVar("T")

METHODS_S_MAX = 2.0  # time limit of an exception's own methods, in seconds


def exception_text(error: BaseException) -> str:
    """Return `str(error)`, or the reason why there is none."""

    def text() -> str:
        try:
            return str(error)
        except BaseException as second:  # __str__ may raise SystemExit, too
            return f"<{class_names(error)[1]} whose str() failed: {type(second).__name__}>"

    return within_limit(
        error, text, f"<{class_names(error)[1]} whose str() takes more than {METHODS_S_MAX:g} s>"
    )


def class_names(error: BaseException) -> tuple[str, str]:
    """Return the module and the qualified name of an exception's class."""
    try:
        module, name = type(error).__module__, type(error).__qualname__
    except Exception:  # properties of a metaclass
        return "", type.__repr__(type(error))
    return module if isinstance(module, str) else "", name


def within_limit(error: BaseException, work: Callable[[], T], otherwise: T) -> T:
    """Return the result of work that calls an exception's methods, or `otherwise` after `METHODS_S_MAX`."""
    if any(_has_user_methods(type(each)) for each in _chain(error)):
        return _in_thread(work, otherwise)
    return work()


def _in_thread(work: Callable[[], T], otherwise: T) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="exception text", daemon=True)
    thread.start()
    thread.join(METHODS_S_MAX)  # a thread that goes on is abandoned: Python code can't be stopped
    return results[0] if results else otherwise


def _has_user_methods(cls: type) -> bool:
    methods = (getattr(cls, name, None) for name in ("__new__", "__init__", "__str__", "__repr__"))
    return any(isinstance(m, FunctionType) and not str(m.__module__).startswith("pipedist.") for m in methods)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that the traceback of an exception shows."""
    pending = [error]
    seen = set()
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            pending += [one for one in (each.__cause__, each.__context__, *inner) if one is not None]


def rebuild_exception(module: str, name: str, text: str) -> BaseException:
    """Return an exception with the class and text of the remote one.

    It is a RemoteError that names the class if that is unknown here, or its instance has another text.
    """
    cls = getattr(sys.modules.get(module), name, None)
    unknown: BaseException = RemoteError(f"{name}: {text}" if text else name)
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return unknown

    def build() -> BaseException:
        for argument in (text, _unquoted(text)):
            try:
                error = cls(argument) if text else cls()
                if str(error) == text:
                    return error
            except BaseException:  # code of the user's class
                continue
        return unknown

    return _in_thread(build, unknown) if _has_user_methods(cls) else build()


def _unquoted(text: str) -> object:
    """Return the value whose repr is `text`: the text of a KeyError is the repr of its argument."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
