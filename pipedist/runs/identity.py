"""The identity of a run: two specs with the same digest mean the same results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipedist.core.functions import reference
from pipedist.spec import CollectivesSpec, InitFile, InitFunction, InitLiteral, ResourcesSpec, Spec


def meaning(spec: Spec) -> dict[str, Any]:
    """Return everything in a spec that decides its results, as JSON; `cluster` is no part of it."""
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
    """Return the digest of what a spec means."""
    return digest_of(meaning(spec))


def digest_of(meant: Mapping[str, Any]) -> str:
    """Return the digest of `meaning`."""
    return hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as JSON, in which functions and arrays stand as their digests."""
    if isinstance(value, np.number | np.bool_):  # whose type decides that of a result, as 1 and 1.0 do
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
