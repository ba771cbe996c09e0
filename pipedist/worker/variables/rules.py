"""What a variable is, and what becomes of it when it is assigned or read (tf.Variable's semantics).

| synchronization | copies | assigned in a replica function | read outside |
|---|---|---|---|
| ON_WRITE (AUTO) | one value, the same on every replica | all replicas together: the aggregate | the value |
| ON_READ | each replica has its own | each replica its own, alone | the copies, aggregated |

The aggregation is SUM, MEAN, ONLY_FIRST_REPLICA or NONE. NONE is refused where several replicas
would have to be aggregated: by an assignment to an ON_WRITE variable, or by reading an ON_READ one
outside. Nothing here does I/O: these are the rules, for the driver's side and the workers'.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipedist import values
from pipedist.values import PerReplica

Array = NDArray[Any]

How = Literal["assign", "assign_add", "assign_sub"]
"""The ways to change a variable, by the names of their methods."""


class VariableSynchronization(enum.StrEnum):
    """When a variable's copies on the replicas are made to agree (tf.VariableSynchronization)."""

    AUTO = "auto"
    """As ON_WRITE."""
    NONE = "none"
    """There is one copy only; refused by every strategy, which would have to make several."""
    ON_WRITE = "on_write"
    """With every assignment: there is one value."""
    ON_READ = "on_read"
    """When it is read outside of replica functions: each replica has a value of its own."""

    @classmethod
    def of(cls, value: object) -> VariableSynchronization:
        """Return the member of that name, in any case of letters; AUTO for None.

        Raises:
            ValueError: there is no such member.
        """
        return cls.AUTO if value is None else _member(cls, value, "synchronization")


class VariableAggregation(enum.StrEnum):
    """How the replicas' values become one (tf.VariableAggregation)."""

    NONE = "none"
    """Not at all: where it would be needed, a ValueError says so."""
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"
    """Replica 0's is taken."""

    @classmethod
    def of(cls, value: object) -> VariableAggregation:
        """Return the member of that name, in any case of letters; NONE for None.

        Raises:
            ValueError: there is no such member.
        """
        return cls.NONE if value is None else _member(cls, value, "aggregation")


_Member = TypeVar("_Member", VariableSynchronization, VariableAggregation)


def _member(cls: type[_Member], value: object, what: str) -> _Member:
    if isinstance(value, str):
        try:
            return cls(value.lower())
        except ValueError:
            pass
    names = ", ".join(member.value for member in cls)
    raise ValueError(f"{what} is {value!r}; expected one of {names}")


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a variable never changes.

    Args:
        name: for people and errors.
        shape, dtype: of its value.
        trainable: whether an optimizer should change it; pipedist only keeps it.
        synchronization: ON_WRITE or ON_READ.
        aggregation: how the replicas' values become one.
        replicas: R.
        one_place: its strategy keeps variables in one place, or has no replicas but the caller.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    replicas: int
    one_place: bool

    @property
    def copies(self) -> bool:
        """Whether each replica has a value of its own."""
        return self.synchronization is VariableSynchronization.ON_READ and not self.one_place

    @property
    def label(self) -> str:
        """The variable, in an error."""
        return f"variable {self.name!r} ({self.dtype}{list(self.shape)})"

    def to_wire(self) -> list[Any]:
        """Return what `from_wire` needs beside the value."""
        return [
            self.name,
            self.trainable,
            self.synchronization.value,
            self.aggregation.value,
            self.replicas,
            self.one_place,
        ]

    @classmethod
    def from_wire(cls, fields: Sequence[Any], value: Array) -> Traits:
        """Return the traits of a variable.

        Args:
            fields: of `to_wire`.
            value: its value, or that of one of its copies.
        """
        name, trainable, synchronization, aggregation, replicas, one_place = fields
        return cls(
            name,
            value.shape,
            value.dtype,
            trainable,
            VariableSynchronization(synchronization),
            VariableAggregation(aggregation),
            replicas,
            one_place,
        )


