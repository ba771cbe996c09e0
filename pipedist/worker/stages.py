"""One stage of a pass in this process: its function, loaded once, the ways to call it, and a call that runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from pipedist.core import functions
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.program import OWN_STATE, StageProgram, StateValue
from pipedist.reduction.tree import FoldTree, fold_all
from pipedist.worker.array_isolation import as_readonly
from pipedist.worker.context import Collectives, ReplicaContext
from pipedist.worker.devices import CPU, GPU
from pipedist.worker.inputs import States, fill_states, state_names

if TYPE_CHECKING:
    from pipedist.worker.variables.replica import ReplicaVariable, ReplicaVariables


class GangCallContext(Struct, frozen=True):
    """The context of a call in a gang."""

    collectives: Callable[[bool], Collectives]  # of an async (True) or a plain function
    device: str  # as in `ReplicaContext`; "": none
    variables: ReplicaVariables | None


class CallHeld(Exception):
    """Ends a call whose next attempt or element does not begin, because its pass drains."""


class Call(Struct, eq=False):
    """One call while it runs; `number` counts in the pass."""

    number: int
    step: int
    replica: int
    stage: str  # the current one; the first one while its shard is read
    gang: GangCallContext | None
    permanent: bool = False  # whether an error now would recur on every attempt
    reading: bool = False  # whether its shard is being read
    in_user_code: bool = False
    lease: int = 0  # 0: not known, and no other call runs at the same time
    place: int = 1  # the number of its stage, counted from 1
    begin: Callable[[int], None] = lambda _call: None  # records that the call has the thread
    fresh: list[Tree] = field(default_factory=list)
    """[stage, element, result, failure] of elements that are over, and not reported yet."""
    culprits: tuple[tuple[int, str], ...] = ()  # elements that failed by themselves; see `messages.Failed`
    seconds: list[float] = field(default_factory=list)  # how long each stage took, if its value may be stored

    def begin_step(self) -> None:
        """Record that the call has the thread, in its stage."""
        self.begin(self.number)


class Stage:
    """A stage's function, ready to be called; `code` has the folders of the spec's modules."""

    def __init__(self, program: StageProgram, code: Sequence[str]) -> None:
        self.name = program.name
        self.of = program.of
        self.collectives = program.collectives
        self.device = GPU if program.gpus else CPU
        self.program = program
        self.limit_ns = 0 if program.timeout_s is None else max(1, int(program.timeout_s * 1e9))  # 0: none
        self._code = code
        self._error: Exception | None = None
        self._reads = sorted(state_names(program.kwargs)) if program.kwargs else []  # names of states
        self._read: list[tuple[int, int]] = []  # space and version of each state that `_kwargs` contains
        self._values: Mapping[str, Tree] = {}  # the values of the states that the calls read, by name
        self._variables: Mapping[str, ReplicaVariable] = {}  # those of these values that are variables
        self._kwargs = _Kwargs({} if self._reads else program.kwargs)
        self._fn: Callable[..., Any] | None = None
        self._instances: dict[int, Callable[..., Any]] = {}  # by replica in a gang; else under 0
        self._wants_ctx = False
        self.takes_shard_only = False  # whether calls need no other argument
        self.is_loaded = False  # whether the function was found, and can be called
        self.is_class = False  # whether calls go to an instance, which serves one call at a time
        self.is_async = False  # whether calls return an awaitable
        self.waits = program.per_element or program.attempts > 1 or program.calls_per_s > 0

    @property
    def fn(self) -> Callable[..., Any]:
        """The function, or the class, after `load`."""
        assert self._fn is not None
        return self._fn

    def load(self) -> None:
        """Find the function, or raise the error for which it cannot be called, as the first time."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self.is_loaded:
            return
        try:
            self._prepare(functions.load(self.program.function, self._code))
        except Exception as error:
            self._error = error
            raise

    def _prepare(self, fn: Callable[..., Any]) -> None:
        label = self.program.function.label
        called: object = fn
        if inspect.isclass(fn) and self.program.form not in ("apply", "update"):
            self.is_class = True
            if wrong := functions.uncallable(fn, label):
                raise TypeError(wrong)
            called = functions.call_of(fn)
        self.is_async = functions.is_async(called)
        self._wants_ctx = functions.wants_ctx(called)
        others = self.is_class or self._wants_ctx or self.program.kwargs
        self.takes_shard_only = self.program.form == "shard" and not (others or self.program.given_as)
        if self.program.form == "combine" and self.is_async:
            raise TypeError(f"{label} combines values, so it must be a plain function, not an async one")
        self._fn = fn
        self.is_loaded = True

    def use(
        self, states: States, values: Mapping[str, Tree], variables: Mapping[str, ReplicaVariable] = {}
    ) -> None:
        """Set the states that the next lease reads; for other versions, a new instance is made."""
        self._values, self._variables = values, variables
        if not self._reads:
            return
        if missing := [name for name in self._reads if name not in states]:
            raise RemoteProtocolError(f"stage {self.name} reads {missing}, which its lease does not name")
        read = [(states[name][0], states[name][1]) for name in self._reads]
        if read != self._read:
            self._kwargs = _Kwargs(fill_states(self.program.kwargs, values))
            self._instances.clear()
            self._read = read

    def make_instance(self, owner: int = 0) -> None:
        """Construct an instance for a replica of a gang, or for all calls (0), if the function is a class."""
        if self.is_class and owner not in self._instances:
            assert self._fn is not None  # load() came first
            self._instances[owner] = self._fn(**self._kwargs.fresh())

    def call(self, value: Tree, ctx: ReplicaContext, owner: int = 0) -> Any:
        """Call the function after `load` and `make_instance`; its result is an awaitable if it is async."""
        fn = self._instances[owner] if self.is_class else self._fn
        assert fn is not None  # load() came first
        if self.takes_shard_only:  # the common case, cheaper
            return fn(value)
        form = self.program.form
        if form == "apply" and not (self._values or self.is_class or self.program.kwargs):
            args, own = value
            if self._wants_ctx and "ctx" not in own:
                return fn(*args, ctx=ctx, **own)
            return fn(*args, **own)
        kwargs = {} if self.is_class else self._kwargs.fresh()
        if form == "shard":
            if self.program.given_as:
                from pipedist.datasets.frames import form_of  # rarely needed

                value = form_of(value, self.program.given_as)
            return self.call_with((value,), kwargs, ctx, fn)
        if form == "combine":
            return _fold(fn, value, kwargs)
        if form == "update":
            return fn(kwargs.pop(OWN_STATE), value, **kwargs)
        args, own = self._filled(value)
        return self.call_with(args, {**kwargs, **own}, ctx, fn)

    def arguments(self, value: Tree) -> tuple[tuple[Any, ...], dict[str, Tree]]:
        """Return the arguments of a call of a plain function, the context excepted."""
        args, own = self._filled(value) if self.program.form == "apply" else ((value,), {})
        return tuple(args), {**self._kwargs.fresh(), **own}

    def call_with(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        ctx: ReplicaContext,
        fn: Callable[..., Any] | None = None,  # None: the stage's plain function
    ) -> Any:
        """Call a function with its arguments, and the context if it has a parameter for it."""
        if self._wants_ctx and "ctx" not in kwargs:
            kwargs["ctx"] = ctx
        called = fn or self._fn
        assert called is not None  # load() came first
        return called(*args, **kwargs)

    def _filled(self, value: Tree) -> Any:
        if not self._values:
            return value
        args, own = value
        if self._variables and not own:  # the common case, cheaper
            filled: list[Any] = []
            for each in args:
                if type(each) is StateValue and (variable := self._variables.get(each.name)) is not None:
                    filled.append(variable)
                elif type(each) in _LEAVES:
                    filled.append(each)
                else:
                    break
            else:
                return tuple(filled), own
        return as_readonly(fill_states(value, self._values))


