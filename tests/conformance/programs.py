"""The replica functions of the cases: an interpreter of their nested expressions.

Imported in the workers. `function(expression)` is a plain Python function of `*args, **kwargs`,
as a user would write it. The language's arithmetic is that of typed tensors, because the expressions
were recorded from it: two arrays of different dtypes don't mix, a Python number adapts to an array,
`["tensor", 1]` is int32 and `["tensor", 1.0]` float32.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import pipedist
from pipedist.core.trees import flatten, tree_map, unflatten
from tests.conformance.cases import Json, Skip, decode, dtype_of
from tests.conformance.namedtuples import namedtuple_class

VARIABLE_OPS = ("read", "assign", "assign_add", "assign_sub")


def function(
    expression: Json, variables: Mapping[str, pipedist.Variable] | None = None
) -> Callable[..., Any]:
    """Return the replica function of an expression.

    Args:
        variables: those that it reads and assigns, by name; it captures them.

    Raises:
        Skip: it uses an operation that is not known.
    """
    check(expression)
    captured = dict(variables or {})

    def replica_function(*args: Any, **kwargs: Any) -> Any:
        return _Evaluation(args, kwargs, captured)(expression)

    return replica_function


def check(expression: Json) -> None:
    """Look at the whole expression for what can't be executed.

    Raises:
        Skip: it uses an operation that is not known.
    """
    match expression:
        case ["const" | "shared", value]:
            decode(value)
        case ["raise", str(name), _]:
            if not isinstance(getattr(builtins, name, None), type):
                raise Skip(f"unknown program raise {name}")
        case ["dict", dict(items)]:
            for item in items.values():
                check(item)
        case ["namedtuple", _, dict(items)]:
            for item in items.values():
                check(item)
        case ["list" | "tuple" | "seq" | "by_replica", list(items)]:
            for item in items:
                check(item)
        case ["merge_call", body, list(arguments)]:
            for item in (body, *arguments):
                check(item)
        case [str(op), *operands]:
            if not hasattr(_Evaluation, f"op_{op}"):
                raise Skip(f"unknown program {op}")
            for operand in operands:
                if isinstance(operand, list) and operand and isinstance(operand[0], str):
                    check(operand)
        case _:
            raise Skip(f"unknown program {str(expression)[:80]}")


def op_of(op: Json) -> Any:
    """Return the operator of a call: "SUM" is the enum member, {"str": s} a string, {"py": x} an object."""
    match op:
        case str():
            return pipedist.ReduceOp[op]
        case {"str": text}:
            return text
        case {"py": plain}:
            return plain
    raise Skip(f"unknown program reduce_op {op}")


def arguments_of(call: Mapping[str, Json]) -> tuple[Any, Any]:
    """Return what a call gives `run` as `args` and `kwargs`: a tuple and a dict, unless it says otherwise.

    Raises:
        Skip: the arguments come in a form that is not known.
    """
    given, named = call.get("args", ()), call.get("kwargs", {})
    args: Any = None if given is None else tuple(decode(arg) for arg in given)
    kwargs = None if named is None else {key: decode(arg) for key, arg in named.items()}
    match call.get("args_as", "tuple"):
        case "list":
            args = list(args)
        case "bare":
            (args,) = args
        case "none" | "None" | None:
            args = None
        case "tuple":
            pass
        case other:
            raise Skip(f"unknown program args_as {other}")
    return args, kwargs


def axis_of(axis: Json) -> Any:
    """Return the axis of a call: [0] is a tuple, {"list": [0]} a list, {"py": x} an object."""
    match axis:
        case list():
            return tuple(axis)
        case {"list": items}:
            return items
        case {"py": plain}:
            return plain
    return axis


def operations(expression: Json) -> set[str]:
    """Return the names of all operations of an expression."""
    found: set[str] = set()
    if isinstance(expression, list):
        if expression and isinstance(expression[0], str):
            found.add(expression[0])
            if expression[0] in ("const", "shared", "py"):
                return found
        for part in expression:
            found |= operations(part)
    elif isinstance(expression, Mapping):
        for part in expression.values():
            found |= operations(part)
    return found


def stacked(branches: list[Json]) -> Any:
    """Return the constants of all replicas, stacked leaf by leaf; None: they are none, or differ in shape."""
    if any(
        operations(branch) - {"const", "shared", "dict", "list", "tuple", "tensor"} for branch in branches
    ):
        return None
    found = [_Evaluation((), {}, {})(branch) for branch in branches]
    columns = [flatten(each) for each in found]
    leaves = [each for each, _ in columns]
    if any(treedef != columns[0][1] for _, treedef in columns):
        return None
    for own in zip(*leaves, strict=True):
        kinds = {
            (leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray | np.generic) else None for leaf in own
        }
        if len(kinds) != 1 or None in kinds or own[0].dtype.kind not in "biufc":
            return None
    return unflatten(columns[0][1], [np.stack(own) for own in zip(*leaves, strict=True)])


class _Evaluation:
    """Evaluates one expression in one replica; `op_NAME` is the operation NAME.

    Args:
        args, kwargs: of the function.
        variables: by name.
        merging: the strategy, in a function that merge_call runs.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        variables: Mapping[str, Any],
        merging: Any = None,
    ) -> None:
        self._args = args
        self._kwargs = kwargs
        self._variables = variables
        self._merging = merging

    def __call__(self, expression: Json) -> Any:
        op, *operands = expression
        return getattr(self, f"op_{op}")(*operands)

    def op_arg(self, index: int) -> Any:
        return self._args[index]

    def op_kwarg(self, key: str) -> Any:
        return self._kwargs[key]

    def op_const(self, value: Json) -> Any:
        return decode(value)

    def op_shared(self, value: Json) -> Any:
        return decode(value)

    def op_py(self, value: Json) -> Any:
        return value

    def op_none(self) -> None:
        return None

    def op_replica_id(self) -> int:
        return pipedist.get_replica_context().replica_id_in_sync_group

    def op_num_replicas(self) -> int:
        return pipedist.get_replica_context().num_replicas_in_sync

    def op_in_replica_context(self) -> bool:
        return pipedist.get_replica_context() is not None

    def op_in_cross_replica_context(self) -> bool:
        return pipedist.in_cross_replica_context()

    def op_has_strategy(self) -> bool:
        return pipedist.has_strategy()

    def op_by_replica(self, branches: list[Json]) -> Any:
        constants = stacked(branches) if _np() is not np else None
        if constants is not None:  # as a user would write it for a compiler
            return tree_map(lambda leaf: _np().asarray(leaf)[self.op_replica_id()], constants)
        return self(branches[self.op_replica_id()])

    def op_add(self, a: Json, b: Json) -> Any:
        return _binary("add", self(a), self(b))

    def op_sub(self, a: Json, b: Json) -> Any:
        return _binary("subtract", self(a), self(b))

    def op_mul(self, a: Json, b: Json) -> Any:
        return _binary("multiply", self(a), self(b))

    def op_div(self, a: Json, b: Json) -> Any:
        x, y = self(a), self(b)
        if _is_python(x) and _is_python(y):
            return x / y
        quotient = _binary("true_divide", x, y)
        small = [v.dtype.itemsize <= 2 for v in (x, y) if not _is_python(v) and v.dtype.kind in "iu"]
        return quotient.astype(np.float32) if small and all(small) else quotient

    def op_neg(self, a: Json) -> Any:
        return -self(a)

    def op_square(self, a: Json) -> Any:
        x = self(a)
        return x * x

    def op_sum(self, a: Json, axis: Json) -> Any:
        x = _np().asarray(self(a))
        return _np().sum(x, axis=_axis(axis), dtype=x.dtype)

    def op_mean(self, a: Json, axis: Json) -> Any:
        x = _np().asarray(self(a))
        axes = _axis(axis)
        if x.dtype.kind not in "iu":
            return _np().mean(x, axis=axes)
        total = _np().sum(x, axis=axes, dtype=x.dtype)
        return _np().trunc(total / (x.size // max(1, np.size(total)))).astype(x.dtype)

    def op_cast(self, a: Json, dtype: str) -> Any:
        return _np().asarray(self(a)).astype(dtype_of(dtype))

    def op_shape(self, a: Json) -> Any:
        return np.array(np.shape(self(a)), np.int32)

    def op_tensor(self, a: Json) -> Any:
        x = self(a)
        if isinstance(x, bool) or not _is_python(x):
            return _np().asarray(x)
        return _np().asarray(x, {int: np.int32, float: np.float32}.get(type(x)))

    def op_get(self, a: Json, key: Json) -> Any:
        return self(a)[key]

    def op_getattr(self, a: Json, name: str) -> Any:
        return getattr(self(a), name)

    def op_dict(self, items: Mapping[str, Json]) -> Any:
        return {key: self(item) for key, item in items.items()}

    def op_list(self, items: list[Json]) -> Any:
        return [self(item) for item in items]

    def op_tuple(self, items: list[Json]) -> Any:
        return tuple(self(item) for item in items)

    def op_namedtuple(self, name: str, items: Mapping[str, Json]) -> Any:
        return namedtuple_class(name, tuple(items))(*map(self, items.values()))

    def op_seq(self, items: list[Json]) -> Any:
        return [self(item) for item in items][-1]

    def op_raise(self, name: str, text: str) -> Any:
        raise getattr(builtins, name)(text)

    def op_reduce(self, op: Json, a: Json, axis: Json) -> Any:
        value = self(a)
        return self._strategy.reduce(op_of(op), value, axis=axis_of(axis))

    def op_gather(self, a: Json, axis: Json) -> Any:
        value = self(a)
        return self._strategy.gather(value, axis=axis_of(axis))

    def op_local_results(self, a: Json) -> Any:
        value = self(a)
        return self._strategy.local_results(value)

    @property
    def _strategy(self) -> Any:
        return self._merging or pipedist.get_replica_context().strategy

    def op_all_reduce(self, op: Json, a: Json) -> Any:
        value = self(a)
        return pipedist.get_replica_context().all_reduce(op_of(op), value)

    def op_all_gather(self, a: Json, axis: Json) -> Any:
        value = self(a)
        return pipedist.get_replica_context().all_gather(value, axis=axis_of(axis))

    def op_merge_call(self, body: Json, arguments: list[Json]) -> Any:
        def merge_fn(strategy: Any, *args: Any) -> Any:
            return _Evaluation(args, {}, self._variables, strategy)(body)

        return pipedist.get_replica_context().merge_call(merge_fn, args=tuple(map(self, arguments)))

    def op_marg(self, index: int) -> Any:
        return self._args[index]

    def op_read(self, name: str) -> Any:
        return self._variables[name].value()

    def op_assign(self, name: str, a: Json) -> Any:
        return self._variables[name].assign(self(a))

    def op_assign_add(self, name: str, a: Json) -> Any:
        return self._variables[name].assign_add(self(a))

    def op_assign_sub(self, name: str, a: Json) -> Any:
        return self._variables[name].assign_sub(self(a))


def _np() -> Any:
    """Return NumPy, or that of JAX in a function that it traces."""
    ctx = pipedist.get_replica_context()
    if type(ctx).__name__ == "TracedContext":
        return importlib.import_module("jax.numpy")
    return np


def _is_python(x: Any) -> bool:
    return not hasattr(x, "dtype")


def _axis(axis: Json) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def _binary(name: str, x: Any, y: Any) -> Any:
    ufunc = getattr(np if _is_python(x) and _is_python(y) else _np(), name)
    if _is_python(x) and _is_python(y):
        result = ufunc(x, y)
        return result.item() if isinstance(result, np.generic) else result
    if not _is_python(x) and not _is_python(y) and x.dtype != y.dtype:
        raise ValueError(f"operands of dtypes {x.dtype} and {y.dtype}: cast one of them first")
    for python, array in ((x, y), (y, x)):
        if isinstance(python, float) and not _is_python(array) and array.dtype.kind in "biu":
            raise ValueError(f"{python} does not adapt to {array.dtype}: cast the array first")
    return ufunc(x, y)
