"""Classes of the user as sources: `source: {class: ..., with: ...}`, and the checks for their authors."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipedist
from pipedist.core.functions import reference
from pipedist.core.types import FunctionRef
from pipedist.datasets.sharding import auto_shard
from pipedist.datasets.sources import Source, SourceError, is_visible, open_source
from pipedist.datasets.sources.paths import hindrance
from pipedist.errors import PlanError
from pipedist.plan.compiler import compile_plan
from pipedist.plan.view import as_text
from pipedist.runs.input_stamps import changed_files, stamps
from pipedist.runs.replay import CallKey, open_replay
from pipedist.spec import load
from pipedist.testing import check_source
from tests.datasets.sources.reading import read_elsewhere
from tests.datasets.sources.sample_readers import Squares

R = "tests.datasets.sources.sample_readers"


def opened(name: str, **with_: Any) -> Source:
    ref = FunctionRef(name, f"{R}:{name}")
    return open_source("source", {"class": ref, "with": with_, "code": []}, folder=Path())


def document(count: int = 60, cls: Any = f"{R}:Squares", **with_: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "name": "squares",
        "replicas": 2,
        "dataset": {
            "source": {"class": cls, "with": {"count": count, **with_}},
            "batch": 16,
            "shuffle": True,
            "epochs": 2,
        },
        "stages": {
            "read": {"run": f"{R}:numbers", "on_error": "quarantine"},
            "rows": {"gather": 0, "of": "read"},
            "sum": {"reduce": "sum", "of": "read", "axis": 0},
        },
    }


def test_a_run_reads_with_the_class_in_each_worker(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(json.dumps(document(cls=f"{R}:Counted", broken=[17])))
    result = pipedist.run(tmp_path / "s.yaml", workers=2, output=tmp_path / "out")
    rows = result["rows"]
    assert sorted(rows["number"].tolist()) == sorted([n for n in range(60) if n != 17] * 2)
    assert rows["number"].tolist() != sorted(rows["number"].tolist())
    assert (rows["square"] == rows["number"] ** 2).all()
    assert (rows["made"] == 1).all(), "made once in each worker"
    assert result.ledger.quarantined == 2
    cause = result.quarantined[0]["cause"]
    assert cause.startswith(
        f"SourceError: {R}:Counted: element 17: ValueError: scan 17 is damaged (sample_readers"
    )
    with open_replay(tmp_path / "out", CallKey.of("read/0/0")) as replay:
        assert replay.elements == tuple(rows["number"][:8])


def test_shards_are_those_of_every_source() -> None:
    source = opened("Squares", count=5)
    assert (source.length, source.portable, source.fingerprint) == (5, True, "first")
    shard = read_elsewhere(source, np.array([9, 1]))
    assert shard["square"].tolist() == [16.0, 1.0]
    assert len(read_elsewhere(source, range(0))["square"]) == 0
    assert is_visible(source.config, [])
    assert not is_visible({**source.config, "fingerprint": "second"}, [])
    assert not is_visible({**source.config, "fingerprint": ""}, [])
    assert hindrance(source) == ""
    source.fingerprint = ""
    assert "no fingerprint()" in hindrance(source)


def test_the_plan_names_the_class_and_the_elements() -> None:
    plan = compile_plan(
        load({**document(), "stages": {"sum": {"reduce": "sum", "of": "dataset", "axis": 0}}}), workers=2
    )
    text = as_text(plan)
    plan.close()
    assert f"dataset: source {R}:Squares, 60 elements" in text
    assert "an element is {number: int64, square: float64}" in text
    assert "workers read their own shards" in text


def test_data_with_another_fingerprint_is_refused(tmp_path: Path) -> None:
    version = tmp_path / "version"

    def found() -> dict[str, Any]:
        plan = compile_plan(load(document(version=str(version))), workers=1)
        try:
            return stamps(plan)
        finally:
            plan.close()

    version.write_text("1")
    first = found()
    config = opened("Squares", count=60, version=str(version)).config
    version.write_text("2")
    lines = list(changed_files(first, found(), ["datasets.dataset"]))
    assert lines == ["datasets.dataset: the fingerprint of its data has changed"]
    with pytest.raises(
        SourceError, match="the data has changed since the run began: fingerprint 1 then, 2 now"
    ):
        pipedist.datasets.open_reader(config)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"class": f"{R}:Gone"}, "dataset.source.class: .*has no attribute 'Gone'"),
        ({"class": f"{R}:NoRead"}, "source.class: .*NoRead has no method `read`\n    expected a class with"),
        ({"class": f"{R}:Squares"}, r"source.*: Squares\(count.*can't be called as Squares\(\): missing"),
        ({"class": f"{R}:Squares", "with": {"count": "x"}}, "__len__.*: TypeError"),
        (
            {"class": f"{R}:Declared", "with": {"count": 3}},
            r"ArraySpec\(int64\[2\]\), and `element_spec` declares",
        ),
        (
            {"class": f"{R}:Squares", "with": {"count": 3, "version": "/no"}},
            r"fingerprint\(\): FileNotFoundError",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_one_located_error(source: dict[str, Any], message: str) -> None:
    given = document()
    given["dataset"]["source"] = source
    given["stages"]["read"]["on_error"] = "fail"
    with pytest.raises(PlanError, match=message) as caught:
        compile_plan(load(given), workers=1)
    assert len(caught.value.problems) == 1


def test_a_class_may_be_sent_by_value() -> None:
    class Local(Squares):
        def read(self, ids: Any) -> Any:
            return ids * 3

    source = open_source(
        "source", {"class": reference(Local), "with": {"count": 4}, "code": []}, folder=Path()
    )
    assert read_elsewhere(source, np.array([3, 1])).tolist() == [9, 3]


class ByIds:
    """A built-in source as a reader class."""

    def __init__(self, source: Source) -> None:
        self.source, self.element_spec = source, source.element_spec

    def __len__(self) -> int:
        assert self.source.length is not None
        return self.source.length

    def read(self, ids: Any) -> Any:
        return self.source.read(self.source.locate(ids))

    def close(self) -> None:
        self.source.close()


def test_built_in_sources_follow_the_protocol(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    np.save(tmp_path / "a.npy", np.arange(100.0).reshape(50, 2))
    np.savez(tmp_path / "a.npz", x=np.arange(9), y=np.array([*"abcdefghi"]))
    (tmp_path / "a.csv").write_text("n,t\n" + "".join(f"{n},{'x' * n}\n" for n in range(20)))
    pq.write_table(pa.table({"n": range(30), "l": [[1.0] * n for n in range(30)]}), tmp_path / "a.parquet")
    configs: dict[str, Any] = {
        "range": {"start": 3, "stop": 90, "step": 2},
        "npy": {"path": "a.npy"},
        "npz": {"path": "a.npz"},
        "parquet": {"path": "a.parquet"},
        "csv": {"path": "a.csv", "columns": {"n": "int32", "t": "str"}},
        "arrays": {"arrays": {"x": np.arange(7), "y": np.array([f"{n}" for n in range(7)])}},
    }
    for kind, config in configs.items():

        def make(kind: str = kind, config: Any = config) -> ByIds:
            return ByIds(open_source(kind, config, folder=tmp_path))

        check_source(make(), make=make)


def test_a_reader_is_a_dataset_of_the_strategy_api() -> None:
    dataset = pipedist.Dataset.from_source(Squares(70))
    assert dataset.cardinality() == 70
    assert dataset.element_spec == {"number": pipedist.ArraySpec("i8"), "square": pipedist.ArraySpec("f8")}
    assert [int(element["number"]) for element in dataset] == list(range(70))
    parts = [list(auto_shard(dataset.batch(20), 2, index, "DATA")) for index in range(2)]
    assert [batch["number"].tolist() for batch in parts[1]] == [[*range(20, 40)], [*range(60, 70)]]
    assert sorted(n for part in parts for batch in part for n in batch["number"].tolist()) == list(range(70))
    with pytest.raises(
        TypeError, match="from_source needs an object with `__len__` and `read`, got 3 of type int"
    ):
        pipedist.Dataset.from_source(3)  # type: ignore[arg-type]


def broken(read: Callable[[Any, Any], Any], **members: Any) -> Any:
    return type("Broken", (), {"__len__": lambda self: 5, "read": read, **members})()


NUMBERS = count()


class Reused:
    """Returns the same memory each time."""

    def __init__(self) -> None:
        self.memory = np.zeros(1000)

    def __len__(self) -> int:
        return 5

    def read(self, ids: Any) -> Any:
        self.memory[: len(ids)] = ids
        return self.memory[: len(ids)]


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (NoRead := type("NoRead", (), {"__len__": lambda self: 1})(), "it has no method read"),
        (broken(lambda self, ids: ids[:1]), r"returned arrays of 1 rows; expected one row for each id"),
        (broken(lambda self, ids: [1, 2]), r"read\(\[0\]\): .*not an array"),
        (
            broken(lambda self, ids: ids - ids.min(initial=9)),
            "read all of them together, is .*must not depend",
        ),
        (broken(lambda self, ids: ids if len(ids) else np.zeros(0)), r"read\(\[\]\) returned float64\[0\]"),
        (broken(lambda self, ids: (ids,) if len(ids) > 1 else ids), "elements that were read before are"),
        (broken(lambda self, ids: ids, fingerprint=lambda self: 5), "returned a int, not a text"),
        (
            broken(lambda self, ids: ids, fingerprint=lambda self: str(next(NUMBERS))),
            "changes from call to call",
        ),
        (broken(lambda self, ids: ids, element_spec=3), "must be a tree of pipedist.ArraySpec"),
        (
            broken(lambda self, ids: ids, element_spec=pipedist.ArraySpec("f4")),
            r"`element_spec` declares .*float32",
        ),
        (Reused(), "a later read.. changed arrays of an earlier one|must not depend on others"),
    ],
)
def test_check_source_names_the_rule_that_is_broken(reader: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_source(reader)


def test_check_source_compares_another_object() -> None:
    check_source(Squares(9), make=lambda: Squares(9))
    with pytest.raises(AssertionError, match="another object has 8 elements, and this one has 9"):
        check_source(Squares(9), make=lambda: Squares(8))
