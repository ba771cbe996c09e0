"""Several logical workers, each with an input pipeline and replicas of its own.

TensorFlow runs the same program in every worker; `workers[w]` is what worker w sees. pipedist runs it
once: worker w's part is that of its replicas, `w * replicas_per_worker` and those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import pipedist
from pipedist.core import trees
from pipedist.values import PerReplica
from tests.conformance import pipelines_oracle as oracle
from tests.conformance import reference
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip, Value, decode
from tests.conformance.deviations import GATHER, REDUCE
from tests.conformance.explanations import agree
from tests.conformance.families.auto_shard import batch_sizes_for_worker
from tests.conformance.families.input_function import resolved
from tests.conformance.pipelines import build, files_of, read
from tests.conformance.programs import axis_of, op_of
from tests.conformance.session import Session

FAMILY = "multi_worker"

STEPS_MAX = 30

COLLECTIVE_DTYPES = frozenset({"bfloat16", "float16", "float32", "float64", "int32", "int64"})
"""What TensorFlow reduces and gathers over several workers."""

PEER_WENT = ("UnavailableError", "CancelledError")
"""What one worker gets where another one failed."""


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says, and return each worker's part."""
    if case.strategy is None or case.call["op"] not in _PROGRAMS:
        raise Skip(f"unknown program {case.call['op']}")
    strategy: Any = await session.strategy(case.strategy)
    each = case.replicas // case.strategy.workers
    owned = [range(w * each, (w + 1) * each) for w in range(case.strategy.workers)]
    try:
        return Outcome({"workers": await _PROGRAMS[case.call["op"]](strategy, case.call, owned)})
    except Skip:
        raise
    except Exception as error:
        return Outcome({"workers": [Raised(error)] * len(owned)})


