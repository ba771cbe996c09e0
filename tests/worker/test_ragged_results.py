from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.errors import PlanError
from pipedist.worker.ragged_results import as_arrays, fit, kind_of, lists_of, rows_of


def prepared(*results: Any) -> list[Any]:
    made = [as_arrays(result) for result in results]
    kinds = [kind_of(result) for result in made]
    assert all(fit(kind, kinds[0]) or fit(kind, kinds[1]) for kind in kinds)
    return made


def test_rows_have_the_numbers_of_their_elements() -> None:
    found = rows_of(prepared([1, 2], [], [3]), [5, 7, 9])
    assert {name: column.tolist() for name, column in found.items()} == {
        "element": [5, 5, 9],
        "value": [1, 2, 3],
    }
    assert found["value"].dtype == np.int64
    made = prepared({"w": ["a", "bb"], "x": 1.5}, {"w": [], "x": 2.5}, {"w": ["c"], "x": 3.5})
    found = rows_of(made, [0, 1, 2])
    assert {name: column.tolist() for name, column in found.items()} == {
        "element": [0, 0, 2],
        "w": ["a", "bb", "c"],
        "x": [1.5, 1.5, 3.5],
    }


def test_rows_of_records_stay_records() -> None:
    assert rows_of(prepared([{"a": 1}, {"a": 2}], [], [{"a": 3}]), [4, 5, 6]) == [
        {"element": 4, "a": 1},
        {"element": 4, "a": 2},
        {"element": 6, "a": 3},
    ]


def test_lists_are_cells() -> None:
    found = lists_of(prepared({"v": np.ones(2), "n": 2}, {"v": [], "n": 0}, {"v": np.zeros(1), "n": 1}))
    assert [cell.tolist() for cell in found["v"]] == [[1, 1], [], [0]]
    assert found["n"].tolist() == [2, 0, 1]
    same = lists_of(prepared({"v": np.ones(2)}, {"v": np.ones(2)}))
    assert same["v"].dtype == object  # whatever the lengths in this batch are
    found = lists_of(prepared([{"a": 1}], []))
    assert found.tolist() == [[{"a": 1}], []]
    found = lists_of(prepared({"r": [{"a": 1}], "k": "x"}, {"r": [], "k": "y"}))
    assert [list(cell) for cell in found["r"]] == [[{"a": 1}], []]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([{"a": np.ones(2), "b": np.ones(3)}], "element 5 has arrays of 2, 3 rows"),
        ([{"a": 1.0}], "element 5 has no array"),
        ([{"element": np.ones(2)}], "has the key 'element'"),
        ([[{"element": 1}]], "has the key 'element'"),
    ],
)
def test_rows_that_have_no_one_length_are_errors(results: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of([as_arrays(result) for result in results], [5])


def words(element: np.int64) -> list[str]:
    return ["w" * (1 + int(n)) for n in range(int(element) % 4)]


def scores(element: np.int64) -> dict[str, Any]:
    return {"score": np.arange(int(element) % 3) * 0.5, "id": element}


def spec(**run: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": 2,
        "dataset": {"range": 12, "batch": 5, "shuffle": True},
        "stages": {
            "words": {"run": words, "per": "element", "ragged": "rows"},
            "scores": {"run": scores, "per": "element", "ragged": "lists", **run},
            "rows": {"gather": 0, "of": "words"},
            "lists": {"gather": 0, "of": "scores"},
        },
    }


@pytest.mark.slow
def test_ragged_results_of_a_run_are_the_same_on_any_number_of_workers() -> None:
    one, two = (pipedist.run(spec(), workers=workers) for workers in (1, 2))
    rows = one["rows"]
    assert sorted(zip(rows["element"].tolist(), rows["value"].tolist(), strict=True)) == sorted(
        (element, word) for element in range(12) for word in words(np.int64(element))
    )
    assert [len(cell) for cell in one["lists"]["score"]] == [n % 3 for n in one["lists"]["id"]]
    assert rows["element"].tolist() == two["rows"]["element"].tolist()
    assert [c.tolist() for c in one["lists"]["score"]] == [c.tolist() for c in two["lists"]["score"]]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"per": None}, "`ragged` is about the results of single elements"),
        ({"of": "words"}, "`words` has any number of rows for each element, so `per` can't divide them"),
    ],
)
def test_ragged_results_where_they_make_no_sense_are_errors_of_the_plan(
    run: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        pipedist.run(spec(**run))
