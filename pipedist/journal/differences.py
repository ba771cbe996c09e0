"""Lists the differences between two documents, path by path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

TEXT_MAX: Final = 60
"""Characters of a value in a line."""

_MISSING: Final = object()


def differences(there: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each difference: "stages.late.axis: 0 there, 1 now".

    Args:
        there, now: plain values: maps, lists, text, numbers.
        path: of both documents, as the lines begin with it.
    """
    if _text(there) == _text(now):
        return
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*there, *now)):
            below = f"{path}.{name}" if path else str(name)
            yield from differences(there.get(name, _MISSING), now.get(name, _MISSING), below)
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        for index, (a, b) in enumerate(zip(there, now, strict=True)):
            yield from differences(a, b, f"{path}[{index}]")
    else:
        yield f"{path or 'all of it'}: {_excerpt(there)} there, {_excerpt(now)} now"


def _text(value: Any) -> str:
    # as for a digest: 1, 1.0 and true differ, as do 0.0 and -0.0, and NaN equals NaN
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def _excerpt(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."
