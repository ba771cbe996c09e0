"""Compares what happened with what a case expects; the rules are those of the cases' README."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import pipedist.errors
from pipedist.values import PerReplica
from tests.conformance.cases import Json, Raised, Value, decode_array

KINDS = {
    "ValueError": "VALUE",
    "InvalidArgumentError": "VALUE",
    "AssertionError": "VALUE",
    "TypeError": "TYPE",
    "AttributeError": "TYPE",
    "RuntimeError": "STATE",
    "NotImplementedError": "STATE",
    "FailedPreconditionError": "STATE",
    "StopIteration": "END",
    "StopAsyncIteration": "END",
    "OutOfRangeError": "END",
}
"""Kinds of errors by the names of their classes; a class that is not here is a kind of its own."""

ACCIDENTS = frozenset({"IndexError", "AssertionError", "AttributeError", "UnboundLocalError"})
"""Where TensorFlow raised one of these, any clear error will do."""

UNCLEAR = (
    AssertionError,
    UnboundLocalError,
    TimeoutError,
    pipedist.errors.ProtocolError,
    pipedist.errors.WorkerDied,
    pipedist.errors.WorkersLost,
)
"""Errors of pipedist that are never an answer."""

TOLERANCES = {"float16": 1e-3, "bfloat16": 1e-2}
"""Relative, by dtype; 1e-6 for the others."""


def difference(expected: Json, actual: Any, *, exact_error: bool = False, path: str = "") -> str | None:
    """Return the first difference between a RESULT and what happened, None where there is none.

    Args:
        expected: a RESULT, or a part of one.
        actual: `Value`, `Raised`, or a dict, list or plain JSON that is compared part by part.
        exact_error: an expected error was raised by the case's own code, so that its class and
            text must have come through.
        path: where in the RESULT this is, for the text.
    """
    where = f"{path}: " if path else ""
    if isinstance(actual, Raised):
        if not isinstance(expected, Mapping) or "error" not in expected:
            return f"{where}expected {shorten(expected)}, got the error {describe_error(actual.error)}"
        text = error_difference(expected, actual.error, exact=exact_error)
        return text and where + text
    if isinstance(expected, Mapping) and "error" in expected and not isinstance(actual, Mapping):
        return f"{where}expected the error {expected['error']}, got {describe(actual)}"
    if isinstance(actual, Value):
        if isinstance(expected, Mapping) and set(expected) == {"value"}:
            expected = expected["value"]
        return value_difference(expected, actual.tree, path)
    if isinstance(actual, Mapping):
        if not isinstance(expected, Mapping):
            return f"{where}expected {shorten(expected)}, got parts {sorted(actual)}"
        if "error" in expected and "error" not in actual:
            return f"{where}expected the error {expected['error']}, got {describe(actual)}"
        if set(expected) != set(actual):
            return f"{where}expected parts {sorted(expected)}, got {sorted(actual)}"
        pairs = [(key, expected[key], actual[key]) for key in expected]
    elif isinstance(actual, (list, tuple)):
        if not isinstance(expected, list):
            return f"{where}expected {shorten(expected)}, got a list of {len(actual)}"
        if len(expected) != len(actual):
            return f"{where}expected {len(expected)} items, got {len(actual)}"
        pairs = [(str(i), e, a) for i, (e, a) in enumerate(zip(expected, actual, strict=True))]
    else:
        return (
            None if _plain_equal(expected, actual) else f"{where}expected {shorten(expected)}, got {actual!r}"
        )
    for key, part, live in pairs:
        text = difference(part, live, exact_error=exact_error, path=f"{path}/{key}" if path else str(key))
        if text:
            return text
    return None


def value_difference(expected: Json, actual: Any, path: str = "") -> str | None:
    """Return the first difference between a VALUE and a live value, None where there is none."""
    where = f"{path}: " if path else ""
    wrong = f"{where}expected {shorten(expected)}, got {describe(Value(actual))}"
    parts: list[tuple[str, Json, Any]]
    match expected:
        case {"dtype": _, "shape": _, "data": _}:
            text = _array_difference(expected, actual)
            return text and where + text
        case {"per_replica": items} | {"mirrored": items} | {"variable": items}:
            if not isinstance(actual, PerReplica) or len(actual) != len(items):
                return wrong
            parts = [(f"replica {i}", e, a) for i, (e, a) in enumerate(zip(items, actual, strict=True))]
        case {"dict": items}:
            if not isinstance(actual, dict) or set(actual) != set(items):
                return wrong
            parts = [(key, item, actual[key]) for key, item in items.items()]
        case {"list": items} | {"tuple": items}:
            if type(actual) is not (list if "list" in expected else tuple) or len(actual) != len(items):
                return wrong
            parts = [(str(i), e, a) for i, (e, a) in enumerate(zip(items, actual, strict=True))]
        case {"namedtuple": name, "fields": items}:
            if type(actual).__name__ != name or getattr(actual, "_fields", None) != tuple(items):
                return wrong
            parts = [(key, item, getattr(actual, key)) for key, item in items.items()]
        case {"py": plain}:
            return None if _number_equal(plain, actual) else wrong
        case {"none": True}:
            return None if actual is None else wrong
        case _:
            return f"{where}the runner can't compare {shorten(expected)}"
    for key, item, live in parts:
        text = value_difference(item, live, f"{path}/{key}" if path else key)
        if text:
            return text
    return None


def error_difference(expected: Mapping[str, Json], error: BaseException, *, exact: bool) -> str | None:
    """Return how an error differs from an expected one, None where it is of the same kind.

    Args:
        expected: `{"error": CLASS, "message": ...}`.
        error: what was raised; of a CallError its cause counts.
        exact: class and text must be equal, if there is a text.
    """
    cause = unwrap(error)
    name = expected["error"]
    said = (
        f"expected an error like {name} ({shorten(expected.get('message', ''))}), got {describe_error(error)}"
    )
    if exact and "message" in expected:
        same = type(cause).__name__ == name and str(cause) == expected["message"]
        return None if same else said
    if isinstance(cause, UNCLEAR) or not isinstance(cause, Exception):
        return said
    if name in ACCIDENTS:
        return None
    kinds = {KINDS.get(cls.__name__, cls.__name__) for cls in type(cause).__mro__}
    return None if KINDS.get(name, name) in kinds else said


def unwrap(error: BaseException) -> BaseException:
    """Return the replica function's own exception where the error is a CallError."""
    if isinstance(error, pipedist.errors.CallError) and error.__cause__ is not None:
        return error.__cause__
    return error