def declare(
    initial: Array,
    *,
    name: str,
    trainable: bool | None,
    synchronization: object,
    aggregation: object,
    replicas: int,
    one_place: bool,
) -> Traits:
    """Return the traits of a new variable.

    Args:
        initial: its first value, from `first_value`.
        trainable: None: unless it is ON_READ.
        synchronization, aggregation: members or their names; None: AUTO, and NONE.
        replicas: R.
        one_place: the strategy keeps one copy of every variable.

    Raises:
        ValueError: a member that does not exist, NONE synchronization, MEAN of a dtype that is not
            floating, or an ON_READ variable that is trainable.
    """
    when = VariableSynchronization.of(synchronization)
    how = VariableAggregation.of(aggregation)
    if when is VariableSynchronization.NONE:
        raise ValueError(
            f"variable {name!r}: synchronization none means one copy, but the strategy has replicas "
            "that share it: use on_write (the default) or on_read"
        )
    if when is VariableSynchronization.AUTO:
        when = VariableSynchronization.ON_WRITE
    on_read = when is VariableSynchronization.ON_READ
    if on_read and trainable:
        raise ValueError(
            f"variable {name!r}: an on_read variable can't be trainable, because its copies differ: "
            "use on_write, or trainable=False"
        )
    if how is VariableAggregation.MEAN and not _is_floating(initial.dtype):
        raise ValueError(
            f"variable {name!r}: the mean of {initial.dtype} values is no {initial.dtype}: give it a "
            "floating dtype, or another aggregation"
        )
    return Traits(
        name,
        initial.shape,
        initial.dtype,
        not on_read if trainable is None else bool(trainable),
        when,
        how,
        replicas,
        one_place,
    )


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"


def first_value(initial: object, dtype: object, name: str) -> Array:
    """Return a variable's first value: an array of its own, read-only.

    Args:
        initial: an array, a number or nested lists of them; or a function that returns one.
        dtype: what it becomes; None: as NumPy makes it.

    Raises:
        ValueError: there is no initial value.
        TypeError: it is neither numeric nor bool.
    """
    value = initial() if callable(initial) else initial
    if value is None:
        raise ValueError(f"variable {name!r} needs an initial value, got None")
    if isinstance(value, PerReplica):
        raise TypeError(
            f"variable {name!r}: the initial value is a {type(value).__name__}; give one value, which "
            "every replica starts with"
        )
    array = np.array(value, dtype=dtype, order="C")  # type: ignore[call-overload]
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise TypeError(f"variable {name!r} can't hold {array.dtype} values: numbers and bools only")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return frozen(array)


