"""What a pipeline gives by the rules, in a few lines of plain Python: the oracle of the deviations.

Independent of pipedist's datasets on purpose. It knows the stages that deviating cases use; for
others it has no answer (None), and the deviation then leaves the case as it is.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.conformance.cases import Json, decode, decode_array

READERS = ("text_files", "file_names", "list_files")
SOURCES = (*READERS, "range", "tensor_slices", "tensors", "generator_range")
Files = Mapping[str, Sequence[str]]

STRUCTURES: Mapping[str, Callable[[Any], Any]] = {
    "to_dict_x_y": lambda x: {"x": x, "y": 10 * x},
    "to_pair": lambda x: (x, 10 * x),
    "rank2": lambda x: np.stack([x, 10 * x], axis=-1),
}
"""What the maps that make structures do to a number."""


class NoAnswer(Exception):
    """The oracle does not know this stage."""


def sources(stages: Sequence[Json]) -> Iterator[list[Json]]:
    """Yield the source stages of a pipeline, those in zips and concatenations too."""
    for stage in stages:
        if stage[0] in SOURCES:
            yield stage
        elif stage[0] == "zip":
            for part in stage[1]:
                yield from sources(part)
        elif stage[0] == "concatenate":
            yield from sources(stage[1])


def files_read(stages: Sequence[Json], files: Files) -> int | None:
    """Return how many files the pipeline reads at least per source; None if whole files can't be dealt."""
    if any(stage[0] == "enumerate" for stage in stages):
        return None
    counts = []
    for source in sources(stages):
        if source[0] not in READERS:
            return None
        counts.append(len(_names(source, files)))
    return min(counts)


def policy_of(stages: Sequence[Json]) -> str:
    """Return the policy of a pipeline: the last that its options set, and that is not the default."""
    told = [stage[1]["auto_shard_policy"] for stage in stages if stage[0] == "options"]
    return next((policy for policy in reversed(told) if policy != "AUTO"), "AUTO")


def resolve(policy: str, stages: Sequence[Json], files: Files, pipelines: int) -> str:
    """Return what AUTO comes to; another policy as it is."""
    if policy != "AUTO":
        return policy
    count = files_read(stages, files)
    return "FILE" if count is not None and count >= pipelines else "DATA"


def deal(elements: list[Any], pipelines: int) -> list[list[Any]]:
    """Return elements w, w + W, ... for each of W pipelines."""
    return [elements[index::pipelines] for index in range(pipelines)]


def evaluate(stages: Sequence[Json], files: Files, shard: tuple[int, int] | None = None) -> list[Any]:
    """Return the elements of a finite pipeline: numbers, str, NumPy arrays, tuples of them; batches as lists.

    Args:
        shard: (W, w): only files w, w + W, ... are read.

    Raises:
        NoAnswer: a stage is not known here.
    """
    elements: list[Any] = []
    for stage in stages:
        match stage:
            case ["range", *numbers]:
                elements = list(range(*numbers))
            case ["generator_range", n]:
                elements = list(range(n))
            case ["tensor_slices", {"dtype": _, "shape": _, "data": _} as value]:
                elements = list(decode_array(value))
            case ["tensors", value]:
                elements = [decode(value)]
            case [("text_files" | "file_names" | "list_files") as name, _]:
                names = _names(stage, files)
                names = names if shard is None else names[shard[1] :: shard[0]]
                elements = names if name != "text_files" else _lines(names, files)
            case ["flat_map_text"]:
                elements = _lines(elements, files)
            case ["interleave_text", cycle, block]:
                elements = _take_turns([list(files[name]) for name in elements], cycle, block)
            case ["batch", int(size)] | ["batch", int(size), False]:
                elements = [elements[i : i + size] for i in range(0, len(elements), size)]
            case ["batch", int(size), True]:
                elements = [elements[i : i + size] for i in range(0, len(elements) - size + 1, size)]
            case ["unbatch"] if all(isinstance(batch, list) for batch in elements):
                elements = [row for batch in elements for row in batch]
            case ["repeat", times]:
                elements = elements * times
            case ["take", count]:
                elements = elements[:count]
            case ["skip", count]:
                elements = elements[count:]
            case ["shard", int(shards), int(index)] if shards > 0:
                elements = elements[index::shards]
            case ["prefetch", _] | ["cache"] | ["options", _]:
                pass
            case ["enumerate"]:
                elements = list(enumerate(elements))
            case ["map", "double"]:
                elements = [
                    [2 * row for row in element] if isinstance(element, list) else 2 * element
                    for element in elements
                ]
            case ["map", name] if name in STRUCTURES:
                elements = [_mapped(STRUCTURES[name], element) for element in elements]
            case ["zip", parts]:
                elements = list(zip(*(evaluate(part, files, shard) for part in parts), strict=False))
            case ["concatenate", other]:
                elements = elements + evaluate(other, files, shard)
            case _:
                raise NoAnswer(stage)
    return elements


