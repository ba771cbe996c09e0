"""Hints for common mistakes: a forgotten `async`, another event loop, a TensorFlow name, a value that cannot be sent.

The mixins are hidden from type checkers, which then find the mistake themselves.
"""

from __future__ import annotations

import datetime
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, KeysView, Mapping, Set, ValuesView
from typing import TYPE_CHECKING, ClassVar, NoReturn

if TYPE_CHECKING:
    import asyncio


class AsyncOnly:
    """A mixin for classes that support `async with`, but not `with`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(
                f"{name} is opened with `async with`, in a coroutine (async def), not with `with`"
            )

        def __exit__(self, *raised: object) -> None:
            """Exist, because Python looks it up before it calls `__enter__`."""


class AsyncIterableOnly:
    """A mixin for classes that support `async for`, but not `for`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"{name} is read with `async for`, in a coroutine (async def), not with `for`")


class TfNames:
    """A mixin for classes whose TensorFlow counterparts have attributes of other names."""

    __slots__ = ()

    _tf_names: ClassVar[Mapping[str, str]] = {}  # by TensorFlow's name: the equivalent in pipedist
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            equivalent = self._tf_names.get(name)
            if equivalent is not None:
                text += f": in pipedist, {equivalent} (docs/migrate/tf-distribute-names.md)"
            raise AttributeError(text, name=name, obj=self)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that is running in this thread, or None."""
    import asyncio  # entry points import little before they start a run

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def require_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise UsageError if another event loop than the cluster's is running in this thread."""
    if running_loop() not in (None, loop):
        from pipedist.errors import UsageError

        raise UsageError(
            "this cluster is open in another event loop, which alone may use it: a wait in this one would never "
            "end. Use it in its own loop, or call `pipedist.run(spec, cluster=cluster)`, which does that"
        )


def is_masked(value: object) -> bool:
    """Return whether a value is a masked array; converting it would expose masked values."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def conversion_hint(value: object) -> str:
    """Return how to convert a value to one that can be sent and reduced, or ""."""
    if is_masked(value):
        return "x.filled(0) has its values, and zeros in place of the masked ones"
    if "key<" in str(getattr(value, "dtype", "")):  # a typed key of JAX
        return (
            "jax.random.key_data(...) makes a plain array of it, jax.random.wrap_key_data(...) a key of that"
        )
    if hasattr(value, "__array__"):
        return _array_hint(value)
    if isinstance(value, datetime.date):
        return "np.datetime64(...) makes a date of NumPy of it"
    if isinstance(value, datetime.timedelta):
        return "np.timedelta64(...) makes a duration of NumPy of it"
    if type(value).__name__ == "Decimal":
        return "str(...) makes an exact text of it, float(...) a number"
    if isinstance(value, dict):
        return "dict(...) makes a plain one of it"
    if isinstance(value, Set | KeysView):
        return "sorted(...) makes a list of it"
    if isinstance(value, AsyncIterator):
        return "[x async for x in ...] makes a list of it"
    if isinstance(value, Iterator | ValuesView | deque | range):
        return "np.array(list(...)) makes an array of it, list(...) a list"
    return ""


def _array_hint(value: object) -> str:
    """Return how to convert an object that NumPy can read: its text would become an array of objects."""
    if hasattr(value, "columns"):
        names = "column_names" if hasattr(value, "column_names") else "columns"
        index = ", without its index (df.reset_index() keeps that)" if hasattr(value, "reset_index") else ""
        return (
            "for a data frame df, {str(k): a.astype(str) if (a := np.asarray(df[k])).dtype == object else a "
            f"for k in df.{names}}} makes a dict of arrays of it{index}"
        )
    if getattr(getattr(value, "dtype", None), "kind", "f") not in "biufcmMSU":
        return "np.asarray(...).astype(str) makes a plain array of text of it"
    return "np.asarray(...) makes a plain array of it"
