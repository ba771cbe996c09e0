"""The header of a journal: the run, and all that decides its results.

Two headers are compared to decide what of a run continues (`pipedist.runs.resume`, `pipedist.runs.reuse`). The header
also has the passes, because those of a run that reuses steps differ from those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.structs import asdict, replace

from pipedist._version import __version__
from pipedist.core import platform_id
from pipedist.core.platform_id import Platform
from pipedist.journal.history import FORMAT, NAME, Header
from pipedist.plan import PassPlan, Plan
from pipedist.runs.code_modules import code_of, modules_of
from pipedist.runs.identity import differences, digest_of
from pipedist.runs.input_stamps import changed_files, stamps
from pipedist.runs.spec_source import SpecSource

LAST_WRITES_S = 10  # longest time that functions of a killed run write after its last commit, in seconds


def ended_ns(journal: Path, *, finished: bool = False) -> int:
    """Return until when functions of the run of a journal may have written to files."""
    try:
        return (journal / NAME).stat().st_mtime_ns + (0 if finished else LAST_WRITES_S * 10**9)
    except OSError:
        return 0


def header_of(
    plan: Plan,
    meant: Mapping[str, Any],
    run_id: str,
    source: SpecSource,
    before: Header | None = None,
    ended: int = 0,
) -> Header:
    """Return the header of a new journal.

    `meant` is the meaning of the spec, `before` the header of an earlier run in the folder, and `ended` when that run
    ended, ns since 1970.
    """
    modules = modules_of(plan)
    inputs = stamps(plan) if before is None else stamps(plan, before.inputs, before.spec, ended)
    return Header(
        format=FORMAT,
        pipedist=__version__,
        run=run_id,
        name=plan.spec.name,
        spec=meant,
        digest=digest_of(meant),
        inputs=inputs,
        code=code_of(modules),
        replicas=plan.spec.replicas,
        platform=asdict(Platform.here()),
        passes={pass_.key: described(plan, pass_, modules) for pass_ in plan.passes},
        source=source.source,
        sets=source.sets,
        params=source.params,
    )


def described(plan: Plan, pass_: PassPlan, modules: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the journal's description of a pass.

    `needs` are the paths in the spec that affect its values, by stage."""
    turns = [p for p in plan.passes if p.updates or p.follows]
    names = [*pass_.runs, *pass_.folds, *pass_.updates]
    if pass_ in turns:  # passes of a training complete together
        together = [name for p in turns for name in (p.root, *p.runs, *p.folds, *p.updates)]
        shared = list(_needs(plan, pass_, together))
        needs = dict.fromkeys(names, shared)
    else:
        needs = {name: list(_needs(plan, pass_, [name])) for name in names}
    paths = {path for each in needs.values() for path in each}
    return {
        **asdict(pass_),
        "name": pass_.name,
        "needs": needs,
        "modules": sorted({module for path in paths for module in modules.get(path, ())}),
    }


def _needs(plan: Plan, pass_: PassPlan, names: list[str]) -> Iterator[str]:
    """Yield the paths in the spec that affect the values of stages of a pass."""
    spec, links, training = plan.spec, plan.spec.links, plan.training
    yield from ("replicas", "seed", "threads_per_replica")
    waiting = [*names, pass_.dataset]
    # updates decide the number of epochs: of the passes of a training, and of later reads of its dataset
    counted = {name for p in plan.passes if p.updates or p.follows for name in (*p.runs, *p.folds)}
    if training is not None and pass_.dataset == training.dataset and pass_.phase > training.phase:
        waiting += training.updates
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in spec.datasets:
            yield f"datasets.{name}"
            continue
        yield f"stages.{name}"
        waiting += [other for other in (links[name].of, *links[name].waits, *links[name].reads) if other]
        if training is not None and name in counted:
            waiting += training.updates


def with_passes(plan: Plan, header: Header) -> Plan:
    """Return a plan with the passes that a journal describes, which may have been divided for a reuse."""
    passes = convert([*header.passes.values()], list[PassPlan])
    count = max((p.phase for p in passes), default=-1) + 1
    return replace(plan, phases=tuple(tuple(p for p in passes if p.phase == n) for n in range(count)))


def changes(there: Header, now: Header) -> list[str]:
    """Return the differences of two runs that affect results, except code and the files that it reads."""
    return [*differences(there.spec, now.spec), *changed_inputs(there, now, "datasets.")]


def changed_inputs(there: Header, now: Header, section: str) -> Iterator[str]:
    """Yield the changes of files of datasets or stages."""
    places = [place for place in {**there.inputs, **now.inputs} if place.startswith(section)]
    return changed_files(there.inputs, now.inputs, places)


def platform_changes(there: Header) -> list[str]:
    """Return the differences between this platform and that of a run."""
    began = Platform(**{**there.platform, "traits": tuple(there.platform["traits"])})
    return platform_id.differences(began, Platform.here(), called="now")


def stamp_of(now: Header) -> str:
    """Return a digest that changes with the run, its platform and its code."""
    return digest_of({"run": now.run, "platform": dict(now.platform), "code": dict(now.code)})
