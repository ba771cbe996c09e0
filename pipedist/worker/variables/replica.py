"""Variables in a worker: what replica functions read and assign, and what goes back to the driver.

The driver has each variable's value, with a version. A lease names the versions that its step begins
with; what its replicas assign stays with them until they have returned. Then replica 0's new value (of
a variable with copies: each replica's) travels back with the results, and becomes the next version only
when the driver says so: a step that fails, or is tried again, begins with the same value as before.

    bound = bind(states, trees)           # when a lease begins
    ctx.variables = bound.of(replica)     # around a replica's call; the functions' variables find it there
    assigned = ctx.variables.assigned()   # its outcome
    kept = bound.produced()               # what the worker knows beforehand of the next versions
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.values import PerReplica
from pipedist.worker.context import get_replica_context
from pipedist.worker.strategy_views import VariableValues, merged_variables
from pipedist.worker.variables.access import AnyVariable, component, plain, update_copies
from pipedist.worker.variables.rules import (
    Array,
    How,
    Traits,
    VariableAggregation,
    assign_copies,
    frozen,
    operand_of,
    read_copies,
    require_aggregation,
    updated,
)

PREFIX: Final = "variable:"
"""A variable's state is named so, followed by the number of its space."""

SLOT: Final = "variables"
"""Name under which a call sends back what it has assigned."""

EMIT_OF: Final = -2
"""`Emit.of` of that slot: it is the value of no stage."""


def state_name(space: int) -> str:
    """Return the name of a variable's state in `Shards.states`."""
    return f"{PREFIX}{space}"


def to_state(traits: Traits, copies: Sequence[Array]) -> Tree:
    """Return a version of a variable as it travels to a worker."""
    return {"traits": traits.to_wire(), "value": list(copies) if traits.copies else copies[0]}


class ReplicaVariable(AnyVariable):
    """A variable inside a replica function: the replica's side of `pipedist.Variable`.

    It reads as this replica's value, in NumPy too (`x @ w`). Assignments to an ON_WRITE variable are
    collectives: every replica must make them, in the same order, and what is assigned is the aggregate
    of what they bring; without aggregation they are a ValueError, where there are several replicas. They
    return the new value, read-only; in an async function something that gives it and must be awaited: an
    assignment that was not is not made, and the function fails for it.
    """

    __slots__ = ("_space", "_traits")

    _traits: Traits

    def __init__(self, space: int, traits: Traits) -> None:
        self._space = space
        self._traits = traits

    def value(self) -> Array:
        """Return this replica's value now, read-only: an array, of shape () for a number.

        Raises:
            RuntimeError: called outside of the replica function.
        """
        return self._side().value(self._space)

    def _change(self, how: How, operand: object) -> Any:
        return self._side().change(self, how, operand)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaVariable, (self._space, self._traits)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._traits.label}>"

    def _side(self) -> VariableValues:
        merged = merged_variables.get()
        if merged is not None:
            return merged
        context = get_replica_context()
        side = None if context is None else context.variables
        if side is None:
            raise RuntimeError(
                f"the {self._traits.label} was used outside of the replica function that it was given to: "
                "keep its value instead"
            )
        return side


class BoundVariables:
    """The variables of one lease, as they are when it begins.

    Args:
        states: name -> [space, version] of every state of the lease.
        found: name -> the tree of each variable's state.
    """

    def __init__(self, states: Mapping[str, Sequence[int]], found: Mapping[str, Tree]) -> None:
        self._values: dict[int, Array | list[Array]] = {}
        self._versions: dict[int, int] = {}
        self._replicas: list[ReplicaVariables] = []
        self.traits: dict[int, Traits] = {}
        self.proxies: dict[str, ReplicaVariable] = {}
        """What stands for each variable in the functions' arguments, by the name of its state."""
        for name, tree in found.items():
            space, version = states[name]
            value = tree["value"]
            traits = Traits.from_wire(tree["traits"], value[0] if isinstance(value, list) else value)
            self._values[space] = value
            self._versions[space] = version
            self.traits[space] = traits
            self.proxies[name] = ReplicaVariable(space, traits)

    def of(self, replica: int) -> ReplicaVariables:
        """Return one replica's side; to be asked for once for each replica of the lease."""
        side = ReplicaVariables(self, replica)
        self._replicas.append(side)
        return side

    def copies(self, space: int) -> list[Array]:
        """Return the values that the replicas begin with; one, where all have the same."""
        value = self._values.get(space)
        if value is None:
            raise RuntimeError(
                "a variable was used that the step does not know: a variable belongs to the function that "
                "captured it, or got it as an argument; it can't be kept for another one"
            )
        return value if isinstance(value, list) else [value]

    def first_value(self, space: int, replica: int) -> Array:
        """Return what a replica begins with."""
        copies = self.copies(space)
        return copies[replica] if self.traits[space].copies else copies[0]

    def produced(self) -> list[tuple[int, int, Tree]]:
        """Return the next versions, as far as this worker knows them whole: (space, version, tree)."""
        if not self._replicas:
            return []
        side = self._replicas[0]
        return [
            (space, self._versions[space] + 1, to_state(self.traits[space], [value]))
            for space, value in side.changed.items()
            if not self.traits[space].copies
        ]


def bind(states: Mapping[str, Sequence[int]], found: Mapping[str, Tree]) -> BoundVariables | None:
    """Return the variables among a lease's states, None where there are none.

    Args:
        states: name -> [space, version].
        found: name -> the tree of that version.
    """
    own = {name: tree for name, tree in found.items() if name.startswith(PREFIX)}
    return BoundVariables(states, own) if own else None


