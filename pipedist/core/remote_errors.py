"""Exceptions of other processes, rebuilt in this one.

Nothing is unpickled or imported: a class is looked up among the modules that this process has already
imported, and instantiated with the text of the remote exception.
"""

from __future__ import annotations

import ast
import sys

from pipedist.errors import RemoteError


def rebuild_exception(module: str, name: str, text: str) -> BaseException:
    """Return an exception with the class and text of the remote one.

    It is a RemoteError that names the class if that is unknown here, or its instance has another text.
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
    """Return the value whose repr is `text`: the text of a KeyError is the repr of its argument."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
