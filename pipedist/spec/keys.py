"""What is said of each key of the language, once: for errors, the JSON Schema and the reference.

Every field of `pipedist.spec.model` carries a `Key`. pydantic decides whether a value fits;
what a person reads about it comes from here, never from pydantic.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

WRONG = "pipedist"
"""The pydantic error type of `wrong`."""

FUNCTION_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
ENDPOINT_PATTERN = r"^tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)$"
COLUMN_TYPES = (
    "str",
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
FUNCTION_EXPECTED = '"package.module:name", of Python identifiers'


class Section(BaseModel):
    """A mapping of the language: known keys only, no coercion, immutable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


@dataclass(frozen=True, slots=True)
class Key:
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


def key_of(field: FieldInfo) -> Key | None:
    """Return the `Key` of a model's field, None where it is no key of the language."""
    return next((data for data in field.metadata if isinstance(data, Key)), None)


def wrong(message: str, *, expected: str = "", allowed: Sequence[str] = ()) -> PydanticCustomError:
    """Return the error that a validator raises to say in its own words what is wrong.

    Args:
        message: what is wrong; "" for the usual "`key` is ...".
        expected, allowed: instead of what the `Key` says, where they are not empty.
    """
    # The text is handed over in the context: pydantic would format braces in a template.
    return PydanticCustomError(
        WRONG, "wrong", {"message": message, "expected": expected, "allowed": list(allowed)}
    )


def function_name(value: object) -> Any:
    """Return `value` if it names a function or is one; else raise what pydantic reports."""
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not colon or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise wrong("", expected=FUNCTION_EXPECTED)
        return value
    if not callable(value):
        raise wrong("", expected=FUNCTION_EXPECTED)
    return value


def _listed(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    return value


def _path(value: object) -> object:
    if not isinstance(value, str) or not value or "\0" in value:
        raise wrong("")
    return value


def _column_type(value: object) -> object:
    if value not in COLUMN_TYPES:
        raise wrong("", expected="one of " + ", ".join(COLUMN_TYPES), allowed=COLUMN_TYPES)
    return value


def _endpoint(value: object) -> object:
    if isinstance(value, str) and re.match(ENDPOINT_PATTERN, value):
        port = value.rpartition(":")[2]
        if port == "*" or int(port) <= 65_535:
            return value
    raise wrong("")


Function = Annotated[
    str | Callable[..., Any],
    PlainValidator(function_name),
    WithJsonSchema({"type": "string", "pattern": FUNCTION_PATTERN}),
]
"""A function: "package.module:name", or (in a dict) a callable."""

PathText = Annotated[str, PlainValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
"""A path, relative to the spec's folder."""

Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(_listed),
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]
"""A glob or a list of globs."""

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    Field(min_length=1),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    ),
]
"""A name or a list of names."""

ColumnType = Annotated[str, PlainValidator(_column_type), WithJsonSchema({"enum": list(COLUMN_TYPES)})]
"""The type of a column."""

Endpoint = Annotated[
    str, PlainValidator(_endpoint), WithJsonSchema({"type": "string", "pattern": ENDPOINT_PATTERN})
]
"""A TCP address to listen at."""

WithTree = Annotated[
    dict[str, Any],
    Key(
        "Keyword arguments of the function (of a class: of its constructor): any tree of values.",
        expected="a mapping of argument names to values",
        example='with: {scale: 0.5, centre: "${stages.mean}"}',
    ),
]
"""The `with` of a function."""