class ReplicaVariables:
    """The variables of a step, as one replica has them while its function runs."""

    def __init__(self, bound: BoundVariables, replica: int) -> None:
        self._bound = bound
        self.replica = replica
        self.changed: dict[int, Array] = {}
        """New values by space, in the order of the first assignment."""

    def value(self, space: int) -> Array:
        """Return the replica's value now."""
        value = self.changed.get(space)
        return self._bound.first_value(space, self.replica) if value is None else value

    def change(self, variable: ReplicaVariable, how: How, operand: object) -> Any:
        """Assign, on behalf of the replica function: see `ReplicaVariable.assign`."""
        context = get_replica_context()
        assert context is not None  # it is where the variable found this
        space = variable._space
        traits = self._bound.traits[space]
        own = operand_of(traits, operand, how)
        if traits.copies or traits.replicas == 1:
            new = self._set(space, traits, how, own)
            return _Done(new) if context.is_async else new
        require_aggregation(traits, how)
        label = f"{how} of variable {traits.name!r}"
        if traits.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            result = context._collective("broadcast", own, source=0, label=label)
        else:
            result = context._collective("all_reduce", own, op=traits.aggregation.value, label=label)
        if context.is_async:
            return self._later(space, traits, how, result)
        return self._set(space, traits, how, frozen(np.asarray(result)))

    async def _later(self, space: int, traits: Traits, how: How, result: Awaitable[Any]) -> Array:
        return self._set(space, traits, how, frozen(np.asarray(await result)))

    def _set(self, space: int, traits: Traits, how: How, operand: Array) -> Array:
        new = self.changed[space] = updated(traits, self.value(space), how, operand)
        return new

    def assigned(self) -> Tree:
        """Return what the call sends back, {space: value}; None where it has nothing to tell.

        Of a variable with one value replica 0 tells it; of one with copies each replica its own. The
        arrays are read-only, and nobody writes them any more.
        """
        told = {
            space: value
            for space, value in self.changed.items()
            if self.replica == 0 or self._bound.traits[space].copies
        }
        return told or None

    # -- merge_call ------------------------------------------------------------------------

    def merge(
        self, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Callable[..., Tree], tuple[Any, ...], dict[str, Any]]:
        """Return what to merge-call instead, so that `fn` finds the variables of all replicas.

        Args:
            fn, args, kwargs: as given to `merge_call`, which adds the strategy as first argument.
                Variables in the arguments stay variables.
        """
        leaves, treedef = trees.flatten((tuple(args), dict(kwargs or {})))
        places = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, ReplicaVariable)}
        # None is a node: the other arguments keep their places, and the replicas' structures are compared.
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
        """Take over what the merge-called function assigned.

        Args:
            result: what the function of `merge` returned, this replica's part.

        Returns:
            What the user's function returned.
        """
        self.changed.update({space: frozen(value) for space, value in result["assigned"].items()})
        return result["result"]


class MergedVariables:
    """The variables of a step, as a function has them that `merge_call` runs once for all replicas.

    Args:
        own: of the replica in whose thread it runs.
        copies: by space, of each variable with copies: what the replicas have now.
    """

    def __init__(self, own: ReplicaVariables, copies: dict[int, list[Array]]) -> None:
        self._own = own
        self._copies = copies
        self._changed: dict[int, list[Array]] = {}

    def copies(self, space: int) -> list[Array]:
        """Return each replica's value; one, where all have the same."""
        changed = self._changed.get(space)
        if changed is not None:
            return changed
        found = self._copies.get(space)
        return [self._own.value(space)] if found is None else found

    def components(self, value: Tree, *, mirrored: bool) -> Tree:
        """Return a value with what the replicas have in place of variables: see `components`."""
        traits = self._own._bound.traits

        def leaf(item: Any) -> Any:
            if not isinstance(item, ReplicaVariable):
                return item
            space = item._space
            return component(traits[space], self.copies(space), mirrored=mirrored)

        return trees.tree_map(leaf, value)

    def value(self, space: int) -> Array:
        """Return the variable's value, as it is read outside of replica functions."""
        traits = self._own._bound.traits[space]
        copies = self.copies(space)
        return read_copies(traits, copies) if traits.copies else copies[0]

    def change(self, variable: ReplicaVariable, how: How, operand: object) -> Array:
        """Assign, as it is done outside of replica functions."""
        space = variable._space
        traits = self._own._bound.traits[space]
        if traits.copies:
            self._changed[space] = assign_copies(traits, self.copies(space), operand, how)
        else:
            new = updated(traits, self.copies(space)[0], how, operand_of(traits, operand, how))
            self._changed[space] = [new]
        return self._changed[space][0]

    def update(
        self,
        variable: ReplicaVariable,
        fn: Callable[..., Tree],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tree:
        """Call `fn(variable, *args, **kwargs)` for each replica's copy, which `fn` may assign."""
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
        """Return the new values: {space: value}, PerReplica for a variable with copies."""
        traits = self._own._bound.traits
        return {
            space: PerReplica(copies) if traits[space].copies else copies[0]
            for space, copies in self._changed.items()
        }


def size_of(assigned: Tree) -> int:
    """Return the bytes of what `assigned` returned."""
    return sum(value.nbytes for value in assigned.values())


class _Done(Coroutine[Any, Any, Array]):
    """A new value, for an async function to await: there already, so nothing is lost where it does not."""

    def __init__(self, value: Array) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Array]:
        yield from ()
        return self._value

    def send(self, _value: Any) -> Any:
        raise StopIteration(self._value)

    def throw(self, *error: Any) -> Any:
        return super().throw(*error)

    def close(self) -> None:
        """It holds nothing."""
