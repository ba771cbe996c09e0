"""The rules by which pipedist answers something better than TensorFlow: reduce, gather, run.

Each rule looks at what a case does, and gives pipedist's own expectation for it, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.conformance import reference
from tests.conformance.cases import Case, Deviation, Json
from tests.conformance.explanations import (
    Explanation,
    agree,
    all_zero,
    answered,
    any_of,
    bool_as_axis,
    copies_reduced,
    first_components,
    gathered_along_number,
    nearly,
    one_array,
    refused,
    where,
    wrapped,
)


def _by_reference(
    name: str,
    row: int,
    op: str,
    concerns: Callable[[Case], bool],
    answer: Callable[[Case], Json],
    explains: Explanation,
) -> Deviation:
    def expected(case: Case, recorded: Json) -> Json:
        if case.call["op"] != op or not concerns(case):
            return recorded
        own = answer(case)
        return own if not agree(recorded, own) and explains(case, recorded, own) else recorded

    return Deviation(name, row, expected)


def _reduce_rule(name: str, row: int, concerns: Callable[[Case], bool], explains: Explanation) -> Deviation:
    return _by_reference(
        name,
        row,
        "reduce",
        concerns,
        lambda case: reference.reduce_result(case.call, case.replicas),
        explains,
    )


def _gather_rule(name: str, concerns: Callable[[Case], bool], explains: Explanation) -> Deviation:
    return _by_reference(
        name,
        18,
        "gather",
        lambda case: not values_are_plain(case) and _is_gathered(case) and concerns(case),
        lambda case: reference.gather_result(case.call),
        explains,
    )


def _dtypes(case: Case) -> set[str]:
    return {array["dtype"] for array in reference.arrays(case.call["value"]) if "dtype" in array}


def _has_integers(case: Case) -> bool:
    return any(dtype in reference.INT_BITS | reference.UINT_BITS for dtype in _dtypes(case))


def _is_mean(case: Case) -> bool:
    op = case.call["reduce_op"]
    return str(op if isinstance(op, str) else op.get("str")).lower() == "mean"


def _odd_op(case: Case) -> bool:
    op = case.call["reduce_op"]
    return not isinstance(op, str) and str(op.get("str")).lower() not in ("sum", "mean")


def _odd_axis(case: Case) -> bool:
    return isinstance(case.call["axis"], Mapping)


def _has_plain_leaf(case: Case) -> bool:
    value = case.call["value"]
    leaves = reference.leaves(value)
    return case.replicas > 1 and (
        value == {"none": True} or any(reference.components(leaf) is None for leaf in leaves)
    )


def _is_gathered(case: Case) -> bool:
    """Whether there is more than a plain value, which comes back as it is."""
    leaves = reference.leaves(case.call["value"])
    return case.replicas == 1 or any(reference.components(leaf) is not None for leaf in leaves)


def _has_axis(case: Case) -> bool:
    return case.call["axis"] is not None


def _refused_dtype(case: Case) -> bool:
    return len(_dtypes(case)) > 1 or bool(_dtypes(case) & {"bool", "string"})


REDUCE = (
    _reduce_rule(
        "reduce: operators are sum, mean, min, max, prod; others a ValueError",
        15,
        _odd_op,
        any_of(
            refused("ValueError"), where(lambda case: "py" in case.call["reduce_op"], refused("TypeError"))
        ),
    ),
    _reduce_rule(
        "reduce: an axis may be a list; what is no int is a TypeError",
        14,
        _odd_axis,
        any_of(
            where(lambda case: "list" in case.call["axis"], refused("TypeError")),
            where(
                lambda case: type(case.call["axis"].get("py")) is not bool, refused("InvalidArgumentError")
            ),
            answered(bool_as_axis),
        ),
    ),
    _reduce_rule(
        "reduce: a tree is reduced leaf by leaf, with an axis too",
        16,
        lambda case: reference.is_container(case.call["value"]) and _has_axis(case),
        any_of(refused("TypeError", "AttributeError", "InvalidArgumentError"), one_array),
    ),
    _reduce_rule(
        "reduce: a plain value is a ValueError, but MEAN with axis None returns it",
        17,
        _has_plain_leaf,
        any_of(
            where(_has_axis, answered(copies_reduced)),
            where(
                lambda case: _has_axis(case) and (_refused_dtype(case) or not _dtypes(case)),
                refused("TypeError"),
            ),
            where(all_zero, any_of(answered(first_components), refused("AttributeError"))),
        ),
    ),
    _reduce_rule(
        "reduce: MEAN of integers is a float, with one replica too",
        11,
        lambda case: case.replicas == 1 and _is_mean(case) and _has_integers(case) and not _has_axis(case),
        answered(first_components),
    ),
    _reduce_rule(
        "reduce: integers are added exactly, OverflowError if the result does not fit",
        12,
        _has_integers,
        any_of(answered(wrapped), refused("InvalidArgumentError", "NotFoundError", "UnimplementedError")),
    ),
    _reduce_rule(
        "reduce: float16 and bfloat16 are folded in float32",
        12,
        lambda case: bool(_dtypes(case) & {"float16", "bfloat16"}),
        nearly,
    ),
    _reduce_rule(
        "reduce: dtypes that differ or can't be added are a TypeError",
        13,
        _refused_dtype,
        any_of(
            refused("InvalidArgumentError"),
            where(lambda case: case.replicas == 1 and not _has_axis(case), answered(first_components)),
        ),
    ),
)

GATHER = (
    _gather_rule(
        "gather: a tree is gathered leaf by leaf",
        lambda case: reference.is_container(case.call["value"]),
        answered(first_components),
    ),
    _by_reference(
        "gather: an axis that is no int is a TypeError",
        18,
        "gather",
        lambda case: type(case.call["axis"]) is not int and not values_are_plain(case),
        lambda case: reference.gather_result(case.call),
        any_of(
            refused("ValueError", "InvalidArgumentError"),
            answered(gathered_along_number),
            where(lambda case: not _is_gathered(case), answered(first_components)),
        ),
    ),
    _gather_rule(
        "gather: one replica's axis is checked too",
        lambda case: case.replicas == 1,
        answered(first_components),
    ),
    _gather_rule(
        "gather: negative axes for every dtype",
        lambda case: type(case.call["axis"]) is int and case.call["axis"] < 0 and _dtypes(case) != {"int32"},
        refused("ValueError", "InvalidArgumentError"),
    ),
    _gather_rule("gather: every dtype", _refused_dtype, refused("TypeError", "InvalidArgumentError")),
    _gather_rule(
        "gather: every dtype, integers and floats of any size",
        lambda case: not _dtypes(case) <= {"float32", "float16", "float64", "int32", "int64"},
        refused("TypeError", "InvalidArgumentError"),
    ),
)


def _skeleton(value: Json) -> Json:
    """Return the structure of a VALUE, with "*" for a leaf."""
    match value:
        case {"none": True}:
            return None
        case {"namedtuple": name, "fields": items}:
            return [name, {key: _skeleton(item) for key, item in items.items()}]
        case {"dict": items}:
            return {key: _skeleton(item) for key, item in items.items()}
        case {"list": items}:
            return ["list", [_skeleton(item) for item in items]]
        case {"tuple": items}:
            return ["tuple", [_skeleton(item) for item in items]]
    return "*"


def _structures_differ(case: Case, recorded: Json) -> Json:
    for leaf in reference.leaves(recorded.get("value", {"none": True})):
        skeletons = [_skeleton(part) for part in leaf.get("per_replica", ())]
        if any(skeleton != skeletons[0] for skeleton in skeletons):
            return {"error": "ValueError"}
    return recorded


def values_are_plain(case: Case) -> bool:
    """Return whether the strategy's one replica is the caller's own: its values are never PerReplica."""
    return case.strategy is None or case.strategy.kind in ("one_device", "default")


def always_per_replica(case: Case, recorded: Json) -> Json:
    """Return a RESULT of `run` whose leaves are all per replica."""
    if "value" not in recorded or values_are_plain(case):
        return recorded

    def leaf(value: Json) -> Json:
        if "per_replica" not in value:
            return {"per_replica": [value] * case.replicas}
        return {"none": True} if all(part == {"none": True} for part in value["per_replica"]) else value

    return {"value": reference.map_leaves(leaf, recorded["value"])}


def local_results_of(case: Case, changed: Json) -> Json:
    """Return `expect_local_results` for a changed expectation of `run`."""
    if "error" in changed:
        return changed
    value = changed["value"]
    if value == {"none": True}:
        return {"value": {"tuple": [value]}}

    def component(replica: int) -> Json:
        return reference.map_leaves(
            lambda leaf: leaf["per_replica"][replica] if "per_replica" in leaf else leaf, value
        )

    return {"value": {"tuple": [component(replica) for replica in range(case.replicas)]}}


def _is_plain_arithmetic(expression: Json) -> bool:
    """Return whether an expression has only replica ids and Python numbers in it."""
    match expression:
        case ["replica_id"] | ["num_replicas"]:
            return True
        case ["py", value]:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case ["add" | "sub" | "mul" | "div", a, b]:
            return _is_plain_arithmetic(a) and _is_plain_arithmetic(b)
        case ["neg" | "square", a]:
            return _is_plain_arithmetic(a)
    return False


def _plain_numbers(value: Json) -> Json:
    """Return a VALUE with Python numbers in place of scalars."""

    def leaf(item: Json) -> Json:
        if "per_replica" in item:
            return {"per_replica": [_plain_numbers(part) for part in item["per_replica"]]}
        return {"py": item["data"][0]} if item.get("shape") == [] and item["dtype"] != "string" else item

    return reference.map_leaves(leaf, value)


def ids_in(expression: Json, value: Json) -> Json:
    """Return the value of an expression with Python numbers where the expression has only such and ids."""
    match expression, value:
        case ["seq", [*_, last]], _:
            return ids_in(last, value)
        case ["dict", fields], {"dict": items}:
            return {"dict": {key: ids_in(fields[key], item) for key, item in items.items()}}
        case ["list" | "tuple" as kind, parts], {"list": items} | {"tuple": items}:
            return {kind: [ids_in(part, item) for part, item in zip(parts, items, strict=True)]}
        case ["namedtuple", name, fields], {"fields": items}:
            return {
                "namedtuple": name,
                "fields": {key: ids_in(fields[key], item) for key, item in items.items()},
            }
        case ["by_replica", [first, *_]], _ if reference.is_container(value):
            return ids_in(first, value)
        case ["by_replica", branches], {"per_replica": parts}:
            return {"per_replica": [ids_in(b, part) for b, part in zip(branches, parts, strict=True)]}
        case ["merge_call", body, arguments], _:
            return ids_in(_substituted(body, arguments), value)
        case ["local_results", part], {"tuple": items}:
            return {"tuple": [ids_in(part, item) for item in items]}
    return _plain_numbers(value) if _is_plain_arithmetic(expression) else value


def _substituted(body: Json, arguments: list[Json]) -> Json:
    """Return a merge_call's body with the arguments in place of its parameters."""
    match body:
        case ["marg", int(index)] if index < len(arguments):
            return arguments[index]
        case dict():
            return {key: _substituted(item, arguments) for key, item in body.items()}
        case [*items]:
            return [_substituted(item, arguments) for item in items]
    return body


def _ids_are_ints(case: Case, recorded: Json) -> Json:
    if case.call["op"] != "run" or "value" not in recorded:
        return recorded
    return {"value": ids_in(case.call["fn"], recorded["value"])}


def _context_ids_are_ints(case: Case, recorded: Json) -> Json:
    if "value" not in recorded:
        return recorded

    def leaf(value: Json) -> Json:
        if "per_replica" in value:
            return {"per_replica": [reference.map_leaves(leaf, part) for part in value["per_replica"]]}
        return _plain_numbers(value) if value.get("dtype") == "int32" else value

    return {"value": reference.map_leaves(leaf, recorded["value"])}


_PER_REPLICA = Deviation(
    "run: a leaf is always per replica, None stays None", 3, always_per_replica, local_results_of
)
RUN = (
    Deviation("run: replica ids are Python ints", 19, _ids_are_ints, local_results_of),
    Deviation("run: structures that differ are a ValueError", 5, _structures_differ, local_results_of),
    _PER_REPLICA,
)

VALUES_FROM_FUNCTION = (
    Deviation("values_from_function: replica ids are Python ints", 19, _context_ids_are_ints),
    Deviation("values_from_function: a leaf is always per replica, None stays None", 3, always_per_replica),
)
