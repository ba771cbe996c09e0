"""Family `parameter_server`: partitioners, sharded variables, and the coordinator's closures."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import pipedist
from pipedist.strategy.parameter_server import ParameterVariable
from tests.conformance import deviations, programs
from tests.conformance.cases import (
    Case,
    Deviation,
    Json,
    Outcome,
    Raised,
    Skip,
    StrategySpec,
    Value,
    decode,
    dtype_of,
)
from tests.conformance.explanations import agree
from tests.conformance.families.reduce import axis_of, op_of
from tests.conformance.session import Session

FAMILY = "parameter_server"

SERVERS = 2
"""Parameter servers of every case's strategy."""

GOOD_CLOSURES = 50
"""Scheduled after the bad one of `fail_among_50`."""

PARTITIONERS: Mapping[str, Callable[..., Any]] = {
    "FixedShards": pipedist.FixedShardsPartitioner,
    "MinSize": pipedist.MinSizePartitioner,
    "MaxSize": pipedist.MaxSizePartitioner,
}

Coordinator = pipedist.ClusterCoordinator


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    call = case.call
    try:
        if call["op"] == "partitioner":
            return Outcome({"partitions": _partitions(call)})
        strategy = await _strategy(case, session)
        match call["op"]:
            case "sharded_variable":
                return Outcome(_sharded_variable(strategy, call))
            case "ps_placement":
                made = [_variable(strategy) for _ in range(call["variables"])]
                return Outcome({"ps_of_variable": [_server(variable) for variable in made]})
            case "ps_property":
                if not hasattr(strategy, call["name"]):
                    raise Skip(f"unknown program {call['name']}")
                return Outcome(Value(getattr(strategy, call["name"])))
            case "ps_reduce":
                value, axis = decode(call["value"]), axis_of(call.get("axis"))
                return Outcome(Value(await strategy.reduce(op_of(call["reduce_op"]), value, axis=axis)))
            case "ps_gather":
                return Outcome(Value(await strategy.gather(decode(call["value"]), axis_of(call["axis"]))))
            case "ps_local_results":
                return Outcome(Value(strategy.local_results(decode(call["value"]))))
            case "ps_run":
                args, kwargs = programs.arguments_of(call)
                fn = programs.function(call["fn"])
                return Outcome(Value(await strategy.run(fn, args=args, kwargs=kwargs)))
            case "ps_distribute" if call["what"] == "iterate":
                steps = strategy.distribute_dataset(pipedist.Dataset.range(4).batch(2))
                return Outcome({"steps": [Value(step) async for step in steps]})
            case "coordinator" if call["program"] in PROGRAMS:
                coordinator = pipedist.ClusterCoordinator(strategy)
                try:
                    return Outcome(await PROGRAMS[call["program"]](coordinator))
                finally:
                    await coordinator.aclose()
        raise Skip(f"unknown program {call.get('program') or call.get('what') or call['op']}")
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))


def _partitions(call: Mapping[str, Json]) -> list[int]:
    if call["kind"] not in PARTITIONERS:
        raise Skip(f"unknown program {call['kind']}")
    partitioner = PARTITIONERS[call["kind"]](**call["kwargs"])
    partitions: list[int] = partitioner(call["shape"], dtype_of(call["dtype"]), **_axis(call))
    return partitions


def _axis(call: Mapping[str, Json]) -> dict[str, Json]:
    """Return the axis of a partitioner's call, if it has one."""
    return {"axis": axis_of(call["axis"])} if call.get("axis") is not None else {}


async def _strategy(case: Case, session: Session) -> pipedist.ParameterServerStrategy:
    """Return a strategy of the case's workers, on the session's cluster."""
    other = await session.strategy(StrategySpec("mirrored", 1))
    assert isinstance(other, pipedist.Strategy)
    partitioner = None
    if "num_shards" in case.call:
        partitioner = pipedist.FixedShardsPartitioner(case.call["num_shards"])
    workers = 1 if case.strategy is None else case.strategy.workers
    return pipedist.ParameterServerStrategy(
        other.cluster,  # type: ignore[arg-type]  # it is a LocalCluster
        partitioner,
        parameter_servers=SERVERS,
        workers=workers,
    )


def _server(variable: Any) -> int:
    assert isinstance(variable, ParameterVariable)
    return variable.parameter_server


def _first(call: Mapping[str, Json]) -> np.ndarray:
    """Return `first`, first + 1, ... in the call's shape."""
    size = int(np.prod(call["shape"], dtype=int))
    first = call["first"]
    return np.arange(first, first + size).astype(dtype_of(call["dtype"])).reshape(call["shape"])


def _variable(strategy: pipedist.ParameterServerStrategy, value: Any = 0.0) -> ParameterVariable:
    with strategy.scope():
        variable: Any = pipedist.Variable(value, dtype="float32")
    assert isinstance(variable, ParameterVariable)
    return variable


