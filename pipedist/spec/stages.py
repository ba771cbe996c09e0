"""Stages: the four verbs of tf.distribute, and the keys of each."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Struct
from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipedist.core.types import Form, Tree
from pipedist.spec.fields import (
    BATCH_ELEMENTS_MAX,
    FUNCTION_EXPECTED,
    FUNCTION_PATTERN,
    Arguments,
    Expected,
    ExpectedShape,
    Function,
    Names,
    Paths,
    Section,
    function_name,
    mapping,
    message_error,
    satisfies,
)
from pipedist.spec.scalars import describe, listing
from pipedist.spec.stage_options import (
    RETRIES_MAX,
    CollectivesSpec,
    OptionalSeconds,
    RateSpec,
    ResourcesSpec,
    RetrySpec,
)

CONCURRENCY_MAX = 65_536
AXIS_MAX = 63

Op = Literal["sum", "mean", "min", "max", "prod"]
OPS: Final[tuple[str, ...]] = get_args(Op)

INIT_ENDINGS: Final = (".npy", ".npz", ".json")

_Axis = Annotated[int, Field(ge=-AXIS_MAX - 1, le=AXIS_MAX)]


_UNTIL_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "pattern": FUNCTION_PATTERN},
        {
            "type": "object",
            "properties": {
                "function": {"type": "string", "pattern": FUNCTION_PATTERN},
                "with": {"type": "object"},
            },
            "required": ["function"],
            "additionalProperties": False,
        },
    ]
}


def _op(value: object) -> object:
    return value if isinstance(value, str) and value in OPS else function_name(value)


class InitLiteral(Struct, frozen=True):
    """A state whose first value is a value of the spec."""

    value: Tree


class InitFile(Struct, frozen=True):
    """A state whose first value is the content of a file, relative to the spec's folder."""

    path: str


class InitFunction(Struct, frozen=True):
    """A state whose first value is returned by a function."""

    function: str | Callable[..., Any]
    with_: dict[str, Tree]


class Until(Struct, frozen=True):
    """The function that ends the epochs of a training, and its keyword arguments."""

    function: str | Callable[..., Any]
    with_: dict[str, Tree]


def _until(value: object) -> Until:
    if isinstance(value, dict) and "function" in value and set(value) <= {"function", "with"}:
        with_ = value.get("with", {})
        if isinstance(with_, dict):
            return Until(function_name(value["function"]), with_)
        raise ValueError("no mapping of arguments")
    return Until(function_name(value), {})


def _init(value: object) -> InitLiteral | InitFile | InitFunction:
    """Return the first value of a state; the keys of a mapping decide its kind."""
    if isinstance(value, dict) and set(value) == {"file"}:
        path = value["file"]
        if not isinstance(path, str) or not path.endswith(INIT_ENDINGS):
            raise _wrong_init("file", f"a path that ends in {listing(INIT_ENDINGS)}", path)
        return InitFile(path)
    if isinstance(value, dict) and "function" in value and set(value) <= {"function", "with"}:
        function, with_ = value["function"], value.get("with", {})
        if not isinstance(with_, dict):
            raise _wrong_init("with", "a mapping of argument names to values", with_)
        try:
            return InitFunction(function_name(function), with_)
        except ValueError:
            raise _wrong_init("function", FUNCTION_EXPECTED, function) from None
    return InitLiteral(value)


def _wrong_init(key: str, expected: str, given: object) -> PydanticCustomError:
    return message_error(f"the `{key}` of `init` must be {expected}, got {describe(given)}", expected)


def _collectives(value: object) -> object:
    return {} if value is True else value if value is False else mapping(value)


Per = Literal["run", "epoch", "step"]  # how often there is a value

_Per = Annotated[
    Per,
    Field(
        description="How often there is a value: one for the whole run, one for each epoch, or one for each "
        "step.",
        examples=["step"],
    ),
]


def _with() -> Any:
    return Field(
        default_factory=dict,
        alias="with",
        description="The keyword arguments of the function (of a class: of its constructor): any tree of "
        "values.",
        examples=[{"scale": 0.5, "centre": "${stages.mean}"}],
    )


_Inputs = Annotated[
    Paths,
    Field(
        description="Files that the function reads beside its arguments: globs, relative to the spec's folder. If "
        "one changes, a resumed run does not mix its results with earlier ones.",
        examples=[["models/*.json"]],
    ),
]

