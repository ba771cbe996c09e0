"""Functions of Python objects as replica functions: the elements of a list that is mapped, and their results.

A shard has no objects, so an element that is no number, text or bytes is pickled by the program that maps, as the
function itself is. Results go the other way, where nothing is unpickled: they are encoded as every value is that a
worker sends: those of a call as one list, or with `per: element` one by one, so that they need not be alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from pipedist.core import dlpack, ragged
from pipedist.core.functions import call_of, is_async, unpickled_value, wants_ctx
from pipedist.core.record_format import frames_of, pack, record_at
from pipedist.core.types import Tree
from pipedist.protocol.codec import UnsendableError, decode, encode
from pipedist.worker.array_isolation import without_frames
from pipedist.worker.context import get_replica_context
from pipedist.worker.failures import note_element
from pipedist.worker.waiting_calls import batched, count_elements, element_at, unlike


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


Form = Literal["tree", "plain", "pickled"]
"""The elements of a shard: rows of arrays, numbers or texts of a list, or pickled objects of one."""


class Mapped:
    """A function of one element, or of a list of them, as a replica function.

    Args:
        fn: the function, or a class whose instance is called; made once, with the keyword arguments.
        per_element: whether the function gets one element at a time.
        loops: with `per_element`, whether a call gets a shard, and calls the function with each element of it; this
            takes a hundredth of the time of a stage with `per: element`, which does more for each.
    """

    def __init__(self, fn: Callable[..., Any], form: Form, *, per_element: bool, loops: bool) -> None:
        self.__wrapped__ = fn
        self._form = form
        self._per_element = per_element
        self._loops = loops
        self._constructs = inspect.isclass(fn) and call_of(fn) is not None
        self._instance: Callable[..., Any] | None = None
        self.__qualname__ = self.__name__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__signature__ = _signature(fn, constructs=self._constructs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.__wrapped__, self._form, self._per_element, self._loops)

    def __call__(self, shard: Tree, **kwargs: Any) -> Any:
        if not self._loops:
            return self._results(self._call(shard, kwargs))
        call = self._called(kwargs)
        elements, results = self._elements(shard), []
        try:
            for element in elements:
                results.append(call(element))
        except Exception as error:
            _note(error, len(results), elements)
            raise
        return (
            _batched(results)
            if self._form == "tree"
            else ragged.objects([self._packed_all(results, elements)])
        )

    def _call(self, shard: Tree, kwargs: dict[str, Any]) -> Any:
        return self._called(kwargs)(self._element(shard) if self._per_element else self._elements(shard))

    def _called(self, kwargs: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the function with its keyword arguments, or the instance with its context."""
        if not self._constructs:
            return partial(self.__wrapped__, **kwargs) if kwargs else self.__wrapped__
        ctx = {"ctx": kwargs.pop("ctx")} if "ctx" in kwargs else {}
        if self._instance is None:
            self._instance = self.__wrapped__(**kwargs)
        assert self._instance is not None  # it was just made
        return partial(self._instance, **ctx)

    def _element(self, element: Any) -> Any:
        if self._form == "pickled":
            return unpickled_value(bytes(element))
        return element.item() if isinstance(element, np.generic | np.ndarray) else element

    def _elements(self, shard: Any) -> list[Any]:
        if self._form == "tree":
            return [element_at(shard, index) for index in range(count_elements(shard))]
        return [unpickled_value(each) for each in shard] if self._form == "pickled" else list(shard.tolist())

    def _packed_all(self, results: list[Any], elements: Sequence[Any]) -> bytes:
        """Return `packed` of the results of elements; an error names the element whose result can't be sent."""
        try:
            return self._packed(results)
        except UnsendableError:
            for at, result in enumerate(results):
                try:
                    self._packed(result)
                except UnsendableError as error:
                    _note(error, at, elements)
                    raise
            raise  # they can be sent one by one, but not together

    def _packed(self, value: Any) -> bytes:
        try:
            return packed(value)
        except UnsendableError as error:
            raise UnsendableError(f"the result of {self.__qualname__} cannot be sent: {error}") from None

    def _results(self, value: Any) -> Any:
        if self._per_element:
            return self._packed(value)
        if not isinstance(value, list | tuple | np.ndarray):
            raise TypeError(
                f"{self.__qualname__} got a list of elements, and must return a list of results, not a value of type "
                f"{type(value).__qualname__}; or map it with per_element=True"
            )
        return ragged.objects([self._packed(list(value))])


def _note(error: Exception, at: int, elements: Sequence[Any]) -> None:
    """Note on an exception which element of a shard it is about."""
    ctx = get_replica_context()
    ids = None if ctx is None else ctx.elements
    if ids is not None and at < len(ids):
        note_element(error, int(ids[at]), elements[at])


_NUMBERS = frozenset({bool, float, np.bool_, np.int32, np.int64, np.float32, np.float64})


def _batched(results: list[Any]) -> Tree:
    kinds = set(map(type, results))
    if len(kinds) == 1 and kinds <= _NUMBERS:  # the common case, cheaper
        return np.array(results)
    values = dlpack.to_host(without_frames(results))
    if unlike(values, range(len(values))):
        raise ValueError(
            "results of elements can't be batched: they must have the same keys, shapes and dtypes, as with float(x), "
            "and NaN or an empty text instead of None. Results of a list need not be alike"
        )
    return batched(values)


class AsyncMapped(Mapped):
    """`Mapped` of an async function."""

    async def __call__(self, shard: Tree, **kwargs: Any) -> Any:
        return self._results(await self._call(shard, kwargs))


def is_async_map(fn: object) -> bool:
    """Return whether calls of a function, or of the instances of a class, are async."""
    called = call_of(fn) if inspect.isclass(fn) else fn
    return called is not None and is_async(called)


def mapped(fn: Callable[..., Any], form: Form, *, per_element: bool, loops: bool = False) -> Mapped:
    """Return a function of elements as a replica function; see `Mapped`."""
    return (AsyncMapped if is_async_map(fn) else Mapped)(fn, form, per_element=per_element, loops=loops)


def _mapped(fn: Callable[..., Any], form: Form, per_element: bool, loops: bool) -> Mapped:
    return mapped(fn, form, per_element=per_element, loops=loops)


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
