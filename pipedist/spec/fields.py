"""The base class of the spec's models, and the types of their fields.

A type carries the phrase that completes "`key` must be ...": errors and the language reference read it from
there, and pydantic derives the JSON Schema from the same annotations. Nothing is coerced: text is never a
number, and a boolean is never an integer. The one exception is an integer where a number is expected.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pipedist.spec.scalars import listing

EXPECTED: Final = "expected"  # type of `Expected`'s errors; their context has the phrase and allowed words
MESSAGE: Final = "message"  # type of an error whose context has a complete message and the expected value

FUNCTION_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
FUNCTION_EXPECTED = '"package.module:name", made of Python identifiers'
ENDPOINT_PATTERN = r"^tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)$"
PORT_MAX = 65_535
SECONDS_MAX = 10_000_000
BATCH_ELEMENTS_MAX = 2**40


class Section(BaseModel):
    """A mapping of the spec: known keys only, no coercion, immutable."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        defer_build=True,  # a run builds the validators of those sections that its spec has
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of this section; in a field of another one, of a call of its own validator.

        That validator is built with the first value: a spec has one of twenty sources.
        """
        if handler.field_name is None:
            return handler(source)
        name = f"{cls.__module__}.{cls.__qualname__}:{id(cls)}"
        return core_schema.no_info_plain_validator_function(cls.model_validate, ref=name)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON Schema of the section, which does not depend on where it is."""
        if schema["type"] == "function-plain":
            cls.model_rebuild()
            schema = cls.__pydantic_core_schema__
        return handler(schema)

    def __hash__(self) -> int:
        # The hash that pydantic makes for frozen models fails only if a section has mappings.
        raise TypeError(f"unhashable type: {type(self).__name__!r}")


@cache
def keys_of(model: type[Section]) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by their keys in a spec."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def summary(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split())


class Expected:
    """Replaces every error of a type by one phrase; the nearest of the allowed words is suggested."""

    def __init__(self, phrase: str, *words: str) -> None:
        self.phrase = phrase
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source),
            custom_error_type=EXPECTED,
            custom_error_message="{expected}",
            custom_error_context={EXPECTED: self.phrase, "allowed": self.words},
        )


class ExpectedShape(Expected):
    """Checks the shape of a container, and keeps the errors of the values in it.

    Args:
        read: returns the value in its longest form, or raises ValueError.
        written: the type of the value as written, for the JSON Schema; None if it is the type itself.
    """

    def __init__(self, phrase: str, read: Callable[[Any], Any], written: Any = None) -> None:
        super().__init__(phrase)
        self._read = read
        self._written = written

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = handler.generate_schema(self._written) if self._written is not None else None
        return core_schema.no_info_before_validator_function(
            self._check, handler(source), json_schema_input_schema=written
        )

    def _check(self, value: object) -> object:
        try:
            return self._read(value)
        except ValueError:
            raise PydanticCustomError(EXPECTED, "{expected}", {EXPECTED: self.phrase}) from None


def message_error(message: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError(MESSAGE, "{message}", {MESSAGE: message, EXPECTED: expected})


def expected_phrase(annotation: Any, metadata: list[Any]) -> str:
    """Return the phrase for the values of a field, or ""; it may also stand inside an optional type."""
    for item in reversed(metadata):
        if isinstance(item, Expected):
            return item.phrase
    if annotation is bool:
        return "true or false"
    if words := [word for word in get_args(annotation) if isinstance(word, str)]:
        return listing(words)
    for part in get_args(annotation):
        inner, *extra = get_args(part) if hasattr(part, "__metadata__") else (part,)
        if extra and (phrase := expected_phrase(inner, extra)):
            return phrase
    return ""


def mapping(value: object) -> object:
    """Return a mapping, or a model made of one; raise ValueError for anything else."""
    if isinstance(value, dict | BaseModel):
        return value
    raise ValueError("no mapping")


def filled_mapping(value: object) -> object:
    """Return a mapping that is not empty; raise ValueError for anything else."""
    if isinstance(value, dict) and value:
        return value
    raise ValueError("no mapping, or an empty one")


def one_or_more(value: object) -> object:
    """Return one text, or a list of at least one value, as a tuple; raise ValueError for anything else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        return tuple(value)
    raise ValueError("neither a text nor a list")


def function_name(value: object) -> Any:
    """Return a callable or the name of a function; raise ValueError for anything else."""
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if colon and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            return value
    elif callable(value):
        return value
    raise ValueError(FUNCTION_EXPECTED)


def is_endpoint(text: str) -> bool:
    """Return whether a text is a TCP address to listen at."""
    port = text.rpartition(":")[2]
    return bool(re.match(ENDPOINT_PATTERN, text)) and (port == "*" or int(port) <= PORT_MAX)


def satisfies(is_valid: Callable[[Any], bool]) -> AfterValidator:
    """Return a validator of values for which a function returns true."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError("the value is not valid")
        return value

    return AfterValidator(check)


Function = Annotated[
    str | Callable[..., Any],
    PlainValidator(function_name),
    WithJsonSchema({"type": "string", "pattern": FUNCTION_PATTERN}),
    Expected(FUNCTION_EXPECTED),
]
"""A function: "package.module:name", or a callable in a spec that is a dict."""

Arguments = Annotated[dict[Any, Any], ExpectedShape("a mapping of argument names to values", mapping)]
"""The keyword arguments of a function."""

_Path = Annotated[
    str,
    satisfies(lambda path: path and "\0" not in path),
    WithJsonSchema({"type": "string", "minLength": 1}),
]
PathText = Annotated[_Path, Expected("a path")]  # a path, relative to the spec's folder

_Glob = Annotated[_Path, Expected("a glob")]
Paths = Annotated[
    tuple[_Glob, ...],
    ExpectedShape(
        "a glob or a list of globs", one_or_more, _Glob | Annotated[list[_Glob], Field(min_length=1)]
    ),
]

_Name = Annotated[str, Expected("the name of a stage")]
Names = Annotated[
    tuple[_Name, ...],
    ExpectedShape(
        "the name of a stage, or a list of names",
        one_or_more,
        _Name | Annotated[list[_Name], Field(min_length=1)],
    ),
]

Endpoint = Annotated[
    str,
    satisfies(is_endpoint),
    WithJsonSchema({"type": "string", "pattern": ENDPOINT_PATTERN}),
    Expected('"tcp://ADDRESS:PORT"'),
]
"""A TCP address to listen at."""

_SECONDS: dict[str, Any] = {"le": SECONDS_MAX, "allow_inf_nan": False}
Seconds = Annotated[float, Field(ge=0, **_SECONDS), Expected("a number of seconds, 0 or more")]
PositiveSeconds = Annotated[float, Field(gt=0, **_SECONDS), Expected("a number of seconds, more than 0")]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), Expected("an integer of at most 64 bits")]

ColumnType = Literal[
    "str", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "date", "timestamp",
]  # fmt: skip
COLUMN_TYPES: Final[tuple[str, ...]] = get_args(ColumnType)
