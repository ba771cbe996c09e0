"""Replicas of a gang as one JAX program, over a mesh of this process's devices.

The replica function is traced once per structure, shapes and dtypes of its arguments, with `shard_map` over the axis
of replicas, and compiled; the compiled programs are kept for the life of the process. Arrays and numbers in the
arguments are traced; other leaves (bool, str, objects) are constants, which must be equal in all replicas. Collectives
become those of XLA, which fold in an order of their own. Values of variables are inputs and results of the program, so
a step that fails assigns nothing.

Several steps of one shape are one dispatch, a `jax.lax.scan`. Replicas whose arguments differ in shape are separate
programs, one on each device, which cannot call collectives.
"""

from __future__ import annotations

import operator
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from pipedist.collectives.requests import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    CollectiveRequest,
    UnawaitedCollectives,
)
from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.reduction.partials import ReduceOp
from pipedist.worker.context import ReplicaContext, current, get_replica_context
from pipedist.worker.failures import user_frames
from pipedist.worker.jax_arguments import ArgumentSignature, Constant, text_of
from pipedist.worker.jax_mesh import AXIS, Host, Mesh, jax
from pipedist.worker.stages import Stage
from pipedist.worker.variables.access import plain
from pipedist.worker.variables.replica import ReplicaVariable
from pipedist.worker.variables.rules import (
    AssignMethod,
    Traits,
    VariableAggregation,
    require_aggregation,
)

PROGRAMS_MAX: Final = 256  # compiled programs; the least recently used one is dropped
_MEANS: Final = {
    1: np.float32,
    2: np.float32,
    4: np.float64,
    8: np.float64,
}  # dtype of a mean of ints, by bytes

Array = Any  # an array of jax, or its tracer


# -- in the traced function --------------------------------------------------------------


class NeedsAll(Exception):
    """A replica that is a program of its own called a collective."""


class _Collectives:
    """The collectives of a replica function while it is traced."""

    def __init__(self, replicas: int, is_async: bool, together: bool) -> None:
        self.is_async = is_async
        self.unawaited = UnawaitedCollectives()
        self._replicas = replicas
        self._together = together

    def call(self, request: CollectiveRequest) -> Any:
        if not self.is_async:
            return self.result(request)
        return self.unawaited.add(request, self._later(request))

    async def _later(self, request: CollectiveRequest) -> Tree:
        return self.result(request)

    def result(self, request: CollectiveRequest) -> Tree:
        if request.kind == BARRIER:
            return None  # a program has no time between its operations
        one: Callable[[Array], Array]
        if request.kind == ALL_REDUCE:
            op = ReduceOp.of(request.op)
            one = lambda leaf: self._reduce(op, leaf)  # noqa: E731
        elif request.kind == ALL_GATHER:
            one = lambda leaf: self._gather(request.axis, leaf)  # noqa: E731
        elif request.kind == BROADCAST:
            source = operator.index(request.source)
            if not 0 <= source < self._replicas:
                raise ValueError(
                    f"`source` must be the id of a replica, 0..{self._replicas - 1}, got {source}"
                )
            one = lambda leaf: jax().lax.all_gather(leaf, AXIS)[source]  # noqa: E731
        else:
            raise RuntimeError(
                f"{request.label or request.kind} was called in a function that is compiled: {request.kind} runs "
                "Python code for all replicas at once. Use ctx.all_reduce or ctx.all_gather, and jax.numpy"
            )
        leaves, treedef = trees.flatten(request.tree)
        if not leaves:
            raise ValueError(f"{request.kind} of a tree without leaves, {request.tree!r}")
        arrays = [self._array(request, treedef, at, leaf) for at, leaf in enumerate(leaves)]
        if not self._together:
            shapes = ", ".join(text_of(array.shape, array.dtype) for array in arrays)
            raise NeedsAll(request.kind, f"{request.label or request.kind} of {shapes}, at {request.where}")
        return trees.unflatten(treedef, map(one, arrays))

    def _array(self, request: CollectiveRequest, treedef: trees.Treedef, at: int, leaf: Any) -> Array:
        path = trees.treedef_paths(treedef)[at]
        place = f"{request.kind} of leaf {path!r}" if path else f"{request.kind} of the value"
        kind = getattr(leaf, "dtype", type(leaf))
        if isinstance(leaf, str | bytes) or (request.kind == ALL_REDUCE and kind in (bool, np.bool_)):
            raise TypeError(f"{place}: {kind} is not numeric")
        array = jax().numpy.asarray(leaf)
        if request.kind == ALL_GATHER and array.ndim == 0:
            raise ValueError(f"{place}: a scalar has no axis; expected rank >= 1")
        return array

    def _reduce(self, op: ReduceOp, leaf: Array) -> Array:
        lax = jax().lax
        if op is ReduceOp.MEAN:
            if leaf.dtype.kind in "iu":
                leaf = leaf.astype(_MEANS[leaf.dtype.itemsize])
            return (lax.psum(leaf, AXIS) / self._replicas).astype(leaf.dtype)
        if op is ReduceOp.PROD:
            return lax.all_gather(leaf, AXIS).prod(axis=0, dtype=leaf.dtype)
        fold = {ReduceOp.SUM: lax.psum, ReduceOp.MIN: lax.pmin, ReduceOp.MAX: lax.pmax}[op]
        return fold(leaf, AXIS)

    def _gather(self, axis: Any, leaf: Array) -> Array:
        if isinstance(axis, bool) or not hasattr(type(axis), "__index__"):
            raise TypeError(f"`axis` must be an int, got {axis!r}")
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"all_gather along axis {axis} of an array of rank {leaf.ndim}")
        return jax().lax.all_gather(leaf, AXIS, axis=axis % leaf.ndim, tiled=True)


