"""Variables in replica functions: reads, assignments, and the values that are sent back to the driver.

The driver process has each variable's value, with a version. A lease names the versions with which its step begins;
assignments stay in the replicas until they have returned. Then replica 0's new value (or each replica's, if the
variable has copies) is sent back with the results, and becomes the next version when the driver commits it: a
step that fails or is retried begins with the same values as before.

    bound = bind(states, trees)           # when a lease begins
    ctx.variables = bound.of(replica)     # during a replica's call; variables in its functions use it
    assigned = ctx.variables.assigned()   # part of its outcome
    values = bound.produced()             # next versions that this worker knows already
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipedist.collectives.folding import RECYCLED_BYTES_MIN, FusedUpdate
from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.values import PerReplica
from pipedist.worker.context import get_replica_context
from pipedist.worker.strategy_views import VariableValues, merged_variables
from pipedist.worker.variables.access import AnyVariable, component, plain, update_copies
from pipedist.worker.variables.rules import (
    Array,
    AssignMethod,
    Traits,
    VariableAggregation,
    assign_copies,
    frozen,
    operand_of,
    read_copies,
    require_aggregation,
    updated,
)

PREFIX: Final = "variable:"  # prefix of the name of a variable's state, followed by the number of its space
SLOT: Final = "variables"  # slot in which a call sends back its assignments
_FUSED_DTYPES: Final = (np.float32, np.float64)
_QUIET_ERRORS: Final = frozenset({"ignore", "warn"})
EMIT_OF: Final = -2  # `Emit.of` of that slot, which is not the value of a stage


def state_name(space: int) -> str:
    return f"{PREFIX}{space}"


def to_state(traits: Traits, copies: Sequence[Array]) -> Tree:
    return {"traits": traits.to_wire(), "value": list(copies) if traits.copies else copies[0]}


class ReplicaVariable(AnyVariable):
    """A `pipedist.Variable` inside a replica function.

    It reads as this replica's value, also in NumPy (`x @ w`). Assignments to an ON_WRITE variable are collectives:
    every replica must make them, in the same order, and the aggregate of the operands is assigned; without an
    aggregation they raise ValueError if there are several replicas. They return the new value, read-only; in an
    async function, an awaitable of it. An assignment that is not awaited has no effect, and the function fails.
    """

    __slots__ = ("_space", "_traits")

    _traits: Traits

    def __init__(self, space: int, traits: Traits) -> None:
        self._space = space
        self._traits = traits

    def value(self) -> Array:
        """Return this replica's current value, a read-only array."""
        return self._values().value(self._space)

    def _change(self, method: AssignMethod, operand: object) -> Any:
        return self._values().change(self, method, operand)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaVariable, (self._space, self._traits)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._traits.label}>"

    def _values(self) -> VariableValues:
        merged = merged_variables.get()
        if merged is not None:
            return merged
        context = get_replica_context()
        variables = None if context is None else context.variables
        if variables is None:
            raise RuntimeError(
                f"the {self._traits.label} was used outside of its replica function: keep its value instead"
            )
        return variables


class BoundVariables:
    """The variables of one lease, with their values when it begins.

    `states` has [space, version] of every state of the lease; `found` the trees of the variables' states.
    """

    def __init__(self, states: Mapping[str, Sequence[int]], found: Mapping[str, Tree]) -> None:
        self._values: dict[int, Array | list[Array]] = {}
        self._versions: dict[int, int] = {}
        # New values in the first replica. Not the replicas: with a cycle, values would wait for the garbage collector
        self._changed: dict[int, Array] | None = None
        self.traits: dict[int, Traits] = {}
        self.proxies: dict[str, ReplicaVariable] = {}  # by state name: their replacements in arguments
        for name, tree in found.items():
            space, version = states[name]
            value = tree["value"]
            traits = Traits.from_wire(tree["traits"], value[0] if isinstance(value, list) else value)
            self._values[space] = value
            self._versions[space] = version
            self.traits[space] = traits
            self.proxies[name] = ReplicaVariable(space, traits)

    def of(self, replica: int) -> ReplicaVariables:
        """Return the variables of one replica. Call it once for each replica of the lease."""
        variables = ReplicaVariables(self, replica)
        if self._changed is None:
            self._changed = variables.changed
        return variables

    def copies(self, space: int) -> list[Array]:
        """Return the first value of each replica; only one if all are the same."""
        value = self._values.get(space)
        if value is None:
            raise RuntimeError(
                "a variable of another step was used: a variable belongs to the function that captured it, or "
                "got it as an argument; it can't be kept for another one"
            )
        return value if isinstance(value, list) else [value]

    def first_value(self, space: int, replica: int) -> Array:
        copies = self.copies(space)
        return copies[replica] if self.traits[space].copies else copies[0]

    def produced(self) -> list[tuple[int, int, Tree]]:
        """Return the next versions that this worker has: (space, version, tree)."""
        return [
            (space, self._versions[space] + 1, to_state(self.traits[space], [value]))
            for space, value in (self._changed or {}).items()
            if not self.traits[space].copies
        ]


