"""Corrupts what cases expect: a runner that compares must notice each corruption.

A corruption may go unnoticed only where a rule of deviation changes the recorded result itself; these are
counted by rule. Where the rules change nothing, the recorded result is what decides.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.conformance.cases import Case, Json, Outcome
from tests.conformance.compare import ACCIDENTS, KINDS, difference
from tests.conformance.families import Family
from tests.conformance.runner import Verdict, expectation, judge, raises_on_purpose

OTHER_DTYPES: Mapping[str, str] = {
    "float16": "float32",
    "float32": "float64",
    "float64": "float32",
    "int32": "int64",
    "int64": "int32",
    "bool": "int8",
}
"""The dtype that takes the place of another; "int64" for those that are not here."""

OTHER_ERRORS = ("ValueError", "TypeError", "RuntimeError", "OutOfRangeError", "KeyError")

Place = tuple[Any, ...]
"""Keys and indices from the whole result down to a part."""


@dataclass(slots=True)
class Corruptions:
    """The account of all corruptions."""

    noticed: Counter[str] = field(default_factory=Counter)
    """By kind."""
    excused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Those that went unnoticed because of rules, by (rule, kind)."""
    unnoticed: list[str] = field(default_factory=list)
    """Descriptions of all others."""

    def add(self, verdict: Verdict, family: Family, seed: int) -> None:
        """Corrupt one case that has passed, once in each way that its result allows."""
        if verdict.status != "passed" or verdict.replayed is None:
            return
        case, outcome = _decided_by_one_result(verdict.case, verdict.replayed), verdict.replayed
        for kind, corrupted in corruptions(case, random.Random(f"{seed} {case.id}")):
            rules = _rules_that_pass(corrupted, outcome, family)
            if rules is None:
                self.noticed[kind] += 1
            elif verdict.deviations:
                self.excused[verdict.deviations[0], kind] += 1
            else:
                self.unnoticed.append(f"{case.id} ({case.title}): {kind}, by {', '.join(rules) or 'no rule'}")

    def report(self) -> str:
        """Return the account for people."""
        lines = [f"UNNOTICED {text}" for text in self.unnoticed]
        lines += ["", "corruptions that are noticed:"]
        lines += [f"{count:6}  {kind}" for kind, count in sorted(self.noticed.items())]
        lines += ["", "corruptions of results that a deviation replaces:"]
        lines += [f"{count:6}  {rule}: {kind}" for (rule, kind), count in sorted(self.excused.items())]
        noticed, excused = sum(self.noticed.values()), sum(self.excused.values())
        return "\n".join(
            [*lines, "", f"{noticed} noticed, {excused} replaced, {len(self.unnoticed)} unnoticed"]
        )


def _decided_by_one_result(case: Case, outcome: Outcome) -> Case:
    """Return the case with the one recorded result that the outcome has; traced results are as good."""
    exact = raises_on_purpose(case.call)
    for told in (case.expect_function, case.expect_outer_function):
        if (
            told is not None
            and difference(case.expect, outcome.result, exact_error=exact) is not None
            and difference(told, outcome.result, exact_error=exact) is None
        ):
            return replace(case, expect=told, expect_function=None, expect_outer_function=None)
    return replace(case, expect_function=None, expect_outer_function=None)


def _rules_that_pass(case: Case, outcome: Outcome, family: Family) -> tuple[str, ...] | None:
    """Return the rules by which an outcome agrees with a case, None where it does not agree."""
    try:
        expected, local_results, names = expectation(case, family.deviations)
        return None if judge(case, outcome, expected, local_results, exact=bool(names)) else names
    except Exception:  # a rule or the comparison can't read it: the runner calls that a failure
        return None


def corruptions(case: Case, rng: random.Random) -> Iterator[tuple[str, Case]]:
    """Yield (kind, corrupted case): one for each kind of part that the results have, at a random place."""
    exact = raises_on_purpose(case.call)
    for name in ("expect", "expect_local_results"):
        result = getattr(case, name)
        if result is None:
            continue
        places: dict[str, list[tuple[Place, Json]]] = {}
        for place, part in _parts(result, ()):
            for kind, other in _others(part, rng, exact):
                places.setdefault(kind, []).append((place, other))
        for kind, found in places.items():
            place, other = rng.choice(found)
            yield kind, replace(case, **{name: _changed(result, place, other)})


def _parts(part: Json, place: Place) -> Iterator[tuple[Place, Json]]:
    """Yield all parts of a result but those inside of arrays and errors."""
    yield place, part
    if isinstance(part, Mapping):
        if "error" in part or _is_array(part) or "py" in part or "object" in part:
            return
        for key, inner in part.items():
            if key != "namedtuple":
                yield from _parts(inner, (*place, key))
    elif isinstance(part, list):
        for index, inner in enumerate(part):
            yield from _parts(inner, (*place, index))


def _is_array(part: Mapping[str, Json]) -> bool:
    return {"dtype", "shape", "data"} <= set(part)


def _others(part: Json, rng: random.Random, exact: bool) -> Iterator[tuple[str, Json]]:
    """Yield (kind, what takes the place of a part)."""
    match part:
        case {"error": str(name), **rest}:
            others = OTHER_ERRORS if name not in ACCIDENTS else ("BufferError",)
            others = tuple(other for other in others if KINDS.get(other, other) != KINDS.get(name, name))
            yield "error", {**part, "error": rng.choice(others)}
            yield "error", {**part, "error": "BufferError"}
            yield "value for an error", {"value": {"py": 123_456}}
            if exact and "message" in rest:
                yield "message", {**part, "message": f"{rest['message']}?"}
        case {"dtype": str(dtype), "shape": list(shape), "data": list(data)}:
            yield "shape", {**part, "shape": [*shape, 1]}
            if data:
                index = rng.randrange(len(data))
                number = [*data[:index], _other_plain(data[index]), *data[index + 1 :]]
                yield "text" if dtype == "string" else "number", {**part, "data": number}
            if dtype != "string":
                yield "dtype", {**part, "dtype": OTHER_DTYPES.get(dtype, "int64")}
        case {"py": plain}:
            yield "text" if isinstance(plain, str) else "number", {"py": _other_plain(plain)}
        case {"none": True}:
            yield "none", {"py": 0}
        case {"value": _}:
            yield "error for a value", {"error": rng.choice(OTHER_ERRORS), "message": "corrupted"}
            yield "error for a value", {"error": "BufferError", "message": "corrupted"}
        case {"namedtuple": name, "fields": _}:
            yield "text", {**part, "namedtuple": f"{name}X"}
        case dict() if part and "object" not in part:
            key = rng.choice(list(part))
            yield "key", {f"{k}_" if k == key else k: item for k, item in part.items()}
        case [*items]:
            yield "list", items[:-1] if items and rng.random() < 0.5 else [*items, *(items[-1:] or [0])]
        case str() | int() | float():
            yield "text" if isinstance(part, str) else "number", _other_plain(part)


def _other_plain(plain: Json) -> Json:
    match plain:
        case bool():
            return not plain
        case int():
            return plain - 1 if plain > 0 else plain + 1
        case float():
            return plain + 1 + abs(plain)
        case "nan" | "inf" | "-inf":
            return 7.0
        case str():
            return f"{plain}x"
        case [real, *rest]:
            return [real + 1, *rest]
    return plain


def _changed(result: Json, place: Place, other: Json) -> Json:
    """Return a copy of a result with another part at a place."""
    if not place:
        return other
    changed = copy.deepcopy(result)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = other
    return changed
