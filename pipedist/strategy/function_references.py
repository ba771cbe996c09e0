"""References to the functions that a strategy runs.

A function that an import finds again is sent by name. Other functions are pickled, with the objects that
they capture. These may change between runs, so a function is pickled for each run, unless everything that
pickling reads is shown to be unchanged: code, defaults, closure and the globals it names. That holds for
immutable objects, for small arrays and containers (compared by value), and for objects sent by name.
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

_NAMED_MAX: Final = 64  # functions that modules hold, whose references are kept
_TOKENS_MAX: Final = 512  # functions that capture more are pickled for each run: comparing would cost as much
_ARRAY_BYTES_MAX: Final = 2**14  # larger captured arrays are not compared

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, np.generic, ModuleType)


class _NotComparable(Exception):
    """A captured object may pickle to other bytes without a visible change."""


@dataclass(frozen=True, slots=True)
class _CachedReference:
    tokens: list[Any]
    function: FunctionRef
    variables: tuple[Variable, ...]


class FunctionReferences:
    """The references of one strategy's functions, cached while the functions live."""

    def __init__(self) -> None:
        self._cached: WeakKeyDictionary[FunctionType, _CachedReference] = WeakKeyDictionary()
        self._named: dict[FunctionType, FunctionRef] = {}  # of functions that modules hold

    def of(self, fn: Callable[..., Any], captured: CapturedVariables) -> FunctionRef:
        """Return a reference to a function in its current state; `captured` receives its variables."""
        if type(fn) is not FunctionType:
            require_callable(fn)
            with captured.while_pickling():
                return serialized(fn)
        if _has_name(fn):
            named = self._named.get(fn)
            if named is None or named.name != f"{fn.__module__}:{fn.__qualname__}":
                if len(self._named) >= _NAMED_MAX:
                    self._named.clear()
                named = self._named[fn] = reference(fn)
            return named
        cached = self._cached.get(fn)
        tokens = _tokens(fn)
        if cached is not None and tokens is not None and _same(tokens, cached.tokens):
            for variable in cached.variables:
                captured.space_of(variable)
            return cached.function
        before = set(captured.variables)
        with captured.while_pickling():
            function = serialized(fn)
        if tokens is not None:
            new = [variable for space, variable in captured.variables.items() if space not in before]
            self._cached[fn] = _CachedReference(tokens, function, tuple(new))
        return function


def require_callable(fn: Callable[..., Any]) -> None:
    if not callable(fn):
        raise TypeError(f"run needs a function, but {fn!r} of type {type(fn).__name__} can't be called")


def serialized(fn: Callable[..., Any]) -> FunctionRef:
    """Return a reference to a function, or raise NotForReplicas as the object that it captures does."""
    try:
        return reference(fn)
    except UsageError as error:
        if isinstance(error.__cause__, NotForReplicas):
            raise error.__cause__ from None
        raise


def _same(tokens: list[Any], cached: list[Any]) -> bool:
    return len(tokens) == len(cached) and all(
        new is old or (type(new) is bytes and type(old) is bytes and new == old)
        for new, old in zip(tokens, cached, strict=True)
    )


def _tokens(fn: FunctionType) -> list[Any] | None:
    """Return objects that stay identical (bytes: equal) as long as pickling `fn` gives the same bytes."""
    walk = _CaptureWalk()
    try:
        walk.function(fn)
    except _NotComparable:
        return None
    return walk.found


class _CaptureWalk:
    """Visits everything that pickling a function reads.

    Functions that are sent by value are not among the objects found, which would keep them alive.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._functions: set[int] = set()

    def value(self, value: Any) -> None:
        kind = type(value)
        found = self.found
        if len(found) > _TOKENS_MAX:
            raise _NotComparable
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
                raise _NotComparable
            found.append(repr((value.shape, value.strides, value.dtype, value.flags.writeable)).encode())
            found.append(value.tobytes())
        elif _is_constant(value) or getattr(kind, "pickles_identically", False):
            found.append(value)
        else:
            raise _NotComparable

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
                raise _NotComparable from error
            self.value(content)
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                self.value(fn.__globals__[name])


def _is_constant(value: Any) -> bool:
    if isinstance(value, BuiltinFunctionType):  # a method is pickled with its object: `table.get`
        return isinstance(value.__self__, ModuleType | None)
    if isinstance(value, type):
        return _has_name(value)
    return isinstance(value, _CONSTANTS) and not isinstance(value, np.void)  # a record is mutable


def _has_name(value: FunctionType | type) -> bool:
    """Return whether a new process finds the object by importing its module."""
    if value.__module__ in ("__main__", "__mp_main__"):
        return False
    module = sys.modules.get(value.__module__)
    return (
        getattr(module, "__spec__", None) is not None and getattr(module, value.__qualname__, None) is value
    )


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return every name that may be a global, in a function and the functions defined in it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_names(constant)))
    return tuple(names)
