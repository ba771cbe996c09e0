"""The identity of a run: the meaning of its spec, and where it came from.

Two specs with the same digest give the same results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from pipedist.core.functions import reference
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, UsageError
from pipedist.journal.log_format import packed, unpacked
from pipedist.protocol.codec import encode
from pipedist.spec import CollectivesSpec, InitFile, InitFunction, InitLiteral, ResourcesSpec, Spec, load


def meaning(spec: Spec) -> dict[str, Any]:
    """Return everything in a spec that decides its results, as JSON."""
    return {
        "replicas": spec.replicas,
        "seed": spec.seed,
        "threads_per_replica": spec.threads_per_replica,
        "datasets": {
            name: {
                d.kind: _plain(d.config),
                "batch": d.batch,
                "drop_remainder": d.drop_remainder,
                "epochs": d.epochs,
                "shuffle": d.shuffle,
            }
            for name, d in spec.datasets.items()
        },
        "stages": {
            name: {field.removesuffix("_"): _plain(value) for field, value in stage if value is not None}
            for name, stage in spec.stages.items()
        },
        "outputs": dict(spec.outputs),
    }


def digest(spec: Spec) -> str:
    return digest_of(meaning(spec))


def digest_of(meant: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as JSON, with digests for functions and arrays."""
    if isinstance(value, np.number | np.bool_):  # the type decides the result's type, as for 1 and 1.0
        return [str(value.dtype), str(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value)
        return [str(value.dtype), list(value.shape), hashlib.sha256(content.tobytes()).hexdigest()]
    if isinstance(value, InitLiteral | InitFile | InitFunction):
        return [type(value).__name__, *(_plain(getattr(value, f.name)) for f in dataclasses.fields(value))]
    if isinstance(value, CollectivesSpec | ResourcesSpec):
        return _plain(dict(value))
    if callable(value):
        ref = reference(value)
        return ref.name or hashlib.sha256(ref.pickled).hexdigest()
    return str(value)


class SpecSource(Struct, frozen=True):
    """Where a spec came from, so that a later process can load it again.

    Args:
        source: absolute path of its file; "" if the spec can't be loaded again.
        sets: texts NAME=VALUE of the command line.
        params: parameters given as values: a dict, encoded as a record of a log.
    """

    source: str = ""
    sets: tuple[str, ...] = ()
    params: bytes = b""

    @classmethod
    def of(cls, spec: object, params: Mapping[str, Tree] | None, sets: Sequence[str]) -> SpecSource:
        if not isinstance(spec, str | os.PathLike):
            return NO_SOURCE
        try:
            kept = b"".join(packed(None, encode(dict(params)))) if params else b""
        except PipedistError:  # a value that can't be encoded
            return NO_SOURCE
        return cls(os.path.abspath(os.fspath(spec)), tuple(sets), kept)

    def load(self) -> Spec:
        if not self.source:
            raise UsageError(
                "the run's spec did not come from a file: it was passed in Python, as a dict or with values "
                "that can't be stored. Write the spec to a YAML file, and run that file"
            )
        if not Path(self.source).is_file():
            raise UsageError(f"the run's spec file {self.source} does not exist any more: put it back")
        return load(self.source, sets=self.sets, params=unpacked(self.params) if self.params else None)


NO_SOURCE = SpecSource()
"""The source of a spec that can't be loaded again."""

TEXT_MAX: Final = 60
"""Longest excerpt of a value in a line, in characters."""

_MISSING: Final = object()


def differences(there: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each difference: "stages.late.axis: 0 there, 1 now"."""
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


LINES_MAX = 12


def listed(lines: Iterable[str]) -> str:
    """Return at most LINES_MAX lines, indented, and the number of the others."""
    shown = list(lines)
    rest = [f"... and {len(shown) - LINES_MAX} more"] if len(shown) > LINES_MAX else []
    return "".join(f"\n    {line}" for line in shown[:LINES_MAX] + rest)
