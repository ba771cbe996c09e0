"""Whether two runs gave the same, to the bit; and if not, where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.errors import CallError
from pipedist.protocol.codec import encode
from pipedist.runs.result import Result

_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a run gave.

    Args:
        digests: of each finished value and each file, by "stage NAME" and "file NAME".
        values: of the stages, for telling where they differ.
        error: how the run ended instead, without what may differ: the worker, the attempts; "" for none.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Tree] = field(default_factory=dict)
    error: str = ""


def of_result(result: Result) -> Fingerprint:
    """Return the fingerprint of a run that came to its end."""
    digests: dict[str, str] = {}
    values: dict[str, Tree] = {}
    for name, value in result.by_stage.items():
        if isinstance(value, Path):
            continue
        values[name] = value
        digests[f"stage {name}"] = _digest(encode(value))
    for path in result.files.values():
        digests[f"file {path.name}"] = _digest([path.read_bytes()])
    return Fingerprint(digests, values)


def of_error(error: Exception) -> Fingerprint:
    """Return the fingerprint of a run that failed."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CallError):
        text = f"CallError: stage {error.stage}, step {error.step}, replica {error.replica}: {error.cause}"
    return Fingerprint(error=text)


def _digest(frames: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame)
        digest.update(b"|")
    return digest.hexdigest()


def difference(expected: Fingerprint, came: Fingerprint) -> str:
    """Return where two runs differ, for people; "" if they don't."""
    if expected.error != came.error:
        return f"it ended with {came.error or 'no error'}, expected {expected.error or 'none'}"
    names = [
        n for n in {**expected.digests, **came.digests} if expected.digests.get(n) != came.digests.get(n)
    ]
    if not names:
        return ""
    told = []
    for name in names:
        stage = name.removeprefix("stage ")
        if stage in expected.values and stage in came.values:
            told.append(f"{name} {_place(expected.values[stage], came.values[stage])}")
        else:
            told.append(f"{name} is another one" if name in came.digests else f"{name} is missing")
    return "; ".join(told)


def _place(expected: Tree, came: Tree) -> str:
    """Return the first leaf in which two trees differ, with its values."""
    expected_leaves, came_leaves = trees.flatten(expected)[0], trees.flatten(came)[0]
    paths = trees.paths(expected)
    others = trees.paths(came)
    if paths != others:
        return f"has another structure: {_only(others, paths)}, expected {_only(paths, others)}"
    for path, a, b in zip(paths, expected_leaves, came_leaves, strict=True):
        if _digest(encode(a)) != _digest(encode(b)):
            return f"{_at(path)}is {_short(b, a)}, expected {_short(a, b)}"
    return "differs"


def _only(paths: Sequence[str], others: Sequence[str]) -> str:
    """Return how many leaves a tree has, and the first that another one has not."""
    alone = [path for path in paths if path not in set(others)]
    return f"{len(paths)} leaves" + (f", {alone[0] or 'the value itself'} among them" if alone else "")


def _at(path: str) -> str:
    return f"at {path} " if path else ""


def _short(value: Tree, other: Tree) -> str:
    """Return a value for people; of arrays of one shape the first element that differs."""
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray) and value.shape == other.shape:
        if value.ndim == 0:
            return str(value[()])
        differs = np.argwhere(~((value == other) | ((value != value) & (other != other))))
        if len(differs):
            place = tuple(int(i) for i in differs[0])
            return f"{value[place]} in place {list(place)}"
    return f"{value:.17g}" if isinstance(value, float) else f"{value!s:.{_SHOWN_CHARS}}"