# Arrays that were received are read-only
_LEAVES = frozenset({np.ndarray, int, float, bool, str, type(None)})


class _Kwargs:
    """A stage's `with`, in new containers for each call."""

    def __init__(self, kwargs: Mapping[str, Tree]) -> None:
        self._kwargs = {name: as_readonly(value) for name, value in kwargs.items()}
        self._nested = any(
            isinstance(value, (dict, list, tuple)) or hasattr(type(value), "__dataclass_fields__")
            for value in self._kwargs.values()
        )

    def fresh(self) -> dict[str, Tree]:
        if self._nested:
            return {name: as_readonly(value) for name, value in self._kwargs.items()}
        return dict(self._kwargs)


def _fold(fn: Callable[..., Tree], groups: Sequence[Sequence[Tree]], kwargs: dict[str, Tree]) -> Tree:
    """Fold groups by `fn(a, b)` in the fixed tree: first each group's components, then the results."""
    merge_groups: Callable[..., Tree] | None = getattr(fn, "merge_groups", None)
    if merge_groups is not None:  # it does that at once, for all keys
        return merge_groups(groups)

    def combine(a: Tree, b: Tree) -> Tree:
        return fn(a, b, **kwargs)

    nodes: FoldTree[Tree] = FoldTree(combine)
    for place, group in enumerate(groups):
        if group:
            nodes.push(place, fold_all(combine, group))
    return nodes.result()