class TracedContext(ReplicaContext):
    """The context of a replica function that is compiled: `step` and the replica's id are traced."""

    __slots__ = ()

    @property
    def rng(self) -> NoReturn:
        """Raise RuntimeError: the numbers would be constants of the program."""
        raise RuntimeError(
            "ctx.rng in a function that is compiled would draw its numbers once, when it is traced: use jax.random "
            "with a key of ctx.step and the replica's id: jax.random.fold_in(jax.random.key(SEED), ctx.step)"
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Raise RuntimeError if the attribute is one that a spec's functions have only if they are not compiled."""
        if name in ("epoch", "_elements"):
            raise RuntimeError(
                f"ctx.{name.lstrip('_')} is not there in a function that is compiled: it changes from step to step, "
                "but only ctx.step is traced. Compute it from ctx.step, or make it a part of the dataset's elements"
            )
        raise AttributeError(f"a ReplicaContext has no attribute {name!r}")


class _TracedVariables:
    """The variables of a step in a replica function while it is traced."""

    def __init__(
        self, traits: Mapping[int, Traits], values: Mapping[int, Array], collectives: _Collectives
    ) -> None:
        self._traits = traits
        self._values = values
        self._collectives = collectives
        self.changed: dict[int, Array] = {}

    def value(self, space: int) -> Array:
        found = self.changed.get(space)
        if found is None:
            found = self._values.get(space)
        if found is None:
            raise RuntimeError(
                "a variable of another step was used: it belongs to the function that captured it"
            )
        return found

    def change(self, variable: ReplicaVariable, method: AssignMethod, operand: object) -> Any:
        traits = self._traits[variable._space]
        own = _operand(traits, operand, method)
        if traits.dtype.kind == "b" and method != "assign":
            raise TypeError(f"{method} to the {traits.label}: bools can only be assigned")
        context = get_replica_context()
        assert context is not None  # the variable got this object from it
        if traits.copies or traits.replicas == 1:
            new = self._set(variable._space, method, own)
            return _done(new) if self._collectives.is_async else new
        require_aggregation(traits, method)
        first = traits.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        kind, op = (BROADCAST, "sum") if first else (ALL_REDUCE, traits.aggregation.value)
        label = f"{method} of variable {traits.name!r}"
        result = context._request(kind, own, op=op, label=label)
        if self._collectives.is_async:
            return self._later(variable._space, method, result)
        return self._set(variable._space, method, result)

    async def _later(self, space: int, method: AssignMethod, result: Any) -> Array:
        return self._set(space, method, await result)

    def _set(self, space: int, method: AssignMethod, operand: Array) -> Array:
        old = self.value(space)
        new = operand if method == "assign" else old + operand if method == "assign_add" else old - operand
        self.changed[space] = new
        return new

    def assigned(self) -> Tree:
        return None

    def merge(self, fn: Any, args: Any, kwargs: Any) -> Any:
        return fn, tuple(args), dict(kwargs or {})

    def merged(self, result: Tree) -> Tree:
        return result


async def _done(value: Array) -> Array:
    return value


def _operand(traits: Traits, value: object, method: AssignMethod) -> Array:
    """Return an operand as an array with the variable's dtype and shape, as `rules.operand_of`."""
    array = jax().numpy.asarray(value)
    adapts = not hasattr(value, "dtype") or getattr(value, "weak_type", False)
    fits = array.dtype == traits.dtype or (adapts and np.can_cast(array.dtype, traits.dtype, "same_kind"))
    if not fits or (array.dtype == bool) != (traits.dtype == bool):
        raise ValueError(
            f"{method} of a value of dtype {array.dtype} to the {traits.label}: cast it first, as in "
            f"x.astype({str(traits.dtype)!r})"
        )
    if array.shape != traits.shape:
        raise ValueError(
            f"{method} of a value of shape {list(array.shape)} to the {traits.label}: the shape must be the same"
        )
    return array.astype(traits.dtype)


def _place(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback, as text."""
    for frame in reversed(traceback.extract_tb(user_frames(error.__traceback__))):
        if f"{os.sep}site-packages{os.sep}" not in frame.filename:
            return f", at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def _awaited(result: Any) -> Tree:
    """Return the result of a function, sync or async: a collective's result is there when it is awaited."""
    if not hasattr(type(result), "__await__"):
        return result
    steps = result.__await__()
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    if isinstance(result, Coroutine):
        result.close()
    raise RuntimeError(
        "an async function that is compiled may await collectives only, but this one waits for something else"
    )


# -- programs ----------------------------------------------------------------------------


class CompiledFunction:
    """A replica function, compiled for calls of one signature.

    `together`: for all replicas of a mesh, and `steps` steps at once; otherwise for one replica, and one step.
    """

    def __init__(
        self,
        stage: Stage,
        signature: ArgumentSignature,
        traits: Mapping[int, Traits],
        mesh: Mesh,
        *,
        replicas: int,
        steps: int,
        together: bool,
    ) -> None:
        self._stage = stage
        self._signature = signature
        self._traits = traits
        self._replicas = replicas
        self._steps = steps
        self._together = together
        self._kinds: list[
            Constant | None
        ] = []  # for each leaf of the result, a constant, or None for an array
        self._treedef: trees.Treedef | None = None
        self._own = [space for space, each in traits.items() if each.copies]
        body: Callable[..., Any] = self._replica
        if together:
            spec = jax().sharding.PartitionSpec
            body = jax().shard_map(
                self._shard,
                mesh=mesh.mesh,
                in_specs=(spec(), spec(AXIS), spec(), spec(), spec(AXIS)),
                out_specs=(spec(AXIS), spec(), spec(AXIS)),
                check_vma=False,  # a gradient is the replica's own; all_reduce sums it
            )
        self._call = jax().jit(body)
        self.is_ready = False  # whether all members of a mesh of several processes have traced it

    def __call__(self, *inputs: Any) -> Any:
        return self._checked(self._call, inputs)

    def trace(self, *inputs: Any) -> None:
        """Call the function with tracers, and execute nothing."""
        self._checked(self._call.trace, inputs)

    def _checked(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        errors = jax().errors
        try:
            return call(*inputs)
        except (errors.JAXTypeError, errors.JAXIndexError) as error:
            label = self._stage.program.function.label
            fact = str(error).strip().partition("\n")[0].rstrip(".") + _place(error)
            raise TypeError(
                f"{label} cannot be compiled by JAX: {fact}. Its arguments are traced: use jax.numpy in place of "
                "NumPy, jax.numpy.where or jax.lax.cond in place of `if`, and a bool or str argument for constants"
            ) from error

    def results(self, leaves: Sequence[Host]) -> Tree:
        """Return one replica's result from its arrays."""
        assert self._treedef is not None  # traced
        given = iter(leaves)
        return trees.unflatten(
            self._treedef, [next(given) if kind is None else kind.value for kind in self._kinds]
        )

    def _shard(
        self,
        first: Array,
        arrays: list[Array],
        numbers: list[Array],
        shared: dict[int, Array],
        own: dict[int, Array],
    ) -> tuple[list[Array], dict[int, Array], dict[int, Array]]:
        """Execute the steps of one replica; sharded arrays have a first axis of length 1."""
        lax, replica = jax().lax, jax().lax.axis_index(AXIS)
        values = shared | {space: value[0] for space, value in own.items()}
        given = [array[0] for array in arrays]
        changed: dict[int, Array] = {}
        if self._steps == 1:
            results, changed = self._replica(replica, first, given, numbers, values)
        else:
            spaces: list[int] = []

            def body(carry: dict[int, Array], each: tuple[Array, list[Array]]) -> Any:
                step, own_arrays = each
                found, new = self._replica(replica, step, own_arrays, numbers, carry)
                spaces[:] = new
                return carry | new, found

            numbered = first + jax().numpy.arange(self._steps)
            last, results = lax.scan(body, values, (numbered, given))
            changed = {space: last[space] for space in spaces}
        return (
            [result[None] for result in results],
            {space: value for space, value in changed.items() if space not in self._own},
            {space: value[None] for space, value in changed.items() if space in self._own},
        )

    def _replica(
        self, replica: Array, step: Array, arrays: list[Array], numbers: list[Array], values: dict[int, Array]
    ) -> tuple[list[Array], dict[int, Array]]:
        """Trace the function in one step of one replica; return the arrays of its result, and new values."""
        stage, given, plain_numbers = self._stage, iter(arrays), iter(numbers)
        leaves = [
            leaf.value
            if isinstance(leaf, Constant)
            else next(given if type(leaf) is tuple else plain_numbers)
            for leaf in self._signature.leaves
        ]
        args, kwargs = trees.unflatten(self._signature.treedef, leaves)
        collectives = _Collectives(self._replicas, stage.is_async, self._together)
        variables = _TracedVariables(self._traits, values, collectives)
        ctx = TracedContext(replica, self._replicas, step, 0, stage.name, None, 0, collectives)
        ctx.variables = variables
        if stage.program.form != "apply":
            del ctx.epoch, ctx._elements
        token = current.set(ctx)
        try:
            result = plain(_awaited(stage.call_with(args, kwargs, ctx)))
            collectives.unawaited.check()
        finally:
            collectives.unawaited.drop()
            current.reset(token)
        found, self._treedef = trees.flatten(result)
        self._kinds = [None if isinstance(leaf, jax().Array) else Constant(leaf) for leaf in found]
        return [leaf for leaf in found if isinstance(leaf, jax().Array)], variables.changed


_programs: OrderedDict[Hashable, CompiledFunction] = OrderedDict()


def program(
    stage: Stage,
    signature: ArgumentSignature,
    traits: Mapping[int, Traits],
    mesh: Mesh,
    *,
    replicas: int,
    steps: int = 1,
    together: bool = True,
) -> CompiledFunction:
    """Return the compiled program of a stage's function, a cached one if there is one."""
    key = (
        stage.program.function,
        stage.name,
        signature,
        tuple(sorted((space, each.name, repr(each)) for space, each in traits.items())),
        mesh.devices,
        replicas,
        steps,
        together,
    )
    found = _programs.get(key)
    if found is None:
        while len(_programs) >= PROGRAMS_MAX:
            _programs.popitem(last=False)
        found = _programs[key] = CompiledFunction(
            stage, signature, traits, mesh, replicas=replicas, steps=steps, together=together
        )
    _programs.move_to_end(key)
    return found
