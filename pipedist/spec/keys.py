"""The kinds of values that several sections have: functions, paths, names, column types."""

from __future__ import annotations

import keyword
import re
from typing import Any, Final

from pipedist.spec.kinds import Anything, Checked, MappingOf, OneOrMore, Text, Wrong
from pipedist.spec.section import Key

FUNCTION_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
ENDPOINT_PATTERN = r"^tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)$"
ENGINE_ADDRESS_PATTERN = r"^(local|auto|([a-z]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5})$"
_ENGINE_ADDRESSES = {
    "ray": re.compile(r"local|auto|(ray://)?[^/]+"),
    "dask": re.compile(r"local|(tcp|tls|ws|wss|ucx)://[^/]+"),
}
ENGINE_ADDRESS_EXPECTED = {
    "ray": "local, auto, HOST:PORT or ray://HOST:PORT",
    "dask": "local or tcp://HOST:PORT (tls, ws, wss, ucx)",
}
"""By launcher."""

COLUMN_TYPES = (
    "str",
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
FUNCTION_EXPECTED = '"package.module:name", of Python identifiers'


def function_name(value: object) -> Any:
    """Return `value` if it names a function or is one; else raise `Wrong`."""
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not colon or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise Wrong(expected=FUNCTION_EXPECTED)
        return value
    if not callable(value):
        raise Wrong(expected=FUNCTION_EXPECTED)
    return value


def _path(value: object) -> object:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Wrong
    return value


def _one_of(words: tuple[str, ...]) -> Checked:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in words:
            raise Wrong(expected="one of " + ", ".join(words), allowed=words)
        return value

    return Checked(check, {"enum": list(words)})


def _endpoint(value: object) -> object:
    if isinstance(value, str) and re.match(ENDPOINT_PATTERN, value):
        port = value.rpartition(":")[2]
        if port == "*" or int(port) <= 65_535:
            return value
    raise Wrong


def fits_engine(address: str, launcher: str) -> bool:
    """Return whether a text can be the address of an engine."""
    return bool(re.match(ENGINE_ADDRESS_PATTERN, address) and _ENGINE_ADDRESSES[launcher].fullmatch(address))


def _engine_address(value: object) -> object:
    if not isinstance(value, str) or not re.match(ENGINE_ADDRESS_PATTERN, value):
        raise Wrong
    return value


Function: Final = Checked(function_name, {"type": "string", "pattern": FUNCTION_PATTERN})
"""A function: "package.module:name", or (in a dict) a callable."""

PathText: Final = Checked(_path, {"type": "string", "minLength": 1})
"""A path, relative to the spec's folder."""

Paths: Final = OneOrMore(PathText)
"""A glob or a list of globs."""

Names: Final = OneOrMore(Text())
"""A name or a list of names."""

ColumnType: Final = _one_of(COLUMN_TYPES)
TypedColumn: Final = _one_of((*COLUMN_TYPES, "own"))
"""Of a file that says what its columns are."""
"""The type of a column."""

Endpoint: Final = Checked(_endpoint, {"type": "string", "pattern": ENDPOINT_PATTERN})
"""A TCP address to listen at."""

EngineAddress: Final = Checked(_engine_address, {"type": "string", "pattern": ENGINE_ADDRESS_PATTERN})
"""Where an engine is."""

Arguments: Final = MappingOf(Anything())
"""The `with` of a function."""

WITH: Final = Key(
    "Keyword arguments of the function (of a class: of its constructor): any tree of values.",
    expected="a mapping of argument names to values",
    example='with: {scale: 0.5, centre: "${stages.mean}"}',
)
