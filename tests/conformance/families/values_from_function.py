"""Strategy.distribute_values_from_function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.conformance import deviations
from tests.conformance.cases import Case, Outcome, Raised, Skip, Value
from tests.conformance.session import Session

FAMILY = "values_from_function"
DEVIATIONS = deviations.VALUES_FROM_FUNCTION


def _raise(context: Any) -> Any:
    raise ValueError("boom")


VALUE_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "id": lambda context: context.replica_id_in_sync_group,
    "num": lambda context: context.num_replicas_in_sync,
    "none": lambda context: None,
    "str": lambda context: f"r{context.replica_id_in_sync_group}",
    "constant": lambda context: 7,
    "const_tensor": lambda context: np.array(1.0, np.float32),
    "tensor": lambda context: np.array([context.replica_id_in_sync_group], np.float32),
    "numpy": lambda context: np.arange(context.replica_id_in_sync_group + 1),
    "dict": lambda context: {"id": context.replica_id_in_sync_group, "n": context.num_replicas_in_sync},
    "list": lambda context: [context.replica_id_in_sync_group, 1],
    "tuple": lambda context: (context.replica_id_in_sync_group, 1),
    "raise": _raise,
}
"""What each replica's function returns, by the names that the cases use."""


async def replay(case: Case, session: Session) -> Outcome:
    """Replay `values_from_function`."""
    if case.call["op"] != "values_from_function":
        raise Skip(f"unknown program {case.call['op']}")
    value_fn = VALUE_FUNCTIONS.get(case.call["value_fn"])
    if value_fn is None:
        raise Skip(f"unknown program {case.call['value_fn']}")
    strategy = await session.strategy(case.strategy)
    try:
        return Outcome(Value(strategy.distribute_values_from_function(value_fn)))
    except Exception as error:
        return Outcome(Raised(error))
