"""Variables in the driver process: their values before and after each step.

The driver holds each variable's value and counts its versions. A run uses a variable if its function captures
it or gets it as an argument. The run starts with the latest version; when the whole step has succeeded, and only
then, the replicas' assignments become the next version. So a step that fails, or is retried on other workers,
starts with the same bits.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import finalize

import numpy as np

from pipedist.core import trees
from pipedist.core.files import AtomicFile
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.program import StateValue
from pipedist.strategy.context import NotForReplicas, VariableOwner, current_strategy, require_outside
from pipedist.worker.context import get_replica_context
from pipedist.worker.variables.access import AnyVariable, VariableTree, update_copies
from pipedist.worker.variables.replica import SLOT, Assigned, ReplicaVariable, state_name, to_state
from pipedist.worker.variables.rules import (
    Array,
    AssignMethod,
    Traits,
    VariableAggregation,
    VariableSynchronization,
    assign_copies,
    declare,
    first_value,
    frozen,
    operand_of,
    read_copies,
    updated,
)

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator

_COPIED_BYTES_MAX: Final = 2**16  # received values up to this size are copied, so that the message is freed


class Variable(AnyVariable):
    """A value that replica functions read and assign (tf.Variable).

    Create it in the scope of the strategy whose functions use it. A function captures it, or gets it as an
    argument; in the function it is a `ReplicaVariable`, the replica's view of it. NumPy uses a variable as
    its value: `w + 1`. A variable created outside of every scope stays in this process.

    Assignments outside of replica functions return None; they raise RuntimeError while a run uses the
    variable. Assigning an on_read variable gives the value to each replica; with sum, the replicas' parts add
    up to the value (floats are divided evenly, for integers replica 0 also gets the remainder), and
    `assign_add` and `assign_sub` outside of replica functions raise ValueError.

    Args:
        initial_value: an array, a number, nested lists of them, or a function that returns one. A dict, with
            dicts, lists and tuples inside, makes a `VariableTree`, whose variables have the names NAME/KEY.
        trainable: for optimizers; None: true unless the variable is on_read.
        name: name in error messages, and in the file of `Strategy.save`.
        dtype: None: the dtype that NumPy gives the initial value.
        synchronization: on_write (auto): one value for all replicas, which assign it together; on_read:
            each replica has its own value, and reading outside of replica functions aggregates them.
        aggregation: sum, mean, only_first_replica or none (None): combines the replicas' values.

    Raises:
        ValueError: synchronization is none; mean of a dtype that is not floating; no initial value; an
            unknown name; or created inside a replica function.
        TypeError: the value is neither numeric nor bool.

    Example:
        with strategy.scope():
            w = pipedist.Variable(np.zeros(3), name="w", aggregation="sum")


        def step(x):
            w.assign_add(x.sum(axis=0))  # the sum over the replicas is added, once


        await strategy.run(step, args=(batch,))
    """

    pickles_identically: ClassVar = True
    """A variable that a function captures pickles to the same bytes, whatever its value is."""

    __slots__ = ("__weakref__", "_copies", "_sent", "_space", "_strategy", "_traits", "_users", "_version")

    _traits: Traits

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return a variable of the current strategy's own kind, or a tree of variables."""
        initial = args[0] if args else options.get("initial_value")
        if isinstance(initial, Mapping):
            return _tree(initial, **{"name": "variable", **options})
        made = current_strategy()._make_variable(*args, **options)
        return object.__new__(cls) if made is None else made

    def __init__(
        self,
        initial_value: object,
        *,
        trainable: bool | None = None,
        name: str = "variable",
        dtype: object = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
    ) -> None:
        require_outside("creating a variable", "create it outside, in strategy.scope(), and use it inside")
        self._strategy: VariableOwner = current_strategy()
        value = first_value(initial_value, dtype, name)
        self._traits = declare(
            value,
            name=name,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            replicas=self._strategy.num_replicas_in_sync,
            one_place=self._strategy._variables_in_one_place,
        )
        self._copies: list[Array] = [value] * (self._traits.replicas if self._traits.copies else 1)
        self._version = 0
        self._space: int | None = None  # its state at the coordinator; None before the first run that uses it
        self._sent = -1  # the latest version that was given to the coordinator
        self._users = 0  # number of unfinished runs that use it
        self._strategy.made[id(self)] = self

    def value(self) -> Array:
        """Return the current value, read-only: an array, of shape () for a number.

        If the variable is on_read, the value is the aggregate of the replicas' values.

        Raises:
            ValueError: the variable is on_read, and has no aggregation.
        """
        return read_copies(self._traits, self._copies) if self._traits.copies else self._copies[0]

    @property
    def local_values(self) -> tuple[Array, ...]:
        """The value of each replica, in order of replica id; read-only."""
        return tuple(self._copies if self._traits.copies else self._copies * self._traits.replicas)

    def _change(self, method: AssignMethod, operand: object) -> Any:
        if self._traits.copies:
            self._become(assign_copies(self._traits, self._copies, operand, method))
        else:
            own = operand_of(self._traits, operand, method)
            self._become([updated(self._traits, self._copies[0], method, own)])
        context = get_replica_context()
        if context is None:
            return None
        # A function of the default strategy, which runs in this process
        return Assigned(self._copies[0]) if context.is_async else self._copies[0]

    def saved(self) -> Array:
        """Return the value for a file, see `Strategy.save`."""
        return np.stack(self._copies) if self._traits.copies else self._copies[0]

    def restored(self, value: Array) -> None:
        """Set the value from a file."""
        self._become([frozen(copy) for copy in value] if self._traits.copies else [frozen(value)])

    def _become(self, copies: list[Array]) -> None:
        self.require_unused()
        self._copies = copies
        self._version += 1

    def require_unused(self) -> None:
        """Raise RuntimeError while a run uses the variable."""
        if self._users:
            raise RuntimeError(
                f"the {self._traits.label} can't be changed now: a run that uses it is not finished, and "
                "would lose or miss the change. Await the run first"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the replica's view of the variable, for functions that capture it."""
        captured = _captured.get()
        if captured is None:
            raise NotForReplicas(
                f"the {self._traits.label} can't be pickled: only a function that a strategy runs may "
                "capture it. Send its value: variable.numpy()"
            )
        return ReplicaVariable, (captured.space_of(self), self._traits)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._traits.label}, version {self._version}>"


