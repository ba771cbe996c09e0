"""One stage of a pass in this process: its function, loaded once, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipedist import functions
from pipedist.program import StageProgram, Tree
from pipedist.reductions import FoldTree
from pipedist.worker.boundary import guard
from pipedist.worker.context import ReplicaContext


class Stage:
    """A stage's function, ready to be called.

    Args:
        program: the stage.
        code: folders of the spec's modules.
    """

    def __init__(self, program: StageProgram, code: Sequence[str]) -> None:
        self.name = program.name
        self.of = program.of
        self._program = program
        self._code = code
        self._error: Exception | None = None
        self._kwargs = _Kwargs(program.kwargs)
        self._fn: Callable[..., Any] | None = None
        self._instance: Callable[..., Any] | None = None
        self._wants_ctx = False
        self.is_class = False
        """Calls go to an instance, which serves one call at a time."""
        self.is_async = False
        """Calls return something to await."""

    def load(self) -> None:
        """Find the function; once, later calls repeat what came of it.

        Raises:
            FunctionNotFound: if there is none.
            TypeError: if it can't be called the way the stage calls it.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._fn is not None:
            return
        try:
            self._prepare(functions.load(self._program.function, self._code))
        except Exception as error:
            self._error = error
            raise

    def _prepare(self, fn: Callable[..., Any]) -> None:
        label = self._program.function.label
        called: object = fn
        if inspect.isclass(fn) and self._program.form != "apply":
            self.is_class = True
            if wrong := functions.uncallable(fn, label):
                raise TypeError(wrong)
            called = functions.call_of(fn)
        self.is_async = _is_async(called)
        self._wants_ctx = _has_ctx(called)
        if self._program.form == "combine" and self.is_async:
            raise TypeError(f"{label} combines values, so it must be a plain function, not an async one")
        self._fn = fn

    def make_instance(self) -> None:
        """Construct the stage's instance, where its function is a class and it has none yet."""
        if self.is_class and self._instance is None:
            assert self._fn is not None  # load() came first
            self._instance = self._fn(**self._kwargs.fresh())

    def call(self, value: Tree, ctx: ReplicaContext) -> Any:
        """Call the function, after `load` and `make_instance`.

        Returns:
            What it returned; something to await, where it is async.
        """
        fn = self._instance if self.is_class else self._fn
        assert fn is not None  # load() came first
        kwargs = {} if self.is_class else self._kwargs.fresh()
        if self._program.form == "combine":
            return _fold(fn, value, kwargs)
        if self._program.form == "apply":
            args, own = value
            kwargs = {**kwargs, **own}
        else:
            args = (value,)
        if self._wants_ctx and "ctx" not in kwargs:
            kwargs["ctx"] = ctx
        return fn(*args, **kwargs)


class _Kwargs:
    """A stage's `with`, as each call gets it: no call sees what another one did to a container."""

    def __init__(self, kwargs: Mapping[str, Tree]) -> None:
        self._kwargs = {name: guard(value) for name, value in kwargs.items()}
        self._nested = any(isinstance(v, (dict, list)) or _is_nest(v) for v in self._kwargs.values())

    def fresh(self) -> dict[str, Tree]:
        if self._nested:
            return {name: guard(value) for name, value in self._kwargs.items()}
        return dict(self._kwargs)


def _is_nest(value: Tree) -> bool:
    return isinstance(value, tuple) or hasattr(type(value), "__dataclass_fields__")


def _fold(fn: Callable[..., Tree], groups: Sequence[Sequence[Tree]], kwargs: dict[str, Tree]) -> Tree:
    """Fold groups by `fn(a, b)` in the fixed tree: each group's components, then the groups' nodes."""

    def combine(a: Tree, b: Tree) -> Tree:
        return fn(a, b, **kwargs)

    nodes: FoldTree[Tree] = FoldTree(combine)
    for place, group in enumerate(groups):
        node: FoldTree[Tree] = FoldTree(combine)
        for index, component in enumerate(group):
            node.push(index, component)
        if group:
            nodes.push(place, node.result())
    return nodes.result()


def _is_async(called: object) -> bool:
    if inspect.iscoroutinefunction(called):
        return True
    return not inspect.isroutine(called) and inspect.iscoroutinefunction(
        inspect.getattr_static(type(called), "__call__", None)
    )


def _has_ctx(called: object) -> bool:
    try:
        parameters = inspect.signature(called).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False  # a built-in without a signature
    ctx = parameters.get("ctx")
    return ctx is not None and ctx.kind in (ctx.POSITIONAL_OR_KEYWORD, ctx.KEYWORD_ONLY)
