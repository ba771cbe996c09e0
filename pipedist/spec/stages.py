"""Stages: the four verbs of tf.distribute, and the keys that go with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from pipedist.core.gpus import GPUS_MAX
from pipedist.core.types import Tree
from pipedist.spec.keys import FUNCTION_PATTERN, WITH, Arguments, Function, Names, function_name
from pipedist.spec.kinds import Checked, Choice, Integer, Nullable, Number, Text, Wrong
from pipedist.spec.scalars import describe
from pipedist.spec.section import FlagOrSection, Key, Section, key

RETRIES_MAX = 1_000
TIMEOUT_S_MAX = 10_000_000
BYTES_PER_PACK_MAX = 2**40
AXIS_MAX = 63

IMPLEMENTATIONS = ("auto", "shared", "transport", "gloo", "nccl")
"""Roads that the values of collectives can take; `pipedist.collectives` has what they do."""

TORCH_IMPLEMENTATIONS = ("gloo", "nccl")
"""Those that are torch.distributed's."""

OPS = ("sum", "mean", "min", "max", "prod")


def _axis(value: object) -> object:
    axes = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for axis in axes:
        if type(axis) is not int or not -AXIS_MAX - 1 <= axis <= AXIS_MAX:
            raise Wrong
    if isinstance(value, list | tuple):
        if not axes or len(set(axes)) < len(axes):
            raise Wrong("the list of axes is empty or repeats an axis")
        return tuple(axes)
    return value


def _op(value: object) -> object:
    if isinstance(value, str) and ":" not in value:
        if value not in OPS:
            raise Wrong(allowed=OPS)
        return value
    if not isinstance(value, str) and not callable(value):
        raise Wrong
    return function_name(value)


class InitLiteral(Struct, frozen=True):
    """A state that begins as a value of the spec."""

    value: Tree


class InitFile(Struct, frozen=True):
    """A state that begins as the content of a file, relative to the spec's folder."""

    path: str


class InitFunction(Struct, frozen=True):
    """A state that begins as what a function returns."""

    function: str | Callable[..., Any]
    with_: dict[str, Tree]


def _init(value: object) -> object:
    if isinstance(value, dict) and set(value) == {"file"}:
        path = value["file"]
        if not isinstance(path, str) or not path.endswith((".npy", ".npz", ".json")):
            raise Wrong("the file of `init` has no known ending", expected="a .npy, .npz or .json file")
        return InitFile(path)
    if isinstance(value, dict) and "function" in value and set(value) <= {"function", "with"}:
        with_ = value.get("with", {})
        if not isinstance(with_, dict):
            raise Wrong("the `with` of `init` is no mapping", expected="a mapping of names to values")
        return InitFunction(function_name(value["function"]), with_)
    return InitLiteral(value)


_Axis = Checked(
    _axis,
    {
        "anyOf": [
            {"type": "integer"},
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": True},
            {"type": "null"},
        ]
    },
)
_Op = Checked(_op, {"anyOf": [{"enum": list(OPS)}, {"type": "string", "pattern": FUNCTION_PATTERN}]})
_Init = Checked(_init, {})
_OF = Key(
    "What the stage reads: the name of a dataset or of a run.",
    expected="the name of a dataset or of a run",
    example="of: delays",
)
_PER = Key(
    "How often there is a value: one for the whole run, one for each epoch, or one for each step.",
    expected="run, epoch or step",
    example="per: step",
    choices=("run", "epoch", "step"),
)


class CollectivesSpec(Section):
    """How the collectives of a run communicate (tf.distribute's CommunicationOptions)."""

    implementation: Literal["auto", "shared", "transport", "gloo", "nccl"] = key(
        Choice(*IMPLEMENTATIONS),
        Key(
            "The road of the values. `auto`: `shared`, shared memory, where all workers of the step are on "
            "one host, else `transport`, through the scheduler; the bits are the same. `gloo` and `nccl` go "
            "through torch.distributed, for torch tensors; they need a worker for each replica, and their "
            "bits are their own.",
            "auto, shared, transport, gloo or nccl",
            "implementation: auto",
            choices=IMPLEMENTATIONS,
        ),
        default="auto",
    )
    timeout_s: float | None = key(
        Nullable(Number(TIMEOUT_S_MAX, positive=True)),
        Key(
            "How long a collective waits for replicas that do not come, in seconds, before the step is tried "
            "again without the workers that they hang in. `null`: 600.",
            "a positive number of seconds, or null",
            "timeout_s: 30",
        ),
        default=None,
    )
    bytes_per_pack: int = key(
        Integer(0, BYTES_PER_PACK_MAX),
        Key(
            "Large values travel in packs of so many bytes; 0: pipedist chooses. It never changes a bit.",
            f"an integer from 0 to {BYTES_PER_PACK_MAX}",
            "bytes_per_pack: 0",
        ),
        default=0,
    )


