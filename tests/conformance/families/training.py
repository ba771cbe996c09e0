"""Training a linear model: variables, gradients summed over the replicas, updates."""

from __future__ import annotations

from typing import Any

import numpy as np

import pipedist
from tests.conformance.cases import Case, Json, Outcome, Raised, Skip, Value, dtype_of
from tests.conformance.session import Session

FAMILY = "training"

_KEYS = {
    "op",
    "rows",
    "features",
    "global_batch",
    "drop_remainder",
    "epochs",
    "learning_rate",
    "dtype",
    "loss",
}
_LOSSES = ("sum_over_global_batch", "true_row_count", "local_mean_over_replicas")


async def replay(case: Case, session: Session) -> Outcome:
    """Train as the call says, and return what each step gave."""
    call = case.call
    if call["op"] != "train_linear" or set(call) - _KEYS:
        raise Skip(f"unknown program {call['op']} with {', '.join(sorted(set(call) - _KEYS))}")
    if call["loss"] not in _LOSSES:
        raise Skip(f"unknown program loss {call['loss']}")
    strategy: Any = await session.strategy(case.strategy)
    dtype = dtype_of(call["dtype"])
    with strategy.scope():
        w = pipedist.Variable(np.zeros((call["features"], 1), dtype), name="w", aggregation="sum")
        b = pipedist.Variable(np.zeros(1, dtype), name="b", aggregation="sum")
    step_fn = step_function(call, w, b)
    dataset = pipedist.Dataset.from_tensor_slices(rows(call)).batch(
        call["global_batch"], call["drop_remainder"]
    )
    distributed = strategy.distribute_dataset(dataset)
    counts, losses, weights = [], [], []
    for _ in range(call["epochs"]):
        async for x, y in distributed:
            try:
                count, loss, squared = await strategy.run(step_fn, args=(x, y))
            except pipedist.CallError as error:
                return Outcome(Raised(error))
            counts.append([int(each) for each in strategy.local_results(count)])
            losses.append(
                [
                    Value(await strategy.reduce("sum", loss, axis=None)),
                    Value(await strategy.reduce("mean", squared, axis=0)),
                ]
            )
            weights.append([Value(w.value()), Value(b.value())])
    return Outcome(
        {
            "rows_per_replica": counts,
            "loss_sum_and_mean_squared_error": losses,
            "w_and_b_after_step": weights,
        }
    )


def rows(call: Json) -> Any:
    """Return the data: features [rows, features] and targets [rows]."""
    i, j = np.arange(call["rows"])[:, None], np.arange(call["features"])
    x = (((7 * i + 3 * j) % 11) - 5) / 5
    truth = np.array([1.0, -2.0, 0.5])[: call["features"]]
    y = x @ truth + 0.25 + (((5 * i[:, 0]) % 7) - 3) / 50
    dtype = dtype_of(call["dtype"])
    return x.astype(dtype), y.astype(dtype)


def step_function(call: Json, w: Any, b: Any) -> Any:
    """Return the replica function of a step."""
    kind, global_batch, dtype = call["loss"], call["global_batch"], dtype_of(call["dtype"])
    # The recorded learning rate is a float32, whatever the model's dtype is.
    rate = dtype.type(np.float32(call["learning_rate"]))

    def step(x: Any, y: Any) -> Any:
        ctx = pipedist.get_replica_context()
        error = (x @ w.value())[:, 0] + b.value() - y
        squared = error * error
        if kind == "sum_over_global_batch":
            divisor = global_batch
        elif kind == "true_row_count":
            divisor = ctx.all_reduce("sum", len(x))
        else:
            divisor = len(x) * ctx.num_replicas_in_sync
        scale = divisor.astype(dtype) if hasattr(divisor, "astype") else dtype.type(divisor)
        with np.errstate(all="ignore"):
            loss = squared.sum(dtype=dtype) / scale
            slope = 2 * error / scale
        w.assign_sub(rate * (x.T @ slope)[:, None])
        b.assign_sub(rate * slope.sum(keepdims=True, dtype=dtype))
        return len(x), loss, squared

    return step
