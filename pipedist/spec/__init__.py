"""The spec language: YAML text or a dict becomes a frozen, typed `Spec`, or every problem is raised at once.

The entry points are `load` and `with_cluster`. The code runs in the process of the driver and of the command
line. Workers never import this package, nor pydantic: programs that are sent to them hold plain values.
"""

from __future__ import annotations

from pipedist.spec.datasets import DatasetSpec
from pipedist.spec.interpolation import StageRef, StateRef, references, substitute
from pipedist.spec.load import Spec, load, with_cluster
from pipedist.spec.model import QUARANTINE_DEFAULT, ClusterSection
from pipedist.spec.stage_options import TORCH_IMPLEMENTATIONS, CollectivesSpec, ResourcesSpec, RetrySpec
from pipedist.spec.stages import (
    GatherSpec,
    InitFile,
    InitFunction,
    InitLiteral,
    Per,
    ReduceSpec,
    RunSpec,
    StageSpec,
    Until,
    UpdateSpec,
    per_of,
)

__all__ = [
    "QUARANTINE_DEFAULT",
    "TORCH_IMPLEMENTATIONS",
    "ClusterSection",
    "CollectivesSpec",
    "DatasetSpec",
    "GatherSpec",
    "InitFile",
    "InitFunction",
    "InitLiteral",
    "Per",
    "ReduceSpec",
    "ResourcesSpec",
    "RetrySpec",
    "RunSpec",
    "Spec",
    "StageRef",
    "StageSpec",
    "StateRef",
    "Until",
    "UpdateSpec",
    "load",
    "per_of",
    "references",
    "substitute",
    "with_cluster",
]
