"""Calls as people name them: by a key, `STAGE/STEP/REPLICA`, as in `pipedist replay`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from msgspec import Struct

from pipedist.errors import CallError, FoldError, QuarantineError, UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.runs.programs import FINISH
from pipedist.spec import GatherSpec, ReduceSpec

_KEY = re.compile(r"([^/]+)/([0-9]{1,18})/([0-9]{1,18})")


class CallKey(Struct, frozen=True):
    """The name of a call: a stage of its pass, its step and its replica."""

    stage: str
    step: int
    replica: int

    @classmethod
    def of(cls, text: str) -> CallKey:
        found = _KEY.fullmatch(text)
        if found is None:
            raise UsageError(f"{text!r} is not a call: expected STAGE/STEP/REPLICA, for example delays/12/3")
        return cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}/{self.step}/{self.replica}"

    def command(self, run: Path, element: int | None = None) -> str:
        """Return the command that executes the call again."""
        relative = os.path.relpath(run)
        folder = str(run) if relative.startswith("..") else relative
        one = "" if element is None else f" --element {element}"
        return f"pipedist replay {shlex.quote(folder)} --call {shlex.quote(str(self))}{one}"


def pass_of(plan: Plan, stage: str) -> PassPlan | None:
    """Return the pass whose calls execute a stage, None if there is none.

    Calls execute run stages, and make the parts of reduces and gathers. A `combine` function has calls of its
    own, which do not belong to a step of the dataset.
    """
    for pass_ in plan.passes:
        if stage in pass_.runs:
            return pass_
        spec = plan.spec.stages.get(stage)
        if stage in pass_.folds and not (isinstance(spec, ReduceSpec) and spec.combine is not None):
            return pass_
    return None


def is_reduced(plan: Plan, name: str) -> bool:
    """Return whether a stage's values are reduced by a built-in op, whose partials are part of calls."""
    stage = plan.spec.stages.get(name)
    return isinstance(stage, ReduceSpec) and stage.op is not None


def origin_of(plan: Plan, name: str) -> str:
    """Return a sentence on the function of the values that a stage reduces or gathers, and the stage's place."""
    stage, document = plan.spec.stages[name], plan.spec.document
    verb = "gather" if isinstance(stage, GatherSpec) else "reduce"
    at = f", at {document.problem(('stages', name, verb), '').where}," if document.lines else ""
    function = plan.functions.get(stage.of)
    by = f"The function {function.label} of stage {stage.of}" if function is not None else "The dataset"
    made = "returned" if function is not None else "has"
    return f"{by} {made} the values that stage {name}{at} {verb}s."


def replay_of(plan: Plan, error: CallError | FoldError | QuarantineError, run: Path) -> str:
    """Return the command that executes a failed call again, or ""."""
    if isinstance(error, FoldError):
        return "" if error.call is None else CallKey(*error.call).command(run)
    # if a worker died, its stage is unknown, and the error names the pass
    named = next((p.runs[0] for p in plan.passes if p.runs and p.name == error.stage), error.stage)
    finished = named.removesuffix(FINISH)
    is_finish = finished != named and getattr(plan.spec.stages[finished], "per", "") == "run"
    if pass_of(plan, named) is None and not is_finish:
        return ""
    return CallKey(named, error.step, error.replica).command(run)
