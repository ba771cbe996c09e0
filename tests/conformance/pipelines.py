"""Builds the dataset pipelines of the cases with pipedist, and reads what they give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipedist.core import trees
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.input import InputContext
from pipedist.datasets.logical import Dataset
from pipedist.errors import OutOfRangeError
from pipedist.strategy import DistributedDataset
from pipedist.values import PerReplica
from tests.conformance.cases import Json, Raised, Skip, Value, decode

MAPS: Mapping[str, Callable[[Any], Any]] = {
    "double": lambda x: 2 * x,
    "to_dict_x_y": lambda t: {"x": t, "y": 10 * t},
    "to_pair": lambda t: (t, 10 * t),
    "to_nested": lambda t: {"a": (t, t + 100), "b": {"c": t.astype(np.float32)}},
    "rank2": lambda t: np.stack([t, 10 * t], axis=-1),
    "ones_up_to": lambda t: np.repeat(t, t % 3 + 1),
}

SOURCES = (
    "range",
    "tensor_slices",
    "tensors",
    "generator_range",
    "text_files",
    "file_names",
    "list_files",
    "zip",
)

FILTERS: Mapping[str, Callable[[Any], Any]] = {
    # What was recorded returned numbers here, which is the point of those cases.
    "even": lambda t: 1 - t % 2,
    "odd": lambda t: t % 2,
    "none": lambda t: False,
}


@contextlib.contextmanager
def files_of(call: Mapping[str, Json]) -> Iterator[Path]:
    """Write the files of a call to a new folder."""
    with TemporaryDirectory() as name:
        for file, lines in (call.get("files") or {}).items():
            Path(name, file).write_text("".join(line + "\n" for line in lines))
        yield Path(name)


def build(stages: Sequence[Json], folder: Path | None = None, context: InputContext | None = None) -> Dataset:
    """Return the Dataset of a pipeline.

    Args:
        folder: where the files of the call are.
        context: what `{"ctx": FIELD}` asks.

    Raises:
        Skip: a stage is not known.
    """

    def number(value: Json) -> Any:
        match value:
            case {"ctx": [_, batch]}:
                return context.get_per_replica_batch_size(batch)
            case {"ctx": str(field)}:
                return getattr(context, field)
        return value

    def paths(names: Sequence[str]) -> list[Path]:
        return [folder / name for name in names]

    if not stages or stages[0][0] not in SOURCES:
        raise Skip(f"unknown program stage {stages[:1]!r} as a source")
    dataset: Any = Dataset
    for stage in stages:
        match stage:
            case ["range", *numbers]:
                dataset = Dataset.range(*numbers)
            case ["tensor_slices", value]:
                dataset = Dataset.from_tensor_slices(decode(value))
            case ["tensors", value]:
                dataset = Dataset.from_tensors(decode(value))
            case ["generator_range", n]:
                dataset = Dataset.from_generator(lambda n=n: map(np.int64, range(n)), ArraySpec(np.int64))
            case ["text_files", names]:
                dataset = Dataset.text_files(paths(names))
            case ["file_names", names]:
                dataset = Dataset.file_names(paths(names))
            case ["list_files", pattern]:
                dataset = Dataset.list_files(folder / pattern)
            case ["flat_map_text"]:
                dataset = dataset.flat_map(Dataset.text_files)
            case ["interleave_text", cycle, block]:
                dataset = dataset.interleave(Dataset.text_files, cycle, block)
            case ["concatenate", other]:
                dataset = dataset.concatenate(build(other, folder, context))
            case ["zip", parts]:
                dataset = Dataset.zip(*(build(part, folder, context) for part in parts))
            case ["options", {"auto_shard_policy": policy}]:
                dataset = dataset.with_options(auto_shard_policy=policy)
            case ["map", str(name)] if name in MAPS:
                dataset = dataset.map(MAPS[name])
            case ["filter", str(name)] if name in FILTERS:
                dataset = dataset.filter(FILTERS[name])
            case [
                (
                    "batch"
                    | "padded_batch"
                    | "unbatch"
                    | "repeat"
                    | "take"
                    | "skip"
                    | "shard"
                    | "prefetch"
                    | "cache"
                    | "enumerate"
                ) as name,
                *arguments,
            ]:
                dataset = getattr(dataset, name)(*map(number, arguments))
            case _:
                raise Skip(f"unknown program stage {stage[:2]!r}")
    return dataset


def spec_json(spec: Any) -> list[Json]:
    """Return an element_spec as the cases write it: a list of leaves."""
    return [
        {"per_replica": [_leaf_json(part) for part in leaf]}
        if isinstance(leaf, PerReplica)
        else _leaf_json(leaf)
        for leaf in trees.flatten(spec)[0]
    ]


def _leaf_json(spec: ArraySpec) -> Json:
    return {"dtype": "string" if spec.dtype.kind == "U" else spec.dtype.name, "shape": list(spec.shape)}


def elements_json(dataset: Dataset) -> list[Any]:
    """Return elements as the cases of auto-sharding write them: nested lists, trees as VALUEs.

    Raises:
        ValueError: the dataset does not end.
    """
    if dataset.cardinality() == Dataset.INFINITE:
        raise ValueError("the dataset does not end")
    return [
        element.tolist() if isinstance(element, np.ndarray | np.generic) else Value(element)
        for element in dataset
    ]


async def read(dataset: DistributedDataset, iterate: str, steps_max: int) -> dict[str, Any]:
    """Iterate a distributed dataset in one of four ways.

    Args:
        iterate: "for", "next", "get_next" or "optional".
        steps_max: where reading an endless dataset is cut off.

    Returns:
        `steps`, and how it ended.
    """
    steps: list[Value] = []
    has_value: list[Value] = []
    end: Any = None
    async with aiter(dataset) as iterator:
        while end is None:
            if dataset.cardinality() == Dataset.INFINITE and len(steps) == steps_max:
                end = f"cut off after {steps_max} steps"
                break
            try:
                match iterate:
                    case "for":
                        step = await anext(iterator, _END)
                        if step is _END:
                            end = "exhausted"
                            break
                    case "next":
                        step = await anext(iterator)
                    case "get_next":
                        step = await iterator.get_next()
                    case "optional":
                        optional = await iterator.get_next_as_optional()
                        has_value.append(Value(np.bool_(optional.has_value())))
                        if not optional.has_value():
                            end = {
                                "optional": "has_value is false",
                                "get_value": _error_of(optional.get_value),
                            }
                            break
                        step = optional.get_value()
                    case _:
                        raise Skip(f"unknown program iterate {iterate}")
            except (StopAsyncIteration, OutOfRangeError) as error:
                end = Raised(error)
                break
            steps.append(Value(step))
    return {"steps": steps, "end": end} | ({"has_value": has_value} if iterate == "optional" else {})


_END = object()


def _error_of(fn: Callable[[], Any]) -> Any:
    try:
        return Value(fn())
    except ValueError as error:
        return Raised(error)
