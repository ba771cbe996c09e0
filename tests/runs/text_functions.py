"""Replica functions and documents of `test_text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def identity(shard: Any) -> Any:
    return shard


def embedded(shard: Any) -> Any:
    """Return text beside an embedding and tags, and keep the order of columns."""
    texts = shard["text"].tolist()
    numbers = np.array([[len(text), text.count("a")] for text in texts], np.float32)
    words = np.fromiter((np.array(text.split(), object) for text in texts), object, len(texts))
    return {"text": np.array(texts, object), "id": shard["id"], "embedding": numbers, "words": words}


def records(shard: Any) -> Any:
    """Return one record for each element, and none for those without text."""
    rows = zip(shard["id"].tolist(), shard["text"].tolist(), strict=True)
    return [{"id": n, "text": text, "at": {"x": n / 2, "tags": [text[:1]]}} for n, text in rows if text]


def binary(shard: Any) -> Any:
    """Return bytes that end with zeros."""
    made = np.array([b"\0" * (number % 4) for number in shard.tolist()], object)
    return {"b": made, "n": shard}


def counted(shard: Any) -> Any:
    return np.array([len(text) for text in shard["text"]])


def one_fails(shard: Any) -> Any:
    if "bad" in shard["text"].tolist():
        raise ValueError("bad text")
    return shard


def fails_unless(shard: Any, path: str) -> Any:
    """Raise for a bad text, unless a file exists."""
    return shard if Path(path).exists() else one_fails(shard)


def merged(a: Any, b: Any) -> Any:
    return a + b
