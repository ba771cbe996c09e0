"""What a call of a run is called where people meet it: `STAGE/STEP/REPLICA`, in `pipedist replay`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from msgspec import Struct

from pipedist.errors import CallError, UsageError
from pipedist.plan import PassPlan, Plan
from pipedist.spec import ReduceSpec


class CallKey(Struct, frozen=True):
    """A call: of a stage, one of those that its pass executes back to back.

    Args:
        stage: its name.
        step, replica: the call's.
    """

    stage: str
    step: int
    replica: int

    @classmethod
    def of(cls, text: str) -> CallKey:
        """Read a key.

        Raises:
            UsageError: it is none.
        """
        stage, _, rest = text.partition("/")
        step, _, replica = rest.partition("/")
        if not (stage and _is_number(step) and _is_number(replica)):
            raise UsageError(f"{text!r} is no call: expected STAGE/STEP/REPLICA, as delays/12/3")
        return cls(stage, int(step), int(replica))

    def __str__(self) -> str:
        return f"{self.stage}/{self.step}/{self.replica}"

    def command(self, run: Path, element: int | None = None) -> str:
        """Return the command line that executes the call again.

        Args:
            run: the output folder.
            element: of the call, alone; None: the whole call.
        """
        relative = os.path.relpath(run)
        folder = str(run) if relative.startswith("..") else relative
        one = "" if element is None else f" --element {element}"
        return f"pipedist replay {shlex.quote(folder)} --call {shlex.quote(str(self))}{one}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def pass_of(plan: Plan, stage: str) -> PassPlan | None:
    """Return the pass whose calls execute a stage; None: none does.

    Those of a run do; and those that give the parts of a reduce or gather, but no fold of a combine
    function, whose calls have no step of the dataset.
    """
    for pass_ in plan.passes:
        if stage in pass_.runs:
            return pass_
        spec = plan.spec.stages.get(stage)
        if stage in pass_.folds and not (isinstance(spec, ReduceSpec) and spec.combine is not None):
            return pass_
    return None


def replay_of(plan: Plan, error: CallError, run: Path) -> str:
    """Return the command that executes a call that failed again, "" where there is none.

    Args:
        run: the output folder.
    """
    # where a worker died nobody knows the stage, and it is the pass that is named
    named = next((p.runs[0] for p in plan.passes if p.runs and p.name == error.stage), error.stage)
    if pass_of(plan, named) is None:
        return ""
    return CallKey(named, error.step, error.replica).command(run)
