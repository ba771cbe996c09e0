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
from pipedist.core.types import FunctionRef, Tree
from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.protocol.codec import Frame, UnsendableError, decode, encode
from pipedist.protocol.layout import ClassNotFound

OWN_STATE = ""
"""The name of the changed state among an update's arguments; no other argument has it."""


@dataclass(frozen=True, slots=True)  # not a Struct: the codec sends dataclasses within trees
class StateValue:
    """A placeholder in a stage's arguments.

    It stands for the state's value, at the version that the lease names.

    Args:
        name: of the state, in `Shards.states`.
    """

    name: str


class StageProgram(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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
            `fn(state, value, **kwargs)`; `kwargs` has the state under OWN_STATE.
        collectives: the function may call collectives, and is called with empty shards too. The
            pass is a gang (`Program.gang`).
        timeout_s: maximum time of one call of the function, seconds; None: no limit.
        gpus: number of GPUs that a call of it needs to itself; a fraction: calls share one.
    """

    name: str
    function: FunctionRef
    of: int
    kwargs: dict[str, Tree]
    form: Literal["shard", "apply", "combine", "update"] = "shard"
    collectives: bool = False
    timeout_s: float | None = None
    gpus: float = 0.0


class Emit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One value that each call sends back.

    Args:
        slot: name under which the coordinator finds it.
        of: index of the stage whose value it is; -1: the shard itself; -2: the values that the call
            assigned to variables (`pipedist.worker.variables.replica`), missing if there are none.
        op: "" for the value itself; else the reduce op whose PARTIAL of the value is sent
            (`pipedist.reduction.tree.Reduction(op, axis).partial(value)`), so that rows do not travel.
        axis: the reduction's axis: None, or a tuple of ints.
    """

    slot: str
    of: int
    op: str = ""
    axis: tuple[int, ...] | None = None


class ReaderConfig(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker finds a call's shard.

    Args:
        source: the arguments of `pipedist.datasets.open_reader` for reading the data in another
            process, or None: shards travel as values.
        batch: global batch size, elements.
        length: number of elements of one epoch, -1 if unknown.
        drop_remainder: the dataset's setting.
    """

    source: dict[str, Any] | None
    batch: int
    length: int
    drop_remainder: bool


class Program(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that a worker needs to execute the calls of a pass.

    Args:
        seed: the spec's seed; `ctx.rng` comes from (seed, stage, step, replica).
        replicas: R.
        reader: None if a call's value is not a shard of a dataset (`Strategy.run`, folds).
        stages: in the order of execution.
        emits: the values that each call sends back.
        code: absolute folders appended last to the worker's sys.path.
        threads: BLAS and OpenMP threads of a replica.
        gang: the calls of a step run at once (AssignGang), on all workers there are.
        devices: each replica's device ("cpu:0", "cuda:1"); empty: the CPU.
        communication: defaults of the gang's collectives: bytes_per_pack, timeout_s, implementation
            (`pipedist.collectives.options.CommunicationOptions`).
        verify: execute each call twice, and fail it if the values differ.
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


class Shards(Struct, frozen=True):
    """The payload of an Assign.

    It has the shards of calls [lo, hi), one entry per call.

    If the first three are None, the worker computes the element ids from the contract
    (`pipedist.datasets.division`) and reads the elements itself, by id.

    Args:
        ids: element ids of each call, int64[n], if arithmetic does not give them (shuffled datasets).
        locations: the arguments of `Reader.read`, if the source needs more than ids.
        values: the shards themselves, if the worker can't read the source.
        states: name -> [space, version] of each state that the calls read.
    """

    ids: list[Tree] | None = None
    locations: list[Tree] | None = None
    values: list[Tree] | None = None
    states: dict[str, list[int]] | None = None


def to_tree(program: Program) -> Tree:
    """Return `program` as nested lists that the codec can send.

    The user's values stay as they are.
    """
    return _to_lists(program)


def from_tree(tree: Tree) -> Program:
    """Return the Program that `to_tree` turned into `tree`.

    Raises:
        msgspec.ValidationError: it is not one.
    """
    return convert(tree, Program)


def _to_lists(value: object) -> Tree:
    if isinstance(value, Struct):
        value = astuple(value)
    return [_to_lists(item) for item in value] if type(value) is tuple else value


class Unloadable(PipedistError):
    """The class of a value that was sent to this worker is missing here, or differs."""


def to_frames(program: Program) -> list[Frame]:
    """Return the payload of Bind for a program.

    Raises:
        UnsendableError: a value of a stage's `with` cannot be sent; the text has its path.
    """
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

    Args:
        local_folder: returns the folder here that replaces a code folder of the driver.

    Raises:
        Unloadable: the class of a value cannot be imported here; the text names class and module.
        RemoteProtocolError: the payload is malformed.
    """
    code = tuple(map(local_folder, decode(frames[:1])))
    functions.append_code(code)
    return replace(from_tree(load_tree(frames[1:], "the arguments of this pass")), code=code)


def load_tree(frames: Sequence[memoryview], what: str) -> Tree:
    """Decode a tree that this worker's own scheduler sent, and import the modules of its classes.

    Args:
        what: name of the tree in an error.

    Raises:
        Unloadable: the class of a value cannot be imported here; the text names class and module.
        RemoteProtocolError: the payload is malformed.
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
