"""What replica functions must answer together: collectives and variables, worked out from the JSON.

A second, slow interpreter of the cases' expressions that shares nothing with pipedist. Each replica is
a generator, which stops where it meets the others; reductions are those of `reference`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance import reference
from tests.conformance.cases import Json, decode

_FLOATS = ("float16", "float32", "float64", "bfloat16")


class NoAnswer(Exception):
    """The oracle does not know this expression."""


class Raised(Exception):
    """An error that the replica functions meet; `result` is its RESULT."""

    def __init__(self, name: str, message: str = "") -> None:
        super().__init__(f"{name}: {message}")
        self.result = {"error": name, "message": message}


MISMATCH = "CollectiveMismatchError"


FIRST_ALONE = "ONLY_FIRST_REPLICA alone"
"""Aggregation of a variable that is assigned without a look at the values of replicas other than 0."""


class Merged:
    """One value for each replica, as a merge_call's function gets it."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


@dataclass(frozen=True)
class Request:
    """What one replica brings to a collective."""

    kind: str
    value: Any = None
    op: Json = None
    axis: Json = None
    label: str = ""
    body: Json = None


@dataclass
class Variable:
    """A variable: one value, or one for each replica.

    Args:
        copies: of each replica; one, where they share it.
        aggregation: in upper case.
        on_read: each replica has its own.
    """

    copies: list[np.ndarray]
    aggregation: str
    on_read: bool


@dataclass
class Step:
    """The replicas of one step.

    Args:
        replicas: R.
        has_strategy: they are of another strategy than the default one.
        variables: by name; what the step assigns is seen in `values` until it is committed.
    """

    replicas: int
    variables: Mapping[str, Variable] = field(default_factory=dict)
    has_strategy: bool = True
    values: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def value(self, name: str, replica: int) -> np.ndarray:
        variable = self.variables[name]
        return self.values.get((name, replica), variable.copies[replica if variable.on_read else 0])

    def commit(self) -> None:
        for name, variable in self.variables.items():
            variable.copies = [self.value(name, replica) for replica in range(len(variable.copies))]


def run(
    expression: Json,
    replicas: int,
    args: list[Json],
    kwargs: Mapping[str, Json],
    *,
    plain: bool = False,
    has_strategy: bool = True,
    variables: Mapping[str, Variable] | None = None,
) -> Json:
    """Return the RESULT of running an expression on all replicas.

    Args:
        args, kwargs: VALUEs.
        plain: the one replica's values are the caller's own.
        has_strategy: whether it is of another strategy than the default one.
        variables: what the step may read and assign; changed only if it succeeds.

    Raises:
        NoAnswer: the oracle does not know.
    """
    step = Step(replicas, variables or {}, has_strategy)
    try:
        results = _lockstep(expression, step, args, kwargs)
        value = to_json(results[0]) if plain else _joined([to_json(result) for result in results])
    except Raised as raised:
        return raised.result
    step.commit()
    return {"value": value}


def _lockstep(expression: Json, step: Step, args: list[Json], kwargs: Mapping[str, Json]) -> list[Any]:
    count = step.replicas
    runs: list[Any] = [
        _Replica(
            step,
            replica,
            [_component(a, replica) for a in args],
            {k: _component(a, replica) for k, a in kwargs.items()},
        ).evaluate(expression)
        for replica in range(count)
    ]
    results: list[Any] = [None] * count
    answers: list[Any] = [None] * count
    while True:
        requests: dict[int, Request] = {}
        errors: dict[int, Raised] = {}
        for replica, generator in enumerate(runs):
            if generator is None:
                continue
            try:
                requests[replica] = generator.send(answers[replica])
            except StopIteration as end:
                results[replica], runs[replica] = end.value, None
            except Raised as raised:
                errors[replica] = raised
        if errors:
            raise errors[min(errors)]
        if not requests:
            return results
        if len(requests) < count:
            raise Raised(MISMATCH)
        answers = _meet(step, [requests[replica] for replica in range(count)])