def _tree(initial: Mapping[Any, Tree], **options: Any) -> VariableTree:
    """Return a tree with a variable for each array of `initial`; raise ValueError if there is none."""
    leaves, treedef = trees.flatten(initial)
    if not leaves:
        raise ValueError(f"variable {options['name']!r}: there is no array in {initial!r}")
    name = options.pop("name")
    names = [f"{name}/{path}" for path in trees.treedef_paths(treedef)]
    made = [
        Variable(**{**options, "initial_value": leaf}, name=own)
        for leaf, own in zip(leaves, names, strict=True)
    ]
    return VariableTree(trees.unflatten(treedef, made))


class CapturedVariables:
    """Collects the variables that a run uses."""

    def __init__(self, strategy: VariableOwner, coordinator: Coordinator) -> None:
        self._strategy = strategy
        self.coordinator = coordinator
        self.variables: dict[int, Variable] = {}  # the variables by the number of their state

    def space_of(self, variable: Variable) -> int:
        """Add a variable of the run's strategy, and return the number of its state."""
        _require_own(variable, self._strategy)
        if variable._space is None:
            variable._space = self.coordinator.states.open_space()
            # The garbage collector may run in any thread, so the next run drops the space.
            finalize(variable, self._strategy.unused_spaces.append, variable._space)
        self.variables[variable._space] = variable
        return variable._space

    def argument(self, variable: Variable) -> StateValue:
        """Add a variable that is an argument, and return the value to send in its place."""
        return StateValue(state_name(self.space_of(variable)))

    @contextmanager
    def while_pickling(self) -> Iterator[None]:
        """Add the variables that are pickled inside the `with` block."""
        token = _captured.set(self)
        try:
            yield
        finally:
            _captured.reset(token)


def _require_own(variable: Variable, strategy: VariableOwner) -> None:
    if variable._strategy is not strategy:
        where = (
            "outside of strategy.scope(), so it stays in this process"
            if variable._strategy.is_default
            else f"in the scope of another strategy, {variable._strategy!r}"
        )
        raise NotForReplicas(
            f"the {variable._traits.label} was made {where}: its replicas can't share it. Create it in "
            f"the scope of the strategy that uses it, {strategy!r}"
        )


_captured: ContextVar[CapturedVariables | None] = ContextVar("pipedist_captured_variables", default=None)
"""Set while a replica function is pickled."""


@contextmanager
def used(variables: Mapping[int, Variable]) -> Iterator[None]:
    """Mark variables as used by a run: assignments outside raise inside the `with` block."""
    for variable in variables.values():
        variable._users += 1
    try:
        yield
    finally:
        for variable in variables.values():
            variable._users -= 1


