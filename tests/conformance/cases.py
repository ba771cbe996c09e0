"""Conformance cases: what a file says, and what a replay of it answers.

The contract of a family module (`tests/conformance/families/NAME.py`):

    FAMILY: str                                    # the name in the case files
    DEVIATIONS: tuple[Deviation, ...] = ()         # where pipedist answers something else on purpose
    async def replay(case: Case, session: Session) -> Outcome

`replay` does what `case.call` says through pipedist's public API and returns what happened. It never
looks at `case.expect` nor at `case.id`. It raises `Skip(reason)` for what this release has not.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipedist.values import Mirrored, PerReplica
from tests.conformance.namedtuples import namedtuple_class

Json = Any
"""What `json.load` returns."""

SCHEMA = "distconf/1"


class Skip(Exception):
    """The case can't be replayed by this release; its text says why."""


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """The `strategy` of a case.

    Args:
        kind: "mirrored", "one_device", "default", "central_storage", "multi_worker_mirrored",
            "parameter_server".
        replicas: replicas in sync, over all of its processes.
        workers: its processes (1 where the kind has only one).
    """

    kind: str
    replicas: int
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded case. The fields are those of the file (README of the cases)."""

    id: str
    family: str
    group: str
    title: str
    strategy: StrategySpec | None
    call: Mapping[str, Json]
    expect: Json
    expect_function: Json = None
    expect_outer_function: Json = None
    expect_local_results: Json = None

    @property
    def replicas(self) -> int:
        """The number of replicas in sync; 1 where the case has no strategy."""
        return 1 if self.strategy is None else self.strategy.replicas


@dataclass(frozen=True, slots=True)
class Value:
    """A live value of pipedist, to be compared with a VALUE of the file."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised; to be compared with `{"error": ...}`."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay answers.

    Args:
        result: `Value` for `{"value": VALUE}`; `Raised` for `{"error": CLASS}`; for a composite
            expectation a dict with the same keys. Inside it, `Value` stands for a VALUE, `Raised`
            for an error, lists and dicts are compared part by part, anything else is plain JSON
            and must be equal.
        local_results: for `expect_local_results`, where the case has one.
    """

    result: Value | Raised | Mapping[str, Any]
    local_results: Value | Raised | None = None


@dataclass(frozen=True, slots=True)
class Deviation:
    """A rule: where pipedist answers something better than TensorFlow on purpose.

    `expected` turns the expectation of a case (its `expect`, the JSON of the file) into pipedist's
    own, in the same language, or returns it unchanged where the rule says nothing about the case.
    It may look at what the case does (`case.strategy`, `case.call`) and at the expectation, never at
    the case's id, group or title. The rules of a family are applied one after the other; one that
    changed the expectation is counted. The changed expectation is then checked like any other.

    Args:
        name: short, unique: "reduce: integer overflow is an error".
        row: the row of the semantics table.
        expected: `(case, expectation) -> expectation`.
        expected_local_results: `(case, changed expectation) -> expect_local_results`, for a rule
            that changes that one too.
    """

    name: str
    row: int
    expected: Callable[[Case, Json], Json] = field(repr=False)
    expected_local_results: Callable[[Case, Json], Json] | None = field(default=None, repr=False)


def read_cases(folder: Path) -> Iterator[Case]:
    """Yield every case of every `*.json` file of a folder, files in sorted order.

    Raises:
        ValueError: a file is not of the schema `distconf/1`.
    """
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"{path}: expected a JSON object with schema {SCHEMA!r}")
        for entry in document["cases"]:
            yield parse_case(document["family"], entry)


def parse_case(family: str, entry: Mapping[str, Json]) -> Case:
    """Return the case of one JSON object."""
    return Case(
        id=entry["id"],
        family=family,
        group=entry["group"],
        title=entry["title"],
        strategy=_strategy(entry.get("strategy")),
        call=entry["call"],
        expect=entry["expect"],
        expect_function=entry.get("expect_function"),
        expect_outer_function=entry.get("expect_outer_function"),
        expect_local_results=entry.get("expect_local_results"),
    )


def _strategy(entry: Mapping[str, Json] | None) -> StrategySpec | None:
    if entry is None:
        return None
    if "workers" in entry:
        workers = int(entry["workers"])
        return StrategySpec(entry["kind"], workers * int(entry.get("replicas_per_worker", 1)), workers)
    return StrategySpec(entry["kind"], int(entry.get("replicas", 1)))


def decode(value: Json) -> Any:
    """Return the live value of a VALUE: arrays as NumPy arrays, `per_replica` as PerReplica.

    Raises:
        Skip: it is something that only TensorFlow has (a ragged tensor, an object), or needs a
            package that is not installed.
        ValueError: it is no VALUE.
    """
    match value:
        case {"dtype": _, "shape": _, "data": _}:
            return decode_array(value)
        case {"numpy": array}:
            return decode_array(array)
        case {"per_replica": parts} | {"variable": parts}:
            return PerReplica(map(decode, parts))
        case {"mirrored": parts}:
            return Mirrored(map(decode, parts))
        case {"dict": items}:
            return {key: decode(item) for key, item in items.items()}
        case {"list": items}:
            return [decode(item) for item in items]
        case {"tuple": items}:
            return tuple(decode(item) for item in items)
        case {"namedtuple": name, "fields": items}:
            return namedtuple_class(name, tuple(items))(*map(decode, items.values()))
        case {"py": plain}:
            return plain
        case {"none": True}:
            return None
        case {"ragged": _}:
            raise Skip("ragged tensors are TensorFlow's own")
        case {"object": name}:
            raise Skip(f"an object of TensorFlow's own: {name}")
    raise ValueError(f"not a VALUE: {json.dumps(value)[:200]}")


def decode_array(array: Mapping[str, Json]) -> np.ndarray:
    """Return the array of `{"dtype", "shape", "data"}`."""
    data = array["data"]
    dtype = dtype_of(array["dtype"])
    if dtype.kind == "f" or dtype.kind == "V" or array["dtype"] == "bfloat16":
        data = [float(item) for item in data]
    elif dtype.kind == "c":
        data = [complex(*item) if isinstance(item, list) else complex(item) for item in data]
    return np.array(data, dtype=dtype).reshape(array["shape"])


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy dtype of a dtype's name in the cases."""
    if name == "string":
        return np.dtype(np.str_)
    if name == "bfloat16":
        try:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError:
            raise Skip("bfloat16 needs the package ml_dtypes, which is not installed") from None
    return np.dtype(name)
