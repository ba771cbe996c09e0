"""The program of a pass: the functions that a worker executes.

A PASS is one read of one dataset in one phase of a spec: on each shard, all run stages below the
dataset are executed back to back, in one call, in one worker. So an intermediate value never travels,
and a call is repeated as a whole. The number of a call in its pass is `step * replicas + replica`.

A program is sent as the payload of Bind (`to_frames`, `from_frames`): the user's `with` values as trees of arrays,
functions by name (or, if they have none, by value with cloudpickle, scheduler to worker only). The first frame
is the list of the spec's code folders alone: the worker adds them to its import path before it decodes the rest,
because the class of a `with` value may be defined in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct, convert
from msgspec.structs import astuple, replace

from pipedist.core import functions
from pipedist.core.types import Form, FunctionRef, Tree
from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.protocol.codec import Frame, UnsendableError, decode, encode
from pipedist.protocol.layout import ClassNotFound
from pipedist.protocol.limits import RESULT_OBJECTS_MAX

OWN_STATE = ""  # the name of the changed state among an update's arguments; no other argument has it


@dataclass(frozen=True, slots=True)  # not a Struct: the codec sends dataclasses within trees
class StateValue:
    """A placeholder in a stage's arguments for a state of `Shards.states`, at the version that a lease names."""

    name: str


