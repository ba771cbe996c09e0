"""Family `input_function`: datasets made per input pipeline, InputContext, and NumPy datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipedist.datasets.input import InputContext, InputOptions
from pipedist.datasets.logical import Dataset
from pipedist.strategy import BaseStrategy
from tests.conformance import pipelines_oracle as oracle
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip, Value, decode
from tests.conformance.families.dataset import divides, one_replica_spec
from tests.conformance.pipelines import build, files_of, read
from tests.conformance.session import Session

FAMILY = "input_function"

STEPS_MAX = 4
"""Where an endless dataset is cut off."""

OPTIONS: Mapping[str, str | None] = {
    "experimental_per_replica_buffer_size": "per_replica_buffer_size",
    "experimental_replication_mode": "replication_mode",
    "experimental_fetch_to_device": None,  # values are always arrays in host memory
    "experimental_place_dataset_on_device": None,  # and so are datasets
}
"""pipedist's names of the options; None for what is always so."""

RETURNED: Mapping[str, Any] = {
    "None": None,
    "a list": [1, 2, 3],
    "a tensor": np.arange(3),
    "a numpy array": np.arange(3),
    "an int": 3,
    "a string": "abc",
    "a dict": {"x": 1},
}


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    call = case.call
    try:
        match call["op"]:
            case "input_context":
                return Outcome(Value(_input_context(call)))
        strategy = await session.strategy(case.strategy)
        with files_of(call) as folder:
            match call["op"]:
                case "distribute_from_function":
                    dataset = strategy.distribute_datasets_from_function(
                        lambda context: build(call["dataset"], folder, context)
                    )
                    return Outcome(await read(dataset, call.get("iterate", "for"), STEPS_MAX))
                case "from_function_context":
                    return Outcome({"contexts": _contexts(strategy)})
                case "from_function_returns":
                    if call["value"] not in RETURNED:
                        raise Skip(f"unknown program {call['value']}")
                    strategy.distribute_datasets_from_function(lambda _: RETURNED[call["value"]])
                    return Outcome(Value(None))
                case "from_function_raises":
                    strategy.distribute_datasets_from_function(lambda _: 1 // 0)
                    return Outcome(Value(None))
                case "from_function_noarg":
                    strategy.distribute_datasets_from_function(lambda: Dataset.range(3))
                    return Outcome(Value(None))
                case "distribute_with_options":
                    options = None if call["options"] is None else _options(call["options"])
                    distributed = strategy.distribute_dataset(build(call["dataset"], folder), options)
                    return Outcome(await read(distributed, "for", STEPS_MAX))
                case "make_numpy_dataset":
                    numpy_dataset = strategy.make_numpy_dataset(decode(call["value"]))
                    return Outcome(
                        {"steps": [Value(element) for element in numpy_dataset], "end": "exhausted"}
                    )
                case "make_numpy_dataset_distribute":
                    batched = strategy.make_numpy_dataset(decode(call["value"])).batch(call["batch"])
                    return Outcome(await read(strategy.distribute_dataset(batched), "for", STEPS_MAX))
        raise Skip(f"unknown program {call['op']}")
    except Skip:
        raise
    except Exception as error:
        return Outcome(Raised(error))


def _input_context(call: Mapping[str, Json]) -> Any:
    context = InputContext(**call["kwargs"])
    if call["method"] is None:
        return dataclasses.asdict(context)
    if not hasattr(context, call["method"]):
        raise Skip(f"unknown program {call['method']}")
    return getattr(context, call["method"])(call["arg"])


def _contexts(strategy: BaseStrategy) -> list[dict[str, Any]]:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> Dataset:
        contexts.append(context)
        return Dataset.range(4).batch(1)

    strategy.distribute_datasets_from_function(dataset_fn)
    return [
        # The text names the library.
        dataclasses.asdict(context) | {"str": str(context).replace("pipedist.", "tf.distribute.")}
        for context in contexts
    ]


def _options(given: Mapping[str, Json]) -> InputOptions:
    if given.get("experimental_place_dataset_on_device"):
        raise Skip("unknown program options with experimental_place_dataset_on_device")
    names = {name: OPTIONS.get(name, name) for name in given}
    return InputOptions(**{names[name]: value for name, value in given.items() if names[name] is not None})


def _last_step(case: Case, expect: Json) -> Json:
    """An incomplete last step is delivered; who has nothing gets empty arrays, None for a scalar."""
    if case.call["op"] != "distribute_from_function" or not divides(case) or "steps" not in expect:
        return expect
    if str(expect["end"]).startswith("cut off"):
        return expect
    context = InputContext(1, 0, case.replicas)
    try:
        elements = oracle.evaluate(resolved(case.call["dataset"], context), case.call.get("files") or {})
        full = len(expect["steps"])
        if case.call.get("iterate") == "optional":  # it is delivered, with a 0 for a scalar
            full = min(full, len(elements) // case.replicas)
        missing = elements[full * case.replicas :]
        differs = 0 < len(missing) < case.replicas and (full < len(expect["steps"]) or _drops_last_step(case))
        last = [oracle.across(missing, case.replicas)] if differs else []
    except (oracle.NoAnswer, ValueError):
        return expect
    return {**expect, "steps": [*expect["steps"][:full], *last]} if differs else expect


def _drops_last_step(case: Case) -> bool:
    """Whether TensorFlow drops an incomplete last step: one of static shapes, or of central storage."""
    dynamic = ("padded_batch", "ones_up_to")
    return (case.strategy is not None and case.strategy.kind == "central_storage") or all(
        stage[2:] == [True] if stage[0] == "batch" else not set(map(str, stage)) & set(dynamic)
        for stage in case.call["dataset"]
    )


def resolved(stages: list[Json], context: InputContext) -> list[Json]:
    """Return a pipeline with the numbers that a context gives."""

    def number(value: Json) -> Json:
        match value:
            case {"ctx": [_, batch]}:
                return batch // context.num_replicas_in_sync
            case {"ctx": str(field)}:
                return getattr(context, field)
        return value

    return [[number(part) for part in stage] for stage in stages]


def _refused(case: Case, expect: Json) -> Json:
    """A context or a batch size that makes no sense is refused."""
    if case.call["op"] != "input_context":
        return expect
    fields = {"num_input_pipelines": 1, "input_pipeline_id": 0, "num_replicas_in_sync": 1}
    given = fields | case.call["kwargs"]
    if any(isinstance(value, bool) or not isinstance(value, int) for value in given.values()):
        return {"error": "TypeError", "message": "expected an int"}
    if any(given[name] < least for name, least in fields.items()):
        return {"error": "ValueError", "message": "out of range"}
    if given["input_pipeline_id"] >= given["num_input_pipelines"]:
        return {"error": "ValueError", "message": "no such pipeline"}
    size = case.call["arg"]
    if case.call["method"] == "get_per_replica_batch_size":
        if isinstance(size, bool) or not isinstance(size, int):
            return {"error": "TypeError", "message": "expected an int"}
        if size < 0:
            return {"error": "ValueError", "message": "negative"}
    return expect


def _replicated(case: Case, expect: Json) -> Json:
    """A dataset that is not of a function can't be made for each replica."""
    if case.call["op"] != "distribute_with_options" or expect.get("error") != "NotImplementedError":
        return expect
    mode = str((case.call["options"] or {}).get("experimental_replication_mode"))
    return {"error": "ValueError", "message": "PER_REPLICA"} if mode.endswith("PER_REPLICA") else expect


DEVIATIONS = (
    Deviation(
        "input_function: the replication mode of a distributed dataset is a ValueError", 38, _replicated
    ),
    Deviation("input_function: an incomplete last step is delivered", 38, _last_step),
    Deviation("input_function: one replica is per-replica too", 3, one_replica_spec),
    Deviation("input_function: numbers that make no sense are refused", 38, _refused),
)
