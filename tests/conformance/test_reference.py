"""The rules' reference and pipedist agree on calls that no case file has."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist import values
from tests.conformance import reference
from tests.conformance.cases import Json, Raised, Value, decode
from tests.conformance.compare import difference
from tests.conformance.families.reduce import axis_of, op_of

DTYPES = (
    "int8",
    "uint8",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bool",
    "string",
)


@st.composite
def arrays(draw: Any, dtype: str, tail: tuple[int, ...]) -> Json:
    shape = [draw(st.integers(0, 3)), *tail] if draw(st.integers(0, 9)) else []
    size = 1
    for n in shape:
        size *= n
    if dtype == "bool":
        element: Any = st.booleans()
    elif dtype == "string":
        element = st.sampled_from(["a", "bc"])
    elif dtype.startswith("float"):
        element = st.sampled_from([0.0, 1.0, -2.5, 0.125, "nan", "inf", "-inf"])
    else:
        element = st.sampled_from([0, 1, 2, 3, 100, 2**7 - 1] + ([2**63 - 1] if dtype.endswith("64") else []))
    return {"dtype": dtype, "shape": shape, "data": draw(st.lists(element, min_size=size, max_size=size))}


@st.composite
def leaves(draw: Any, replicas: int) -> Json:
    dtype = draw(st.sampled_from(DTYPES))
    tail = draw(st.sampled_from([(), (2,)]))
    if not draw(st.integers(0, 7)):
        return draw(
            st.sampled_from(
                [{"py": 3}, {"py": 0}, {"py": 2.5}, {"py": True}, {"numpy": draw(arrays(dtype, tail))}]
            )
        )
    return {"per_replica": [draw(arrays(dtype, tail)) for _ in range(replicas)]}


@st.composite
def trees(draw: Any, replicas: int) -> Json:
    kind = draw(st.sampled_from(["leaf", "leaf", "leaf", "dict", "list", "namedtuple"]))
    if kind == "dict":
        return {"dict": {"b": draw(leaves(replicas)), "a": draw(leaves(replicas))}}
    if kind == "list":
        return {"list": draw(st.lists(leaves(replicas), max_size=2))}
    if kind == "namedtuple":
        return {"namedtuple": "Pair", "fields": {"x": draw(leaves(replicas))}}
    return draw(leaves(replicas))


AXES = st.sampled_from(
    [None, None, 0, 0, 1, -1, 2, [0, 1], [0, 0], {"list": [0]}, {"list": [0, -1]}, {"py": True}, {"py": "0"}]
)
OPS = st.sampled_from(
    [
        "SUM",
        "MEAN",
        *({"str": name} for name in ("sum", "Mean", "max", "MIN", "prod", "median", "")),
        {"py": None},
    ]
)


def outcome(call: Any) -> Any:
    try:
        return Value(call())
    except (ValueError, TypeError, OverflowError) as error:
        return Raised(error)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.integers(1, 5), OPS, AXES)
def test_reduce(data: Any, replicas: int, op: Json, axis: Json) -> None:
    call = {"reduce_op": op, "axis": axis, "value": data.draw(trees(replicas))}
    live = outcome(lambda: values.reduce(op_of(op), decode(call["value"]), axis_of(axis), replicas))
    owed = reference.reduce_result(call, replicas)
    if "error" in owed and isinstance(live, Raised):
        return  # several things may be wrong with a call at once
    assert difference(owed, live) is None


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([0, 1, -1, {"py": True}, {"py": 0.5}]))
def test_gather(data: Any, replicas: int, axis: Json) -> None:
    call = {"axis": axis, "value": data.draw(trees(replicas))}
    live = outcome(lambda: values.gather(decode(call["value"]), axis_of(axis), replicas))
    owed = reference.gather_result(call)
    if "error" in owed and isinstance(live, Raised):
        return
    assert difference(owed, live) is None
