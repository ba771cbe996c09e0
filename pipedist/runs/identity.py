"""The identity of a run: the meaning of its spec, as JSON, and the differences between two meanings.

Two specs with the same digest give the same results, whatever their outputs are, from the same files
(`pipedist.runs.input_stamps`) and modules (`pipedist.runs.code_modules`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from pipedist.core.functions import reference
from pipedist.core.names import excerpt
from pipedist.core.types import is_record
from pipedist.protocol.codec import encode
from pipedist.runs.pickle_digest import digest_of_pickle
from pipedist.spec import (
    CollectivesSpec,
    InitFile,
    InitFunction,
    InitLiteral,
    ResourcesSpec,
    RetrySpec,
    Spec,
    Until,
)

_NEVER_DECIDES = ("concurrency", "rate")  # keys of stages that decide the time of calls only


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
            name: {
                field.removesuffix("_"): _plain(value)
                for field, value in stage
                if value is not None and (field, value) != ("inputs", ()) and field not in _NEVER_DECIDES
            }
            for name, stage in spec.stages.items()
        },
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
        if all(type(key) is str for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [type(value).__name__, [[_plain(key), _plain(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        frames = encode(value) if value.dtype.kind in "OT" else [np.ascontiguousarray(value).tobytes()]
        return [str(value.dtype), list(value.shape), hashlib.sha256(b"".join(frames)).hexdigest()]
    if isinstance(value, Until):
        return _plain({"function": value.function, "with": value.with_} if value.with_ else value.function)
    if isinstance(value, InitLiteral | InitFile | InitFunction):
        return [type(value).__name__, *(_plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, CollectivesSpec | ResourcesSpec | RetrySpec):
        return _plain(dict(value))
    if callable(value):
        ref = reference(value)
        return ref.name or digest_of_pickle(ref.pickled)
    if is_record(type(value)):
        return [type(value).__qualname__, _plain({n: getattr(value, n) for n in value.__dataclass_fields__})]
    return str(value)


TEXT_MAX: Final = 60  # longest excerpt of a value in a line, in characters

_MISSING: Final = object()


def differences(
    there: Any, now: Any, path: str = "", *, called: tuple[str, str] = ("there", "now")
) -> Iterator[str]:
    """Yield a line for each difference: "stages.late.axis: 0 there, 1 now"."""
    if _text(there) == _text(now):
        return
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*there, *now)):
            below = f"{path}.{name}" if path else str(name)
            yield from differences(there.get(name, _MISSING), now.get(name, _MISSING), below, called=called)
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        for index, (a, b) in enumerate(zip(there, now, strict=True)):
            yield from differences(a, b, f"{path}[{index}]", called=called)
    else:
        yield f"{path or 'all of it'}: {_excerpt(there)} {called[0]}, {_excerpt(now)} {called[1]}"


def _text(value: Any) -> str:
    # as for a digest: 1, 1.0 and true differ, as do 0.0 and -0.0, and NaN equals NaN
    return "" if value is _MISSING else json.dumps(value, sort_keys=True)


def _excerpt(value: Any) -> str:
    return "nothing" if value is _MISSING else excerpt(repr(value), TEXT_MAX)
