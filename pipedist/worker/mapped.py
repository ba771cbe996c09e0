"""Functions of Python objects as replica functions: the elements of a list that is mapped, and their results.

A shard has no objects, so an element that is no number, text or bytes is pickled by the program that maps, as the
function itself is. Results go the other way, where nothing is unpickled: they are encoded as every value is that a
worker sends, one by one, so that they need not be alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipedist.core import dlpack, ragged
from pipedist.core.functions import call_of, is_async, unpickled_value, wants_ctx
from pipedist.core.record_format import frames_of, pack, record_at
from pipedist.core.types import Tree
from pipedist.protocol.codec import decode, encode
from pipedist.worker.array_isolation import without_frames


def packed(value: Tree) -> bytes:
    """Return a value as a worker sends it, in one piece."""
    return b"".join(pack(encode(dlpack.to_host(without_frames(value)))))


def unpacked(data: bytes) -> Tree:
    """Return the value of `packed`; its arrays are read-only."""
    view = memoryview(data)
    head = record_at(view, 0)
    if isinstance(head, str):
        raise ValueError(f"a result is damaged: {head}")
    return decode(frames_of(view, head))


class Mapped:
    """A function of one element, or of a list of them, as a replica function.

    Args:
        fn: the function, or a class whose instance is called; made once, with the keyword arguments.
        is_pickled: whether the elements are pickled.
        per_element: whether the function gets one element at a time.
    """

    def __init__(self, fn: Callable[..., Any], *, is_pickled: bool, per_element: bool) -> None:
        self.__wrapped__ = fn
        self._is_pickled = is_pickled
        self._per_element = per_element
        self._constructs = inspect.isclass(fn) and call_of(fn) is not None
        self._instance: Callable[..., Any] | None = None
        self.__qualname__ = self.__name__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__signature__ = _signature(fn, constructs=self._constructs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.__wrapped__, self._is_pickled, self._per_element)

    def __call__(self, shard: Tree, **kwargs: Any) -> Any:
        return self._results(self._call(shard, kwargs))

    def _call(self, shard: Tree, kwargs: dict[str, Any]) -> Any:
        value = self._element(shard) if self._per_element else self._elements(shard)
        if not self._constructs:
            return self.__wrapped__(value, **kwargs)
        ctx = {"ctx": kwargs.pop("ctx")} if "ctx" in kwargs else {}
        if self._instance is None:
            self._instance = self.__wrapped__(**kwargs)
        assert self._instance is not None  # it was just made
        return self._instance(value, **ctx)

    def _element(self, element: Any) -> Any:
        if self._is_pickled:
            return unpickled_value(bytes(element))
        return element.item() if isinstance(element, np.generic | np.ndarray) else element

    def _elements(self, shard: Any) -> list[Any]:
        return [unpickled_value(each) for each in shard] if self._is_pickled else list(shard.tolist())

    def _results(self, value: Any) -> Any:
        if self._per_element:
            return packed(value)
        if not isinstance(value, list | tuple | np.ndarray):
            raise TypeError(
                f"{self.__qualname__} got a list of elements, and must return a list of results, not a value of type "
                f"{type(value).__qualname__}; or map it with per_element=True"
            )
        return ragged.objects([packed(each) for each in value])


class AsyncMapped(Mapped):
    """`Mapped` of an async function."""

    async def __call__(self, shard: Tree, **kwargs: Any) -> Any:
        return self._results(await self._call(shard, kwargs))


def mapped(fn: Callable[..., Any], *, is_pickled: bool, per_element: bool) -> Mapped:
    """Return a function of Python objects as a replica function; see `Mapped`."""
    called = call_of(fn) if inspect.isclass(fn) else fn
    kind = AsyncMapped if called is not None and is_async(called) else Mapped
    return kind(fn, is_pickled=is_pickled, per_element=per_element)


def _mapped(fn: Callable[..., Any], is_pickled: bool, per_element: bool) -> Mapped:
    return mapped(fn, is_pickled=is_pickled, per_element=per_element)


def _signature(fn: Callable[..., Any], *, constructs: bool) -> inspect.Signature:
    """Return the signature with which a worker calls: the shard, and keyword arguments."""
    first = inspect.Parameter("shard", inspect.Parameter.POSITIONAL_ONLY)
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return inspect.Signature([first, rest])
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    is_positional = any(each.kind == each.POSITIONAL_ONLY for each in parameters)
    if not constructs and not is_positional and named and named[0].kind == named[0].POSITIONAL_OR_KEYWORD:
        named = named[1:]
    others = [each.replace(kind=each.KEYWORD_ONLY) for each in named]
    if constructs and wants_ctx(call_of(fn)):  # type: ignore[arg-type]  # a class
        others.append(inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY))
    var = [rest] if any(each.kind == each.VAR_KEYWORD for each in parameters) else []
    return inspect.Signature([first, *others, *var])


def joined(batch: Tree) -> dict[str, Any]:
    """Return the value of a call as numbers, which every file holds exactly: its bytes, and how many they are."""
    data = packed(batch)
    return {"data": np.frombuffer(data, np.uint8), "sizes": np.array([len(data)])}
