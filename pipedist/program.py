"""What a worker is told once about a pass: its functions, and what to send back.

A PASS is one reading of one dataset in one phase of a spec: on each shard, every run stage
that descends from the dataset is executed back to back, in one call, in one worker. So an
intermediate value never travels, and a call is repeated as a whole. The number of a call in
its pass is `step * replicas + replica`.

A program is data: it is sent as a payload (`to_tree`, `from_tree`), with the user's `with`
values as trees of arrays, and functions by name (or, where they have none, by value with
cloudpickle, scheduler to worker only).
"""

from __future__ import annotations

from typing import Any, Literal

from pipedist.records import record

Tree = Any
"""A nest of dict, list, tuple, namedtuple, dataclass, None; leaves are arrays, numbers, str, bytes."""


OWN_STATE = ""
"""In the arguments of an update: the state that it changes. No argument is called so."""


@record
class FunctionRef:
    """Where a worker finds a function.

    Args:
        label: for people and errors: "flights:delays", "<lambda>".
        name: "package.module:name", or "" where it travels by value.
        pickled: cloudpickle bytes, or b"" where it travels by name.
    """

    label: str
    name: str = ""
    pickled: bytes = b""


@record
class StateValue:
    """Stands in a stage's arguments for the value of a state, as of the version that its lease names.

    Args:
        name: of the state, in `Shards.states`.
    """

    name: str


@record
class StageProgram:
    """One function to execute on each call.

    Args:
        name: the stage's name.
        function: the user's function or class.
        of: index (in `Program.stages`) of the stage whose value it gets; -1: the shard.
        kwargs: the stage's `with`, resolved: a dict of trees.
        form: how it is called. "shard": `fn(value, **kwargs)`; "apply": the value is
            `(args, kwargs)` and the call is `fn(*args, **kwargs)`; "combine": the value is a
            list of groups, each a list of components, folded by `fn(a, b)` in the fixed tree:
            first the components of each group, then the groups' nodes. "update":
            `fn(state, value, **kwargs)`, where `kwargs` has the state under OWN_STATE.
        timeout_s: how long one call of the function may take, seconds; None: as long as it needs.
        collectives: the function may call collectives, and is called with empty shards too. The
            pass is a gang (`Program.gang`).
        gpus: how many GPUs a call of it needs to itself; a fraction: calls share one.
    """

    name: str
    function: FunctionRef
    of: int
    kwargs: dict[str, Tree]
    form: Literal["shard", "apply", "combine", "update"] = "shard"
    collectives: bool = False
    timeout_s: float | None = None
    gpus: float = 0.0


@record
class Emit:
    """One thing that each call sends back.

    Args:
        slot: name under which the coordinator finds it.
        of: index of the stage whose value it is; -1: the shard itself; -2: what the call assigned to
            variables (`pipedist.worker.variables`), missing where that is nothing.
        op: "" for the value itself; else the reduce op whose PARTIAL of the value is sent
            (`pipedist.reductions.Reduction(op, axis).partial(value)`), so that rows stay put.
        axis: the reduction's axis: None, or a tuple of ints.
    """

    slot: str
    of: int
    op: str = ""
    axis: tuple[int, ...] | None = None


@record
class ReaderConfig:
    """How a call's shard is found.

    Args:
        source: what `pipedist.datasets.open_reader` needs to read the data in another
            process, or None: shards travel as values.
        batch: global batch size, elements.
        length: number of elements of one epoch, -1 where unknown.
        drop_remainder: the dataset's setting.
    """

    source: dict[str, Any] | None
    batch: int
    length: int
    drop_remainder: bool


@record
class Program:
    """Everything that a worker needs to execute the calls of a pass.

    Args:
        seed: the spec's seed; `ctx.rng` comes from (seed, stage, step, replica).
        replicas: R.
        reader: None where a call's value is not a shard of a dataset (`Strategy.run`, folds).
        stages: in the order of execution.
        emits: what each call sends back.
        code: absolute folders appended last to the worker's sys.path.
        threads: BLAS and OpenMP threads of a replica.
        gang: the calls of a step run at once (AssignGang), over as many workers as there are.
        devices: what each replica computes on ("cpu:0", "cuda:1"), one a replica; empty: the CPU.
        communication: what the gang's collectives do where a call says nothing: bytes_per_pack,
            timeout_s, implementation (`pipedist.collectives.options.CommunicationOptions`).
        verify: each call is executed twice, and fails where that gives different values.
    """

    seed: int
    replicas: int
    reader: ReaderConfig | None
    stages: tuple[StageProgram, ...]
    emits: tuple[Emit, ...]
    code: tuple[str, ...] = ()
    threads: int = 1
    gang: bool = False
    devices: tuple[str, ...] = ()
    communication: tuple[int, float | None, str] = (0, None, "auto")
    verify: bool = False


@record
class Shards:
    """The payload of an Assign: where the shards of calls [lo, hi) are, one entry a call.

    All three None: the worker computes the element ids from the contract
    (`pipedist.datasets.division`) and reads them itself, by id.

    Args:
        ids: element ids of each call, int64[n], where they don't follow from arithmetic
            (shuffled datasets).
        locations: what `Reader.read` takes, where the source needs more than ids.
        values: the shards themselves, where the worker can't read the source.
        states: name -> [space, version] of each state that the calls read.
    """

    ids: list[Tree] | None = None
    locations: list[Tree] | None = None
    values: list[Tree] | None = None
    states: dict[str, list[int]] | None = None


def to_tree(program: Program) -> Tree:
    """Return `program` as a nest of dicts and lists that the codec can send."""
    return {
        "seed": program.seed,
        "replicas": program.replicas,
        "reader": None
        if program.reader is None
        else [
            program.reader.source,
            program.reader.batch,
            program.reader.length,
            program.reader.drop_remainder,
        ],
        "stages": [
            [
                s.name,
                [s.function.label, s.function.name, s.function.pickled],
                s.of,
                s.kwargs,
                s.form,
                s.collectives,
                s.timeout_s,
                s.gpus,
            ]
            for s in program.stages
        ],
        "emits": [[e.slot, e.of, e.op, None if e.axis is None else list(e.axis)] for e in program.emits],
        "code": list(program.code),
        "threads": program.threads,
        "gang": program.gang,
        "devices": list(program.devices),
        "communication": list(program.communication),
        "verify": program.verify,
    }


def from_tree(tree: Tree) -> Program:
    """Return the Program that `to_tree` turned into `tree`."""
    return Program(
        seed=tree["seed"],
        replicas=tree["replicas"],
        reader=None if tree["reader"] is None else ReaderConfig(*tree["reader"]),
        stages=tuple(
            StageProgram(name, FunctionRef(*function), of, kwargs, form, collectives, timeout_s, gpus)
            for name, function, of, kwargs, form, collectives, timeout_s, gpus in tree["stages"]
        ),
        emits=tuple(
            Emit(slot, of, op, None if axis is None else tuple(axis)) for slot, of, op, axis in tree["emits"]
        ),
        code=tuple(tree["code"]),
        threads=tree["threads"],
        gang=tree["gang"],
        devices=tuple(tree["devices"]),
        communication=tuple(tree["communication"]),
        verify=tree["verify"],
    )
