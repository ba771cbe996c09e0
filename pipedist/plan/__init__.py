"""Compile a spec into a plan: phases of passes, checked and printable, before anything runs.

The plan fixes which stages share a pass, which passes share a phase, and how datasets are divided; opened sources
and imported functions belong to it. Entry points: `compile_plan`, which returns a `Plan` of `PassPlan`s or raises
PlanError with all problems, and `as_text`, `as_mermaid`, `as_json` and
`picture`, which render a plan. The code runs in the
driver process.
"""

from pipedist.plan.compiler import compile_plan
from pipedist.plan.model import DEFAULT_COLLECTIVES, PassPlan, Plan
from pipedist.plan.picture import picture
from pipedist.plan.view import as_json, as_mermaid, as_text

__all__ = [
    "DEFAULT_COLLECTIVES",
    "PassPlan",
    "Plan",
    "as_json",
    "as_mermaid",
    "as_text",
    "compile_plan",
    "picture",
]
