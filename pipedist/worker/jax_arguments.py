"""Arguments of a replica function that JAX compiles: traced arrays and numbers, and constants of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipedist.core import trees
from pipedist.worker.jax_mesh import Host
from pipedist.worker.variables.replica import ReplicaVariable

_NUMBERS: Final = (int, float, complex)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Constant:
    """A leaf that is compiled into the program; equal if the values and their types are."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = ("variable", value._space) if isinstance(value, ReplicaVariable) else value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        return bool(self.key is other.key or self.key == other.key)

    def __hash__(self) -> int:
        try:
            return hash(self.key)
        except TypeError:
            return hash(type(self.value))


@dataclass(frozen=True)
class ArgumentSignature:
    """What decides the program of a call: structure, and per leaf a dtype and shape, a type, or a constant."""

    treedef: trees.Treedef
    leaves: tuple[Any, ...]

    @property
    def digest(self) -> str:
        """Text that is equal in all processes with the same signature, apart from constants."""
        leaves = [type(leaf.value).__name__ if isinstance(leaf, Constant) else leaf for leaf in self.leaves]
        return f"{trees.describe(self.treedef)} {leaves}"

    def __str__(self) -> str:
        each = [text_of(*leaf) for leaf in self.leaves if type(leaf) is tuple]
        return ", ".join(each) or trees.describe(self.treedef)


@dataclass(frozen=True, eq=False)
class ReplicaArguments:
    """One replica's arguments of one step."""

    signature: ArgumentSignature
    arrays: list[Host]
    numbers: list[Any]  # Python's, which adapt to the dtype of arrays

    @classmethod
    def all_of(cls, arguments: Sequence[Arguments]) -> list[ReplicaArguments]:
        """Return the calls of all replicas in one step."""
        flat = [trees.flatten(each) for each in arguments]
        alike = all(treedef == flat[0][1] for _, treedef in flat)
        shared = (
            [
                type(leaf) in _NUMBERS
                and all(type(own[at]) is type(leaf) and own[at] == leaf for own, _ in flat)
                for at, leaf in enumerate(flat[0][0])
            ]
            if alike
            else []
        )
        return [cls._of(leaves, treedef, shared) for leaves, treedef in flat]

    @classmethod
    def _of(cls, leaves: Sequence[Any], treedef: trees.Treedef, shared: Sequence[bool]) -> ReplicaArguments:
        kinds: list[Any] = []
        arrays: list[Host] = []
        numbers: list[Any] = []
        for at, leaf in enumerate(leaves):
            if type(leaf) in _NUMBERS and shared and shared[at]:
                kinds.append(type(leaf))
                numbers.append(leaf)
            elif isinstance(leaf, (np.ndarray, np.generic)) or type(leaf) in _NUMBERS:
                array = np.asarray(leaf, order="C")
                if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
                    path = trees.treedef_paths(treedef)[at]
                    raise TypeError(
                        f"argument {path}: JAX has no arrays of {array.dtype}; pass numbers, or a str or an object, "
                        "which is compiled into the program"
                    )
                if array.dtype in (np.longdouble, np.clongdouble):
                    raise TypeError(f"JAX has no arrays of {array.dtype}: cast them to float64 or complex128")
                arrays.append(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
                kinds.append((array.shape, arrays[-1].dtype))
            else:
                kinds.append(Constant(leaf))
        return cls(ArgumentSignature(treedef, tuple(kinds)), arrays, numbers)

    def like(self, other: ReplicaArguments) -> bool:
        """Return whether one program serves both calls, with the same numbers."""
        return self.signature == other.signature and self.numbers == other.numbers


def text_of(shape: Sequence[int], dtype: Any) -> str:
    return f"{np.dtype(dtype).name}{list(shape)}"