def bind(states: Mapping[str, Sequence[int]], found: Mapping[str, Tree]) -> BoundVariables | None:
    """Return the variables among a lease's states, or None."""
    own = {name: tree for name, tree in found.items() if name.startswith(PREFIX)}
    return BoundVariables(states, own) if own else None


class ReplicaVariables:
    """The variables of a step in one replica, while its function runs."""

    def __init__(self, bound: BoundVariables, replica: int) -> None:
        self._bound = bound
        self.replica = replica
        self.changed: dict[int, Array] = {}  # new values by space, in the order of the first assignment

    def value(self, space: int) -> Array:
        value = self.changed.get(space)
        return self._bound.first_value(space, self.replica) if value is None else value

    def change(self, variable: ReplicaVariable, method: AssignMethod, operand: object) -> Any:
        context = get_replica_context()
        assert context is not None  # the variable got this object from it
        space = variable._space
        traits = self._bound.traits[space]
        is_shared = not traits.copies and traits.replicas > 1
        # A collective that is awaited later reads the operand after the caller may have changed it.
        own = operand_of(traits, operand, method, is_kept=context.is_async or not is_shared)
        if not is_shared:
            new = self._set(space, traits, method, own)
            return Assigned(new) if context.is_async else new
        require_aggregation(traits, method)
        label = f"{method} of variable {traits.name!r}"
        if traits.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            result = context._request("broadcast", own, source=0, label=label, target=space)
        else:
            update = None if context.is_async else self._fused(space, traits, method)
            op = traits.aggregation.value
            result = context._request("all_reduce", own, op=op, label=label, target=space, update=update)
            if update is not None and update.is_done:
                new = self.changed[space] = frozen(result)
                return new
        if context.is_async:
            return self._later(space, traits, method, result)
        return self._set(space, traits, method, frozen(np.asarray(result)))

    def _fused(self, space: int, traits: Traits, method: AssignMethod) -> FusedUpdate | None:
        """Return the update that all_reduce is to make in its own pass over a large array."""
        old = self.value(space)
        if method == "assign" or traits.dtype not in _FUSED_DTYPES or old.nbytes < RECYCLED_BYTES_MIN:
            return None
        if not _QUIET_ERRORS.issuperset(np.geterr().values()):
            return None  # the function wants to be notified of an overflow
        return FusedUpdate(np.add if method == "assign_add" else np.subtract, old)

    async def _later(self, space: int, traits: Traits, method: AssignMethod, result: Awaitable[Any]) -> Array:
        return self._set(space, traits, method, frozen(np.asarray(await result)))

    def _set(self, space: int, traits: Traits, method: AssignMethod, operand: Array) -> Array:
        new = self.changed[space] = updated(traits, self.value(space), method, operand)
        return new

    def assigned(self) -> Tree:
        """Return the values that the call sends back, {space: value}, or None.

        Replica 0 sends the value of a variable without copies; each replica sends its own copy. The arrays are
        read-only, and never change again.
        """
        assigned = {
            space: value
            for space, value in self.changed.items()
            if self.replica == 0 or self._bound.traits[space].copies
        }
        return assigned or None

    # -- merge_call ------------------------------------------------------------------------

    def merge(
        self, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Callable[..., Tree], tuple[Any, ...], dict[str, Any]]:
        """Return the merge_call to make instead; variables in the arguments remain variables."""
        leaves, treedef = trees.flatten((tuple(args), dict(kwargs or {})))
        places = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, ReplicaVariable)}
        # None is a node: the other arguments keep their positions, and the structures of all replicas are compared.
        rest = trees.unflatten(treedef, [None if at in places else leaf for at, leaf in enumerate(leaves)])
        copies = {space: self.value(space) for space, traits in self._bound.traits.items() if traits.copies}

        @functools.wraps(fn)
        def body(strategy: Any, rest: Tree, copies: dict[int, PerReplica]) -> Tree:
            merged = MergedVariables(self, {space: list(value) for space, value in copies.items()})
            given = iter(trees.flatten(rest)[0])
            own_args, own_kwargs = trees.unflatten(
                treedef, [places[at] if at in places else next(given) for at in range(len(leaves))]
            )
            token = merged_variables.set(merged)
            try:
                result = plain(fn(strategy, *own_args, **own_kwargs))
            finally:
                merged_variables.reset(token)
            return {"result": result, "assigned": merged.assigned()}

        return body, (rest, copies), {}

    def merged(self, result: Tree) -> Tree:
        """Apply the assignments of the function of `merge`; return the user's result."""
        self.changed.update({space: frozen(value) for space, value in result["assigned"].items()})
        return result["result"]