class Transaction:
    """The assignments of one run, committed as a whole or not at all.

    Versions that the coordinator does not have are given to it.
    """

    def __init__(self, captured: CapturedVariables) -> None:
        coordinator = captured.coordinator
        self._variables = variables = captured.variables
        self.states: dict[str, tuple[int, int]] = {}  # (space, version) of each variable's state, by its name
        for space, variable in variables.items():
            if variable._sent != variable._version:
                value = to_state(variable._traits, variable._copies)
                coordinator.states.put(space, variable._version, value, is_alike=variable._sent >= 0)
                variable._sent = variable._version
            self.states[state_name(space)] = (space, variable._version)

    def commit(self, results: Sequence[Mapping[str, Tree]]) -> dict[int, int]:
        """Make the values assigned by the replicas the next versions.

        Returns space -> version of the variables without copies: the step's workers have these versions.
        """
        assigned = [result.get(SLOT) or {} for result in results]
        fresh: dict[int, list[Array]] = {}
        for space, variable in self._variables.items():
            replicas = assigned if variable._traits.copies else assigned[:1]
            if any(space in values for values in replicas):
                fresh[space] = [
                    _received(variable._traits, values[space]) if space in values else old
                    for values, old in zip(replicas, variable._copies, strict=True)
                ]
        shared = {}
        for space, copies in fresh.items():
            variable = self._variables[space]
            variable._copies = copies
            variable._version += 1
            if not variable._traits.copies:
                shared[space] = variable._version
        return shared


def _received(traits: Traits, value: object) -> Array:
    if not isinstance(value, np.ndarray) or value.shape != traits.shape or value.dtype != traits.dtype:
        raise RemoteProtocolError(
            f"a worker returned no value of the {traits.label}, but {type(value).__name__}"
        )
    return frozen(value.copy() if value.nbytes <= _COPIED_BYTES_MAX else value)


def update(
    strategy: VariableOwner,
    variable: Variable,
    fn: Callable[..., Tree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tree:
    """Change a variable by a function, copy by copy: see `BaseStrategy.update`."""
    if not isinstance(variable, Variable):
        raise TypeError(
            f"update needs a pipedist.Variable, not {variable!r} of type {type(variable).__name__}"
        )
    _require_own(variable, strategy)
    before = variable._copies
    after, results = update_copies(variable._traits, before, fn, args, kwargs)
    if any(new is not old for new, old in zip(after, before, strict=True)):
        variable._become(after)
    return results


# -- the file of a strategy's variables ---------------------------------------------------------


def by_name(strategy: VariableOwner) -> dict[str, Any]:
    """Return the variables of a strategy by name; raise ValueError if two have the same."""
    made = list(strategy.made.values())
    for name, count in Counter(variable.name for variable in made).items():
        if count > 1:
            raise ValueError(
                f"{count} variables have the name {name!r}, and a file needs different ones: name them, as in "
                "pipedist.Variable(0.0, name='loss')"
            )
    return {variable.name: variable for variable in made}


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to a .npz, atomically; equal arrays give equal bytes."""
    out = AtomicFile(path)
    try:
        with zipfile.ZipFile(out.file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    plain = array.view(f"V{array.itemsize}") if array.dtype.kind == "V" else array
                    np.lib.format.write_array(member, plain, allow_pickle=False)
        out.commit()
    finally:
        out.abort()


def read(path: Path, names: Collection[str]) -> tuple[dict[str, Array], list[str]]:
    """Return the arrays of some names in a file, and all names in it; ValueError: `write` did not make it."""
    found = {}
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                there = sorted(name.removesuffix(".npy") for name in archive.namelist())
                for name in set(names) & set(there):
                    with archive.open(f"{name}.npy") as member:
                        found[name] = np.lib.format.read_array(member, allow_pickle=False)
        # a damaged file may have an impossible offset, compression or encryption; decompressors have their own errors
        except Exception as error:
            raise ValueError(f"{path} can't be read as a file of Strategy.save: {error}") from error
    return found, there


def restore(
    variables: Mapping[str, Any], saved: Mapping[str, Array], there: Sequence[str], path: Path
) -> None:
    """Set variables to the values in a file, all or none.

    Raises:
        ValueError: a value is missing, or has another dtype or shape; all differences are listed.
        RuntimeError: a run uses a variable.
    """
    problems, found = [], {}
    for name, variable in variables.items():
        traits, wanted = variable._traits, variable.saved()
        if name not in saved:
            problems.append(f"{traits.label}: the file has no such name, but {', '.join(there)}")
            continue
        value = saved[name]
        if value.dtype.kind == "V" and value.itemsize == wanted.itemsize:
            value = value.view(wanted.dtype)  # such as bfloat16, which NumPy saves as bytes
        if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
            needs = f", on_read, needs {_kind(wanted)}" if traits.copies else ""
            axis = "; the first axis is the replicas: use as many as saved it" if traits.copies else ""
            problems.append(f"{traits.label}{needs}: the file has {_kind(value)}{axis}")
        found[name] = value
    if problems:
        raise ValueError("\n  ".join([f"{path} does not fit the variables of the strategy:", *problems]))
    for variable in variables.values():
        variable.require_unused()
    for name, variable in variables.items():
        variable.restored(found[name])


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
