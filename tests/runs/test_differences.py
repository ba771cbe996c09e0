"""What counts as a difference between two specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pipedist.runs.identity import differences, meaning
from pipedist.runs.input_stamps import changed_files
from pipedist.spec import load


@dataclass
class Model:
    weights: np.ndarray[Any, Any]


def test_a_dataclass_is_another_parameter_if_one_number_of_an_array_is() -> None:
    def meant(number: int) -> dict[str, Any]:
        weights = np.zeros(5_000)
        weights[2_500] = number
        stage = {"run": "m:f", "with": {"model": Model(weights)}}
        document = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": {"y": stage}}
        return meaning(load(document))

    assert meant(1) == meant(1)
    (line,) = differences(meant(1), meant(2))
    assert line.startswith("stages.y.with.model[1].weights[2]: ")


def test_a_number_is_another_key_than_its_text() -> None:
    def meant(keys: dict[Any, int]) -> dict[str, Any]:
        stage = {"run": "m:f", "with": {"names": keys}}
        document = {"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": {"y": stage}}
        return meaning(load(document))

    assert meant({1: 5}) == meant({1: 5})
    assert meant({1: 5}) != meant({"1": 5})


@pytest.mark.parametrize(("there", "now"), [(1, 1.0), (True, 1), (0, False), (0.0, -0.0), ("1", 1)])
def test_values_that_python_calls_equal_are_other_parameters(there: Any, now: Any) -> None:
    assert list(differences({"with": {"k": there}}, {"with": {"k": now}})) == [
        f"with.k: {there!r} there, {now!r} now"
    ]


def test_equal_documents_have_no_differences() -> None:
    document = {"a": [1, 2.5, None, float("nan"), float("-inf")], "b": {"c": "\udcff", "d": False}}
    again = {"b": {"d": False, "c": "\udcff"}, "a": [1, 2.5, None, float("nan"), float("-inf")]}
    assert list(differences(document, again)) == []


def test_a_value_in_only_one_document_is_listed() -> None:
    assert list(differences({"a": {"b": [1]}}, {"a": {"b": [1, 2]}, "c": 0})) == [
        "a.b: [1] there, [1, 2] now",
        "c: nothing there, 0 now",
    ]


def test_files_of_two_runs_are_named_by_run() -> None:
    a = {
        "datasets.d": {
            "/same": [1, 2],
            "/old": [1, 2],
            "/grown": [1, 2],
            "/touched": [5, 2],
            "https://h/f": [5, 1],
        },
        "stages.s": {"/text": [1, 2, 3, "x"]},
    }
    b = {
        "datasets.d": {
            "/same": [1, 2],
            "/new": [1, 2],
            "/grown": [3000, 2],
            "/touched": [5, 1700000000000000000],
            "https://h/f": [5, 2],
        },
        "stages.s": {"/text": [1, 2, 3, "y"]},
    }
    assert list(changed_files(a, b, ["datasets.d", "stages.s"], called=("A", "B"))) == [
        "datasets.d: /old is only in A",
        "datasets.d: /grown differs: size 1 bytes in A, 3,000 in B",
        "datasets.d: /touched differs: modification time 1970-01-01T00:00:00.000000002Z in A, "
        "2023-11-14T22:13:20.000000000Z in B",
        "datasets.d: https://h/f differs: its server reports another version",
        "datasets.d: /new is only in B",
        "stages.s: /text differs",
    ]