def _resources(value: object) -> object:
    if not isinstance(value, dict):
        raise Wrong
    for name in value:
        if name != "gpus":
            raise Wrong(f"`resources` has no {name!r}", allowed=("gpus",))
    gpus: Any = value.get("gpus")
    if type(gpus) not in (int, float) or not (0 < gpus < 1 or gpus in range(1, GPUS_MAX + 1)):
        raise Wrong(f"`gpus` is {describe(gpus)}")
    return {"gpus": gpus}


_Resources = Checked(
    _resources,
    {
        "type": "object",
        "properties": {
            "gpus": {
                "anyOf": [
                    {"type": "integer", "minimum": 1, "maximum": GPUS_MAX},
                    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                ]
            }
        },
        "required": ["gpus"],
        "additionalProperties": False,
    },
)


class RunSpec(Section):
    """A replica function, called once on each shard."""

    run: str | Callable[..., Any] = key(
        Function,
        Key(
            "The replica function or class: `fn(shard, **with)`, sync or async; with a parameter named `ctx` "
            "it also gets the `ReplicaContext`. Of a class, one instance is made per worker and called.",
            '"package.module:name", of Python identifiers',
            "run: flights:delays",
        ),
    )
    of: str = key(
        Text(),
        Key(
            "The dataset whose shards, or the run whose values, the function gets.",
            "the name of a dataset or of a run",
            "of: dataset",
            required="Default: the dataset, where there is one only; required where there are several.",
        ),
    )
    with_: dict[str, Any] = key(Arguments, WITH, default={})
    timeout_s: float | None = key(
        Nullable(Number(TIMEOUT_S_MAX, positive=True)),
        Key(
            "How long one call of the function may take, in seconds; then its worker is killed, at most a "
            "second later, and that counts as an exception of the stage. Imports, the construction of a "
            "class and waiting for other replicas do not count. `null`: for ever.",
            "a positive number of seconds, or null",
            "timeout_s: 60",
        ),
        default=None,
    )
    retries: int = key(
        Integer(0, RETRIES_MAX),
        Key(
            "How often a call is tried again after an exception or a timeout: the first time at once, then "
            "after 0.1 s, 0.2 s, 0.4 s and so on, at most 10 s. A worker's death is always retried and does "
            "not count.",
            f"an integer from 0 to {RETRIES_MAX}",
            "retries: 2",
        ),
        default=0,
    )
    on_error: Literal["fail", "quarantine"] = key(
        Choice("fail", "quarantine"),
        Key(
            "What happens after the last retry, or the fifth death of a worker: the run fails, or the "
            "elements of the call are tried apart, the guilty ones are set aside and listed, and the others "
            "count. Of stages with `collectives` the whole step is set aside.",
            "fail or quarantine",
            "on_error: quarantine",
            choices=("fail", "quarantine"),
        ),
        default="fail",
    )
    collectives: CollectivesSpec | Literal[False] = key(
        FlagOrSection(CollectivesSpec),
        Key(
            "Whether the function calls `ctx.all_reduce` and the like: then all replica calls of a step run "
            "at once, or not at all, and empty shards are called too. A mapping means true, and says how its "
            "collectives communicate where a call says nothing else.",
            "true, false, or a mapping with `implementation`, `timeout_s` and `bytes_per_pack`",
            "collectives: true",
        ),
        default=False,
    )
    resources: dict[str, float] | None = key(
        Nullable(_Resources),
        Key(
            "What a call of the function needs for itself. `gpus`: so many GPUs; it runs only on a worker "
            "that owns them, and `ctx.device` is the first one. A fraction, 0.5: so many calls share one. "
            "`null`: nothing but a processor.",
            f"a mapping {{gpus: N}}: an integer from 1 to {GPUS_MAX}, or a fraction between 0 and 1",
            "resources: {gpus: 1}",
        ),
        default=None,
    )
    after: tuple[str, ...] = key(
        Names,
        Key(
            "Stages that must be complete before this one begins, though it reads nothing of theirs.",
            "the name of a stage, or a list of them",
            "after: [warm-up]",
        ),
        default=(),
    )

    @property
    def gpus(self) -> float:
        """How many GPUs a call needs; 0 for none."""
        return float(self.resources["gpus"]) if self.resources else 0.0


