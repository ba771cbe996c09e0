"""The functions of pipedist's jobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipedist.combiners import KeyedTable, by_key_sum, counter, encode_text


def words(lines: list[str]) -> KeyedTable:
    return counter.of(" ".join(lines).split())


def bigrams(lines: list[str]) -> KeyedTable:
    words = encode_text(" ".join(lines).split(" "))
    follows = np.ones(len(words), bool)
    follows[np.cumsum([line.count(" ") + 1 for line in lines]) - 1] = False  # a line's last word
    return counter.of((words[:-1][follows[:-1]], words[1:][follows[:-1]]))


def sums(rows: dict[str, Any]) -> KeyedTable:
    return by_key_sum.of(rows["key"], rows["value"])


def warm(numbers: Any) -> KeyedTable:
    return counter.of(numbers)
