"""Where time goes: exclusive times of named parts, by wrapping functions of pipedist at run time.

Nothing of this is in pipedist itself. A part's time is its own: what it calls that is another
part counts there. Times are of the wall clock, so on a busy machine they hold waits for a core.
A wrapper costs about half a microsecond a call, which goes to the part around it.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any


@dataclass(slots=True)
class Part:
    """What was measured of one part: calls, and seconds in ns."""

    calls: int = 0
    ns: int = 0


@dataclass(slots=True)
class Spans:
    """The parts of one thread: the one that made it."""

    parts: dict[str, Part] = field(default_factory=dict)
    _thread: int = field(default_factory=threading.get_ident)
    _stack: list[Part] = field(default_factory=list)
    _since: int = 0

    def reset(self) -> None:
        """Begin anew, outside of all parts."""
        for part in self.parts.values():
            part.calls = part.ns = 0
        self._since = time.perf_counter_ns()

    def part(self, name: str) -> Part:
        """Return the part of a name."""
        return self.parts.setdefault(name, Part())

    def enter(self, part: Part) -> None:
        """A part begins; the one around it stops."""
        now = time.perf_counter_ns()
        if self._stack:
            self._stack[-1].ns += now - self._since
        self._stack.append(part)
        part.calls += 1
        self._since = now

    def leave(self) -> None:
        """The innermost part ends; the one around it goes on."""
        now = time.perf_counter_ns()
        self._stack.pop().ns += now - self._since
        self._since = now

    def is_here(self) -> bool:
        """Whether this is the thread that is measured."""
        return threading.get_ident() == self._thread

    def wrap(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, measured."""
        part = self.part(name)

        @wraps(fn)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self.is_here():
                return fn(*args, **kwargs)
            self.enter(part)
            try:
                return fn(*args, **kwargs)
            finally:
                self.leave()

        return measured

    def wrap_async(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the coroutine function `fn`, measured while it runs, not while it waits."""
        part = self.part(name)

        @wraps(fn)
        def measured(*args: Any, **kwargs: Any) -> _Awaitable:
            return _Awaitable(self, part, fn(*args, **kwargs))

        return measured

    def install(self, places: Mapping[str, str]) -> None:
        """Wrap functions.

        Args:
            places: "module:name" or "module:class.name", with a leading "async " for coroutine
                functions; and the part that it belongs to.
        """
        for place, name in places.items():
            kind, _, where = place.rpartition(" ")
            module_name, _, path = where.partition(":")
            owner: Any = importlib.import_module(module_name)
            *outer, last = path.split(".")
            for attribute in outer:
                owner = getattr(owner, attribute)
            wrap = self.wrap_async if kind == "async" else self.wrap
            setattr(owner, last, wrap(name, getattr(owner, last)))


class _Awaitable:
    """A coroutine whose turns are measured."""

    def __init__(self, spans: Spans, part: Part, coroutine: Any) -> None:
        self._spans = spans
        self._part = part
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._coroutine.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            self._spans.enter(self._part)
            try:
                waited = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                self._spans.leave()
            error = None
            try:
                value = yield waited
            except BaseException as raised:
                error = raised
