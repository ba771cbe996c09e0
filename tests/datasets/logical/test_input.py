"""InputContext, InputOptions, policies: validated where they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipedist.datasets.input import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode


def test_a_context_says_which_pipeline_it_is() -> None:
    context = InputContext(num_input_pipelines=np.int32(2), input_pipeline_id=1, num_replicas_in_sync=4)
    assert str(context) == "pipedist.InputContext(input pipeline id 1, total: 2)"
    assert type(context.num_input_pipelines) is int
    assert [context.get_per_replica_batch_size(n) for n in (0, 4, 8)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("size", "error"),
    [(5, ValueError), (-4, ValueError), (8.0, TypeError), ("8", TypeError), (True, TypeError)],
)
def test_batch_sizes_that_make_no_sense(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_input_pipelines": 0}, ValueError),
        ({"input_pipeline_id": 1}, ValueError),
        ({"input_pipeline_id": -1}, ValueError),
        ({"num_replicas_in_sync": 0}, ValueError),
        ({"num_replicas_in_sync": 1.5}, TypeError),
        ({"num_replicas_in_sync": None}, TypeError),
    ],
)
def test_contexts_that_make_no_sense(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(fields))):
        InputContext(**fields)


def test_options() -> None:
    assert InputOptions(replication_mode="PER_REPLICA").replication_mode is InputReplicationMode.PER_REPLICA  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        InputOptions(prefetch_to_device=False)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="expected PER_WORKER or PER_REPLICA"):
        InputOptions(replication_mode="ALL")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an InputReplicationMode"):
        InputOptions(replication_mode=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per_replica_buffer_size"):
        InputOptions(per_replica_buffer_size=0)


def test_policies_by_name_in_any_case() -> None:
    assert AutoShardPolicy.of("data") is AutoShardPolicy.of(AutoShardPolicy.DATA) is AutoShardPolicy.DATA
    for wrong in ("ALL", None, 3):
        with pytest.raises(ValueError, match="AUTO, DATA, FILE, OFF, HINT"):
            AutoShardPolicy.of(wrong)