def describe_error(error: BaseException) -> str:
    """Return an error in one line."""
    cause = unwrap(error)
    return f"{type(cause).__name__}: {shorten(str(cause))}"


def describe(actual: Any) -> str:
    """Return what happened in one line."""
    if isinstance(actual, Raised):
        return describe_error(actual.error)
    if isinstance(actual, Value):
        tree = actual.tree
        dtype = f" {tree.dtype}{list(tree.shape)}" if isinstance(tree, (np.ndarray, np.generic)) else ""
        return f"{type(tree).__name__}{dtype} {' '.join(repr(tree).split())}"[:300]
    if isinstance(actual, Mapping):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in actual.items())[:300] + "}"
    if isinstance(actual, (list, tuple)):
        return "[" + ", ".join(map(describe, actual))[:300] + "]"
    return repr(actual)[:300]


def shorten(expected: Json) -> str:
    """Return JSON or text as one line of at most 300 characters."""
    text = expected if isinstance(expected, str) else json.dumps(expected)
    return " ".join(text.split())[:300]


def _array_difference(expected: Mapping[str, Json], actual: Any) -> str | None:
    if not isinstance(actual, (np.ndarray, np.generic)):
        return f"expected {shorten(expected)}, got {describe(Value(actual))}"
    name = expected["dtype"]
    same_dtype = actual.dtype.kind in "US" if name == "string" else actual.dtype.name == name
    if not same_dtype or list(actual.shape) != list(expected["shape"]):
        return (
            f"expected {name}{expected['shape']}, got {actual.dtype}{list(actual.shape)}: "
            f"{describe(Value(actual))}"
        )
    wanted = decode_array(expected)
    if name == "string" and actual.dtype.kind == "S":
        actual = np.char.decode(actual, "utf-8")
    if wanted.dtype.kind in "biuUS":
        close = wanted == actual
    else:
        wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
        close = _close(wanted.astype(wide), np.asarray(actual).astype(wide), TOLERANCES.get(name, 1e-6))
    if np.all(close):
        return None
    return f"expected {shorten(expected['data'])}, got {shorten(str(np.asarray(actual).ravel().tolist()))}"


def _close(a: Any, b: Any, relative: float) -> Any:
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= relative * np.maximum(np.abs(a), np.abs(b))
    near &= np.isfinite(a) & np.isfinite(b)
    return near | (a == b) | (np.isnan(a) & np.isnan(b))


def _number_equal(expected: Any, actual: Any) -> bool:
    """Python's own numbers, or what they count as: int64 and float64 scalars."""
    if isinstance(expected, (bool, str)) or expected is None:
        return type(actual) is type(expected) and actual == expected
    if isinstance(actual, (np.ndarray, np.generic)):
        counts_as = np.int64 if isinstance(expected, int) else np.float64
        if actual.shape != () or actual.dtype != counts_as:
            return False
        actual = actual.item()
    return type(actual) is type(expected) and _plain_equal(expected, actual)


def _plain_equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, float):
        return math.isclose(expected, actual, rel_tol=1e-6) or (math.isnan(expected) and math.isnan(actual))
    return type(expected) is type(actual) and bool(expected == actual)
