"""Rules of assigning and reading variables (tf.Variable's semantics), for the driver and the workers.

| synchronization | copies | assigned in a replica function | read outside |
|---|---|---|---|
| ON_WRITE (AUTO) | one value for all replicas | by all replicas together: the aggregate | the value |
| ON_READ | one for each replica | by each replica alone: its own copy | the aggregate of the copies |

The aggregation is SUM, MEAN, ONLY_FIRST_REPLICA or NONE. NONE raises an error if the values of several replicas need
aggregation: in an assignment to an ON_WRITE variable, or in a read of an ON_READ one outside. This module does no I/O.
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

AssignMethod = Literal["assign", "assign_add", "assign_sub"]  # the methods that change a variable


class VariableSynchronization(enum.StrEnum):
    """The time of synchronization of copies (tf.VariableSynchronization).

    Example:
        pipedist.Variable(0, synchronization=pipedist.VariableSynchronization.ON_READ, aggregation="sum")
    """

    AUTO = "auto"
    """As ON_WRITE."""
    NONE = "none"
    """A single copy. Every strategy rejects it, because its replicas need several."""
    ON_WRITE = "on_write"
    """With every assignment: all replicas have one value."""
    ON_READ = "on_read"
    """In reads outside of replica functions: each replica has its own value."""

    @classmethod
    def of(cls, value: object) -> VariableSynchronization:
        """Return the member with a name, in upper or lower case."""
        return _member(cls, value, "synchronization")


class VariableAggregation(enum.StrEnum):
    """The aggregation of the replicas' values (tf.VariableAggregation).

    Example:
        pipedist.Variable(0.0, aggregation=pipedist.VariableAggregation.MEAN)  # or "mean"
    """

    NONE = "none"
    """No aggregation: operations that need one raise ValueError."""
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"
    """The value of replica 0."""

    @classmethod
    def of(cls, value: object) -> VariableAggregation:
        """Return the member with a name, in upper or lower case; NONE for None."""
        return cls.NONE if value is None else _member(cls, value, "aggregation")


_Member = TypeVar("_Member", VariableSynchronization, VariableAggregation)


def _member(cls: type[_Member], value: object, what: str) -> _Member:
    if isinstance(value, str):
        try:
            return cls(value.lower())
        except ValueError:
            pass
    names = ", ".join(member.value for member in cls)
    raise ValueError(f"{what} must be one of {names}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Traits:
    """The constant properties of a variable.

    `one_place`: its strategy has a single copy of each variable, or no other replicas than the caller.
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
        """Whether each replica has its own value."""
        return self.synchronization is VariableSynchronization.ON_READ and not self.one_place

    @property
    def label(self) -> str:
        return f"variable {self.name!r} ({self.dtype}{list(self.shape)})"

    def to_wire(self) -> list[Any]:
        constants = (self.synchronization.value, self.aggregation.value, self.replicas, self.one_place)
        return [self.name, self.trainable, *constants]

    @classmethod
    def from_wire(cls, fields: Sequence[Any], value: Array) -> Traits:
        """Return the traits from `to_wire`, and the value of the variable or one copy."""
        name, trainable, synchronization, aggregation, replicas, one_place = fields
        how = VariableSynchronization(synchronization), VariableAggregation(aggregation)
        return cls(name, value.shape, value.dtype, trainable, *how, replicas, one_place)


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
    """Return the traits of a new variable; `trainable` None means True, except for ON_READ."""
    synchronized = VariableSynchronization.of(synchronization)
    aggregated = VariableAggregation.of(aggregation)
    if synchronized is VariableSynchronization.NONE:
        raise ValueError(
            f"variable {name!r}: synchronization none means one copy, but the strategy has replicas "
            "that share it: use on_write (the default) or on_read"
        )
    if synchronized is VariableSynchronization.AUTO:
        synchronized = VariableSynchronization.ON_WRITE
    on_read = synchronized is VariableSynchronization.ON_READ
    if aggregated is VariableAggregation.MEAN and not _is_floating(initial.dtype):
        raise ValueError(
            f"variable {name!r}: the mean of {initial.dtype} values is not {initial.dtype}: use a floating "
            "dtype, or another aggregation"
        )
    trains = not on_read if trainable is None else bool(trainable)
    how = synchronized, aggregated
    return Traits(name, initial.shape, initial.dtype, trains, *how, replicas, one_place)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"


def first_value(initial: object, dtype: object, name: str) -> Array:
    """Return a variable's first value, or that of the function `initial`, as a new read-only array."""
    value = initial() if callable(initial) else initial
    if value is None:
        raise ValueError(f"variable {name!r} needs an initial value, got None")
    if isinstance(value, PerReplica):
        raise TypeError(
            f"variable {name!r}: the initial value is a {type(value).__name__}; give one value for "
            "all replicas"
        )
    array = np.array(value, dtype=dtype, order="C")  # type: ignore[call-overload]
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise TypeError(f"variable {name!r} can't hold {array.dtype} values: numbers and bools only")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return frozen(array)


