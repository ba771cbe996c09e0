"""Compile a spec into a plan: open sources, import functions, order phases, check them all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from pipedist.core import gpus as accelerators
from pipedist.core.functions import FunctionNotFound, call_of, code_on_path, is_async, load, reference
from pipedist.core.gpus import Supply, spelled
from pipedist.core.names import plural
from pipedist.core.types import FunctionRef
from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.datasets.sources.paths import expand
from pipedist.errors import PlanError, Problem, UsageError
from pipedist.plan.callables import CallSignature, UnknownException, exception_names, find, plan_states
from pipedist.plan.model import PassPlan, Plan
from pipedist.plan.phases import ConflictingTrainingInputs, dataset_of, phases
from pipedist.spec import TORCH_IMPLEMENTATIONS, GatherSpec, ReduceSpec, RunSpec, Spec
from pipedist.spec.training import training_of

_UNKNOWN = Supply(None, (), "workers that dial in bring them")


def compile_plan(spec: Spec, *, workers: int, verify: bool = False, supply: Supply | None = None) -> Plan:
    """Plan a spec.

    Args:
        workers: decides only whether the plan is possible, and how GPUs are divided.
        verify: execute every call twice.
        supply: the GPUs of an open cluster; None: those of the spec's own cluster.

    Raises:
        PlanError: with everything that is missing or not possible here, and its place.
    """
    problems: list[Problem] = []
    with ExitStack() as stack:
        stack.enter_context(code_on_path([str(spec.code)]))
        sources = _open_sources(spec, problems, stack)
        functions = _import_functions(spec, problems)
        states = plan_states(spec, functions, problems)
        finishes = _import_finishes(spec, problems)
        problems += _check_outputs(spec, functions)
        problems += _check_inputs(spec)
        ordered: tuple[tuple[PassPlan, ...], ...] = ()
        try:
            ordered = phases(spec, training_of(tuple(spec.datasets), spec.links))
        except ConflictingTrainingInputs as error:
            place, expected = ("stages", error.stage, "of"), "one input for all updates"
            problems.append(spec.document.problem(place, str(error), expected=expected))
        if problems:
            raise PlanError(problems)
        supply = supply or supply_for(spec, workers)
        called = {name: _called(spec, name, ref) for name, ref in functions.items()}
        classes = frozenset(name for name, (is_class, _) in called.items() if is_class)
        asynchronous = frozenset(name for name, (_, is_async) in called.items() if is_async)
        keyed = frozenset(name for name, ref in functions.items() if _is_keyed(spec, name, ref))
        plan = Plan(
            spec,
            workers,
            sources,
            functions,
            states,
            ordered,
            supply,
            verify,
            asynchronous,
            classes,
            finishes,
            keyed,
        )
        problems += [*_check_gangs(plan), *_check_communication(plan), *_check_gpus(plan)]
        problems += [
            *_check_compiled(plan),
            *_check_waiting(plan),
            *_check_retries(spec),
            *_check_forms(spec),
            *_check_ragged(spec),
        ]
        if problems:
            raise PlanError(problems)
        plan.opened.push(stack.pop_all())
    return plan


def _open_sources(spec: Spec, problems: list[Problem], stack: ExitStack) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    tolerant = {  # their elements that can't be read are quarantined
        dataset_of(spec, name)
        for name, stage in spec.stages.items()
        if isinstance(stage, RunSpec) and stage.on_error == "quarantine"
    }
    for name, dataset in spec.datasets.items():
        place = ("datasets", name)
        config = dict(dataset.config)
        if dataset.kind == "source":
            form = CallSignature((), tuple(config["with"]))
            at, before = (*place, "source"), len(problems)
            ref = find(spec, problems, config["class"], form, (*at, "class"), (*at, "with"))
            if ref is None or len(problems) > before:
                continue
            config |= {"class": ref, "code": [str(spec.code)]}
        if isinstance(config.get("call"), str):  # a callable is called in this process
            try:
                config["call"] = load(reference(config["call"]), [str(spec.code)])
            except (FunctionNotFound, UsageError) as error:
                problems.append(spec.document.problem((*place, "function", "call"), str(error)))
                continue
        try:
            source = open_source(dataset.kind, config, folder=Path(spec.folder))
            stack.callback(source.close)
            if name not in tolerant:
                source.probe()
        except SourceError as error:
            key = [part for part in (error.key, error.name) if part]
            problem = spec.document.problem((*place, dataset.kind, *key), str(error), expected=error.expected)
            problems.append(replace(problem, nearest=error.nearest))
            continue
        sources[name] = source
        if dataset.shuffle and not source.random_access:
            message = "shuffle needs random access, but this dataset can only be read sequentially"
            expected = "a source of arrays or files, or shuffle: false"
            problems.append(spec.document.problem((*place, "shuffle"), message, expected=expected))
    return sources


def _import_functions(spec: Spec, problems: list[Problem]) -> dict[str, FunctionRef]:
    """Return references to the functions of runs and combines."""
    functions: dict[str, FunctionRef] = {}
    for name, stage in spec.stages.items():
        place = ("stages", name)
        ref = None
        if isinstance(stage, RunSpec):
            form = CallSignature(("shard",), tuple(stage.with_), serves_calls=True)
            ref = find(spec, problems, stage.run, form, (*place, "run"), (*place, "with"))
        elif isinstance(stage, ReduceSpec) and stage.combine is not None:
            at = (*place, "reduce")
            ref = find(spec, problems, stage.combine, CallSignature(("a", "b"), name="combine"), at, at)
        if ref is not None:
            functions[name] = ref
    return functions


def _import_finishes(spec: Spec, problems: list[Problem]) -> dict[str, FunctionRef]:
    """Return references to the functions that finish the values of reduces and gathers."""
    finishes: dict[str, FunctionRef] = {}
    for name, stage in spec.stages.items():
        if isinstance(stage, ReduceSpec | GatherSpec) and stage.finish is not None:
            form = CallSignature(("value",), tuple(stage.with_))
            place = ("stages", name)
            ref = find(spec, problems, stage.finish, form, (*place, "finish"), (*place, "with"))
            if ref is not None:
                finishes[name] = ref
    return finishes


def _called(spec: Spec, name: str, ref: FunctionRef) -> tuple[bool, bool]:
    """Return whether the function of a run is a class, and whether its calls are async."""
    stage = spec.stages[name]
    if not isinstance(stage, RunSpec):
        return False, False
    fn = load(ref, [str(spec.code)]) if ref.name else stage.run
    is_class = inspect.isclass(fn)
    return is_class, is_async(call_of(fn) if inspect.isclass(fn) else fn)


def _is_keyed(spec: Spec, name: str, ref: FunctionRef) -> bool:
    stage = spec.stages[name]
    if not isinstance(stage, ReduceSpec):
        return False
    from pipedist.reduction.keyed.combiners import KeyedCombiner  # most specs have no combine function

    combine = load(ref, [str(spec.code)]) if ref.name else stage.combine
    return isinstance(combine, KeyedCombiner)


def _check_waiting(plan: Plan) -> Iterator[Problem]:
    """Check that calls that wait at the same time are async, read no state that changes, and are of no gang."""
    for pass_ in plan.passes:
        states = plan.states_read(pass_)
        gang = next((n for n in pass_.runs if getattr(plan.spec.stages[n], "collectives", False)), "")
        for name in pass_.runs:
            stage = plan.spec.stages[name]
            if not isinstance(stage, RunSpec):
                continue
            if stage.concurrency and name not in plan.asynchronous:
                message = f"`concurrency` needs an async function, and `{plan.functions[name].label}` is a plain one"
                expected = (
                    "`async def`, or no `concurrency`: a plain function runs once at a time in each worker"
                )
                yield plan.spec.document.problem(("stages", name, "concurrency"), message, expected=expected)
            message, expected = "", ""
            if states:
                message = f"is not possible in a pass whose calls read a state that changes (`{states[0]}`)"
            elif gang:
                message = (
                    f"is for calls that are executed by themselves, and those of `{name}` are executed with those of "
                    f"`{gang}`, which has `collectives`"
                )
                expected = "a `batch` for the one that reads the other (`after`, if neither does), or "
            for key in ("concurrency", "per", "rate") if message else ():
                if getattr(stage, key) is not None:
                    place = ("stages", name, key)
                    yield plan.spec.document.problem(
                        place, f"`{key}` {message}", expected=f"{expected}no `{key}`"
                    )


def _check_retries(spec: Spec) -> Iterator[Problem]:
    for name, stage in spec.stages.items():
        if isinstance(stage, RunSpec) and stage.retry is not None:
            try:
                exception_names(stage.retry.on)
            except UnknownException as error:
                place = ("stages", name, "retry", "on")
                expected = "the name of its class, as in `TimeoutError`, or with its module, as in `httpx.ConnectError`"
                yield spec.document.problem(
                    place,
                    str(error),
                    expected=expected,
                    allowed=error.known,
                    given=error.name,
                    fragment=error.name,
                )


def _check_forms(spec: Spec) -> Iterator[Problem]:
    """Check that inputs in the form of another library are possible, and that the library is installed."""
    for name, stage in spec.stages.items():
        if not isinstance(stage, RunSpec) or stage.as_ is None:
            continue
        from pipedist.datasets.frames import missing_package  # rarely needed

        place = ("stages", name, "as")
        if stage.per or stage.compile:
            other = "per: element" if stage.per else f"compile: {stage.compile}"
            message = f"a function with `{other}` gets no {stage.as_} input"
            yield spec.document.problem(place, message, expected=f"no `as`, or no `{other}`")
        elif install := missing_package(stage.as_):
            message = f"`as: {stage.as_}` needs a package that is not installed here"
            yield spec.document.problem(place, message, expected=install)


def _check_ragged(spec: Spec) -> Iterator[Problem]:
    """Check that results of any number of rows are those of single elements, and not divided into elements again."""
    for name, stage in spec.stages.items():
        if not isinstance(stage, RunSpec):
            continue
        if stage.ragged and not stage.per:
            place = ("stages", name, "ragged")
            message = "`ragged` is about the results of single elements"
            yield spec.document.problem(place, message, expected="`per: element` too, or no `ragged`")
        before = spec.stages.get(stage.of)
        if isinstance(before, RunSpec) and before.ragged == "rows" and (stage.per or stage.batch):
            key = "per" if stage.per else "batch"
            message = f"`{stage.of}` has any number of rows for each element, so `{key}` can't divide them"
            yield spec.document.problem(
                ("stages", name, key), message, expected=f"no `{key}`, or `ragged: lists`"
            )


def _check_outputs(spec: Spec, functions: Mapping[str, FunctionRef]) -> Iterator[Problem]:
    if spec.outputs:
        from pipedist import outputs  # most embedded runs write no files
        from pipedist.outputs.tables import misfit
    for key, sink in spec.sinks.items():
        name, _, part = key.partition("/")
        place = ("outputs", name, part) if part else ("outputs", name)
        if complaint := outputs.missing_package(sink.kind):
            yield spec.document.problem(place, complaint)
        if sink.kind == "sink":
            from pipedist.outputs.class_sink import class_problem  # rarely needed

            cls, with_ = sink.options["class"], sink.options.get("with", {})
            if complaint := class_problem(cls, with_, str(spec.code)):
                yield spec.document.problem((*place, "sink", "class"), complaint)
        stage, ref = spec.stages[name], functions.get(name)
        is_whole = not part and isinstance(stage, ReduceSpec) and stage.finish is None
        if isinstance(stage, ReduceSpec) and ref is not None and is_whole:
            combine = load(ref, [str(spec.code)]) if ref.name else stage.combine
            if complaint := misfit(combine, Path(sink.path).suffix, stage.per):
                yield spec.document.problem(place, complaint)


def _check_inputs(spec: Spec) -> Iterator[Problem]:
    """Check that each declared input matches a file."""
    for name, stage in spec.stages.items():
        declared = () if isinstance(stage, GatherSpec) else stage.inputs
        for place, pattern in enumerate(declared):
            try:
                expand(pattern, Path(spec.folder))
            except SourceError as error:
                key = ("stages", name, "inputs", place)
                yield spec.document.problem(key, str(error), expected=error.expected)


def _check_gangs(plan: Plan) -> Iterator[Problem]:
    """Check that the runs of a gang have an input for empty shards too."""
    for pass_ in plan.passes:
        # The only replica of a step waits for no other one
        why, remedy = _why_empty(plan, pass_) if pass_.gang and plan.spec.replicas > 1 else ("", "")
        for name in pass_.runs if why else ():
            stage = plan.spec.stages[name]
            source = plan.spec.stages.get(stage.of)
            joins = getattr(stage, "collectives", False) and source is not None and stage.of in pass_.runs
            if joins and not getattr(source, "collectives", False):
                yield plan.spec.document.problem(
                    ("stages", name, "of"),
                    f"{why}. An empty shard has no value of `{stage.of}`, but `{name}` must join the collectives on "
                    "every replica",
                    expected=f"`collectives: true` on `{stage.of}` too{remedy}",
                )


def _why_empty(plan: Plan, pass_: PassPlan) -> tuple[str, str]:
    """Return why shards of a pass may be empty, and what prevents that; ("", ""): no shard is empty."""
    division = plan.division_of(pass_)
    if division is not None and division.steps_per_epoch:
        last = division.steps_per_epoch - 1
        if (parts := division.parts(last)) < division.replicas:
            shards, replicas = plural(parts, "shard"), plural(division.replicas, "replica")
            return f"step {last} of an epoch has {shards} for {replicas}", ", or `drop_remainder: true`"
    source = plan.source(pass_)
    while source is not None:
        for name in source.runs:
            if getattr(plan.spec.stages[name], "on_error", "") == "quarantine":
                return f"`{name}` may quarantine all elements of a shard", ""
        source = plan.source(source)
    return "", ""


def _check_communication(plan: Plan) -> Iterator[Problem]:
    """Check the communication options of gangs, and the needs of torch.distributed."""
    replicas = plan.spec.replicas
    for pass_ in plan.passes:
        options = pass_.communication(plan.spec)
        for name, collectives in options.items():
            first = next(iter(options))
            place = ("stages", name, "collectives")
            if collectives != options[first]:
                message = (
                    f"`{name}` and `{first}` run in the same gang but have different `collectives` settings"
                )
                expected = f"the same as in `{first}`, or `collectives: true`"
                yield plan.spec.document.problem(place, message, expected=expected)
            elif name == first and (implementation := collectives.implementation) in TORCH_IMPLEMENTATIONS:
                at = (*place, "implementation")
                if replicas > plan.workers:
                    division = f"{plural(replicas, 'replica')} on {plural(plan.workers, 'worker')}"
                    message = f"`{implementation}` needs a worker for each replica: there are {division}"
                    expected = f"--workers {replicas}, or `implementation: auto`"
                    yield plan.spec.document.problem(at, message, expected=expected)
                if find_spec("torch") is None:
                    message = f"`{implementation}` uses torch.distributed, but torch is not installed"
                    expected = "pip install torch, or `implementation: auto`"
                    yield plan.spec.document.problem(at, message, expected=expected)


def _check_compiled(plan: Plan) -> Iterator[Problem]:
    """Check that compiled runs have jax and their devices, and no other runs in their calls."""
    for pass_ in plan.passes:
        kind = pass_.devices(plan.spec)
        for name in pass_.runs if kind else ():
            stage = plan.spec.stages[name]
            place: tuple[str, ...] = ("stages", name)
            assert isinstance(stage, RunSpec)
            own = stage.resources.devices if stage.compile and stage.resources else None
            if own != kind or name in plan.classes:
                message = f"the calls of `{name}` execute compiled functions too, on {kind} devices"
                expected = f"`compile: jax` with `devices: {kind}` on all of them, and functions, not classes"
            elif find_spec("jax") is None:
                place = (*place, "compile")
                message = "the function is compiled by jax, which is not installed here"
                expected = "pip install 'pipedist[jax]', or no `compile`"
            elif kind != "cpu" and (missing := accelerators.missing_devices(kind)):
                place = (*place, "resources", "devices")
                message, expected = (
                    f"`{name}` needs {kind} devices, but {missing}",
                    "`devices: cpu`, or another host",
                )
            elif plan.spec.replicas % plan.hosts:
                hosts = plural(plan.hosts, "worker")
                message = f"{plural(plan.spec.replicas, 'replica')} cannot be divided among {hosts}"
                expected = "the same number of replicas for each worker: --workers 1"
            else:
                continue
            yield plan.spec.document.problem(place, message, expected=expected)


def _gpus_needed(spec: Spec) -> float:
    return max((s.gpus for s in spec.stages.values() if isinstance(s, RunSpec)), default=0.0)


def needs_gpus(spec: Spec) -> bool:
    return spec.cluster.launcher == "local" and _gpus_needed(spec) > 0


def supply_for(spec: Spec, workers: int) -> Supply:
    """Return the GPUs of the workers of a spec's own cluster."""
    if not (needed := _gpus_needed(spec)):
        return Supply((0.0,) * workers, (), "no stage needs any")
    if spec.cluster.launcher != "local":
        return _UNKNOWN
    return accelerators.supply(accelerators.found(), needed, workers)


def _check_gpus(plan: Plan) -> Iterator[Problem]:
    """Check that workers own enough GPUs for the calls of each stage."""
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
                message = f"`{name}` needs {spelled(stage.gpus)} per call, but {_there(plan.supply)}"
                expected = "a host with as many; or workers that dial in from one (`launcher: connect`); "
                expected += "or no `resources`, if the function does not need them"
                yield plan.spec.document.problem(place, message, expected=expected)
            elif pass_.gang and plan.gpu_owners(pass_) < plan.spec.replicas:
                yield plan.spec.document.problem(
                    place,
                    f"`{name}` is in a gang: its {plan.spec.replicas} replicas run at the same time, each on a "
                    f"worker with {spelled(pass_.gpus)}, but only {plan.gpu_owners(pass_)} of {plan.workers} "
                    f"workers have that; {_there(plan.supply)}",
                    expected=f"`--workers {plan.spec.replicas}` and GPUs for each; or fewer replicas; or a "
                    "fraction of a GPU for each, `gpus: 0.5`",
                )


def _there(supply: Supply) -> str:
    count = len(supply.gpus)
    there = f"are {count}" if count > 1 else "is 1" if count else "is none"
    return f"there {there} here ({supply.how})"
