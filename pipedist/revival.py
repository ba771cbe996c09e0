"""Exceptions of other processes, brought back to life in this one.

Nothing is unpickled and nothing is imported: a class is looked up among the modules that this
process has imported by itself, and made anew from its text.
"""

from __future__ import annotations

import ast
import sys

from pipedist.errors import RemoteError


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