def chunks(batch: list[Any], parts: int) -> list[list[Any]]:
    """Cut a batch into chunks of ceil(rows / parts), in order, the last ones shorter or empty."""
    size = -(-len(batch) // parts)
    return [batch[i * size : (i + 1) * size] for i in range(parts)]


def rebatched(rows: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Cut rows as TensorFlow's rebatch does: by a cycle of sizes, up to the first one that finds no row."""
    parts: list[list[Any]] = []
    for size in itertools.cycle(sizes):
        if size and not rows:
            break
        parts.append(rows[:size])
        rows = rows[size:]
    return parts


def divided(batch: Any, parts: int) -> Json:
    """Return a batch as a VALUE whose leaves have a chunk for each of `parts` replicas."""
    match batch:
        case tuple():
            return {"tuple": [divided(item, parts) for item in batch]}
        case dict():
            return {"dict": {key: divided(item, parts) for key, item in batch.items()}}
    return per_replica(chunks(batch, parts), batch)


def per_replica(parts: list[list[Any]], like: list[Any]) -> Json:
    """Return lists of rows, one a replica, as a VALUE; those without rows are as if cut off from `like`."""
    match like[0]:
        case tuple() as row:
            columns = [[_column(part, i) for part in (*parts, like)] for i in range(len(row))]
            return {"tuple": [per_replica(column[:-1], column[-1]) for column in columns]}
        case dict() as row:
            named = {key: [_column(part, key) for part in (*parts, like)] for key in row}
            return {"dict": {key: per_replica(column[:-1], column[-1]) for key, column in named.items()}}
    whole = value_of(like)
    empty = {**whole, "shape": [0, *whole["shape"][1:]], "data": []}
    return {"per_replica": [value_of(part) if len(part) else empty for part in parts]}


def _column(rows: list[Any], key: Any) -> list[Any]:
    return [row[key] for row in rows]


def across(elements: list[Any], replicas: int) -> Json:
    """Return elements, one a replica, as a VALUE; who has none gets empty arrays, None for a scalar."""
    missing = replicas - len(elements)
    match elements[0]:
        case tuple() as first:
            return {"tuple": [across(_column(elements, i), replicas) for i in range(len(first))]}
        case dict() as first:
            return {"dict": {key: across(_column(elements, key), replicas) for key in first}}
        case list() as first:
            return per_replica(elements + [[]] * missing, first)
    values = [value_of(element) for element in elements]
    shape = values[0]["shape"]
    empty = {**values[0], "shape": [0, *shape[1:]], "data": []} if shape else {"none": True}
    return {"per_replica": values + [empty] * missing}


def value_of(element: Any) -> Json:
    """Return an element as a VALUE."""
    match element:
        case None:
            return {"none": True}
        case tuple():
            return {"tuple": [value_of(item) for item in element]}
        case str():
            return {"dtype": "string", "shape": [], "data": [element]}
        case int():
            return {"dtype": "int64", "shape": [], "data": [element]}
        case list():
            if not element:
                raise NoAnswer("the dtype of nothing")
            array = np.asarray(element)
        case _:
            array = np.asarray(element)
    dtype = "string" if array.dtype.kind == "U" else array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "data": array.ravel().tolist()}


def _mapped(fn: Callable[[Any], Any], element: Any) -> Any:
    """Map a number, or the column of numbers that a batch is."""
    return fn(np.asarray(element)) if isinstance(element, list) else fn(element)


def _names(source: Sequence[Json], files: Files) -> list[str]:
    if source[0] == "list_files":
        return sorted(fnmatch.filter(files, source[1]))
    return list(source[1])


def _lines(names: Sequence[str], files: Files) -> list[str]:
    return [line for name in names for line in files[name]]


def _take_turns(queues: list[list[str]], cycle: int, block: int) -> list[str]:
    """`cycle` places; a place that finds its queue empty at its turn is free for the next queue later."""
    taken: list[str] = []
    places: list[list[str] | None] = [None] * cycle
    turn = 0
    while queues or any(place is not None for place in places):
        if places[turn] is None and queues:
            places[turn] = queues.pop(0)
        place = places[turn]
        if place is not None:
            part, rest = place[:block], place[block:]
            taken += part
            places[turn] = rest if len(part) == block else None
        turn = (turn + 1) % cycle
    return taken
