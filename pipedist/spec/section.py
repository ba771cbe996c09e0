"""Sections: mappings of the language with known keys, read strictly, immutable.

A section is a class whose attributes are made with `key`: what the value must be (a `Kind`), what
is said of the key (a `Key`), and its default. Errors, JSON Schema and reference come from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Self

from msgspec import Struct

from pipedist.spec.document import Path
from pipedist.spec.kinds import Kind, Misfits, Wrong

REQUIRED: Final = object()
"""The default of a key that must be there."""


class Key(Struct, frozen=True):
    """The account of one key.

    Args:
        says: what it means, in full sentences.
        expected: a phrase for the values it can have, after the word "expected".
        example: YAML text of a mapping which holds the key.
        choices: the words it can be, where there is a list of them.
        required: when a key without a default must be there.
    """

    says: str
    expected: str
    example: str
    choices: tuple[str, ...] = ()
    required: str = "Required."


class Field:
    """A key of a section.

    Args:
        kind: what its value must be.
        account: what is said of it; None where nothing is.
        default: its value where it is not written, or REQUIRED.
    """

    def __init__(self, kind: Kind, account: Key | None, default: Any) -> None:
        self.kind = kind
        self.account = account
        self.default = default
        self.attribute = ""
        """Of the section's class; the key itself with a `_` where that is a word of Python."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name


class Misspelled(Wrong):
    """A section has no such key."""


class Missing(Wrong):
    """A section lacks a key."""


class Section:
    """A mapping of the language: known keys only, no coercion, immutable.

    Args:
        values: by attribute.
    """

    fields: ClassVar[Mapping[str, Field]] = {}
    """The keys, as they are written."""

    def __init_subclass__(cls) -> None:
        own = {name.rstrip("_"): field for name, field in vars(cls).items() if isinstance(field, Field)}
        cls.fields = {**cls.fields, **own}

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    @classmethod
    def read(cls, raw: Mapping[Any, object], misfits: Misfits, at: Path = ()) -> Self | None:
        """Return what was written as a section; None, with a note of everything that does not fit.

        Args:
            raw: keys and values.
            misfits: where that is noted.
            at: where the section stands, below the one that is being read.
        """
        before = len(misfits)
        values = {}
        for name, field in cls.fields.items():
            if name in raw:
                values[field.attribute] = field.kind.read(raw[name], (*at, name), misfits)
            elif field.default is REQUIRED:
                misfits.append(((*at, name), raw, Missing()))
            else:
                values[field.attribute] = (
                    field.default.copy() if isinstance(field.default, dict) else field.default
                )
        misfits += [((*at, name), raw[name], Misspelled()) for name in raw if name not in cls.fields]
        return cls(**values) if len(misfits) == before else None

    def replaced(self, **values: Any) -> Self:
        """Return a copy with other values, by attribute."""
        return type(self)(**{**self.__dict__, **values})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a spec is frozen: {name!r} can't be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a spec is frozen: {name!r} can't be deleted")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.__dict__.items())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"


def key(kind: Kind, account: Key | None, *, default: object = REQUIRED) -> Any:
    """Return a key of a section, for its class body.

    Args:
        kind: what its value must be.
        account: what is said of it.
        default: its value where it is not written.
    """
    return Field(kind, account, default)


class SectionOf(Kind):
    """A section inside a section."""

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return the section."""
        if isinstance(value, dict):
            return self.section.read(value, misfits, at)
        misfits.append((at, value, Wrong()))
        return None

    def schema(self) -> dict[str, Any]:
        """Return a reference to its JSON Schema."""
        return {"$ref": f"#/$defs/{self.section.__name__}"}


class FlagOrSection(SectionOf):
    """True, false, or a section, which means true and says more."""

    def read(self, value: object, at: Path, misfits: Misfits) -> Any:
        """Return False, or the section: of true, with its defaults."""
        if value is False:
            return False
        return super().read({} if value is True else value, at, misfits)

    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        return {"anyOf": [{"type": "boolean"}, super().schema()]}
