"""Sources and sinks of other packages: their entry points, and the arguments of their classes.

A package registers a class in the group `pipedist.sources` or `pipedist.sinks` of its entry points:

    [project.entry-points."pipedist.sources"]
    dicom = "pipedist_dicom:DicomReader"

The name is then a key of specs, beside the built-in ones, which it can't replace. The keys below it are the arguments
of the class's constructor: their annotations are the types, their defaults make keys optional, and the lines below
`Args:` in the docstring of the class describe them. The list of packages is read when a key is needed that is not
built in; a class is imported when its key is used, or when the language is described.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from msgspec import Struct

from pipedist.core.functions import FunctionNotFound, load, reference
from pipedist.errors import UsageError

SOURCES: Final = "pipedist.sources"
SINKS: Final = "pipedist.sinks"

_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_KEY = re.compile(r"[^\W\d][\w-]*")


class Plugin(Struct, frozen=True):
    """A class that a package registers under a name.

    Args:
        name: the key in specs.
        target: the class, "package.module:Class".
        package: the name and version of the package that registers it.
    """

    name: str
    target: str
    package: str

    def load(self) -> Callable[..., Any]:
        """Import the class; raise UsageError, which names the package, if that is impossible."""
        try:
            return load(reference(self.target), [])
        except (FunctionNotFound, UsageError) as error:
            raise UsageError(f"`{self.name}` of {self.package} can't be used: {error}") from error


class Argument(Struct, frozen=True):
    """An argument of a class's constructor.

    Args:
        annotation: its type; `Any` if it has none or if it can't be evaluated.
        default: its default; `inspect.Parameter.empty` if it is required.
        description: its text in the docstring of the class, or "".
    """

    annotation: Any
    default: Any
    description: str


@cache
def registered(group: str) -> Mapping[str, Plugin]:
    """Return the classes that the installed packages register in a group, by name.

    Args:
        group: `SOURCES` or `SINKS`.

    Raises:
        UsageError: two packages register the same name, or a name can't be a key.
    """
    from importlib.metadata import entry_points  # takes long, and most specs have no such keys

    found: dict[str, Plugin] = {}
    for entry in entry_points(group=group):
        package = (
            f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        )
        plugin = Plugin(entry.name, entry.value.replace(" ", ""), package)
        before = found.setdefault(entry.name, plugin)
        if before.target != plugin.target:
            raise UsageError(
                f"{before.package} and {package} both register `{entry.name}` in {group}: uninstall one of them"
            )
        if not _KEY.fullmatch(entry.name):
            raise UsageError(f"{package} registers {entry.name!r} in {group}, which can't be a key of a spec")
    return dict(sorted(found.items()))


def arguments_of(cls: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a class's constructor, by name, which are its keys in a spec.

    Example:
        >>> class Reader:
        ...     '''Reads slices.
        ...
        ...     Args:
        ...         path: the file.
        ...     '''
        ...     def __init__(self, path: str, level: int = 0) -> None: ...
        >>> arguments_of(Reader)["path"].description
        'the file.'
    """
    constructor = cls.__init__ if inspect.isclass(cls) else cls
    try:
        hints = typing.get_type_hints(constructor, include_extras=True)
    except Exception:  # an annotation of a module that is imported for types only may raise anything
        hints = {}
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class without a signature has no keys
        return {}
    described = _described(inspect.getdoc(cls) or "")
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Argument(hints.get(name, Any), parameter.default, described.get(name, ""))
        for name, parameter in parameters.items()
        if parameter.kind in named
    }


def summary_of(cls: Callable[..., Any]) -> str:
    """Return the text of a class's docstring before its first section, in one line."""
    lines = []
    for line in (inspect.getdoc(cls) or "").splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line.strip()):
            break
        lines.append(line.strip())
    return " ".join(" ".join(lines).split())


def _described(docstring: str) -> dict[str, str]:
    """Return the descriptions of arguments in the section `Args:` of a docstring."""
    described: dict[str, str] = {}
    name, indent, inside = "", 0, False
    for line in docstring.splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if text == "Args:":
            inside, indent = True, 0
        elif inside and text and not depth:
            break
        elif inside and text:
            indent = indent or depth
            match = _ARGUMENT.match(text) if depth == indent else None
            if match:
                name = match[1]
                described[name] = match[2]
            elif name:
                described[name] += f" {text}"
    return described