class ReduceSpec(Section):
    """The components of all calls, folded into one value in a fixed order."""

    reduce: str | Callable[..., Any] = key(
        _Op,
        Key(
            "How two values become one: a built-in op, or an associative `combine(a, b)` of yours, which "
            "runs on the workers.",
            'sum, mean, min, max, prod, or "package.module:combine"',
            "reduce: sum",
            choices=OPS,
        ),
    )
    of: str = key(Text(), _OF)
    axis: int | tuple[int, ...] | None = key(
        _Axis,
        Key(
            "The axes of the components that are folded away, over all calls together; `null`: element by "
            "element across the calls. Required with a built-in op, and only there.",
            "an integer, a list of different integers, or null",
            "axis: 0",
        ),
        default=None,
    )
    per: Literal["run", "epoch", "step"] = key(Choice("run", "epoch", "step"), _PER, default="run")

    @property
    def op(self) -> str | None:
        """The built-in op, or None where `combine` is a function."""
        return self.reduce if isinstance(self.reduce, str) and ":" not in self.reduce else None

    @property
    def combine(self) -> str | Callable[..., Any] | None:
        """The combining function, or None where `op` is a built-in one."""
        return None if self.op is not None else self.reduce


class GatherSpec(Section):
    """The components of all calls, end to end, in element order."""

    gather: int = key(
        Integer(-AXIS_MAX - 1, AXIS_MAX),
        Key("The axis along which the components are put together.", "an integer", "gather: 0"),
    )
    of: str = key(Text(), _OF)
    per: Literal["run", "epoch", "step"] = key(Choice("run", "epoch", "step"), _PER, default="run")


class UpdateSpec(Section):
    """A state that is carried from step to step."""

    update: str | Callable[..., Any] = key(
        Function,
        Key(
            "`fn(state, value, **with) -> state`, called once for each value of `of`, on a worker; its "
            "arrays are read-only. Of updates with values at the same time, one that reads another's state "
            "comes after it; those of an epoch come after its last step.",
            '"package.module:name", of Python identifiers',
            "update: regression:descend",
        ),
    )
    of: str = key(
        Text(),
        Key(
            "The reduce or gather whose values change the state.",
            "the name of a reduce or gather",
            "of: gradient",
        ),
    )
    init: InitLiteral | InitFile | InitFunction = key(
        _Init,
        Key(
            "The state before the first step: a literal, `{file: w.npy}`, or "
            '`{function: "module:name", with: {...}}`.',
            'a value, {file: NAME}, or {function: "module:name", with: {...}}',
            "init: 0.0",
        ),
    )
    with_: dict[str, Any] = key(Arguments, WITH, default={})
    until: str | Callable[..., Any] | None = key(
        Nullable(Function),
        Key(
            "`fn(old, new) -> bool`, asked after each update: true ends the dataset that feeds the state "
            "there, and no later step is visible.",
            '"package.module:name", of Python identifiers',
            "until: regression:converged",
        ),
        default=None,
    )


OUTPUT_ENDINGS = (".json", ".npy", ".npz", ".csv", ".parquet", ".jsonl")
"""The endings of output files; each is a format."""

StageSpec = RunSpec | ReduceSpec | GatherSpec | UpdateSpec
STAGES: Mapping[str, type[Section]] = {
    "run": RunSpec,
    "reduce": ReduceSpec,
    "gather": GatherSpec,
    "update": UpdateSpec,
}
