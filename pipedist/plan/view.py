"""Render a plan: text for people, Mermaid for documents, JSON for programs."""

from __future__ import annotations

from typing import Any

from pipedist.core.functions import reference
from pipedist.core.gpus import spelled
from pipedist.core.names import plural
from pipedist.core.types import FunctionRef, Tree
from pipedist.datasets.element import described
from pipedist.datasets.sources.paths import hindrance
from pipedist.plan.model import WHEN, PassPlan, Plan
from pipedist.spec import GatherSpec, ReduceSpec, RunSpec
from pipedist.spec.training import training_of, why_together

_REPLICAS_SHOWN = 8
_SHARDS = {
    "jsonl": "a list of n objects",
    "text": "a list of n texts",
}
"""The input of a function, from sources whose elements are no arrays."""


def as_text(plan: Plan) -> str:
    spec = plan.spec
    sizes = f"{plural(spec.replicas, 'replica')}, {plural(plan.workers, 'worker')}"
    lines = [
        f"{spec.name}: {sizes}, seed {spec.seed}, {_launcher(plan)}",
        "  another number of replicas changes the results; another number of workers never does",
    ]
    for name in spec.datasets:
        title = name if name == "dataset" else f"dataset {name}"
        lines += ["", f"{title}: {_kind(plan, name)}, {_extent(plan, name)}"]
        lines += [f"  {line}" for line in _elements(plan, name)]
        lines += [f"  {line}" for line in _ranges(plan, name)]
        lines.append(f"  {_delivery(plan, name)}")
    for number, phase in enumerate(plan.phases):
        lines += ["", f"phase {number + 1} of {len(plan.phases)}"]
        for pass_ in phase:
            lines += [f"  {line}" for line in _pass_lines(plan, pass_)]
    return "\n".join(lines)


def _launcher(plan: Plan) -> str:
    cluster = plan.spec.cluster
    where = cluster.listen if cluster.launcher == "connect" else cluster.address
    placed = f", {cluster.placement}" if cluster.launcher == "ray" else ""
    return f"launcher {cluster.launcher}{f' at {where}' if where else ''}{placed}"


def _kind(plan: Plan, name: str) -> str:
    """Return the kind of a source, and the class that reads it if the user names one."""
    dataset = plan.spec.datasets[name]
    given = dataset.config.get("class")
    return dataset.kind if given is None else f"source {reference(given).label}"


def _elements(plan: Plan, name: str) -> list[str]:
    source = plan.sources[name]
    shard = _SHARDS.get(plan.spec.datasets[name].kind)
    known = [] if shard is None else [f"a shard of n elements is {shard}"]
    if source.element_spec is not None:
        known = [f"an element is {described(source.element_spec)}"]
    return known + ([source.note] if source.note else [])


def _extent(plan: Plan, name: str) -> str:
    dataset = plan.spec.datasets[name]
    division = plan.division(name)
    replicas = plan.spec.replicas
    share = f"{dataset.batch // replicas:,}"
    if dataset.batch % replicas:
        share = f"up to {dataset.batch // replicas + 1:,}"
    size = f"{dataset.batch:,}{f' ({share} per replica)' if replicas > 1 else ''}"
    if division is None:
        return f"as many elements as it yields, in steps of {size}, {plural(dataset.epochs, 'epoch')}"
    steps = f"{plural(division.steps_per_epoch, 'step')} of {size}"
    epochs = f" in each of {dataset.epochs:,} epochs" if dataset.epochs > 1 else ""
    return f"{plural(division.length, 'element')}, {steps}{epochs}{', shuffled' if dataset.shuffle else ''}"


