"""How a strategy's functions travel, found once and not for every run.

A function without a name is pickled, with what it has captured. What it captures may change between
runs, so it is pickled again for each, unless everything that pickling looks at can be shown to be the
same: code, defaults, closure and the globals that it names, as far as they are immutable, are small
arrays and containers (which are compared), or travel by reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef
from pipedist.errors import UsageError
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.variables import CapturedVariables, Variable

_TOKENS_MAX: Final = 512
"""Functions that capture more are pickled for each run: looking through it would cost as much."""

_ARRAY_BYTES_MAX: Final = 2**14
"""Larger captured arrays are not compared."""

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, np.generic, ModuleType)


class _Unclear(Exception):
    """It can't be shown that pickling would give the same."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tokens: list[Any]
    function: FunctionRef
    variables: tuple[Variable, ...]


class References:
    """The references of one strategy's functions."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[FunctionType, _Kept] = WeakKeyDictionary()

    def of(self, fn: Callable[..., Any], noted: CapturedVariables) -> FunctionRef:
        """Return how a function travels, as it is now.

        Args:
            noted: is told the variables that it has captured.

        Raises:
            TypeError: it can't be called.
            UsageError: it can't be pickled.
            NotForReplicas: it has captured what feeds all replicas, or another strategy's variable.
        """
        require_callable(fn)
        if type(fn) is not FunctionType:
            return _referred(fn, noted)
        if _has_name(fn):
            return reference(fn)
        kept = self._kept.get(fn)
        tokens = _tokens(fn)
        if kept is not None and tokens is not None and _same(tokens, kept.tokens):
            for variable in kept.variables:
                noted.space_of(variable)
            return kept.function
        before = set(noted.variables)
        function = _referred(fn, noted)
        if tokens is not None:
            captured = [variable for space, variable in noted.variables.items() if space not in before]
            self._kept[fn] = _Kept(tokens, function, tuple(captured))
        return function


def require_callable(fn: Callable[..., Any]) -> None:
    """Refuse what can't be called.

    Raises:
        TypeError: it can't be called.
    """
    if not callable(fn):
        raise TypeError(f"run needs a function, but {fn!r} of type {type(fn).__name__} can't be called")


def _referred(fn: Callable[..., Any], noted: CapturedVariables) -> FunctionRef:
    try:
        with noted.here():
            return reference(fn)
    except UsageError as error:
        if isinstance(error.__cause__, NotForReplicas):
            raise error.__cause__ from None
        raise


def _same(tokens: list[Any], kept: list[Any]) -> bool:
    if len(tokens) != len(kept):
        return False
    return all(
        new is old or (type(new) is bytes and type(old) is bytes and new == old)
        for new, old in zip(tokens, kept, strict=True)
    )


def _tokens(fn: FunctionType) -> list[Any] | None:
    """Return objects that are the same ones (bytes: equal) as long as pickling `fn` gives the same."""
    walk = _Walk()
    try:
        walk.function(fn)
    except _Unclear:
        return None
    return walk.found


class _Walk:
    """Looks at everything that pickling a function looks at.

    What it finds holds no function that travels by value: it is kept beside the function, and would
    keep it alive.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._functions: set[int] = set()

    def value(self, value: Any) -> None:
        kind = type(value)
        found = self.found
        if len(found) > _TOKENS_MAX:
            raise _Unclear
        if kind is FunctionType:
            self.function(value)
            return
        found.append(kind)
        if kind in (tuple, list, frozenset):
            found.append(b"%d" % len(value))
            for item in value:
                self.value(item)
        elif kind is dict:
            found.append(b"%d" % len(value))
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif kind is np.ndarray:
            if value.nbytes > _ARRAY_BYTES_MAX or value.dtype.hasobject:
                raise _Unclear
            found.append(repr((value.shape, value.strides, value.dtype, value.flags.writeable)).encode())
            found.append(value.tobytes())
        elif _is_constant(value) or getattr(kind, "pickled_alike", False) or _is_named_class(value):
            found.append(value)
        else:
            raise _Unclear

    def function(self, fn: FunctionType) -> None:
        if id(fn) in self._functions:
            return
        self._functions.add(id(fn))
        if _has_name(fn):
            self.found.append(fn)
            return
        self.found.append(fn.__code__)
        for value in (fn.__defaults__, fn.__kwdefaults__, fn.__dict__):
            if value:
                self.value(value)
        self.found.extend(fn.__annotations__.values())
        for cell in fn.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError as error:  # not filled yet
                raise _Unclear from error
            self.value(content)
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                self.value(fn.__globals__[name])


def _is_constant(value: Any) -> bool:
    if isinstance(value, BuiltinFunctionType):  # a method of an object travels with it: `table.get`
        return isinstance(value.__self__, ModuleType | None)
    return isinstance(value, _CONSTANTS) and not isinstance(value, np.void)  # a record can be written to


def _is_named_class(value: Any) -> bool:
    return isinstance(value, type) and _has_name(value)


def _has_name(value: FunctionType | type) -> bool:
    """Whether a new process that imports the module finds it there: then it travels by reference."""
    if value.__module__ in ("__main__", "__mp_main__"):
        return False
    module = sys.modules.get(value.__module__)
    return (
        getattr(module, "__spec__", None) is not None and getattr(module, value.__qualname__, None) is value
    )


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return every name that may stand for a global in a function, and in those inside it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_names(constant)))
    return tuple(names)