# -- the coordinator's programs ------------------------------------------------------------------


async def _raised(awaitable: Awaitable[Any]) -> Value | Raised:
    try:
        return Value(await awaitable)
    except Exception as error:
        return Raised(error)


def _positive(x: float) -> np.float32:
    if not x > 0:
        raise ValueError(f"{x} is not positive")
    return np.float32(x)


async def _add_0_to_9(coordinator: Coordinator) -> Any:
    total = _variable(coordinator.strategy)
    values = [await coordinator.schedule(lambda x: total.assign_add(x), (float(x),)) for x in range(10)]
    await coordinator.join()
    results = await coordinator.fetch(values)
    return {
        "variable": Value(total.numpy()),
        "done": coordinator.done(),
        "results_number": len(results),
    }


async def _empty_join(coordinator: Coordinator) -> Any:
    await coordinator.join()
    return Value(coordinator.done())


async def _fail_then_ok(coordinator: Coordinator) -> Any:
    failed = await coordinator.schedule(_positive, (-1.0,))
    return {
        "join": await _raised(coordinator.join()),
        "fetch_failed": await _raised(failed.fetch()),
        "join_again": await _raised(coordinator.join()),
        "schedule_after": await _raised((await coordinator.schedule(_positive, (1.0,))).fetch()),
    }


async def _fail_among_50(coordinator: Coordinator) -> Any:
    await coordinator.schedule(_positive, (-1.0,))
    for _ in range(GOOD_CLOSURES):
        await coordinator.schedule(_positive, (1.0,))
    return await _raised(coordinator.join())


async def _per_worker_context(coordinator: Coordinator) -> Any:
    def dataset_fn(context: pipedist.InputContext) -> pipedist.Dataset:
        numbers = [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        return pipedist.Dataset.from_tensors(np.array(numbers, np.int32))

    strategy = coordinator.strategy
    dataset = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset_fn)
    )
    return Value(await (await coordinator.schedule(_same, (iter(dataset),))))


def _same(x: Any) -> Any:
    return x


async def _per_worker_end(coordinator: Coordinator) -> Any:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: pipedist.Dataset.range(1)))
    for _ in range(coordinator.strategy.workers + 1):
        await coordinator.schedule(_same, (iterator,))
    return await _raised(coordinator.join())


async def _per_worker_list(coordinator: Coordinator) -> Any:
    return Value(coordinator.create_per_worker_dataset([1, 2, 3]))  # type: ignore[arg-type]


async def _schedule_int(coordinator: Coordinator) -> Any:
    return Value(await coordinator.schedule(3))  # type: ignore[arg-type]


async def _wrong_strategy(coordinator: Coordinator) -> Any:
    one_device = pipedist.OneDeviceStrategy(coordinator.strategy.cluster)
    return Value(pipedist.ClusterCoordinator(one_device))  # type: ignore[arg-type]


PROGRAMS: Mapping[str, Callable[[Coordinator], Awaitable[Any]]] = {
    "add_0_to_9": _add_0_to_9,
    "empty_join": _empty_join,
    "fail_then_ok": _fail_then_ok,
    "fail_among_50": _fail_among_50,
    "per_worker_context": _per_worker_context,
    "per_worker_end": _per_worker_end,
    "per_worker_list": _per_worker_list,
    "schedule_int": _schedule_int,
    "wrong_strategy": _wrong_strategy,
}
"""By the names in the case files; what they do is told by the cases' titles."""


def _sharded_variable(strategy: pipedist.ParameterServerStrategy, call: Mapping[str, Json]) -> Any:
    with strategy.scope():
        variable: Any = pipedist.Variable(_first(call))
    sharded = isinstance(variable, pipedist.ShardedVariable)
    shards = variable.variables if isinstance(variable, pipedist.ShardedVariable) else (variable,)
    return {
        "sharded": sharded,
        "shard_shapes": [list(shard.shape) for shard in shards],
        "shards": [Value(shard.value()) for shard in shards],
        "ps_of_shard": [_server(shard) for shard in shards],
    }


# -- where pipedist deviates -----------------------------------------------------------------------


class _Refused(Exception):
    """The call must raise an error; the argument is the name of its class."""