def frozen(array: Array) -> Array:
    """Make an array read-only, and C-contiguous if necessary; return it."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    array.flags.writeable = False
    return array


def operand_of(traits: Traits, value: object, method: AssignMethod, *, is_kept: bool = True) -> Array:
    """Return an operand as an array with the variable's dtype and shape: a read-only copy if `is_kept`.

    A NumPy value must have the variable's dtype. Python numbers, and nested lists of them, are converted to it, but
    not from float to int (ValueError, or OverflowError). The shape must be equal: nothing is broadcast.
    """
    if isinstance(value, PerReplica):
        raise ValueError(
            f"{method} of a {type(value).__name__} to the {traits.label}: reduce it first, or assign in "
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
                    f"{method} of {number} to the {traits.label}: it does not fit {traits.dtype}"
                )
    else:
        fits = array.dtype.kind != "O" and np.can_cast(array.dtype, traits.dtype, "same_kind")
        fits = fits and (array.dtype.kind != "b" or traits.dtype.kind == "b")
    if not fits:
        raise ValueError(
            f"{method} of a value of dtype {array.dtype} to the {traits.label}: cast it first, as in "
            f"np.asarray(value, '{traits.dtype}'){_float64_hint(array.dtype, traits.dtype)}"
        )
    if array.shape != traits.shape:
        raise ValueError(
            f"{method} of a value of shape {list(array.shape)} to the {traits.label}: the shape must be the same"
        )
    if not is_kept and array.dtype == traits.dtype:
        return array
    return frozen(np.array(value if array.dtype != traits.dtype else array, traits.dtype, order="C"))


def _integers_in(array: Array) -> list[int]:
    """Return the elements of an array of integers, also of objects; [] for other arrays."""
    found = array.ravel().tolist() if array.dtype.kind in "iuO" else []
    return found if all(type(each) is int for each in found) else []


def _float64_hint(given: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    if given != np.float64 or wanted.kind != "f":
        return ""
    return (
        f". A {wanted} array and a NumPy integer, such as the result of all_reduce of `len(x)`, give float64 in "
        "NumPy; a Python int keeps the dtype"
    )


def updated(traits: Traits, old: Array, method: AssignMethod, operand: Array) -> Array:
    """Return the read-only value after an assignment, with the same dtype.

    An integer result that does not fit the dtype raises OverflowError. (tf.Variable wraps around.)
    """
    if method == "assign":
        return operand
    if traits.dtype.kind == "b":
        raise TypeError(f"{method} to the {traits.label}: bools can only be assigned")
    result = np.asarray(np.add(old, operand) if method == "assign_add" else np.subtract(old, operand))
    if traits.dtype.kind in "iu" and np.any(_wrapped(old, method, operand, result)):
        raise OverflowError(f"{method} to the {traits.label}: the result does not fit {traits.dtype}")
    return frozen(result)


def _wrapped(old: Array, method: AssignMethod, operand: Array, result: Array) -> Any:
    if old.dtype.kind == "u":
        return result < old if method == "assign_add" else operand > old
    # A sum overflows if both terms have one sign and the result has the other; a difference, if the terms have
    # different signs and the result has not the sign of the first.
    other = operand if method == "assign_add" else ~operand
    return ((old ^ result) & (other ^ result)) < 0


def read_copies(traits: Traits, copies: Sequence[Array]) -> Array:
    if traits.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"the {traits.label} is on_read without aggregation: outside of replica functions it has no "
            "single value. Read its copies with local_results, or set an aggregation"
        )
    if traits.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return copies[0]
    folded = values.reduce(traits.aggregation.value, PerReplica(copies), None, traits.replicas)
    return frozen(np.asarray(folded))


def assign_copies(
    traits: Traits, copies: Sequence[Array], value: object, method: AssignMethod
) -> list[Array]:
    """Return the copies of an ON_READ variable after an outside assignment.

    With SUM the copies add up to the value: floats are divided evenly; with integers, replica 0 also gets the
    remainder. Otherwise the method is applied to every copy.
    """
    if isinstance(value, PerReplica):
        raise TypeError(
            f"{method} of a {type(value).__name__} to the {traits.label} outside of a replica function: "
            "give one value, or assign in a replica function, where each replica has its component"
        )
    operand = operand_of(traits, value, method)
    if traits.aggregation is not VariableAggregation.SUM:
        return [updated(traits, copy, method, operand) for copy in copies]
    if method != "assign":
        raise ValueError(
            f"{method} to the {traits.label} outside of a replica function: it is the sum of the replicas' "
            f"copies, so {method} applies to a single copy. Use assign here, or {method} in a replica function"
        )
    if traits.dtype.kind in "iu":
        each = operand // traits.replicas
        first = operand - each * (traits.replicas - 1)
        return [frozen(np.asarray(first)), *[frozen(np.asarray(each))] * (traits.replicas - 1)]
    each = frozen(np.asarray(operand / traits.replicas).astype(traits.dtype))
    return [each] * traits.replicas


def require_aggregation(traits: Traits, method: AssignMethod) -> None:
    """Check that an assignment by several replicas has an aggregation."""
    if traits.aggregation is VariableAggregation.NONE and traits.replicas > 1:
        raise ValueError(
            f"{method} to the {traits.label} in a replica function: {traits.replicas} replicas would assign, "
            "and the variable has no aggregation. Create it with aggregation='sum', 'mean' or "
            "'only_first_replica', or with synchronization='on_read'"
        )