def _meet(step: Step, requests: list[Request]) -> list[Any]:
    first = requests[0]
    if any(
        (r.kind, r.op, r.axis, r.label, r.body) != (first.kind, first.op, first.axis, first.label, first.body)
        for r in requests
    ):
        raise Raised(MISMATCH)
    parts = [to_json(request.value) for request in requests]
    if first.kind == "merge_call":
        merged = [Merged([r.value[i] for r in requests]) for i in range(len(first.value))]
        result = _Replica(step, None, merged, {}).merge_body(first.body)
        return [_unmerged(result, replica) for replica in range(step.replicas)]
    if first.kind == "broadcast":
        return [first.value] * step.replicas
    if any(_skeleton(part) != _skeleton(parts[0]) for part in parts):
        raise Raised(MISMATCH)
    joined = _joined(parts)
    if not reference.leaves(parts[0]):
        raise Raised("ValueError")
    if first.kind == "all_reduce":
        for part in parts:  # each replica's own mistakes come first
            for leaf in reference.arrays(part):
                if (
                    leaf["dtype"] not in reference.INT_BITS | reference.UINT_BITS
                    and leaf["dtype"] not in reference.FLOATS
                ):
                    raise Raised("TypeError")
        shapes = [[(leaf["dtype"], leaf["shape"]) for leaf in reference.arrays(part)] for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise Raised(MISMATCH)
        result = reference.reduce_result(
            {"reduce_op": first.op, "axis": None, "value": joined}, step.replicas
        )
    else:
        for part in parts:
            own = reference.gather_result({"axis": first.axis, "value": _joined([part])})
            if "error" in own:
                raise Raised(own["error"])
        dtypes = [[leaf["dtype"] for leaf in reference.arrays(part)] for part in parts]
        if any(dtype != dtypes[0] for dtype in dtypes):
            raise Raised(MISMATCH)
        result = reference.gather_result({"axis": first.axis, "value": joined})
    if "error" in result:
        raise Raised(result["error"])
    return [decode(result["value"])] * step.replicas


class _Replica:
    """Evaluates expressions; generators, so that a collective can stop one."""

    def __init__(self, step: Step, replica: int | None, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        self._step = step
        self._replica = replica
        self._args = args
        self._kwargs = kwargs

    def merge_body(self, expression: Json) -> Any:
        """Evaluate a merge_call's function, which meets nobody."""
        generator = self.evaluate(expression)
        try:
            next(generator)
        except StopIteration as end:
            return end.value
        raise NoAnswer

    def evaluate(self, expression: Json) -> Generator[Request, Any, Any]:
        match expression:
            case ["arg" | "marg", index] if index < len(self._args):
                return self._args[index]
            case ["kwarg", key] if key in self._kwargs:
                return self._kwargs[key]
            case ["const" | "shared", value]:
                return decode(value)
            case ["py", value]:
                return value
            case ["none"]:
                return None
            case ["replica_id"] if self._replica is not None:
                return self._replica
            case ["num_replicas"] if self._replica is not None:
                return self._step.replicas
            case ["has_strategy"]:
                return self._step.has_strategy
            case ["in_replica_context"]:
                return self._replica is not None
            case ["in_cross_replica_context"]:
                return self._replica is None
            case ["by_replica", branches] if self._replica is not None:
                return (yield from self.evaluate(branches[self._replica]))
            case ["add" | "sub" | "mul" as op, a, b]:
                x = yield from self.evaluate(a)
                y = yield from self.evaluate(b)
                return _arithmetic(op, x, y)
            case ["cast", a, dtype]:
                x = yield from self.evaluate(a)
                return np.asarray(x).astype(dtype)
            case ["tensor", a]:
                x = yield from self.evaluate(a)
                return np.asarray(x, {int: np.int32, float: np.float32}.get(type(x)))
            case ["get", a, key]:
                x = yield from self.evaluate(a)
                if isinstance(x, Merged):
                    return Merged([part[key] for part in x.parts])
                return x[key]
            case ["dict", items]:
                found = {}
                for key, item in items.items():
                    found[key] = yield from self.evaluate(item)
                return found
            case ["namedtuple", name, items]:
                fields = {}
                for key, item in items.items():
                    fields[key] = yield from self.evaluate(item)
                return _Named(name, fields)
            case ["list" | "tuple" | "seq" as kind, items]:
                values = []
                for item in items:
                    values.append((yield from self.evaluate(item)))
                return values[-1] if kind == "seq" else values if kind == "list" else tuple(values)
            case ["raise", name, text]:
                raise Raised(name, text)
            case ["all_reduce", op, a]:
                if self._replica is None:
                    raise Raised("AttributeError")
                x = yield from self.evaluate(a)
                name = op if isinstance(op, str) else op.get("str")
                if not isinstance(name, str) or name.lower() not in reference.OPS:
                    raise Raised("ValueError")
                return (yield Request("all_reduce", x, name.lower()))
            case ["all_gather", a, axis]:
                if self._replica is None:
                    raise Raised("AttributeError")
                x = yield from self.evaluate(a)
                axis = axis["py"] if isinstance(axis, Mapping) and "py" in axis else axis
                if type(axis) is not int:
                    raise Raised("TypeError")
                return (yield Request("all_gather", x, axis=axis))
            case ["merge_call", body, arguments]:
                if self._replica is None:
                    raise Raised("AttributeError")
                values = []
                for argument in arguments:
                    values.append((yield from self.evaluate(argument)))
                return (yield Request("merge_call", values, body=body))
            case ["reduce", op, a, axis] if self._replica is None:
                x = yield from self.evaluate(a)
                call = {"reduce_op": op, "axis": axis, "value": to_json(x)}
                return self._decoded(reference.reduce_result(call, self._step.replicas))
            case ["gather", a, axis] if self._replica is None:
                x = yield from self.evaluate(a)
                return self._decoded(reference.gather_result({"axis": axis, "value": to_json(x)}))
            case ["local_results", a] if self._replica is None:
                x = yield from self.evaluate(a)
                if not isinstance(x, Merged):
                    raise NoAnswer
                return tuple(x.parts)
            case ["read", name]:
                return self._step.value(name, self._owner())
            case ["assign" | "assign_add" | "assign_sub" as how, name, a]:
                x = yield from self.evaluate(a)
                return (yield from self._assign(how, name, x))
        raise NoAnswer(str(expression)[:80])

    def _owner(self) -> int:
        if self._replica is None:
            raise NoAnswer
        return self._replica

    def _decoded(self, result: Json) -> Any:
        if "error" in result:
            raise Raised(result["error"])
        return decode(result["value"])

    def _assign(self, how: str, name: str, value: Any) -> Generator[Request, Any, Any]:
        replica, variable = self._owner(), self._step.variables[name]
        old = self._step.value(name, replica)
        ignored = replica > 0 and variable.aggregation == FIRST_ALONE
        own = old if ignored else operand(value, old)
        if not variable.on_read and self._step.replicas > 1:
            if variable.aggregation == "NONE":
                raise Raised("ValueError")
            label = f"{how} {name}"
            if variable.aggregation in ("ONLY_FIRST_REPLICA", FIRST_ALONE):
                own = yield Request("broadcast", own, label=label)
            else:
                own = yield Request("all_reduce", own, variable.aggregation, label=label)
        new = changed(how, old, np.asarray(own))
        self._step.values[name, replica] = new
        return new


def operand(value: Any, old: np.ndarray) -> np.ndarray:
    """Return what is assigned to a variable, like its value."""
    strong = isinstance(value, np.ndarray | np.generic)
    if strong and np.asarray(value).dtype != old.dtype:
        raise Raised("ValueError")
    if isinstance(value, float) and old.dtype.name not in _FLOATS:
        raise Raised("ValueError")
    array = np.asarray(value, old.dtype)
    if array.shape != old.shape:
        raise Raised("ValueError")
    return array


def changed(how: str, old: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return a value after an assignment."""
    return delta if how == "assign" else np.asarray(old + delta if how == "assign_add" else old - delta)


@dataclass(frozen=True)
class _Named:
    name: str
    fields: dict[str, Any]


def _arithmetic(op: str, x: Any, y: Any) -> Any:
    if isinstance(x, Merged) or isinstance(y, Merged):
        raise NoAnswer
    live = [v for v in (x, y) if isinstance(v, np.ndarray | np.generic)]
    if len(live) == 2 and live[0].dtype != live[1].dtype:
        raise Raised("ValueError")
    if len(live) == 1 and live[0].dtype.kind in "biu" and (isinstance(x, float) or isinstance(y, float)):
        raise Raised("ValueError")
    return {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y}[op]()


def _component(value: Json, replica: int) -> Any:
    def leaf(item: Json) -> Json:
        parts = reference.components(item)
        return item if parts is None else parts[replica]

    return decode(reference.map_leaves(leaf, value))


def to_json(value: Any) -> Json:
    """Return a live value as a VALUE."""
    if value is None:
        return {"none": True}
    if isinstance(value, Merged):
        return _joined([to_json(part) for part in value.parts])
    if isinstance(value, _Named):
        return {"namedtuple": value.name, "fields": {k: to_json(v) for k, v in value.fields.items()}}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        dtype = "string" if array.dtype.kind in "US" else array.dtype.name
        data = (
            array.astype(np.float64).ravel().tolist()
            if array.dtype.name in _FLOATS
            else array.ravel().tolist()
        )
        data = [x if not isinstance(x, float) or np.isfinite(x) else str(x) for x in data]
        return {"dtype": dtype, "shape": list(array.shape), "data": data}
    if isinstance(value, dict):
        return {"dict": {key: to_json(item) for key, item in value.items()}}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "namedtuple": type(value).__name__,
            "fields": {key: to_json(item) for key, item in zip(value._fields, value, strict=True)},
        }
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [to_json(item) for item in value]}
    return {"py": value}


def _skeleton(value: Json) -> Json:
    return reference.map_leaves(lambda leaf: "*", value)


def _joined(parts: list[Json]) -> Json:
    """Return one VALUE of all replicas' VALUEs, per-replica in every leaf."""
    if any(_skeleton(part) != _skeleton(parts[0]) for part in parts):
        raise Raised("ValueError")
    columns = [iter(reference.leaves(part)) for part in parts]
    return reference.map_leaves(lambda leaf: {"per_replica": [next(column) for column in columns]}, parts[0])


def _unmerged(value: Any, replica: int) -> Any:
    if isinstance(value, Merged):
        return value.parts[replica]
    if isinstance(value, dict):
        return {key: _unmerged(item, replica) for key, item in value.items()}
    if isinstance(value, list):
        return [_unmerged(item, replica) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_unmerged(item, replica) for item in value)
    return value