class MergedVariables:
    """The variables of a step inside merge_call.

    `own` belongs to the replica in whose thread it runs; `copies` has the current values of variables with copies.
    """

    def __init__(self, own: ReplicaVariables, copies: dict[int, list[Array]]) -> None:
        self._own = own
        self._copies = copies
        self._changed: dict[int, list[Array]] = {}

    def copies(self, space: int) -> list[Array]:
        """Return each replica's value; a single one if all have the same."""
        return self._changed.get(space) or self._copies.get(space) or [self._own.value(space)]

    def components(self, value: Tree, *, mirrored: bool) -> Tree:
        traits = self._own._bound.traits

        def leaf(item: Any) -> Any:
            if not isinstance(item, ReplicaVariable):
                return item
            space = item._space
            return component(traits[space], self.copies(space), mirrored=mirrored)

        return trees.tree_map(leaf, value)

    def value(self, space: int) -> Array:
        traits = self._own._bound.traits[space]
        copies = self.copies(space)
        return read_copies(traits, copies) if traits.copies else copies[0]

    def change(self, variable: ReplicaVariable, method: AssignMethod, operand: object) -> Array:
        space = variable._space
        traits = self._own._bound.traits[space]
        if traits.copies:
            self._changed[space] = assign_copies(traits, self.copies(space), operand, method)
        else:
            new = updated(traits, self.copies(space)[0], method, operand_of(traits, operand, method))
            self._changed[space] = [new]
        return self._changed[space][0]

    def update(
        self,
        variable: ReplicaVariable,
        fn: Callable[..., Tree],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tree:
        if not isinstance(variable, ReplicaVariable):
            raise TypeError(
                f"update needs a pipedist.Variable, not {variable!r} of type {type(variable).__name__}"
            )
        space = variable._space
        traits = self._own._bound.traits[space]
        before = self.copies(space)
        new, results = update_copies(traits, before, fn, args, kwargs)
        if any(a is not b for a, b in zip(new, before, strict=True)):
            self._changed[space] = new
        return results

    def assigned(self) -> dict[int, Any]:
        """Return the new values, {space: value}, PerReplica if there are copies."""
        traits = self._own._bound.traits
        return {
            space: PerReplica(copies) if traits[space].copies else copies[0]
            for space, copies in self._changed.items()
        }


class Assigned(Coroutine[Any, Any, Array]):
    """An awaitable of a new value that is set already: nothing is lost if it is not awaited."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Array]:
        yield from ()
        return self._value

    def send(self, _value: Any) -> Any:
        raise StopIteration(self._value)

    def throw(self, *error: Any) -> Any:
        return super().throw(*error)

    def close(self) -> None: ...
