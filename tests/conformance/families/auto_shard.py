"""Family `auto_shard`: how elements are dealt to logical input pipelines ("workers" in the cases)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipedist.datasets.logical import Dataset
from pipedist.datasets.sharding import auto_shard, rebatch
from tests.conformance import pipelines_oracle as oracle
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip
from tests.conformance.pipelines import build, elements_json, files_of
from tests.conformance.session import Session

FAMILY = "auto_shard"


def batch_sizes_for_worker(
    global_batch: int, num_pipelines: int, replicas_per_pipeline: int, index: int
) -> list[int]:
    """Return the cycle of batch sizes of a pipeline that gives global steps of `global_batch` rows.

    With N = W * R replicas, the N sizes are global_batch / N, rounded down or up, and pipeline w starts R * w entries
    after pipeline 0, so the sizes of each step have the sum `global_batch`: the sizes that an input function of an
    independent stream needs (tf.data.experimental.distribute.batch_sizes_for_worker).
    """
    if not 0 <= index < num_pipelines:
        raise ValueError(f"index is {index}, expected 0 to {num_pipelines - 1}")
    replicas = num_pipelines * replicas_per_pipeline
    floor, longer = divmod(global_batch, replicas)
    first = [floor + 1] * longer + [floor] * (replicas - longer)
    offset = index * replicas_per_pipeline
    return first[offset:] + first[:offset]


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    with files_of(case.call) as folder:
        try:
            return Outcome(_answer(case.call, folder))
        except Skip:
            raise
        except Exception as error:
            return Outcome(Raised(error))


def _answer(call: Mapping[str, Json], folder: Path) -> dict[str, Any]:
    pipelines = call.get("num_workers", 1)
    match call["op"]:
        case "auto_shard":
            dataset = build(call["dataset"], folder)
            return _workers(pipelines, lambda w: auto_shard(dataset, pipelines, w, call["policy"]))
        case "rebatch_and_shard":
            replicas = pipelines * call["replicas_per_worker"]
            chunks = rebatch(build(call["dataset"], folder).batch(call["batch"]), replicas)
            return _workers(pipelines, lambda w: auto_shard(chunks, pipelines, w, call["policy"]))
        case "batch_sizes_for_worker":
            each = call["replicas_per_worker"]
            sizes = [batch_sizes_for_worker(call["batch"], pipelines, each, w) for w in range(pipelines)]
            return {"workers": sizes}
        case "auto_shard_one":
            dataset = build(call["dataset"], folder)
            return {"elements": elements_json(auto_shard(dataset, pipelines, call["index"], "AUTO"))}
        case "dataset_shard":
            dataset = build(call["dataset"], folder)
            return {"elements": elements_json(dataset.shard(call["num_shards"], call["index"]))}
    raise Skip(f"unknown program {call['op']}")


def _workers(pipelines: int, read: Any) -> dict[str, Any]:
    workers: list[Any] = []
    for index in range(pipelines):
        try:
            dataset: Dataset = read(index)
            workers.append({"elements": elements_json(dataset)})
        except Skip:
            raise
        except Exception as error:
            workers.append(Raised(error))
    return {"workers": workers}


def _expected(case: Case) -> Json | None:
    """What each pipeline reads by the rules; None where the oracle has no answer."""
    call = case.call
    stages, files, pipelines = call["dataset"], call.get("files") or {}, call["num_workers"]
    policy = oracle.resolve(call["policy"], stages, files, pipelines)
    each = call.get("replicas_per_worker")
    try:
        streams = []
        for index in range(pipelines):
            shard = (pipelines, index) if policy == "FILE" and pipelines > 1 else None
            elements = oracle.evaluate(stages, files, shard)
            if each is not None:
                size = call["batch"]
                batches = [elements[i : i + size] for i in range(0, len(elements), size)]
                elements = [part for batch in batches for part in oracle.chunks(batch, pipelines * each)]
            streams.append(oracle.deal(elements, pipelines)[index] if policy == "DATA" else elements)
    except oracle.NoAnswer:
        return None
    return {"workers": [{"elements": [_json(element) for element in stream]} for stream in streams]}


def _json(element: Any) -> Json:
    if isinstance(element, tuple):
        return oracle.value_of(element)
    if isinstance(element, list):
        return [_json(item) for item in element]
    return element.tolist() if isinstance(element, np.ndarray | np.generic) else element


def _shards(case: Case) -> bool:
    return case.call["op"] in ("auto_shard", "rebatch_and_shard")


def _too_few_files(case: Case) -> bool:
    """Whether whole files don't suffice for the pipelines, or the dataset reads something else too."""
    count = oracle.files_read(case.call["dataset"], case.call.get("files") or {})
    pipelines = case.call["num_workers"]
    return pipelines > 1 and (count is None or count < pipelines)


def _lacks_files(expect: Json) -> bool:
    """Whether TensorFlow told some pipeline that it has no files of its own, or none at all."""
    return any(
        worker.get("error") in ("InvalidArgumentError", "NotFoundError") for worker in expect["workers"]
    )


def _file_refused(case: Case, expect: Json) -> Json:
    if _shards(case) and case.call["policy"] == "FILE" and _too_few_files(case) and _lacks_files(expect):
        error = {"error": "ValueError", "message": "FILE can't be applied"}
        return {"workers": [error] * case.call["num_workers"]}
    return expect


def _auto_falls_back(case: Case, expect: Json) -> Json:
    if not _shards(case) or case.call["policy"] != "AUTO" or not _too_few_files(case):
        return expect
    sources = [source[0] in oracle.READERS for source in oracle.sources(case.call["dataset"])]
    told = _lacks_files(expect) or not all(
        sources
    )  # of a range beside files, TensorFlow shards something else
    return (_expected(case) or expect) if any(sources) and told else expect


def _few_elements(case: Case, expect: Json) -> Json:
    if not _shards(case) or case.call["policy"] not in ("DATA", "AUTO"):
        return expect
    failed = any("error" in worker for worker in expect["workers"])
    return (_expected(case) or expect) if failed else expect


def _batches_kept(case: Case, expect: Json) -> Json:
    if case.call["op"] != "rebatch_and_shard" or any("error" in worker for worker in expect["workers"]):
        return expect
    files = case.call.get("files") or {}
    policy = oracle.resolve(case.call["policy"], case.call["dataset"], files, case.call["num_workers"])
    own = _expected(case) if policy in ("OFF", "FILE", "HINT") else None
    return own if own is not None and expect["workers"] == _rebatched(case, policy) else expect


def _rebatched(case: Case, policy: str) -> Json:
    """What TensorFlow gives each pipeline under OFF, FILE and HINT: its rows in a cycle of batch sizes."""
    call, pipelines = case.call, case.call["num_workers"]
    workers = []
    for index in range(pipelines):
        shard = (pipelines, index) if policy == "FILE" and pipelines > 1 else None
        rows = oracle.evaluate(call["dataset"], call.get("files") or {}, shard)
        sizes = batch_sizes_for_worker(call["batch"], pipelines, call["replicas_per_worker"], index)
        parts = oracle.rebatched(rows, sizes)
        workers.append({"elements": [[_json(row) for row in part] for part in parts]})
    return workers


DEVIATIONS = (
    Deviation("auto_shard: FILE without enough files is an error for everybody", 32, _file_refused),
    Deviation("auto_shard: AUTO without enough files divides the elements", 32, _auto_falls_back),
    Deviation("auto_shard: fewer elements than pipelines leave some empty", 34, _few_elements),
    Deviation("auto_shard: the chunks don't depend on the policy", 33, _batches_kept),
)