_Input = Annotated[
    str,
    Expected("the name of a dataset or of a run"),
    Field(description="The input of the stage: the name of a dataset or of a run.", examples=["delays"]),
]


class RunSpec(Section):
    """A replica function, called once on each shard."""

    run: Function = Field(
        description="The replica function or class: `fn(shard, **with)`, sync or async; with a parameter named "
        "`ctx` it also gets the `ReplicaContext`. A class is instantiated once per worker, and the instance is "
        "called.",
        examples=["flights:delays"],
    )
    of: _Input = Field(
        description="The input of the function: the dataset whose shards, or the run whose values, it gets. "
        "Required if the spec has several datasets; default: the only dataset.",
        examples=["dataset"],
    )
    batch: Annotated[
        Annotated[int, Field(ge=1, le=BATCH_ELEMENTS_MAX)] | None,
        Expected("a positive whole number of elements, or null"),
    ] = Field(
        default=None,
        description="The global batch size of this stage and of the stages that read it, if `of` is a run. In "
        "each epoch, step s has elements [s * batch, (s + 1) * batch), divided among the replicas as for a dataset. "
        "Arrays of the input are cut and joined along axis 0, which has one row for each element. `null`: the "
        "steps and shards of the input.",
        examples=[256],
    )
    as_: (
        Annotated[
            Form,
            Expected(listing(get_args(Form)), *get_args(Form)),
        ]
        | None
    ) = Field(
        default=None,
        alias="as",
        description="The form in which the function gets its input, instead of NumPy arrays: a DataFrame (`pandas`, "
        "`polars`) or Table (`arrow`), or tensors (`torch`, `jax`) in place of the arrays. Numbers and dates are not "
        "copied, except for torch. A frame needs arrays of one length. A function may return frames in any case: "
        "they become a dict of arrays by column.",
        examples=["pandas"],
    )
    with_: Arguments = _with()
    timeout_s: OptionalSeconds = Field(
        default=None,
        description="How long one call of the function may take, in seconds. Then its worker is killed within a "
        "second, which counts as an exception of the stage. A call that waits at the same time as others is "
        "cancelled instead, with a TimeoutError, and the others go on; its worker is killed only if it does not end "
        "within a second. Imports, the construction of a class, and waiting for other replicas do not count. "
        "`null`: no limit.",
        examples=[60],
    )
    retries: Annotated[int, Field(ge=0, le=RETRIES_MAX), Expected(f"an integer from 0 to {RETRIES_MAX}")] = (
        Field(
            default=0,
            description="How often a call is retried after an exception or a timeout: the first time at once, then "
            "after 0.1 s, 0.2 s, 0.4 s and so on, at most 10 s. After the death of a worker, its calls are always "
            "retried, and that does not count.",
            examples=[2],
        )
    )
    per: Annotated[Literal["element"] | None, Expected("element, or null")] = Field(
        default=None,
        description="`element`: the function is called with one element of its input at a time (an item of each "
        "list, an entry of each array), and the results of all elements are a batch again, in order: each number, "
        "text or array of a result becomes an array with an entry for each element. "
        "They must have the same keys, shapes and dtypes. `null`: with the whole input.",
        examples=["element"],
    )
    ragged: Annotated[Literal["lists", "rows"] | None, Expected("lists, rows, or null")] = Field(
        default=None,
        description="With `per: element`: the results of elements may have different numbers of rows. `lists`: each "
        "array or list of a result is a cell of an object array. `rows`: the rows of all elements follow each other, "
        "with the number of their element in the column `element`. `null`: all results have one shape.",
        examples=["rows"],
    )
    concurrency: Annotated[
        Annotated[int, Field(ge=1, le=CONCURRENCY_MAX)] | None,
        Expected(f"an integer from 1 to {CONCURRENCY_MAX}, or null"),
    ] = Field(
        default=None,
        description="For an async function, or a class with an async `__call__`: the number of calls that wait at the "
        "same time, over all workers; with `per: element`, of elements. It is divided among the workers that have "
        "calls, and exact: also while workers join and die. The instance of a class then serves several "
        "calls at the same time. Such a call is never executed a second time because it is slow. Default: 32 per "
        "worker for a function, one for a class, and one with `resources`.",
        examples=[64],
    )
    rate: Annotated[RateSpec, ExpectedShape("a mapping {calls: N, per_s: S}, or null", mapping)] | None = (
        Field(
            default=None,
            description="The maximum rate of calls (with `per: element`, of elements), attempts of `retry` "
            "included. It is divided among the workers that have calls, each of which begins its calls at even "
            "intervals. So at most one call per worker more than the rate begins in any time.",
            examples=[{"calls": 50, "per_s": 1}],
        )
    )
    retry: (
        Annotated[
            RetrySpec, ExpectedShape("a mapping {attempts: N, backoff_s: S, on: [NAME]}, or null", mapping)
        ]
        | None
    ) = Field(
        default=None,
        description="Attempts of a call (with `per: element`, of an element) in its worker, instead of `retries`.",
        examples=[{"attempts": 5, "backoff_s": 1, "on": ["TimeoutError"]}],
    )
    on_error: Literal["fail", "quarantine"] = Field(
        default="fail",
        description="The effect of a failure after the last retry, or after the fifth death of a worker. `fail`: "
        "the run fails. `quarantine`: the elements of the call are tried separately, the culprits are set aside "
        "and listed, and the other elements count. In a stage with `collectives`, the whole step is set aside.",
        examples=["quarantine"],
    )
    collectives: Annotated[
        Annotated[CollectivesSpec, Tag("collectives:mapping")]
        | Annotated[Literal[False], Tag("collectives:false")],
        Discriminator(lambda value: f"collectives:{'false' if value is False else 'mapping'}"),
        ExpectedShape(
            "true, false, or a mapping with `implementation`, `timeout_s` and `bytes_per_pack`",
            _collectives,
            CollectivesSpec | bool,
        ),
    ] = Field(
        default=False,
        description="Whether the function calls `ctx.all_reduce` and similar functions. If so, a step "
        "runs all its replica calls at the same time, or none, and empty shards are called too. A mapping means true, "
        "and its options hold for collectives whose call gives no others.",
        examples=[True],
    )
    compile: Annotated[Literal["jax"], Expected("jax", "jax")] | None = Field(
        default=None,
        description="`jax`: JAX compiles the function for all replicas of a worker at once, as `pipedist.TPUStrategy` "
        "does; `resources: {devices: ...}` names the devices. It needs `collectives: true`, and all "
        "runs of the same calls are compiled. XLA rounds in its own way, so the bits depend on the number of devices "
        "and workers.",
        examples=["jax"],
    )
    resources: (
        Annotated[ResourcesSpec, ExpectedShape("a mapping {gpus: N} or {devices: KIND}, or null", mapping)]
        | None
    ) = Field(
        default=None,
        description="The resources that a call of the function needs for itself. `null`: only a processor. "
        "If they differ from those of the run that it reads, the two are different calls, and run at the same "
        "time.",
        examples=[{"gpus": 1}],
    )
    after: Names = Field(
        default=(),
        description="Stages that must be complete before this one begins, although it reads none of their "
        "values.",
        examples=[["warm-up"]],
    )
    inputs: _Inputs = ()

    @property
    def gpus(self) -> float:
        """The number of GPUs that a call needs; 0 for none."""
        return float(self.resources.gpus) if self.resources else 0.0