async def _distribute(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    with files_of(call) as folder:
        return await _steps(strategy.distribute_dataset(build(call["dataset"], folder)), call, owned)


async def _from_function(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    with files_of(call) as folder:
        distributed = strategy.distribute_datasets_from_function(
            lambda context: build(call["dataset"], folder, context)
        )
        return await _steps(distributed, call, owned)


async def _steps(distributed: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    found = await read(distributed, "for", call.get("max_steps", STEPS_MAX))
    return [
        {"steps": [Value(_part(step.tree, own)) for step in found["steps"]], "end": found["end"]}
        for own in owned
    ]


def _part(value: Any, own: range) -> Any:
    """Return a value with a worker's components only."""
    return trees.tree_map(lambda leaf: PerReplica([leaf[r] for r in own]), value)


async def _contexts(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    contexts: list[Any] = []

    def dataset_fn(context: Any) -> Any:
        contexts.append(context)
        return pipedist.Dataset.range(1)

    strategy.distribute_datasets_from_function(dataset_fn)
    described = [
        {
            "num_input_pipelines": context.num_input_pipelines,
            "input_pipeline_id": context.input_pipeline_id,
            "num_replicas_in_sync": context.num_replicas_in_sync,
            "per_replica_batch_size": {
                str(batch): _answer(lambda c=context, b=batch: c.get_per_replica_batch_size(b))
                for batch in call["per_replica_of"]
            },
        }
        for context in contexts
    ]
    return [{"contexts": [described[w]]} for w in range(len(owned))]


def _answer(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except ValueError as error:
        return Raised(error)


async def _local_values(strategy: Any, call: Mapping[str, Json]) -> Any:
    """Return the workers' values as one, which has been in the workers' processes."""
    values = [decode(value) for value in call["values"]]
    each = strategy.num_replicas_in_sync // strategy.workers
    given = PerReplica([value for value in values for _ in range(each)])
    return await strategy.run(lambda x: x, args=(given,))


async def _reduce(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    value = await _local_values(strategy, call)
    result = await strategy.reduce(op_of(call["reduce_op"]), value, axis=axis_of(call.get("axis")))
    return [Value(result)] * len(owned)


async def _reduce_plain(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    value = strategy.distribute_values_from_function(lambda context: np.array([1, 2], np.float32))
    result = await strategy.reduce(op_of(call["reduce_op"]), value, axis=None)
    return [Value(result)] * len(owned)


async def _gather(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    result = await strategy.gather(await _local_values(strategy, call), axis=axis_of(call["axis"]))
    return [Value(result)] * len(owned)


async def _all_reduce(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    op = op_of(call["reduce_op"])

    def fn(x: Any) -> Any:
        return pipedist.get_replica_context().all_reduce(op, x)

    return _own(await strategy.run(fn, args=(await _local_values(strategy, call),)), owned)


async def _all_gather(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    axis = axis_of(call["axis"])

    def fn(x: Any) -> Any:
        return pipedist.get_replica_context().all_gather(x, axis=axis)

    return _own(await strategy.run(fn, args=(await _local_values(strategy, call),)), owned)


def _own(value: Any, owned: list[range]) -> list[Any]:
    """Return each worker's part of what `run` returned; of one replica its value itself."""
    return [Value(value[own[0]] if len(own) == 1 else _part(value, own)) for own in owned]


async def _local(strategy: Any, call: Mapping[str, Json], owned: list[range]) -> list[Any]:
    def fn() -> Any:
        return np.array([pipedist.get_replica_context().replica_id_in_sync_group], np.float32)

    everything = strategy.local_results(await strategy.run(fn))
    return [Value(tuple(everything[r] for r in own)) for own in owned]


_PROGRAMS = {
    "mwms_distribute_dataset": _distribute,
    "mwms_from_function": _from_function,
    "mwms_from_function_context": _contexts,
    "mwms_reduce": _reduce,
    "mwms_reduce_plain": _reduce_plain,
    "mwms_gather": _gather,
    "mwms_all_reduce": _all_reduce,
    "mwms_all_gather": _all_gather,
    "mwms_local": _local,
}


# -- what pipedist answers on purpose ------------------------------------------------------------


def _workers(case: Case) -> int:
    return 1 if case.strategy is None else case.strategy.workers


def _policy(case: Case) -> str:
    return oracle.policy_of(case.call["dataset"])


def _is_dataset(case: Case) -> bool:
    return case.call["op"] == "mwms_distribute_dataset"


def _too_few_files(case: Case) -> bool:
    count = oracle.files_read(case.call["dataset"], case.call.get("files") or {})
    return count is None or count < _workers(case)


def _by_the_rules(case: Case) -> Json | None:
    """Return each worker's steps by the one rule for all policies; None where the oracle can't say."""
    stages, files, workers = case.call["dataset"], case.call.get("files") or {}, _workers(case)
    policy = oracle.resolve(_policy(case), stages, files, workers)
    each = case.replicas // workers
    streams: list[list[Any]] = []
    try:
        for index in range(workers):
            batches = oracle.evaluate(stages, files, (workers, index) if policy == "FILE" else None)
            if not all(isinstance(batch, list) for batch in batches):
                return None
            chunks = [part for batch in batches for part in oracle.chunks(batch, case.replicas)]
            streams.append(oracle.deal(chunks, workers)[index] if policy == "DATA" else chunks)
        return _in_steps(streams, each)
    except oracle.NoAnswer:
        return None


def _rebatched(case: Case, policy: str) -> Json | None:
    """What TensorFlow gives each worker under OFF, FILE and HINT: its rows in a cycle of batch sizes."""
    stages, files, workers = case.call["dataset"], case.call.get("files") or {}, _workers(case)
    size = next(stage[1] for stage in reversed(stages) if "batch" in stage[0])
    each = case.replicas // workers
    streams: list[list[Any]] = []
    for index in range(workers):
        batches = oracle.evaluate(stages, files, (workers, index) if policy == "FILE" else None)
        sizes = batch_sizes_for_worker(size, workers, each, index)
        streams.append(oracle.rebatched([row for batch in batches for row in batch], sizes))
    return _in_steps(streams, each)


def _made_of_nothing(expect: Json, own: Json) -> bool:
    """Whether steps of empty components stand for no element: a cycle of sizes may begin with 0."""
    parts = [part for worker in expect["workers"] for step in worker["steps"] for part in _parts(step)]
    return not any(worker["steps"] for worker in own["workers"]) and all(p["shape"][:1] == [0] for p in parts)


def _parts(value: Json) -> list[Json]:
    """Return the components of a VALUE's leaves."""
    match value:
        case {"per_replica": parts}:
            return list(parts)
        case {"dict": dict(items)}:
            return [part for item in items.values() for part in _parts(item)]
        case {"tuple": items}:
            return [part for item in items for part in _parts(item)]
    raise ValueError(f"not a step: {value!r}")


def _in_steps(streams: list[list[Any]], each: int) -> Json | None:
    """Return each worker's chunks as steps, who has none left with empty ones; None where all are empty."""
    present = [chunk for stream in streams for chunk in stream if chunk]
    steps = max(-(-len(stream) // each) for stream in streams)
    if steps and not present:
        return None
    return {
        "workers": [
            {
                "steps": [
                    oracle.per_replica(_padded(stream[at * each :][:each], each), present[0])
                    for at in range(steps)
                ],
                "end": "exhausted",
            }
            for stream in streams
        ]
    }


def _padded(chunks: list[Any], each: int) -> list[Any]:
    return chunks + [[]] * (each - len(chunks))


def _file_refused(case: Case, expect: Json) -> Json:
    if _is_dataset(case) and _policy(case) == "FILE" and _too_few_files(case):
        return {"workers": [{"error": "ValueError", "message": "FILE can't be applied"}] * _workers(case)}
    return expect


def _auto_falls_back(case: Case, expect: Json) -> Json:
    if not _is_dataset(case) or _policy(case) != "AUTO" or not _too_few_files(case):
        return expect
    reads_files = any(source[0] in oracle.READERS for source in oracle.sources(case.call["dataset"]))
    return (_by_the_rules(case) or expect) if reads_files else expect


def _batches_kept(case: Case, expect: Json) -> Json:
    if not _is_dataset(case) or any("steps" not in worker for worker in expect["workers"]):
        return expect
    files = case.call.get("files") or {}
    policy = oracle.resolve(_policy(case), case.call["dataset"], files, _workers(case))
    own = _by_the_rules(case) if policy in ("OFF", "FILE", "HINT") else None
    if own is None or not (expect == _rebatched(case, policy) or _made_of_nothing(expect, own)):
        return expect
    return own


def _unbatched(case: Case, expect: Json) -> Json:
    if _is_dataset(case) and not any("batch" in stage[0] for stage in case.call["dataset"]):
        return {
            "workers": [{"error": "ValueError", "message": "add .batch(global_batch_size)"}] * _workers(case)
        }
    return expect


def _ran_out(case: Case, expect: Json) -> Json:
    """A worker that has no element left gets None for a scalar, where TensorFlow makes a 0 up."""
    if case.call["op"] != "mwms_from_function" or any("steps" not in worker for worker in expect["workers"]):
        return expect
    workers = []
    for index, worker in enumerate(expect["workers"]):
        context = pipedist.InputContext(_workers(case), index, case.replicas)
        try:
            elements = oracle.evaluate(resolved(case.call["dataset"], context), {})
        except (oracle.NoAnswer, ValueError):
            return expect
        full = len(elements) * _workers(case) // case.replicas
        steps = [*worker["steps"][:full], *map(_without_scalars, worker["steps"][full:])]
        workers.append({**worker, "steps": steps})
    return {"workers": workers}


def _without_scalars(value: Json) -> Json:
    match value:
        case {"per_replica": parts}:
            return {"per_replica": [part if part["shape"] else {"none": True} for part in parts]}
        case {"dict": dict(items)}:
            return {"dict": {key: _without_scalars(item) for key, item in items.items()}}
        case {"tuple": items}:
            return {"tuple": [_without_scalars(item) for item in items]}
    return value


def _raised_at_once(case: Case, expect: Json) -> Json:
    """An error of a worker's first read is everybody's, and raised."""
    ends = [worker.get("end") for worker in expect["workers"] if worker.get("steps") == []]
    errors = [end for end in ends if isinstance(end, dict) and end.get("error") not in (None, *PEER_WENT)]
    return {"workers": errors[:1] * _workers(case)} if errors else expect


def _combined(case: Case, expect: Json) -> Json:
    """What reducing or gathering the workers' values gives in every worker."""
    call = case.call
    if call["op"] not in ("mwms_reduce", "mwms_all_reduce", "mwms_gather", "mwms_all_gather"):
        return expect
    each = case.replicas // _workers(case)
    value = {"per_replica": [part for part in call["values"] for _ in range(each)]}
    op, rules = ("gather", GATHER) if "gather" in call["op"] else ("reduce", REDUCE)
    plain = replace(case, call={"axis": None, **call, "op": op, "value": value})
    own = (
        reference.gather_result(plain.call)
        if op == "gather"
        else reference.reduce_result(plain.call, case.replicas)
    )
    from_the_end = op == "gather" and isinstance(call["axis"], int) and call["axis"] < 0
    unsupported = not {part["dtype"] for part in call["values"]} <= COLLECTIVE_DTYPES

    def answer(worker: Json) -> Json:
        name = worker.get("error")
        if agree(worker, own):
            return worker
        if name in PEER_WENT or (unsupported and name in ("InvalidArgumentError", "TypeError")):
            return own
        if from_the_end and name == "ValueError":  # for int32 too, other than within one process
            return own
        return next((told for rule in rules if (told := rule.expected(plain, worker)) != worker), worker)

    return {**expect, "workers": [answer(worker) for worker in expect["workers"]]}


DEVIATIONS = (
    Deviation("multi_worker: FILE without enough files is an error for everybody", 32, _file_refused),
    Deviation("multi_worker: AUTO without enough files divides the elements", 32, _auto_falls_back),
    Deviation("multi_worker: the chunks don't depend on the policy", 33, _batches_kept),
    Deviation("multi_worker: who has run out gets None for a scalar", 38, _ran_out),
    Deviation("multi_worker: without batch there is nothing to divide", 36, _unbatched),
    Deviation("multi_worker: an error of the first read is raised, for everybody", 32, _raised_at_once),
    Deviation("multi_worker: dtypes and errors are those of reduce and gather, for everybody", 18, _combined),
)