def element_ranges(plan: Plan, name: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return each replica's range of positions in the first and the last step of an epoch."""
    division = plan.division(name)
    if division is None or division.steps_per_epoch == 0:
        return []
    shown = sorted({0, division.steps_per_epoch - 1})
    return [(s, [division.bounds(s, r)[1:] for r in range(division.replicas)]) for s in shown]


def _ranges(plan: Plan, name: str) -> list[str]:
    lines = []
    order = " of the shuffled order" if plan.spec.datasets[name].shuffle else ""
    for step, bounds in element_ranges(plan, name):
        if step > 1:
            lines.append("...")
        texts = [
            f"{f'[{lo}, {hi})' if lo < hi else 'none'} for replica {r}"
            for r, (lo, hi) in enumerate(bounds[:_REPLICAS_SHOWN])
        ]
        if len(bounds) > _REPLICAS_SHOWN:
            texts.append(f"and {len(bounds) - _REPLICAS_SHOWN} more")
        lines.append(f"step {step:,}{order}: elements " + ", ".join(texts))
    return lines


def _delivery(plan: Plan, name: str) -> str:
    source = plan.sources[name]
    if not source.portable:
        return f"shards are sent to the workers: {source.why_not_portable}"
    is_local = plan.spec.cluster.launcher == "local"
    if not is_local and (why := hindrance(source)):
        return f"workers on this host read their own shards; other workers receive theirs: {why}"
    if is_local or source.config["kind"] == "range":
        return "workers read their own shards"
    return (
        "workers that see the same files (path, size, time of change) read their own shards; "
        "other workers receive theirs"
    )


def _pass_lines(plan: Plan, pass_: PassPlan) -> list[str]:
    again = "" if pass_.root == pass_.dataset else f" (the kept values of {pass_.root})"
    if plan.maker(pass_) is not None:
        again = f" (the values of {pass_.root}, streamed while they are made)"
    if plan.rebatched(pass_):
        again += f", in steps of {pass_.batch:,}, {-(-pass_.batch // plan.spec.replicas):,} per replica"
    once = f" once after each epoch of {pass_.follows}" if pass_.follows else ""
    turns = ""
    if pass_.updates and (granularity := plan.granularity(pass_)) != "run":
        turns = f", one {granularity} at a time: each waits for the updates before it"
    lines = [f"reads {pass_.dataset}{again}{once}{turns}"]
    if pass_.gang:
        lines.append(f"  {_gang(plan, pass_)}")
    if pass_.gpus:
        lines.append(f"  {_gpus(plan, pass_)}")
    if any(getattr(plan.spec.stages[name], "on_error", "") == "quarantine" for name in pass_.runs):
        limit = plural(plan.quarantine_max(pass_.dataset), "element")
        every = ", or all," if plan.spec.quarantine_max == "auto" else ""
        lines.append(f"  ends if more than {limit}{every} fail (quarantine_max)")
    needs = {getattr(plan.spec.stages[name], "gpus", 0.0) for name in pass_.runs}
    if len(pass_.runs) > 1 and (len(needs) > 1 or any(plan.maker(each) for each in plan.passes)):
        datasets, links = tuple(plan.spec.datasets), plan.spec.links
        reasons = [why_together(name, datasets, links, training_of(datasets, links)) for name in pass_.runs]
        reason = next(filter(None, reasons), "") if len(needs) > 1 else ""
        why = f", although their `resources` differ: {reason}" if reason else ""
        lines.append(f"  one call executes {', '.join(pass_.runs)}{why}")
    for name in pass_.runs:
        lines.append(f"  run     {name}: {_call(plan, name)}{_waits(plan, name)}{_limits(plan, pass_, name)}")
    for name in pass_.folds:
        stage = plan.spec.stages[name]
        target = _files(plan, name)
        if isinstance(stage, GatherSpec):
            ending = f"{_finish(plan, name)}{target}"
            lines.append(f"  gather  {name}: axis {stage.gather} of {stage.of}, per {stage.per}{ending}")
        elif isinstance(stage, ReduceSpec):
            how = plan.functions[name].label + " (on workers)" if stage.op is None else stage.op
            axes: Any = list(stage.axis) if isinstance(stage.axis, tuple) else stage.axis
            axis = "" if stage.op is None else f", axis {'null' if axes is None else axes}"
            ending = f"{_finish(plan, name)}{target}"
            lines.append(f"  reduce  {name}: {how} of {stage.of}{axis}, per {stage.per}{ending}")
    for name in pass_.updates:
        lines.append(f"  update  {name}: {_update(plan, name)}")
    for name in (*pass_.runs, *pass_.folds, *pass_.updates):
        if declared := getattr(plan.spec.stages[name], "inputs", ()):
            lines.append(f"  inputs of {name}: {', '.join(declared)}")
    return lines


def _finish(plan: Plan, name: str) -> str:
    finish = plan.finishes.get(name)
    return "" if finish is None else f", then {finish.label} (on a worker){_waits(plan, name)}"


def _limits(plan: Plan, pass_: PassPlan, name: str) -> str:
    """Return how calls of a run wait: at the same time, at which rate, with how many attempts."""
    stage = plan.spec.stages[name]
    assert isinstance(stage, RunSpec)
    at_once, _ = plan.waiting(pass_)
    parts = ["for each element"] if stage.per else []
    if (calls := plan.calls_at_once(name)) and at_once and name in plan.asynchronous:
        parts.append(f"{plural(calls, 'element' if stage.per else 'call')} at once over all workers")
    if stage.rate:
        noun = "element" if stage.per else "call"
        parts.append(
            f"at most {stage.rate.calls:g} {noun}{'s' * (stage.rate.calls != 1)} per {stage.rate.per_s:g} s"
        )
    if stage.retry:
        parts.append(f"up to {plural(stage.retry.attempts, 'attempt')}")
    return "".join(f", {part}" for part in parts)


def _gpus(plan: Plan, pass_: PassPlan) -> str:
    need = f"needs {spelled(pass_.gpus)} per call"
    if plan.supply.owned is None:
        return f"{need}: {plan.supply.how}"
    return f"{need}: {plan.gpu_owners(pass_)} of {plural(plan.workers, 'worker')} own it ({plan.supply.how})"


def _gang(plan: Plan, pass_: PassPlan) -> str:
    replicas = plan.spec.replicas
    workers = plural(replicas if pass_.gpus else min(replicas, plan.workers), "worker")
    used = {each.implementation for each in pass_.communication(plan.spec).values()} - {"auto"}
    through = f", collectives through {used.pop()}" if used else ""
    if kind := pass_.devices(plan.spec):
        each = replicas // plan.hosts
        through = f", compiled by jax for a mesh of {replicas} {kind} devices, {each} each, 1 step per run"
    return f"a gang of {plural(replicas, 'replica')}: at the same time, on {workers}{through}"


def _update(plan: Plan, name: str) -> str:
    state = plan.states[name]
    text = f"{_call(plan, name)}, {WHEN[state.per]}{_waits(plan, name)}"
    if state.init is not None:
        text += f", from {state.init.label}"
    if state.until is not None:
        text += f", until {state.until.label}"
    return text + _files(plan, name)


def _files(plan: Plan, name: str) -> str:
    files = plan.spec.files_of(name)
    return f" -> {', '.join(files.values())}" if files else ""


def _call(plan: Plan, name: str) -> str:
    return f"{plan.functions[name].label} of {plan.spec.stages[name].of}"


def _waits(plan: Plan, name: str) -> str:
    parts = (
        ("with", plan.awaited(name)),
        ("with state", plan.spec.links[name].reads),
        ("after", plan.after(name)),
    )
    return "".join(f", {word} {', '.join(names)}" for word, names in parts if names)


_SHAPES = {
    "dataset": '[("{}")]',
    "run": '["{}"]',
    "fold": '{{{{"{}"}}}}',
    "update": '[["{}"]]',
    "output": '[/"{}"/]',
}
_ARROWS = {"data": "-->", "stream": "-->|stream|"}


def as_mermaid(plan: Plan) -> str:
    graph = plan.graph()
    ids = {node["name"]: f"n{number}" for number, node in enumerate(graph["nodes"])}

    def drawn(node: dict[str, Any]) -> str:
        label = "<br/>".join(map(_quoted, node["lines"]))
        return ids[node["name"]] + _SHAPES[node["kind"]].format(label)

    lines = ["flowchart LR", *(f"  {drawn(node)}" for node in graph["nodes"] if node["kind"] == "dataset")]
    for number in range(len(plan.phases)):
        lines.append(f'  subgraph phase{number + 1}["phase {number + 1}"]')
        lines += [f"    {drawn(node)}" for node in graph["nodes"] if node["phase"] == number]
        lines.append("  end")
    lines += [f"  {drawn(node)}" for node in graph["nodes"] if node["kind"] == "output"]
    for edge in graph["edges"]:
        arrow = _ARROWS.get(edge["kind"], f"-.->|{edge['kind']}|")
        lines.append(f"  {ids[edge['source']]} {arrow} {ids[edge['target']]}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # `#` begins an entity of Mermaid's, what stands in `<>` is HTML
    for letter, entity in {"#": "#35;", '"': "#quot;", "&": "#amp;", "<": "#lt;", ">": "#gt;"}.items():
        text = text.replace(letter, entity)
    return text


def as_json(plan: Plan) -> dict[str, Any]:
    spec = plan.spec
    datasets: dict[str, Tree] = {}
    for name, dataset in spec.datasets.items():
        division = plan.division(name)
        datasets[name] = {
            "source": dataset.kind,
            "element": None
            if plan.sources[name].element_spec is None
            else described(plan.sources[name].element_spec),
            "batch": dataset.batch,
            "epochs": dataset.epochs,
            "shuffle": dataset.shuffle,
            "elements_per_epoch": None if division is None else division.length,
            "steps_per_epoch": None if division is None else division.steps_per_epoch,
            "ranges": [
                {"step": step, "replicas": [list(b) for b in bounds]}
                for step, bounds in element_ranges(plan, name)
            ],
            "read_by": "workers" if plan.sources[name].portable else "scheduler",
            "delivery": _delivery(plan, name),
        }
    return {
        "format": 1,
        "name": spec.name,
        "replicas": spec.replicas,
        "workers": plan.workers,
        "seed": spec.seed,
        "datasets": datasets,
        "phases": [
            [
                {
                    "dataset": p.dataset,
                    "root": p.root,
                    "runs": list(p.runs),
                    "folds": list(p.folds),
                    "kept": list(p.kept),
                    "updates": list(p.updates),
                    "batch": p.batch,
                    "streams": plan.maker(p) is not None,
                    "follows": p.follows or None,
                    "gpus": p.gpus or None,
                    "calls_at_once": {n: c for n in p.runs if (c := plan.calls_at_once(n))} or None,
                    "gang": {"replicas": spec.replicas, "workers": min(spec.replicas, plan.workers)}
                    if p.gang
                    else None,
                }
                for p in phase
            ]
            for phase in plan.phases
        ],
        "states": {
            name: {"per": state.per, "init": _label(state.init), "until": _label(state.until)}
            for name, state in plan.states.items()
        },
        "finishes": {name: finish.label for name, finish in plan.finishes.items()},
        "inputs": {
            name: list(stage.inputs)
            for name, stage in spec.stages.items()
            if not isinstance(stage, GatherSpec) and stage.inputs
        },
        "outputs": dict(spec.outputs),
    }


def _label(function: FunctionRef | None) -> str | None:
    return None if function is None else function.label
