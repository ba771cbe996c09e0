"""The spec language: YAML text or a dict -> a frozen, typed `Spec`, or every mistake at once."""

from __future__ import annotations

from pipedist.spec.choice import with_cluster
from pipedist.spec.interpolation import StageRef, StateRef, references, substitute
from pipedist.spec.loading import Spec, load
from pipedist.spec.model import ClusterSpec
from pipedist.spec.sources import DatasetSpec
from pipedist.spec.stages import (
    TORCH_IMPLEMENTATIONS,
    CollectivesSpec,
    GatherSpec,
    InitFile,
    InitFunction,
    InitLiteral,
    ReduceSpec,
    RunSpec,
    StageSpec,
    UpdateSpec,
)

__all__ = [
    "TORCH_IMPLEMENTATIONS",
    "ClusterSpec",
    "CollectivesSpec",
    "DatasetSpec",
    "GatherSpec",
    "InitFile",
    "InitFunction",
    "InitLiteral",
    "ReduceSpec",
    "RunSpec",
    "Spec",
    "StageRef",
    "StageSpec",
    "StateRef",
    "UpdateSpec",
    "load",
    "references",
    "substitute",
    "with_cluster",
]