def _own_partitions(call: Mapping[str, Json]) -> Json:
    """Return what a partitioner owes, found by trying every number of shards."""
    kwargs = call["kwargs"]
    if call["kind"] not in PARTITIONERS:
        raise Skip(f"unknown program {call['kind']}")
    try:
        inspect.signature(PARTITIONERS[call["kind"]]).bind(**kwargs)
    except TypeError:
        raise _Refused("TypeError") from None
    for name, value in kwargs.items():
        if name == "max_shards" and value is None and call["kind"] == "MaxSize":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Refused("TypeError")
        if value < 1:
            raise _Refused("ValueError")
    if not call["shape"]:
        raise _Refused("ValueError")
    axis = _axis(call).get("axis", 0)
    if type(axis) is not int:
        raise _Refused("TypeError")
    if not -len(call["shape"]) <= axis < len(call["shape"]):
        raise _Refused("ValueError")
    rest = list(call["shape"])
    rows = rest.pop(axis)
    dtype = dtype_of(call["dtype"])
    row_bytes = int(np.prod(rest, dtype=int)) * (dtype.itemsize or kwargs.get("bytes_per_string", 16))
    possible = range(1, max(1, rows) + 1)
    sizes = {n: [len(part) * row_bytes for part in np.array_split(np.empty(rows), n)] for n in possible}
    match call["kind"]:
        case "FixedShards":
            shards = max(n for n in possible if n <= kwargs["num_shards"])
        case "MinSize":
            least, most = kwargs.get("min_shard_bytes", 256 << 10), kwargs.get("max_shards", 1)
            shards = max(n for n in possible if n == 1 or (n <= most and min(sizes[n]) >= least))
        case "MaxSize":
            fitting = [n for n in possible if max(sizes[n]) <= kwargs["max_shard_bytes"]]
            shards = min(min(fitting, default=max(possible)), kwargs.get("max_shards") or max(possible))
    partitions = [1] * len(call["shape"])
    partitions[axis] = shards
    return {"partitions": partitions}


def _of_tensorflow(call: Mapping[str, Json]) -> Json:
    """Return what TensorFlow's partitioner returns (sharded_variable.py, partitioned_variables.py)."""
    kwargs, shape, axis = call["kwargs"], call["shape"], _axis(call).get("axis", 0)
    element_bytes = dtype_of(call["dtype"]).itemsize or kwargs.get("bytes_per_string", 16)
    size_bytes = int(np.prod(shape, dtype=int)) * element_bytes
    match call["kind"]:
        case "FixedShards":
            shards = min(kwargs["num_shards"], shape[axis])
        case "MinSize":
            least, most = kwargs.get("min_shard_bytes", 256 << 10), kwargs.get("max_shards", 1)
            shards = max(1, min(shape[axis], most, math.ceil(size_bytes / least)))
        case _:
            rows_max = max(1, math.floor(kwargs["max_shard_bytes"] / (size_bytes / shape[axis])))
            shards = math.ceil(shape[axis] / rows_max)
            shards = min(kwargs.get("max_shards") or shards, shards)
    partitions = [1] * len(shape)
    partitions[axis] = shards
    return {"partitions": partitions}


def _partitioner_rule(name: str, concerns: Callable[[Mapping[str, Json]], bool]) -> Deviation:
    def expected(case: Case, recorded: Json) -> Json:
        if case.call["op"] != "partitioner" or not concerns(case.call):
            return recorded
        try:
            own = _own_partitions(case.call)
        except _Refused as refused:
            own = {"error": str(refused)}
        if own == recorded or ("error" in own and agree(recorded, own)):
            return recorded
        try:
            explained = recorded == _of_tensorflow(case.call)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # then it raised something like this
            explained = "error" in recorded and "error" not in own
        return own if explained else recorded

    return Deviation(f"parameter_server: {name}", 51, expected)


def _numbers_make_sense(call: Mapping[str, Json]) -> bool:
    try:
        _own_partitions(call)
    except _Refused:
        return False
    return True


def _plain_run(case: Case, recorded: Json) -> Json:
    """The replica id and the number of replicas are Python ints."""
    if case.call["op"] != "ps_run" or "value" not in recorded:
        return recorded
    return {"value": deviations.ids_in(case.call["fn"], recorded["value"])}


def _combined(name: str, rule: Deviation) -> Deviation:
    """Return a rule of reduce or gather, for the one replica of a parameter server's strategy."""

    def expected(case: Case, recorded: Json) -> Json:
        if case.call["op"] != f"ps_{name}":
            return recorded
        plain = replace(
            case, call={"axis": None, **case.call, "op": name}, strategy=StrategySpec("one_device", 1)
        )
        return rule.expected(plain, recorded)

    return Deviation(f"parameter_server: {rule.name}", rule.row, expected)


DEVIATIONS = (
    Deviation("parameter_server: replica ids are Python ints", 19, _plain_run),
    *(_combined("reduce", rule) for rule in deviations.REDUCE),
    _partitioner_rule(
        "a partitioner's numbers are ints of at least 1, and its shape has an axis",
        lambda call: not _numbers_make_sense(call),
    ),
    _partitioner_rule("MinSize keeps its minimum for every shard", lambda call: call["kind"] == "MinSize"),
    _partitioner_rule("there is always one shard", lambda call: 0 in call["shape"]),
)
