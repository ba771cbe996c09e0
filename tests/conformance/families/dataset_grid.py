"""Family `dataset_grid`: range(n).batch(b) divided among R replicas, for many n."""

from __future__ import annotations

from typing import Any

from pipedist.core import trees
from pipedist.datasets.logical import Dataset
from pipedist.strategy import BaseStrategy
from tests.conformance.cases import Case, Deviation, Outcome, Raised, Skip, dtype_of
from tests.conformance.families.dataset import one_replica_spec
from tests.conformance.pipelines import spec_json
from tests.conformance.session import Session

FAMILY = "dataset_grid"


async def replay(case: Case, session: Session) -> Outcome:
    """Do what the call says."""
    if case.call["op"] != "distribute_range_grid":
        raise Skip(f"unknown program {case.call['op']}")
    strategy = await session.strategy(case.strategy)
    first, last = case.call["sizes"]
    result: dict[str, Any] = {"element_spec": None, "cardinality": {}, "steps_by_size": {}}
    try:
        for size in range(first, last + 1):
            spec, cardinality, steps = await _steps(case, strategy, size)
            result["element_spec"] = spec
            result["cardinality"][str(size)] = cardinality
            result["steps_by_size"][str(size)] = steps
    except Exception as error:
        return Outcome(Raised(error))
    return Outcome(result)


async def _steps(case: Case, strategy: BaseStrategy, size: int) -> tuple[Any, int, list[list[list[Any]]]]:
    dtype = dtype_of(case.call["dtype"])
    numbers = Dataset.range(size)
    if dtype != "int64":
        numbers = numbers.map(lambda x: x.astype(dtype))
    dataset = strategy.distribute_dataset(numbers.batch(case.call["batch"], case.call["drop_remainder"]))
    steps = []
    async for step in dataset:
        for part in strategy.local_results(step):
            assert all(leaf.dtype == dtype for leaf in trees.flatten(part)[0])
        steps.append([part.tolist() for part in strategy.local_results(step)])
    return spec_json(dataset.element_spec), dataset.cardinality(), steps


DEVIATIONS = (Deviation("dataset_grid: one replica is per-replica too", 3, one_replica_spec),)