_Finish = Annotated[
    Annotated[Function | None, Expected(f"{FUNCTION_EXPECTED}, or null")],
    Field(
        description="`fn(value, **with)`, called once on a worker with each whole value of the stage, whose value is "
        "then what it returns: for the output, `${stages.NAME}`, an `update` and a stream. Arrays of the value are "
        "read-only. Not called if there were no calls.",
        examples=["statistics:spread"],
    ),
]
_FinishWith = Annotated[
    Arguments, Field(alias="with", description="The keyword arguments of `finish`.", examples=[{"top": 20}])
]
_FinishTimeout = Annotated[
    OptionalSeconds,
    Field(description="How long a call of `finish` may take, in seconds; see `run`.", examples=[60]),
]
_FinishRetries = Annotated[
    Annotated[int, Field(ge=0, le=RETRIES_MAX), Expected(f"an integer from 0 to {RETRIES_MAX}")],
    Field(
        description="How often a call of `finish` is retried after an exception or a timeout; see `run`.",
        examples=[2],
    ),
]


class ReduceSpec(Section):
    """The components of all calls, folded into one value in a fixed order."""

    reduce: Annotated[
        str | Callable[..., Any],
        PlainValidator(_op),
        WithJsonSchema({"anyOf": [{"enum": list(OPS)}, {"type": "string", "pattern": FUNCTION_PATTERN}]}),
        Expected(f'{", ".join(OPS)}, or "package.module:combine"', *OPS),
    ] = Field(
        description="The operation that makes one value from two: a built-in op, or your own associative "
        "`combine(a, b)`, which runs on the workers.",
        examples=["sum"],
    )
    of: _Input
    axis: Annotated[
        _Axis
        | Annotated[tuple[_Axis, ...], satisfies(lambda axes: axes and len(set(axes)) == len(axes))]
        | None,
        ExpectedShape(
            "",
            lambda axes: tuple(axes) if isinstance(axes, list) else axes,
            _Axis
            | Annotated[list[_Axis], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
            | None,
        ),
        Expected("an integer, a list of different integers, or null"),
    ] = Field(
        default=None,
        description="The axes of the components that are folded away, over all calls together; `null`: element "
        "by element across the calls. Required with a built-in op, and an error with a function.",
        examples=[0],
    )
    per: _Per = "run"
    finish: _Finish = None
    with_: _FinishWith = Field(default_factory=dict)
    timeout_s: _FinishTimeout = None
    retries: _FinishRetries = 0
    inputs: _Inputs = ()

    @property
    def op(self) -> str | None:
        """The built-in op, or None if `combine` is a function."""
        return self.reduce if isinstance(self.reduce, str) and ":" not in self.reduce else None

    @property
    def combine(self) -> str | Callable[..., Any] | None:
        """The combining function, or None if `op` is a built-in one."""
        return None if self.op is not None else self.reduce


class GatherSpec(Section):
    """The components of all calls, concatenated in element order."""

    gather: Annotated[_Axis, Expected(f"an integer from {-AXIS_MAX - 1} to {AXIS_MAX}")] = Field(
        description="The axis along which the components are concatenated.", examples=[0]
    )
    of: _Input
    per: _Per = "run"
    finish: _Finish = None
    with_: _FinishWith = Field(default_factory=dict)
    timeout_s: _FinishTimeout = None
    retries: _FinishRetries = 0


class UpdateSpec(Section):
    """A state that is carried from step to step."""

    update: Function = Field(
        description="`fn(state, value, **with) -> state`, called once for each value of `of`, on a worker; its "
        "arrays are read-only. If several updates have values at the same time, an update that reads the state "
        "of another one comes after it; updates per epoch come after the last step of the epoch. Values per step or "
        "epoch that have no output are dropped when they are applied.",
        examples=["regression:descend"],
    )
    of: Annotated[str, Expected("the name of a reduce or gather")] = Field(
        description="The reduce or gather whose values change the state.", examples=["gradient"]
    )
    init: Annotated[InitLiteral | InitFile | InitFunction, PlainValidator(_init), WithJsonSchema({})] = Field(
        description="The state before the first step: a literal, `{file: w.npy}`, or "
        '`{function: "module:name", with: {...}}`.',
        examples=[0.0],
    )
    with_: Arguments = _with()
    until: Annotated[
        Annotated[Until, PlainValidator(_until), WithJsonSchema(_UNTIL_SCHEMA)] | None,
        Expected(f"{FUNCTION_EXPECTED}, a mapping {{function: NAME, with: {{...}}}}, or null"),
    ] = Field(
        default=None,
        description="`fn(old, new, **with) -> bool`, called after each update: true ends the dataset that feeds the "
        'state after this step, and no later step is visible. With arguments: `{function: "module:name", with: '
        "{...}}`.",
        examples=["regression:converged"],
    )
    inputs: _Inputs = ()


StageSpec = RunSpec | ReduceSpec | GatherSpec | UpdateSpec


def per_of(stage: StageSpec) -> Per:
    """Return how often a stage has a value; a state has one, at the end of the run."""
    return stage.per if isinstance(stage, ReduceSpec | GatherSpec) else "run"


STAGES: Final[Mapping[str, type[Section]]] = {
    "run": RunSpec,
    "reduce": ReduceSpec,
    "gather": GatherSpec,
    "update": UpdateSpec,
}


def _verb(value: object) -> str | None:
    found = [verb for verb in STAGES if verb in value] if isinstance(value, dict) else []
    return f"stage:{found[0]}" if found else None


AnyStage = Annotated[
    Annotated[RunSpec, Tag("stage:run")]
    | Annotated[ReduceSpec, Tag("stage:reduce")]
    | Annotated[GatherSpec, Tag("stage:gather")]
    | Annotated[UpdateSpec, Tag("stage:update")],
    Discriminator(_verb),
]
"""A stage, read by the model of its verb."""
