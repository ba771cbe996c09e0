"""Messages to bytes and back: msgpack of a tag and the fields, each checked on both ends."""

from __future__ import annotations

import math
import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

import msgpack

from pipedist import messages
from pipedist.errors import LocalProtocolError, RemoteProtocolError
from pipedist.messages import Message
from pipedist.records import record
from pipedist.transport.config import KIB, LIMITS, STRING_BYTES_MAX

_TAGS: Final[dict[int, type[Any]]] = {
    1: messages.Hello,
    2: messages.Welcome,
    3: messages.Refuse,
    4: messages.Bind,
    5: messages.Unbind,
    6: messages.Assign,
    7: messages.Cancel,
    8: messages.Stop,
    9: messages.Results,
    10: messages.Failed,
    11: messages.Log,
    12: messages.Heartbeat,
    13: messages.Goodbye,
    14: messages.AssignGang,
    15: messages.State,
    16: messages.DropState,
    17: messages.Exchange,
    18: messages.Relay,
    19: messages.Stalled,
    20: messages.Cancelled,
    21: messages.Recall,
    22: messages.Settled,
    23: messages.Code,
    24: messages.Sees,
    25: messages.Share,
}
"""The number of each message class on the wire; a number is never used for another one."""

if set(_TAGS.values()) != set(typing.get_args(Message)):
    raise ImportError("the wire's table of tags and pipedist.messages.Message have drifted apart")


_INT_END: Final = 1 << 63
_SHORT: Final = STRING_BYTES_MAX // 4
"""A text of so many code points is never too long: each takes at most 4 bytes."""


def _str(value: Any) -> str:
    if type(value) is not str or (
        len(value) > _SHORT and len(value.encode("utf-8", "surrogatepass")) > STRING_BYTES_MAX
    ):
        raise ValueError(f"a str of at most {STRING_BYTES_MAX} bytes")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _INT_END:
        raise ValueError("an int from 0 to 2**63 - 1")
    return value


def _float(value: Any) -> float:
    if type(value) is int:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise ValueError("a finite float")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("a bool")
    return value


def _strs(value: Any) -> tuple[str, ...]:
    if type(value) is not tuple:
        raise ValueError("a tuple of str")
    return tuple(map(_str, value))


_CHECKS: Final[dict[Any, Callable[[Any], Any]]] = {
    str: _str,
    int: _int,
    float: _float,
    bool: _bool,
    tuple[str, ...]: _strs,
}


@record
class _Form:
    """How one message class is written, compiled from its annotations."""

    cls: type[Any]
    tag: int
    names: tuple[str, ...]
    checks: tuple[Callable[[Any], Any], ...]
    get: Callable[[Any], Any]
    types: tuple[Any, ...]
    """What the fields are annotated with."""

    @classmethod
    def of(cls, message_class: type[Any], tag: int) -> _Form:
        hints = typing.get_type_hints(message_class)
        names = tuple(field.name for field in fields(message_class))
        types = tuple(hints[name] for name in names)
        get = operator.attrgetter(*names)
        return cls(
            message_class,
            tag,
            names,
            tuple(map(_CHECKS.__getitem__, types)),
            get if len(names) > 1 else lambda message: (get(message),),
            types,
        )

    def check(self, values: tuple[Any, ...]) -> Sequence[Any]:
        fits = _FITS.get(self.tag)
        if fits is None:
            fits = _FITS[self.tag] = _fits_of(self.types)
        if fits(values):
            return values
        if len(values) != len(self.names):
            raise ValueError(f"{self.cls.__name__} has {len(self.names)} fields, not {len(values)}")
        checked = []
        for name, check, value in zip(self.names, self.checks, values, strict=True):
            try:
                checked.append(check(value))
            except ValueError as error:
                raise ValueError(f"{self.cls.__name__}.{name} must be {error}, not {_shown(value)}") from None
        return checked


_FITS: Final[dict[int, Callable[[tuple[Any, ...]], bool]]] = {}
"""By tag, what tells that values are right as they are; compiled with the first message of a class."""

_PLAIN: Final[dict[Any, str]] = {
    int: "type({0}) is int and 0 <= {0} < _INT_END",
    str: "type({0}) is str and len({0}) <= _SHORT",
    bool: "type({0}) is bool",
    float: "type({0}) is float and {0} - {0} == 0.0",  # of no NaN, and of no infinity
    tuple[str, ...]: "{0} == ()",
}


def _fits_of(types: Sequence[Any]) -> Callable[[tuple[Any, ...]], bool]:
    """Compile the look at all fields of a message into one function: it is most of what a message costs.

    Where it says no, the fields are looked at one by one: they may be allowed all the same.
    """
    names = [f"v{place}" for place in range(len(types))]
    lines = ["def fits(values):", f" if len(values) != {len(names)}: return False"]
    if names:
        lines.append(f" {', '.join(names)}, = values")
    tests = [_PLAIN[kind].format(name) for kind, name in zip(types, names, strict=True)]
    lines.append(f" return {' and '.join(tests) or True}")
    scope: dict[str, Any] = {"_INT_END": _INT_END, "_SHORT": _SHORT}
    exec("\n".join(lines), scope)
    fits: Callable[[tuple[Any, ...]], bool] = scope["fits"]
    return fits


_BY_TAG: Final = {tag: _Form.of(cls, tag) for tag, cls in _TAGS.items()}
_BY_CLASS: Final = {form.cls: form for form in _BY_TAG.values()}


# One for all messages and threads: with plain types it runs no Python code, and so in one go.
_PACKER: Final = msgpack.Packer(unicode_errors="surrogatepass", buf_size=4 * KIB)


def pack(message: Message) -> bytes:
    """Turn a message into the bytes of its frame.

    Raises:
        LocalProtocolError: a field has a value that the receiver would refuse.
    """
    form = _BY_CLASS.get(type(message))
    if form is None:
        raise LocalProtocolError(f"{type(message).__qualname__} is no message")
    try:
        head: bytes = _PACKER.pack([form.tag, *form.check(form.get(message))])
    except ValueError as error:
        raise LocalProtocolError(f"can't send: {error}") from None
    if len(head) > LIMITS.head_bytes_max:
        raise LocalProtocolError(
            f"{form.cls.__name__} of {len(head)} bytes, the limit is {LIMITS.head_bytes_max}"
        )
    return head


def unpack(head: bytes | bytearray | memoryview) -> Message:
    """Turn the bytes of a frame back into the message.

    Raises:
        RemoteProtocolError: anything that `pack` would not have written.
    """
    size_bytes = len(head) if isinstance(head, (bytes, bytearray)) else head.nbytes
    if size_bytes > LIMITS.head_bytes_max:
        raise RemoteProtocolError(f"a message of {size_bytes} bytes, limit {LIMITS.head_bytes_max}")
    try:
        # The longest list of a message is an import path. No message holds a map or binary data.
        values = msgpack.unpackb(
            head,
            use_list=False,
            unicode_errors="surrogatepass",
            max_array_len=4096,
            max_map_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
        if type(values) is not tuple or not values or type(values[0]) is not int:
            raise ValueError("no list that begins with a tag")
        form = _BY_TAG.get(values[0])
        if form is None:
            raise ValueError(f"unknown tag {values[0]}")
        message: Message = form.cls(*form.check(values[1:]))
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise RemoteProtocolError(f"malformed message: {str(error) or type(error).__name__}") from error
    return message


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
