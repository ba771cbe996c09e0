"""The keys of sources and sinks that other packages register.

The key of a plugin is short for its class and arguments: `dicom: {path: scans}` is `source: {class:
"pipedist_dicom:DicomReader", with: {path: scans}}`. The arguments of the class's constructor are the keys below it,
as a model like those of built-in sections.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import Field, PydanticUserError, TypeAdapter, create_model
from pydantic_core import PydanticUndefined

from pipedist.core.plugins import SINKS, SOURCES, Plugin, arguments_of, registered, summary_of
from pipedist.spec.datasets import DatasetSpec
from pipedist.spec.fields import Expected, Section
from pipedist.spec.outputs import SINK_SECTIONS

_PHRASES: Final = {
    str: "a text",
    int: "an integer",
    float: "a number",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
"""The phrase after "must be", by type; other types are named as Python writes them."""


def plugin_sources() -> dict[str, Plugin]:
    """Return the sources of other packages by their keys; built-in keys can't be replaced."""
    return {name: each for name, each in registered(SOURCES).items() if name not in DatasetSpec.model_fields}


def plugin_sinks() -> dict[str, Plugin]:
    """Return the sinks of other packages by their keys; built-in keys can't be replaced."""
    return {name: each for name, each in registered(SINKS).items() if name not in SINK_SECTIONS}


@cache
def section_of(plugin: Plugin, without: str = "") -> type[Section]:
    """Return the model of the keys of a plugin; raise UsageError if its class can't be imported.

    Args:
        without: an argument that is not among the keys.
    """
    cls = plugin.load()
    fields: dict[str, Any] = {}
    for name, argument in arguments_of(cls).items():
        if name == without:
            continue
        required = argument.default is inspect.Parameter.empty
        field = Field(
            default=PydanticUndefined if required else argument.default,
            alias=name,
            description=argument.description or f"The argument `{name}` of `{plugin.target}`.",
        )
        fields[f"argument_{name}"] = (_checkable(argument.annotation), field)
    model: type[Section] = create_model(
        f"{plugin.name.title().replace('-', '')}Plugin",
        __base__=Section,
        __doc__=summary_of(cls) or f"The class `{plugin.target}`.",
        **fields,
    )
    return model


def _checkable(annotation: Any) -> Any:
    """Return a type that pydantic can check and describe: that of an argument, or `Any`."""
    try:
        TypeAdapter(annotation).json_schema()
    except (PydanticUserError, NameError):  # a class of the package, or a name that it does not define
        return Any
    if annotation is bool or annotation is Any:
        return annotation
    return Annotated[annotation, Expected(_phrase(annotation))]


def _phrase(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _phrase(get_args(annotation)[0])
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        parts = [_phrase(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    found = _PHRASES.get(get_origin(annotation) or annotation)
    if words := [word for word in get_args(annotation) if isinstance(word, str)]:
        return " or ".join(words)
    return found or str(getattr(annotation, "__name__", annotation))
