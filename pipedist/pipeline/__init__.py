"""Pipelines: a spec in, an async stream of results out."""

from pipedist.pipeline.doors import open, run
from pipedist.pipeline.result import Ledger, Progress, Result, StageCount
from pipedist.pipeline.runs import Run
from pipedist.pipeline.subscription import Part, Step

__all__ = ["Ledger", "Part", "Progress", "Result", "Run", "StageCount", "Step", "open", "run"]
