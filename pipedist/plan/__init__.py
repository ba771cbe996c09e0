"""Compile a spec into a plan: phases of passes, checked and printable, before anything runs.

The plan fixes which stages share a pass, which passes share a phase, and how datasets are divided; opened sources
and imported functions belong to it. Entry point: `compile_plan`, which returns a `Plan` of `PassPlan`s or raises
PlanError with all problems. `pipedist.plan.view` prints a plan, and `pipedist.plan.picture` draws it; a run imports
neither. The code runs in the driver process.
"""

from pipedist.plan.compiler import compile_plan
from pipedist.plan.model import DEFAULT_COLLECTIVES, PassPlan, Plan

__all__ = [
    "DEFAULT_COLLECTIVES",
    "PassPlan",
    "Plan",
    "compile_plan",
]
