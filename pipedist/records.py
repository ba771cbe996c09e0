"""Records: frozen dataclasses with slots, which cost a fifth of the time to define.

`dataclass(frozen=True, slots=True)` compiles six methods of every class from text, when the class is
defined. The scheduler and the wire have a hundred such classes, which every driver and every worker
defines while somebody waits for it to start. A record behaves the same, and `dataclasses.fields`,
`replace`, `asdict` and `match` take it for what it is; its methods are plain functions, and only
`__init__` is compiled, with the first object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from inspect import Signature

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots of a class.

    Its fields are plain: named by annotations, with defaults that are values.

    Raises:
        TypeError: a field needs what only `dataclasses.dataclass` has, or a base has fields too.
    """
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    described: tuple[Field[Any], ...] = fields(made)
    names = tuple(field.name for field in described)
    if made.__match_args__ != names or made.__slots__ != names or not all(map(_is_plain, described)):
        raise TypeError(f"{cls.__qualname__} is no record: make it a dataclass(frozen=True, slots=True)")
    values = _values_of(names)

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        made.__init__ = _initialiser(made, described)
        made.__init__(self, *args, **kwargs)

    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({shown})"

    def __eq__(self: Any, other: object) -> bool:
        return bool(values(self) == values(other)) if type(other) is type(self) else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    def __setstate__(self: Any, state: tuple[object, dict[str, object]]) -> None:
        for name, value in state[1].items():  # as `object.__getstate__` makes it, for slots
            object.__setattr__(self, name, value)

    for method in (__init__, __repr__, __eq__, __hash__, __setstate__):
        if method.__name__ not in vars(cls):
            setattr(made, method.__name__, method)
    made.__signature__ = _SIGNATURE
    made.__setattr__ = _refuse
    made.__delattr__ = _refuse
    return made  # type: ignore[no-any-return]


class _SignatureOnDemand:
    """What `inspect.signature` and `help` show of a record: the arguments of the `__init__` to come."""

    def __get__(self, _made: object, cls: type[Any]) -> Signature:
        from inspect import Parameter, Signature  # only people ask for it

        return Signature(
            [
                Parameter(
                    field.name,
                    Parameter.POSITIONAL_OR_KEYWORD,
                    default=Parameter.empty if field.default is MISSING else field.default,
                    annotation=field.type,
                )
                for field in fields(cls)
            ]
        )


_SIGNATURE = _SignatureOnDemand()


def _is_plain(field: Field[Any]) -> bool:
    return field.default_factory is MISSING and field.init and field.repr and field.compare


def _values_of(names: tuple[str, ...]) -> Callable[[Any], object]:
    """Return what returns an object's values as a tuple."""
    return attrgetter(*names) if len(names) > 1 else lambda made: tuple(getattr(made, name) for name in names)


def _refuse(_self: object, name: str, *_: object) -> NoReturn:
    raise FrozenInstanceError(f"{name!r} can't be set: a {type(_self).__name__} is frozen")


def _initialiser(cls: Any, described: tuple[Field[Any], ...]) -> Any:
    """Compile `__init__`."""
    scope: dict[str, Any] = {}
    arguments, lines = ["self"], []
    for field in described:
        default = f"default_{field.name}"
        if field.default is not MISSING:
            scope[default] = field.default
        arguments.append(field.name + (f"={default}" if default in scope else ""))
        scope[f"set_{field.name}"] = vars(cls)[field.name].__set__  # past the refusal
        lines.append(f" set_{field.name}(self, {field.name})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    exec(f"def __init__({', '.join(arguments)}):\n" + ("\n".join(lines) or " pass"), scope)
    made = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made
