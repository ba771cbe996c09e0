"""Namedtuple and dataclass classes by name: `module:qualname(field,field)`.

A class that a peer names is looked up among the modules that are already imported, in their
dictionaries (no `__getattr__` runs), and instances are made without calling `__init__`: so
bytes that arrive run no code of their choice.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from typing import Any, Final

_SIGNATURE: Final = re.compile(r"([\w.]{1,400}):([\w.]{1,400})\((\w[\w,]{0,20000})?\)")
_CACHE_ENTRIES_MAX: Final = 1024


class Unresolvable(ValueError):
    """A class can't be named, or a name leads to no suitable class."""


_signatures: dict[type, tuple[str, tuple[str, ...]]] = {}


def is_namedtuple(cls: type) -> bool:
    """Tell whether `cls` was made by `collections.namedtuple` or `typing.NamedTuple`."""
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(type(f) is str for f in fields)


def signature(cls: type) -> tuple[str, tuple[str, ...]]:
    """Write a class as text.

    Args:
        cls: a namedtuple or dataclass class.

    Returns:
        The text, and the names of the fields.

    Raises:
        Unresolvable: the class is defined inside a function, where no other process finds it.
    """
    entry = _signatures.get(cls)
    if entry is None:
        fields = _fields(cls)
        text = f"{cls.__module__}:{cls.__qualname__}({','.join(fields)})"
        if not _SIGNATURE.fullmatch(text):
            raise Unresolvable(
                f"class {cls.__module__}.{cls.__qualname__}, which other processes can't find by name; "
                "define it at the top level of a module"
            )
        if len(_signatures) >= _CACHE_ENTRIES_MAX:
            _signatures.clear()
        entry = _signatures[cls] = text, fields
    return entry


def resolve(text: str, *, may_import: bool) -> tuple[type, tuple[str, ...]]:
    """Find the class that `signature` wrote.

    Args:
        may_import: import its module if need be; only for what a trusted peer sent.

    Returns:
        The class and the names of its fields.

    Raises:
        Unresolvable: the text is malformed, there is no such class here, or it has other fields.
    """
    match = _SIGNATURE.fullmatch(text)
    if match is None:
        raise Unresolvable(f"malformed class name {text[:200]!r}")
    module_name, qualname, field_text = match.groups()
    module = sys.modules.get(module_name)
    if module is None and may_import:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise Unresolvable(f"class {module_name}.{qualname}: {error}") from error
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise Unresolvable(
                f"class {module_name}.{qualname}: importing {module_name} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
    if module is None:
        raise Unresolvable(f"class {module_name}.{qualname}: module {module_name} is not imported here")
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not (is_namedtuple(found) or dataclasses.is_dataclass(found)):
        raise Unresolvable(f"{module_name}.{qualname} is no namedtuple and no dataclass here")
    fields = _fields(found)
    if field_text != (",".join(fields) or None):
        raise Unresolvable(
            f"class {module_name}.{qualname} has the fields ({', '.join(fields)}) here "
            f"and ({(field_text or '').replace(',', ', ')}) at the sender; use one version of the code"
        )
    return found, fields


def build(cls: type, fields: tuple[str, ...], values: list[Any]) -> Any:
    """Make an instance of a resolved class from the values of its fields, without `__init__`.

    Raises:
        Unresolvable: the number of values is wrong, or the class refuses them.
    """
    if len(values) != len(fields):
        raise Unresolvable(f"class {cls.__qualname__} has {len(fields)} fields, {len(values)} came")
    if is_namedtuple(cls):
        return tuple.__new__(cls, values)
    try:
        instance: Any = object.__new__(cls)
        for name, value in zip(fields, values, strict=True):
            object.__setattr__(instance, name, value)
    except (TypeError, AttributeError) as error:
        raise Unresolvable(f"class {cls.__qualname__} can't be rebuilt: {error}") from error
    return instance


def _fields(cls: type) -> tuple[str, ...]:
    if is_namedtuple(cls):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    return tuple(field.name for field in dataclasses.fields(cls))
