"""Types that every layer shares: trees of values, and references to functions."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Tree = Any  # a nest of dict, list, tuple, namedtuple, dataclass, None; leaves are arrays, numbers, str, bytes

Form = Literal["pandas", "polars", "arrow", "torch", "jax"]
"""The library whose frame or tensors a function gets instead of NumPy arrays; see `pipedist.datasets.frames`."""


class FunctionRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a worker finds a function."""

    label: str  # for people and errors: "flights:delays", "<lambda>"
    name: str = ""  # "package.module:name", or "" if it travels by value
    pickled: bytes = b""  # cloudpickle bytes, or b"" if it travels by name


def is_record(cls: type) -> bool:
    """Return whether a class is a dataclass, but not an array that is implemented as one, as zarr's is."""
    return hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__array__")
