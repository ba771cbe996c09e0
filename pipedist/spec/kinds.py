"""Kinds of values: what fits a key, said once, for the reader of specs and for the JSON Schema.

Nothing is coerced: a text is never a number, an integer is no boolean. The one exception is an
integer where a number is expected.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pipedist.spec.document import Path


class Wrong(Exception):
    """A value does not fit.

    Args:
        message: what is wrong; "" for the usual "`key` is ...".
        expected, allowed: instead of what the `Key` says, where they are not empty.
    """

    def __init__(self, message: str = "", *, expected: str = "", allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.allowed = tuple(allowed)


Misfits = list[tuple[Path, object, Wrong]]
"""What did not fit: where, below the section that was read; the value; and why."""


class Kind(ABC):
    """What a value must be."""

    @abstractmethod
    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return the value as the section holds it; note what does not fit."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema, of a new dict."""


class Checked(Kind):
    """What a function makes of the value.

    Args:
        check: returns the value as it is held, or raises `Wrong`.
        schema: the JSON Schema.
    """

    def __init__(self, check: Callable[[object], Any], schema: Mapping[str, Any]) -> None:
        self._check = check
        self._schema = schema

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return what the function returns; note what it raises."""
        try:
            return self._check(value)
        except Wrong as why:
            misfits.append((at, value, why))
            return None

    def schema(self) -> dict[str, Any]:
        """Return what was given."""
        return dict(self._schema)


class _Plain(Kind):
    """A value that is held as it is, if it fits."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Whether the value is of this kind."""

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return the value."""
        if not self.fits(value):
            misfits.append((at, value, Wrong()))
        return value


class Anything(_Plain):
    """Any value."""

    def fits(self, value: object) -> bool:
        """Whether the value is of this kind: it is."""
        return True

    def schema(self) -> dict[str, Any]:
        """Return the schema that everything fits."""
        return {}


class Text(_Plain):
    """Any text."""

    def fits(self, value: object) -> bool:
        """Whether the value is a text."""
        return isinstance(value, str)

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"type": "string"}


class Flag(_Plain):
    """True or false."""

    def fits(self, value: object) -> bool:
        """Whether the value is a boolean."""
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"type": "boolean"}


class Choice(_Plain):
    """One of some words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def fits(self, value: object) -> bool:
        """Whether the value is one of the words."""
        return isinstance(value, str) and value in self._words

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"enum": list(self._words), "type": "string"}


class Integer(_Plain):
    """An integer from `low` to `high`, both included."""

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high

    def fits(self, value: object) -> bool:
        """Whether the value is such an integer."""
        return isinstance(value, int) and not isinstance(value, bool) and self._low <= value <= self._high

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"type": "integer", "minimum": self._low, "maximum": self._high}


class Number(Kind):
    """A finite number from 0 to `high`, held as a float.

    Args:
        positive: 0 does not fit.
    """

    def __init__(self, high: float, *, positive: bool = False) -> None:
        self._high = high
        self._positive = positive

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return the value as a float."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not self._holds(value):
            misfits.append((at, value, Wrong()))
            return value
        return float(value)

    def _holds(self, value: Any) -> bool:
        return 0 <= value <= self._high and not (self._positive and value == 0)  # NaN is in no range

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        low = "exclusiveMinimum" if self._positive else "minimum"
        return {"type": "number", low: 0, "maximum": self._high}


class Factor(_Plain):
    """A finite number from 1 to `high`."""

    def __init__(self, high: float) -> None:
        self._high = high

    def fits(self, value: object) -> bool:
        """Whether the value is of this kind."""
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return number and 1 <= value <= self._high  # type: ignore[operator]

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"type": "number", "minimum": 1, "maximum": self._high}


class Either(_Plain):
    """One of several kinds, which hold values as they are."""

    def __init__(self, *kinds: _Plain) -> None:
        self._kinds = kinds

    def fits(self, value: object) -> bool:
        """Whether the value is of one of the kinds."""
        return any(kind.fits(value) for kind in self._kinds)

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"anyOf": [kind.schema() for kind in self._kinds]}


class Nullable(Kind):
    """A kind, or null."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return None for null, else what the kind makes of the value."""
        return None if value is None else self._kind.read(value, at, misfits)

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"anyOf": [self._kind.schema(), {"type": "null"}]}


class OneOrMore(Kind):
    """A value of a kind that takes texts, or a list of at least one; held as a tuple."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return the values."""
        if isinstance(value, str):
            return (self._kind.read(value, at, misfits),)
        if not isinstance(value, list | tuple) or not value:
            misfits.append((at, value, Wrong()))
            return value
        return tuple(self._kind.read(item, (*at, index), misfits) for index, item in enumerate(value))

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {
            "anyOf": [
                self._kind.schema(),
                {"type": "array", "items": self._kind.schema(), "minItems": 1},
            ]
        }


class MappingOf(Kind):
    """A mapping of texts to values of a kind.

    Args:
        kind: of the values.
        items_min: how many there are, at least.
    """

    def __init__(self, kind: Kind, *, items_min: int = 0) -> None:
        self._kind = kind
        self._items_min = items_min

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return a copy of the mapping."""
        if not isinstance(value, dict) or len(value) < self._items_min:
            misfits.append((at, value, Wrong()))
            return value
        misfits += [((*at, key), key, Wrong()) for key in value if not isinstance(key, str)]
        return {key: self._kind.read(item, (*at, key), misfits) for key, item in value.items()}

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        least = {"minProperties": self._items_min} if self._items_min else {}
        return {"type": "object", "additionalProperties": self._kind.schema() or True, **least}


INT64: Final = Integer(-(2**63), 2**63 - 1)
"""What a 64-bit integer holds."""
