"""The passes that `Strategy.run` keeps open, one per function, and references to these functions.

A function that an import finds again is sent by name. Other functions are pickled, with the objects that
they capture. These may change between runs, so a function is pickled for each run, unless everything that
pickling reads is shown to be unchanged: code, defaults, closure and the globals it names. That holds for
immutable objects, for small arrays and containers (compared by value), and for objects sent by name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from pipedist.collectives.options import CommunicationOptions
from pipedist.core.functions import reference
from pipedist.core.misuse_hints import require_loop, running_loop
from pipedist.core.types import FunctionRef
from pipedist.errors import UsageError
from pipedist.protocol.program import Emit, JaxDevices, Program, StageProgram
from pipedist.reduction.tree import Reduction
from pipedist.scheduler import PassSettings
from pipedist.strategy.context import NotForReplicas
from pipedist.strategy.variables import CapturedVariables, Variable
from pipedist.worker.variables import replica as variables

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator, PassHandle

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
                if len(self._named) >= PASSES_MAX:
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


PASSES_MAX: Final = 64  # functions kept loaded in the workers; the least recently used one is dropped
SLOT: Final = "value"  # name of a function's result in the message of a call
PARTIAL: Final = "partial"  # name of its partial, if workers reduce it

_SEED_SHIFT: Final = 32
_Key = tuple[FunctionRef, Reduction | None]


@dataclass(slots=True)
class _OpenPass:
    """A pass, and the number of runs that use it."""

    key: _Key
    handle: PassHandle
    users: int = 0
    may_group: bool = True  # see `UsedPass`


class UsedPass:
    """A pass in use; as a context manager, which is entered once, its handle.

    The use ends with the `with` block, or with this object: the results of a run may never be fetched.
    """

    __slots__ = ("_entry", "_is_used", "_used")

    def __init__(self, entry: _OpenPass, used: Callable[[_OpenPass], None]) -> None:
        self._entry = entry
        self._used = used
        self._is_used = False

    def __enter__(self) -> PassHandle:
        self._is_used = True
        self._entry.users += 1
        return self._entry.handle

    @property
    def may_group(self) -> bool:
        """Whether several steps may be sent at once: none has failed, or needed the other replicas."""
        return self._entry.may_group

    def forbid_groups(self) -> None:
        self._entry.may_group = False

    def __exit__(self, *_error: object) -> None:
        if self._is_used:
            self._is_used = False
            self._entry.users -= 1
            self._used(self._entry)

    def __del__(self) -> None:
        if self._is_used:
            self.__exit__()


class FunctionPasses:
    """Opens a pass for a function, and keeps it open for later runs of the same function.

    Functions are the same if their references are equal: a function that is sent by value, and whose
    captured objects have changed, is another function. Pass number p gets the seed `seed * 2**32 + p`, so that
    `ctx.rng` differs between functions, and between the runs of one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        replicas: int,
        seed: int,
        *,
        gang: bool = False,  # the calls of a step run at the same time, and may call collectives
        devices: tuple[str, ...] = (),  # one for each replica, for `ctx.device`; empty: the CPU
        communication: CommunicationOptions | None = None,  # of collectives without options of their own
        jax: JaxDevices | None = None,  # functions are compiled for these devices
    ) -> None:
        options = communication or CommunicationOptions()
        self.coordinator = coordinator
        self._loop = running_loop()
        self._replicas = replicas
        self._seed = seed
        self._gang = gang
        self._devices = devices
        self._communication = (options.bytes_per_pack, options.timeout_s, options.implementation.value)
        self._jax = jax
        self._opened = 0
        self._open: OrderedDict[_Key, _OpenPass] = OrderedDict()

    def using(self, function: FunctionRef) -> UsedPass:
        """Return a context manager of the pass of a function.

        It stays open at least until the `with` block ends. A pass that fails as a whole is dropped: the next run of the
        function opens a new one. Raises UsageError in another event loop than the cluster's.
        """
        require_loop(self._loop)
        return UsedPass(self._entry((function, None)), self._used)

    def enter(self, function: FunctionRef, reduction: Reduction | None = None) -> _OpenPass:
        """Return the pass of a function, whose results workers may reduce; it stays open at least until `leave`.

        For coroutines; otherwise as `using`.
        """
        import asyncio  # loaded already

        if asyncio.get_running_loop() is not self._loop:
            require_loop(self._loop)
        entry = self._entry((function, reduction))
        entry.users += 1
        return entry

    def leave(self, entry: _OpenPass) -> None:
        entry.users -= 1
        self._used(entry)

    def _entry(self, key: _Key) -> _OpenPass:
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = _OpenPass(key, self._new(*key))
        self._open.move_to_end(key)
        return entry

    def _used(self, entry: _OpenPass) -> None:
        if entry.handle.has_failed:  # the error of a single step does not affect others
            if self._open.get(entry.key) is entry:
                del self._open[entry.key]
            entry.handle.close()
        if len(self._open) > PASSES_MAX:
            idle = [each for each, opened in self._open.items() if opened.users == 0]
            for each in idle[: len(self._open) - PASSES_MAX]:
                self._open.pop(each).handle.close()

    def close(self) -> None:
        """Close every pass; their running calls fail."""
        while self._open:
            self._open.popitem(last=False)[1].handle.close()

    def _new(self, function: FunctionRef, reduction: Reduction | None) -> PassHandle:
        name, gang = function.label, self._gang
        stage = StageProgram(name, function=function, of=-1, kwargs={}, form="apply", collectives=gang)
        result = Emit(SLOT, of=0)
        if reduction is not None:
            result = Emit(PARTIAL, of=0, op=reduction.op.value, axis=reduction.axis, whole=SLOT)
        assigned = Emit(variables.SLOT, of=variables.EMIT_OF)
        program = Program(
            seed=(self._seed << _SEED_SHIFT) + self._opened,
            replicas=self._replicas,
            reader=None,
            stages=(stage,),
            emits=(result, assigned) if gang else (result,),
            gang=gang,
            devices=() if self._jax else self._devices,
            communication=self._communication,
            jax=self._jax,
        )
        self._opened += 1
        settings = PassSettings(
            self._replicas,
            ordered=False,
            pulled=False,
            gang=gang,
            members=0 if self._jax is None else self._jax.hosts,
        )
        return self.coordinator.open_pass(program, name=name, settings=settings)
