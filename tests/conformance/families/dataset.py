"""Family `dataset`: what `distribute_dataset` gives, how its iterators end, and its misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipedist.datasets.logical import Dataset
from pipedist.strategy import BaseStrategy
from tests.conformance import pipelines_oracle as oracle
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip, Value, dtype_of
from tests.conformance.explanations import cut_otherwise
from tests.conformance.pipelines import build, files_of, read, spec_json
from tests.conformance.programs import function
from tests.conformance.session import Session

FAMILY = "dataset"

DELIVERING = (
    "distribute_dataset",
    "distribute_from_function",
    "distribute_with_options",
    "make_numpy_dataset_distribute",
)
"""Calls whose steps are what a distributed dataset delivers."""

STEPS_MAX = 6
"""Where an endless dataset is cut off."""


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    strategy = await session.strategy(case.strategy)
    call = case.call
    try:
        match call["op"]:
            case "distribute_dataset":
                return Outcome(await _distribute(case, strategy))
            case "distribute_run_reduce":
                fn = function(call["fn"])
                steps = []
                async for step in strategy.distribute_dataset(_numbers(case)):
                    value = await strategy.run(fn, args=(step,))
                    steps.append(Value(await strategy.reduce(call["reduce_op"], value, axis=call["axis"])))
                return Outcome({"steps": steps})
            case "distribute_gather":
                gathered = []
                async for step in strategy.distribute_dataset(_numbers(case)):
                    gathered.append(Value(await strategy.gather(step, axis=call["axis"])))
                return Outcome({"steps": gathered})
            case "misuse":
                if call["what"] not in MISUSES:
                    raise Skip(f"unknown program {call['what']}")
                return Outcome(Value(await MISUSES[call["what"]](strategy)))
        raise Skip(f"unknown program {call['op']}")
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))


async def _distribute(case: Case, strategy: BaseStrategy) -> dict[str, Any]:
    with files_of(case.call) as folder:
        dataset = strategy.distribute_dataset(build(case.call["dataset"], folder))
        about: dict[str, Any] = {}
        if case.strategy is not None and case.strategy.kind != "default":
            about = {"element_spec": spec_json(dataset.element_spec), "cardinality": dataset.cardinality()}
        return about | await read(dataset, case.call["iterate"], STEPS_MAX)


def _numbers(case: Case) -> Dataset:
    first, last = case.call["numbers"]
    numbers = np.arange(first, last + 1, dtype=dtype_of(case.call["dtype"]))
    return Dataset.from_tensor_slices(numbers).batch(case.call["batch"])


def _dataset() -> Dataset:
    return Dataset.range(12).batch(4)


async def _list(strategy: BaseStrategy) -> Any:
    return strategy.distribute_dataset([1, 2, 3])  # type: ignore[arg-type]


async def _array(strategy: BaseStrategy) -> Any:
    return strategy.distribute_dataset(np.arange(3))  # type: ignore[arg-type]


async def _none(strategy: BaseStrategy) -> Any:
    return strategy.distribute_dataset(None)  # type: ignore[arg-type]


async def _twice(strategy: BaseStrategy) -> Any:
    return strategy.distribute_dataset(strategy.distribute_dataset(_dataset()))  # type: ignore[arg-type]


def _transformed(name: str, *arguments: Any) -> Callable[[BaseStrategy], Any]:
    async def use(strategy: BaseStrategy) -> Any:
        return getattr(strategy.distribute_dataset(_dataset()), name)(*arguments)

    return use


async def _index(strategy: BaseStrategy) -> Any:
    return strategy.distribute_dataset(_dataset())[0]  # type: ignore[index]


async def _length(strategy: BaseStrategy) -> Any:
    return len(strategy.distribute_dataset(_dataset()))  # type: ignore[arg-type]


async def _next(strategy: BaseStrategy) -> Any:
    return await anext(strategy.distribute_dataset(_dataset()))  # type: ignore[call-overload]


async def _next_inside(strategy: BaseStrategy) -> Any:
    async with aiter(strategy.distribute_dataset(_dataset())) as iterator:

        async def replica_function() -> Any:
            return await anext(iterator)

        return await strategy.run(replica_function)


async def _distribute_inside(strategy: BaseStrategy) -> Any:
    def replica_function() -> Any:
        return strategy.distribute_dataset(Dataset.range(4).batch(2)).cardinality()

    return await strategy.run(replica_function)


async def _reuse(strategy: BaseStrategy) -> Any:
    dataset = strategy.distribute_dataset(_dataset())
    return [len([step async for step in dataset]) for _ in range(2)]


MISUSES: dict[str, Callable[[BaseStrategy], Any]] = {
    "distribute a python list": _list,
    "distribute a numpy array": _array,
    "distribute a tensor": _array,
    "distribute None": _none,
    "distribute an already distributed dataset": _twice,
    "map on a distributed dataset": _transformed("map", abs),
    "filter on a distributed dataset": _transformed("filter", bool),
    "batch on a distributed dataset": _transformed("batch", 2),
    "repeat on a distributed dataset": _transformed("repeat", 2),
    "take on a distributed dataset": _transformed("take", 1),
    "index a distributed dataset": _index,
    "len of a distributed dataset": _length,
    "next of a distributed dataset without iter": _next,
    "next(iterator) inside the replica function": _next_inside,
    "reuse: two iterations of one distributed dataset give the same": _reuse,
    "distribute inside a replica function": _distribute_inside,
}
"""The misuses by their names; what the datasets hold does not matter for them."""


def divides(case: Case) -> bool:
    """Whether the strategy divides elements, rather than handing them through."""
    return case.strategy is not None and case.strategy.kind in ("mirrored", "central_storage")


def batch_depth(stages: list[Json]) -> int:
    """How many leading axes batching has made."""
    depth = 0
    for stage in stages:
        match stage[0]:
            case "batch" | "padded_batch":
                depth += 1
            case "unbatch":
                depth = max(depth - 1, 0)
            case "zip":
                depth = min(batch_depth(part) for part in stage[1])
            case "concatenate":
                depth = min(depth, batch_depth(stage[1]))
    return depth


def _unbatched(case: Case, expect: Json) -> Json:
    stages = case.call.get("dataset")
    if case.call["op"] != "distribute_dataset" or not divides(case):
        return expect
    last_batch = max((i for i, stage in enumerate(stages) if "batch" in stage[0]), default=0)
    scalars = any(stage[0] == "enumerate" for stage in stages[last_batch:])
    if batch_depth(stages) == 0 or scalars:
        return {"error": "ValueError", "message": "add .batch(global_batch_size)"}
    return expect


def _policy(case: Case, expect: Json) -> Json:
    stages = case.call.get("dataset") or []
    if (
        case.call["op"] != "distribute_dataset"
        or not divides(case)
        or oracle.policy_of(stages) in ("AUTO", "DATA")
    ):
        return expect
    if "steps" not in expect or batch_depth(stages) != 1 or expect["cardinality"] == Dataset.INFINITE:
        return expect
    try:
        batches = oracle.evaluate(stages, case.call.get("files") or {})
        steps = [oracle.divided(batch, case.replicas) for batch in batches]
    except oracle.NoAnswer:
        return expect
    told, own = ({"steps": each, "end": expect["end"]} for each in (expect["steps"], steps))
    if not cut_otherwise(told, own):
        return expect
    changed = {**expect, "steps": steps}
    if expect["cardinality"] != Dataset.UNKNOWN:
        changed["cardinality"] = len(steps)
    if "has_value" in expect:
        flags = [True] * len(steps) + [False]
        changed["has_value"] = [{"dtype": "bool", "shape": [], "data": [flag]} for flag in flags]
    return changed


def one_replica_spec(case: Case, expect: Json) -> Json:
    """With one mirrored replica, the spec is one of per-replica values too."""
    if not divides(case) or case.replicas != 1 or not isinstance(expect, dict):
        return expect
    changed = dict(expect)
    if "element_spec" in expect:
        changed["element_spec"] = [
            leaf if "per_replica" in leaf else {"per_replica": [leaf]} for leaf in expect["element_spec"]
        ]
    if isinstance(expect.get("steps"), list) and case.call["op"] in DELIVERING:
        changed["steps"] = [_per_replica(step) for step in expect["steps"]]
    return changed


def _per_replica(value: Json) -> Json:
    match value:
        case {"dtype": _}:
            return {"per_replica": [value]}
        case {"dict": items}:
            return {"dict": {key: _per_replica(item) for key, item in items.items()}}
        case {"tuple": items}:
            return {"tuple": [_per_replica(item) for item in items]}
        case {"list": items}:
            return {"list": [_per_replica(item) for item in items]}
        case {"namedtuple": name, "fields": items}:
            return {"namedtuple": name, "fields": {key: _per_replica(item) for key, item in items.items()}}
    return value


def _distributed_inside(case: Case, expect: Json) -> Json:
    if case.call["op"] == "misuse" and case.call["what"] == "distribute inside a replica function":
        return {"error": "ValueError", "message": "distribute it outside"}
    return expect


DEVIATIONS = (
    Deviation("dataset: without batch there is nothing to divide", 36, _unbatched),
    Deviation("dataset: the chunks don't depend on the auto-shard policy", 33, _policy),
    Deviation("dataset: one replica is per-replica too", 3, one_replica_spec),
    Deviation("dataset: a replica function can't distribute a dataset", 59, _distributed_inside),
)
