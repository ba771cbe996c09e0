"""Whether there are GPUs for the stages that need them; asked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from pipedist.core import gpus as accelerators
from pipedist.core.gpus import Supply, spelled
from pipedist.errors import Problem
from pipedist.plan.model import PassPlan, Plan
from pipedist.spec import RunSpec, Spec

UNKNOWN = Supply(None, (), "workers that dial in bring them")


def supply_for(spec: Spec, workers: int) -> Supply:
    """Return what the workers own that a spec's own cluster will have.

    Args:
        workers: how many there are to be.
    """
    needed = max((s.gpus for s in spec.stages.values() if isinstance(s, RunSpec)), default=0.0)
    if not needed:
        return Supply((0.0,) * workers, (), "no stage needs any")
    if spec.cluster.launcher != "local":
        return UNKNOWN
    return accelerators.supply(accelerators.found(), needed, workers)


def check_gpus(plan: Plan) -> Iterator[Problem]:
    """Tell of each stage for whose calls no worker owns enough."""
    owned = plan.supply.owned
    if owned is None:
        return
    for pass_ in plan.passes:
        for name in pass_.runs:
            stage = plan.spec.stages[name]
            if not isinstance(stage, RunSpec) or not stage.gpus:
                continue
            place = ("stages", name, "resources", "gpus")
            if max(owned, default=0.0) < stage.gpus:
                yield plan.spec.problem(
                    place,
                    f"`{name}` needs {spelled(stage.gpus)} a call, and {_there(plan.supply)}",
                    expected="a machine with as many; or workers that dial in from one (`launcher: "
                    "connect`); or no `resources`, if the function can do without",
                )
            elif pass_.gang and owners(plan, pass_) < plan.spec.replicas:
                yield plan.spec.problem(
                    place,
                    f"`{name}` is in a gang: its {plan.spec.replicas} replicas run at once, each on a worker "
                    f"with {spelled(pass_.gpus)}, and of {plan.workers} workers {owners(plan, pass_)} have "
                    f"that; {_there(plan.supply)}",
                    expected=f"`--workers {plan.spec.replicas}` and GPUs for each; or fewer replicas; or a "
                    "fraction of a GPU for each, `gpus: 0.5`",
                )


def owners(plan: Plan, pass_: PassPlan) -> int:
    """Return how many workers own what a call of a pass needs."""
    return sum(gpus >= pass_.gpus for gpus in plan.supply.owned or ())


def _there(supply: Supply) -> str:
    count = len(supply.gpus)
    there = "there is none" if count == 0 else "there is 1" if count == 1 else f"there are {count}"
    return f"{there} here ({supply.how})"
