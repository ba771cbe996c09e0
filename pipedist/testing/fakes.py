"""Values that are no results: of attempts that do not count, and of functions that are not executed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pipedist.core.types import FunctionRef
from pipedist.errors import UsageError
from pipedist.protocol.program import Program

POISON: Final = "POISON: this attempt was superseded, its results must not count"


def stand_in(value: object, ctx: Any) -> NDArray[np.int64]:
    """Stand for a replica function that is not executed: an int64[1] made of which call it is."""
    which = f"{ctx.stage}/{ctx.step}/{ctx.replica_id_in_sync_group}"
    digest = hashlib.blake2b(which.encode(), digest_size=4).digest()
    return np.array([int.from_bytes(digest, "big")])


def with_stand_ins(program: Program, costs: Mapping[str, float]) -> tuple[Program, float | None]:
    """Return a program in which the stages with declared costs are not executed, and what a call costs.

    Args:
        costs: seconds a call, by stage.

    Returns:
        The program, and the seconds of a call: None where none of its stages has a declared cost.

    Raises:
        UsageError: a stage is executed that gets the value of one that is not.
    """
    declared = [stage.name for stage in program.stages if stage.name in costs]
    if not declared:
        return program, None
    stages = []
    for stage in program.stages:
        if stage.name in costs:
            reference = FunctionRef("stand-in", "pipedist.testing.fakes:stand_in", b"")
            stages.append(replace(stage, function=reference, kwargs={}, form="shard", collectives=False))
            continue
        if stage.of >= 0 and program.stages[stage.of].name in costs:
            raise UsageError(
                f"costs: stage {stage.name} gets the value of {program.stages[stage.of].name}, which is not "
                f"executed: declare a cost for {stage.name} too"
            )
        stages.append(stage)
    return replace(program, stages=tuple(stages)), sum(costs[name] for name in declared)
