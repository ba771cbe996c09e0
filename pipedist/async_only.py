"""What is opened with `async with`, or read with `async for`, and says so where the `async` is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class AsyncOnly:
    """A base of classes that have the async form alone."""

    __slots__ = ()

    # a type checker is to find the mistake itself: it sees classes without these
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(
                f"{name} is opened with `async with`, in a coroutine (async def), not with `with`"
            )

        def __exit__(self, *raised: object) -> None:
            """Python wants it there before it calls `__enter__`."""


class AsyncIterableOnly:
    """A base of classes that are read with `async for` alone."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"{name} is read with `async for`, in a coroutine (async def), not with `for`")