def frozen(array: Array) -> Array:
    """Return an array that nobody can write, without a copy where it is the caller's to give away."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    array.flags.writeable = False
    return array


def operand_of(traits: Traits, value: object, how: How) -> Array:
    """Return what is assigned, added or subtracted, as an array like the variable's value.

    A NumPy value must have the variable's dtype; a Python number, or nested lists of them, adapts to
    it, but a float is no int. The shape must be the variable's: nothing is broadcast.

    Raises:
        ValueError: the dtype or the shape does not fit, or it is a per-replica value.
        OverflowError: a Python integer does not fit the dtype.
    """
    if isinstance(value, PerReplica):
        raise ValueError(
            f"{how} of a {type(value).__name__} to the {traits.label}: reduce it first, or assign in "
            "a replica function, where each replica has its component"
        )
    array = np.asarray(value)
    if hasattr(type(value), "__array__"):
        fits = array.dtype == traits.dtype
    elif traits.dtype.kind in "iu" and (whole := _integers_in(array)):
        fits, bounds = True, np.iinfo(traits.dtype)
        for number in (min(whole), max(whole)):
            if not bounds.min <= number <= bounds.max:
                raise OverflowError(
                    f"{how} of {number} to the {traits.label}: it does not fit {traits.dtype}"
                )
    else:
        fits = array.dtype.kind != "O" and np.can_cast(array.dtype, traits.dtype, "same_kind")
        fits = fits and (array.dtype.kind != "b" or traits.dtype.kind == "b")
    if not fits:
        raise ValueError(
            f"{how} of a value of dtype {array.dtype} to the {traits.label}: cast it first, as in "
            f"np.asarray(value, '{traits.dtype}'){_why_float64(array.dtype, traits.dtype)}"
        )
    if array.shape != traits.shape:
        raise ValueError(
            f"{how} of a value of shape {list(array.shape)} to the {traits.label}: the shape must be the same"
        )
    return frozen(np.array(value if array.dtype != traits.dtype else array, traits.dtype, order="C"))


def _integers_in(array: Array) -> list[int]:
    """Return the elements of an array of integers, of any size; none of any other."""
    found = array.ravel().tolist() if array.dtype.kind in "iuO" else []
    return found if all(type(each) is int for each in found) else []


def _why_float64(given: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    if given != np.float64 or wanted.kind != "f":
        return ""
    return (
        f". NumPy makes float64 of a {wanted} array and a NumPy integer, such as all_reduce returns of "
        "`len(x)`; with a Python int it stays as it is"
    )


def updated(traits: Traits, old: Array, how: How, operand: Array) -> Array:
    """Return the value after an assignment: read-only, and of the variable's dtype.

    Raises:
        OverflowError: an integer result does not fit the dtype. (tf.Variable wraps around.)
        TypeError: adding to a bool variable.
    """
    if how == "assign":
        return operand
    if traits.dtype.kind == "b":
        raise TypeError(f"{how} to the {traits.label}: bools can only be assigned")
    result = np.asarray(np.add(old, operand) if how == "assign_add" else np.subtract(old, operand))
    if traits.dtype.kind in "iu" and np.any(_wrapped(old, how, operand, result)):
        raise OverflowError(f"{how} to the {traits.label}: the result does not fit {traits.dtype}")
    return frozen(result)


def _wrapped(old: Array, how: How, operand: Array, result: Array) -> Any:
    """Where an integer sum or difference has left its dtype."""
    if old.dtype.kind == "u":
        return result < old if how == "assign_add" else operand > old
    # A sum overflows where both terms have one sign and the result the other; a difference where
    # the terms have different signs and the result not that of the first.
    other = operand if how == "assign_add" else ~operand
    return ((old ^ result) & (other ^ result)) < 0


def read_copies(traits: Traits, copies: Sequence[Array]) -> Array:
    """Return what the copies of an ON_READ variable are together.

    Raises:
        ValueError: the aggregation is NONE.
        OverflowError: an integer sum does not fit the dtype.
    """
    if traits.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"the {traits.label} is on_read without aggregation: outside of replica functions it has no "
            "one value. Read its copies with local_results, or give it an aggregation"
        )
    if traits.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return copies[0]
    folded = values.reduce(traits.aggregation.value, PerReplica(copies), None, traits.replicas)
    return frozen(np.asarray(folded))


def assign_copies(traits: Traits, copies: Sequence[Array], value: object, how: How) -> list[Array]:
    """Return the copies of an ON_READ variable after an assignment outside of replica functions.

    With SUM the copies add up to the value: floats are divided evenly, of integers replica 0 also gets
    the remainder. Otherwise every copy gets the value, or has it added.

    Raises:
        TypeError: a per-replica value.
        ValueError: the value does not fit; or adding where the aggregation is SUM.
    """
    if isinstance(value, PerReplica):
        raise TypeError(
            f"{how} of a {type(value).__name__} to the {traits.label} outside of a replica function: "
            "give one value, or assign in a replica function, where each replica has its component"
        )
    operand = operand_of(traits, value, how)
    if traits.aggregation is not VariableAggregation.SUM:
        return [updated(traits, copy, how, operand) for copy in copies]
    if how != "assign":
        raise ValueError(
            f"{how} to the {traits.label} outside of a replica function: it is the sum of the replicas' "
            f"copies, and {how} belongs into one of them. Use assign here, or {how} in a replica function"
        )
    if traits.dtype.kind in "iu":
        each = operand // traits.replicas
        first = operand - each * (traits.replicas - 1)
        return [frozen(np.asarray(first)), *[frozen(np.asarray(each))] * (traits.replicas - 1)]
    each = frozen(np.asarray(operand / traits.replicas).astype(traits.dtype))
    return [each] * traits.replicas


def require_aggregation(traits: Traits, how: How) -> None:
    """Refuse an assignment by several replicas that nothing says how to aggregate.

    Raises:
        ValueError: the aggregation is NONE and there are several replicas.
    """
    if traits.aggregation is VariableAggregation.NONE and traits.replicas > 1:
        raise ValueError(
            f"{how} to the {traits.label} in a replica function: {traits.replicas} replicas would assign, "
            "and the variable has no aggregation. Make it with aggregation='sum', 'mean' or "
            "'only_first_replica', or with synchronization='on_read'"
        )