class StageProgram(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One function to execute on each call."""

    name: str  # the stage's name
    function: FunctionRef  # the user's function or class
    of: int  # index (in `Program.stages`) of the stage whose value it gets; -1: the shard
    kwargs: dict[str, Tree]  # the stage's `with`, resolved: a dict of trees
    # How it is called. "shard": `fn(value, **kwargs)`; "apply": the value is `(args, kwargs)` and the call is
    # `fn(*args, **kwargs)`; "combine": the value is a list of groups, each a list of components, folded by
    # `fn(a, b)` in the fixed tree: first the components of each group, then the groups' nodes. "update":
    # `fn(state, value, **kwargs)`; `kwargs` has the state under OWN_STATE
    form: Literal["shard", "apply", "combine", "update"] = "shard"
    # The function may call collectives, and is called with empty shards too. The pass is a gang
    # (`Program.gang`)
    collectives: bool = False
    timeout_s: float | None = None  # maximum time of one call of the function, seconds; None: no limit
    gpus: float = 0.0  # number of GPUs that a call of it needs to itself; a fraction: calls share one
    per_element: bool = False  # called with each element of the call's value; the results are batched
    ragged: Literal["lists", "rows"] | None = None  # with `per_element`: results may have any number of rows
    # Maximum calls of it at the same time, with elements or whole values, over all workers; 0: no limit
    concurrency: int = 0
    calls_per_s: float = 0.0  # maximum rate of calls, over all workers; 0: no limit
    attempts: int = 1  # how often it is called with a value that it raises for
    backoff_s: float = 0.0  # wait before the second attempt; doubles each time
    retry_on: tuple[str, ...] = ()  # names of the exceptions after which there is another attempt; (): all
    given_as: Form | None = None  # the form of the value of a "shard" call; None: NumPy arrays
    quarantine: bool = False  # an element that fails does not end the call: the others are executed too

    @property
    def is_limited(self) -> bool:
        """Whether its calls have a limit that is divided among the workers."""
        return self.concurrency > 0 or self.calls_per_s > 0


class Emit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One value that each call sends back."""

    slot: str  # name under which the coordinator finds it
    # Index of the stage whose value it is; -1: the shard itself; -2: the values that the call assigned to
    # variables (`pipedist.worker.variables.replica`), missing if there are none
    of: int
    # "" for the value itself; else the reduce op whose PARTIAL of the value is sent
    # (`pipedist.reduction.tree.Reduction(op, axis).partial(value)`), so that rows do not travel
    op: str = ""
    axis: tuple[int, ...] | None = None  # the reduction's axis: None, or a tuple of ints
    # The value is sent as a list of it, if the call took longer than to store it takes
    stored: bool = False
    # Limit of the value's leaves and containers; ELEMENTS_MAX if only functions read it
    objects_max: int = RESULT_OBJECTS_MAX
    # The value is sent as a component of this combine function, by its method `component(value)`, so that dicts
    # of Python objects do not travel
    combine: FunctionRef | None = None
    # With `op`: the slot of the value itself, sent in place of a partial that can't be made; "": the call fails
    whole: str = ""


class ReaderConfig(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker finds a call's shard."""

    # The arguments of `pipedist.datasets.open_reader` for reading the data in another process, or None: shards
    # travel as values
    source: dict[str, Any] | None
    batch: int  # global batch size, elements
    length: int  # number of elements of one epoch, -1 if unknown
    drop_remainder: bool  # the dataset's setting


class JaxDevices(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The JAX devices on which a pass's replicas are one compiled program per process."""

    platform: str  # "tpu", "gpu" or "cpu"
    # For each replica the number of its device in its process; empty: its place among that process's replicas
    ordinals: tuple[int, ...] = ()
    hosts: int = 1  # number of processes, each with the same number of replicas


class Program(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that a worker needs to execute the calls of a pass."""

    seed: int  # the spec's seed; `ctx.rng` comes from (seed, stage, step, replica)
    replicas: int  # R
    # None if a call's value is not a shard of a dataset (`Strategy.run`, folds)
    reader: ReaderConfig | None
    stages: tuple[StageProgram, ...]  # in the order of execution
    emits: tuple[Emit, ...]  # the values that each call sends back
    code: tuple[str, ...] = ()  # absolute folders appended last to the worker's sys.path
    threads: int = 1  # BLAS and OpenMP threads of a replica
    gang: bool = False  # the calls of a step run at once (AssignGang), on all workers there are
    devices: tuple[str, ...] = ()  # each replica's device ("cpu:0", "cuda:1"); empty: the CPU
    # Defaults of the gang's collectives: bytes_per_pack, timeout_s, implementation
    # (`pipedist.collectives.options.CommunicationOptions`)
    communication: tuple[int, float | None, str] = (0, None, "auto")
    verify: bool = False  # execute each call twice, and fail it if the values differ
    jax: JaxDevices | None = None  # the calls of a gang are compiled by JAX; None: they are Python
    fold: str = ""  # the stage that errors name if no function is called: the first fold of the pass

    @property
    def first_stage(self) -> str:
        """The stage that errors name before a function is called."""
        return self.stages[0].name if self.stages else self.fold

    @property
    def limits(self) -> tuple[int, ...]:
        """The calls at the same time of each limited stage, in order; 0: only its rate is limited."""
        return tuple(stage.concurrency for stage in self.stages if stage.is_limited)

    @property
    def call_s_max(self) -> float:
        """The time after which a call ends by the timeouts of its stages, seconds; 0: no limit."""
        limits = [stage.timeout_s for stage in self.stages]
        return 0.0 if None in limits else sum(limit or 0.0 for limit in limits)


class Shards(Struct, frozen=True):
    """The payload of an Assign: the shards of calls [lo, hi), one entry per call.

    If the first three are None, the worker computes the element ids from the contract
    (`pipedist.datasets.division`) and reads the elements itself, by id.
    """

    # Element ids of each call, int64[n], if arithmetic does not give them (shuffled datasets)
    ids: list[Tree] | None = None
    locations: list[Tree] | None = None  # the arguments of `Reader.read`, if the source needs more than ids
    values: list[Tree] | None = None  # the shards themselves, if the worker can't read the source
    states: dict[str, list[int]] | None = None  # name -> [space, version] of each state that the calls read
    # [call, stage, element, result, failure] of each element that needs no execution (`messages.Elements`)
    finished: list[Tree] | None = None


def to_tree(value: object) -> Tree:
    """Return a Program as nested lists that the codec can send; the user's values stay as they are."""
    if isinstance(value, Struct):
        value = astuple(value)
    return [to_tree(item) for item in value] if type(value) is tuple else value


class Unloadable(PipedistError):
    """The class of a value that was sent to this worker is missing here, or differs."""


def to_frames(program: Program) -> list[Frame]:
    """Return the payload of Bind for a program; an UnsendableError has the stage, and the value's path."""
    try:
        return [*encode(list(program.code)), *encode(to_tree(program))]
    except UnsendableError:
        for stage in program.stages:
            try:
                encode(stage.kwargs)
            except UnsendableError as error:
                raise UnsendableError(f"stage {stage.name}: `with`: {error}") from None
        raise


def from_frames(frames: Sequence[memoryview], local_folder: Callable[[str], str] = str) -> Program:
    """Return the program that `to_frames` wrote, and add its code folders to the import path.

    `local_folder` returns the folder here that replaces a code folder of the driver. Raises Unloadable if the
    class of a value cannot be imported here, RemoteProtocolError if the payload is malformed.
    """
    code = tuple(map(local_folder, decode(frames[:1])))
    functions.append_code(code)
    return replace(convert(load_tree(frames[1:], "the arguments of this pass"), Program), code=code)


def load_tree(frames: Sequence[memoryview], what: str) -> Tree:
    """Decode a tree that this worker's own scheduler sent, and import the modules of its classes.

    `what` names it in an error. Raises as `from_frames`.
    """
    try:
        return decode(frames, may_import=True)
    except RemoteProtocolError as error:
        if not isinstance(error.__cause__, ClassNotFound):
            raise
        raise Unloadable(
            f"{what} cannot be rebuilt in the worker: {error.__cause__}; define the class in a module "
            "that workers can import"
        ) from error
