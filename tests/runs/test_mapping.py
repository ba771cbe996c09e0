"""`pipedist.map` and its kind: any data in, results of the same kind out, on the engine of specs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import pipedist
from pipedist.plan.compiler import compile_plan
from pipedist.runs import api, pickle_digest
from pipedist.runs.code_modules import modules_of
from pipedist.spec import load
from pipedist.worker.mapped import mapped
from tests.preloaded import run_module
from tests.runs import mapping_functions as functions


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


def above(x: float) -> float:
    if x > 2:
        raise ValueError(f"{x} is too large")
    return x


@pytest.mark.asyncio
async def test_results_have_the_kind_of_the_data(tmp_path: Path) -> None:
    async with pipedist.LocalCluster(workers=2) as cluster:

        async def amap(fn: Any, data: Any, **options: Any) -> Any:
            return await pipedist.amap(fn, data, cluster=cluster, **options)

        # arrays
        doubled = await amap(lambda x: x * 2, np.arange(300))
        assert doubled.tolist() == [*range(0, 600, 2)]
        rows = await amap(lambda row: {"n": len(row), "sum": row.sum()}, np.ones((3, 4)), per_element=True)
        assert {name: each.tolist() for name, each in rows.items()} == {
            "n": [4, 4, 4],
            "sum": [4.0, 4.0, 4.0],
        }
        assert (await amap(lambda d: d["a"] + d["b"], {"a": np.arange(2), "b": [3, 4]})).tolist() == [3, 5]
        assert await amap(len, np.arange(0)) is None
        # lists: elements and results are objects, which need not be alike
        assert await amap(str.upper, ["a", "b"], per_element=True) == ["A", "B"]
        assert await amap(int, ["1", "22"], per_element=True) == [1, 22]
        assert await amap(lambda xs: [type(x) for x in xs] and [xs], [1, 2, 3], batch=2) == [[1, 2], [3]]
        points = [Point(1), Point("b"), Point(None)]
        assert await amap(lambda p: (p.x, [p.x] * 2), points, per_element=True) == [
            (1, [1, 1]), ("b", ["b", "b"]), (None, [None, None]),
        ]  # fmt: skip
        big = [2**70, 1.5, b"x\0"]
        assert await amap(lambda x: x, big, per_element=True) == big
        assert await amap(lambda x: x, [b"x\0", b""], per_element=True) == [b"x\0", b""]
        assert await amap(lambda x: np.arange(x), range(3), per_element=True) is not None
        assert await amap(lambda x: x**2, (x for x in range(130)), per_element=True) == [
            x**2 for x in range(130)
        ]
        assert await amap(len, [], per_element=True) == []
        # options for each element change nothing else
        for options in ({}, {"retries": 1}, {"retry": {"attempts": 2}}):
            assert (
                await amap(
                    lambda row: row["a"] + row["b"][1],
                    {"a": np.arange(3), "b": np.ones((3, 2))},
                    per_element=True,
                    **options,
                )
                is not None
            )
            found = await amap(lambda x: {"x": x * 2, "s": str(x)}, np.arange(3), per_element=True, **options)
            assert {name: each.tolist() for name, each in found.items()} == {
                "x": [0, 2, 4],
                "s": ["0", "1", "2"],
            }
            assert await amap(lambda x: [x] * x, [1, 2], per_element=True, **options) == [[1], [2, 2]]
            with pytest.raises(pipedist.CallError, match="results of elements can't be batched"):
                await amap(lambda x: np.arange(x), np.arange(3), per_element=True, batch=3, **options)
        # functions
        added = await amap(functions.Adder, [1, 2, 3], per_element=True, with_={"n": 10}, batch=3)
        assert added == [(11, 1), (12, 1), (13, 1)]
        each = await amap(functions.echoed, range(4), per_element=True, concurrency=2)
        assert each == [{"x": x, "none": None} for x in range(4)]
        assert await amap("math:sqrt", [4, 9], per_element=True) == [2.0, 3.0]
        # files
        np.save(tmp_path / "a.npy", np.arange(5))
        (tmp_path / "j.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
        (tmp_path / "c.csv").write_text("x,s\n1,a\n2,b\n")
        assert (await amap(lambda c: c["x"] * 2, tmp_path / "c.csv")).tolist() == [2, 4]
        assert (await amap(lambda x: x + 1, tmp_path / "a.npy")).tolist() == [1, 2, 3, 4, 5]
        assert (await amap(lambda row: row["a"], str(tmp_path / "*.jsonl"), per_element=True)).tolist() == [
            1,
            2,
        ]
        # quarantined elements are not lost silently
        found = await amap(above, [1.0, 3.0, 2.0], per_element=True, on_error="quarantine")
        assert found == [1.0, pipedist.Quarantined(1, "ValueError: 3.0 is too large"), 2.0]
        every = await amap(above, [3.0], per_element=True, on_error="quarantine")
        assert every == [pipedist.Quarantined(0, "ValueError: 3.0 is too large")]
        with pytest.warns(UserWarning, match="quarantined elements have no result: 1"):
            kept = await amap(above, np.array([1.0, 3.0, 2.0]), per_element=True, on_error="quarantine")
        assert kept.tolist() == [1.0, 2.0]
        # streams
        some = pipedist.amap(lambda x: x + 1, [1, 2, 3], per_element=True, cluster=cluster)
        assert [x async for x in some] == [2, 3, 4]
        ready = pipedist.amap(lambda x: x + 1, np.arange(4), batch=2, ordered=False, cluster=cluster)
        assert sorted([x.tolist() async for x in ready]) == [[1, 2], [3, 4]]
        async for first in pipedist.amap(lambda x: x + 1, range(200), per_element=True, cluster=cluster):
            assert first == 1
            break
        async with pipedist.amap(lambda x: x + 1, range(200), per_element=True, cluster=cluster) as stream:
            async for x in stream:
                assert x == 1
                break
        assert [task for task in asyncio.all_tasks() if task.get_name() == "pipedist.amap"][1:] == []
        # errors
        with pytest.raises(pipedist.CallError, match=r"stage map, step 1.*3\.0 is too large"):
            await amap(above, [1.0, 3.0], per_element=True)
        with pytest.raises(
            pipedist.CallError, match="must return a list of results, not a value of type int"
        ):
            await amap(len, [1, 2])
        with pytest.raises(pipedist.FoldError, match=r"can't be concatenated.*per_element=True"):
            await amap(lambda x: x.sum(), np.arange(4))
        with pytest.raises(
            pipedist.CallError, match=r"result of Point cannot be sent: can't send a .*Point, as"
        ):
            await amap(Point, [1], per_element=True)


@pytest.mark.parametrize("library", ["pandas", pytest.param("polars", marks=pytest.mark.slow)])
def test_frames_give_frames(library: str) -> None:
    frames = pytest.importorskip(library)
    data = frames.DataFrame({"a": [1, 2, 3], "s": ["x", "yy", "z"]})

    def longer(frame: Any) -> Any:
        assert type(frame).__module__.startswith(library)
        return frame[["s", "a"]]

    found = pipedist.map(longer, data, batch=2, workers=1)
    assert found.equals(data[["s", "a"]])
    if library == "pandas":
        lengths = pipedist.map(lambda row: len(row["s"]) + row["a"], data, per_element=True, workers=1)
        assert lengths.tolist() == [2, 4, 4]


def test_an_output_keeps_the_results_of_calls(tmp_path: Path) -> None:
    def mapped_to(data: list[int], **options: Any) -> Any:
        return pipedist.map(
            functions.noted, data, per_element=True, with_={"folder": str(tmp_path)}, workers=1,
            output=tmp_path / "out", **options,
        )  # fmt: skip

    with pytest.raises(pipedist.CallError, match="three"):
        mapped_to([1, 2, 3, 4])
    (tmp_path / "fixed").touch()
    assert mapped_to([1, 2, 3, 4]) == [1.5, 3.0, 4.5, 6.0]
    assert mapped_to([1, 2, 3, 4]) == [1.5, 3.0, 4.5, 6.0]
    calls = (tmp_path / "calls").read_text().split()
    assert (calls.count("1"), calls.count("2"), calls.count("3")) == (1, 1, 2)
    with pytest.raises(pipedist.UsageError, match="another spec"):
        mapped_to([1, 2, 5])
    assert mapped_to([1, 2, 5], restart=True) == [1.5, 3.0, 7.5]


def test_a_changed_module_of_a_mapped_function_is_found(tmp_path: Path) -> None:
    run = mapped(functions.noted, "plain", per_element=True)
    document: dict[str, Any] = {
        "pipedist": 1,
        "dataset": {"range": 2, "batch": 1},
        "stages": {"map": {"run": run, "with": {"folder": ""}}},
    }
    plan = compile_plan(load(document), workers=1)
    try:
        assert "tests.runs.mapping_functions" in modules_of(plan)["stages.map"]
    finally:
        plan.close()


def test_it_blocks_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> Any:
        return pipedist.map(lambda x: x + 1, [1, 2], per_element=True, workers=1)

    assert asyncio.run(cell()) == [2, 3]
    assert list(pipedist.imap(lambda x: x + 1, [1, 2], per_element=True, workers=1)) == [2, 3]


def test_wrong_arguments_are_reported_before_workers_start() -> None:
    for data, options, text in (
        ({1, 2}, {}, r"a set has no order: pass sorted\(data\)"),
        (3, {}, "needs an array, a frame, an iterable or a path, got int"),
        ([1], {"worker": 2}, "unexpected keyword argument 'worker'"),
        ([Point(1), threading.Lock()], {}, r"element 1, a lock, can't be sent"),
        ([1], {"columns": {"a": "int64"}}, "`columns` are for a path"),
        ([1], {"with_": [2]}, r"map\(\) needs `with_` as a dict of keyword arguments, got \[2\]"),
    ):
        with pytest.raises(TypeError, match=text):
            pipedist.map(len, data, **options)  # type: ignore[call-overload]
    for data, options, text in (
        ("data/x.foo", {}, r"'data/x\.foo' is read by its ending, which is none of \.csv"),
        (iter([1]), {"output": "out"}, "an iterator can't be read again"),
    ):
        with pytest.raises(pipedist.UsageError, match=text):
            pipedist.map(len, data, **options)  # type: ignore[call-overload]
    with pytest.raises(pipedist.SpecError, match="retries"):
        pipedist.map(len, [1], retries=-1)
    with pytest.raises(pipedist.SpecError, match="batch"):
        pipedist.map(len, [b"x"], batch=0)
    with pytest.raises(pipedist.PlanError, match=r"noted\(.*can't be called as"):
        pipedist.map(functions.noted, [1], per_element=True, workers=1)


class Refused(Exception):
    """An exception whose instances share their notes, and accept no attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def refuse(_: object) -> None:
    raise Refused("no")


@pytest.mark.parametrize(
    ("fn", "data", "options", "note"),
    [
        (above, [0.5, 1.5, 2.5], {}, "element 2: 2.5"),
        (above, [0.5, 1.5, 2.5], {"retries": 1}, "element 2: 2.5"),
        (
            lambda row: above(row["x"]),
            {"x": np.arange(4.0), "s": [*"abcd"]},
            {},
            "element 3: {'s': 'd', 'x': 3.0}",
        ),
        (lambda point: above(point.x), [Point(0.0), Point(3.0)], {}, "element 1: <Point>"),
        (int, ["1", "x" * 1000], {}, "element 1"),
        (refuse, [1, 2], {}, None),
    ],
)
def test_an_error_names_the_element(fn: Any, data: Any, options: dict[str, Any], note: str | None) -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.map(fn, data, per_element=True, workers=1, **options)
    error = caught.value
    if note is None:
        assert error.element is None
        return
    assert error.element == int(note.split()[1].rstrip(":"))
    assert f", replica 0, element {error.element}, worker " in str(error)
    if error.remote_traceback:
        assert error.remote_traceback.splitlines()[-1].startswith(note)


def unsendable_above(x: float) -> Any:
    return object() if x > 2 else x


@pytest.mark.parametrize("options", [{}, {"retries": 1}])
def test_a_result_that_can_not_be_sent_names_its_element(options: dict[str, Any]) -> None:
    with pytest.raises(pipedist.CallError) as caught:
        pipedist.map(unsendable_above, [0.5, 1.5, 2.5], per_element=True, workers=1, **options)
    error = caught.value
    assert error.element == 2
    assert "the result of unsendable_above cannot be sent: can't send an object" in error.cause
    assert not error.remote_traceback  # no frame of the user raised it


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import pipedist

def interrupt(x, pid):
    if x == 1 and not os.path.exists("sent"):
        Path("sent").touch()
        os.kill(pid, signal.SIGINT)
    return -x

if __name__ == "__main__":
    pid = int(sys.argv[1]) if sys.argv[1:] else os.getpid()
    Path("pid").write_text(str(pid))
    options = {"with_": {"pid": pid}, "workers": 1, "output": "out/mp"}
    print(pipedist.map(interrupt, [0, 1, 2], per_element=True, batch=1, **options))
"""


def test_ctrl_c_names_the_folder_of_the_results_that_the_same_call_continues(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    ended = run_module("script", cwd=tmp_path)
    note = "Finished results are kept in out/mp; the same call continues the run."
    assert ended.stderr.splitlines()[-2:] == ["KeyboardInterrupt", note]
    again = run_module("script", (tmp_path / "pid").read_text(), cwd=tmp_path)
    assert again.stdout == "[0, -1, -2]\n", again.stderr


BY_VALUE = """
import dataclasses, enum, sys
from pathlib import Path
from pipedist.runs.identity import digest
from pipedist.spec import load

WEIGHTS = {"a": 1, "of": ("a", b"bytes")}

@dataclasses.dataclass(frozen=True)
class Word:
    text: str
    kinds = {"noun", "verb", "name"}

    def score(self):
        return WEIGHTS.get(self.text, 0) + (self.text in {"x", "y", "z", ("a", "b")})

class Kind(enum.Enum):
    A, B, C = "abc"

MANY = {str(n) for n in range(2_000)}
SETS = {("a", "b"), ("c", "d"), frozenset("ef")}, {Kind.A, Kind.B, Kind.C}, {Word("g"), Word("h")}

def scores(shard):
    return [Word(each).score() + len(__file__) + len(MANY) + len(SETS) for each in shard]

def later(shard):
    return scores(shard) if shard else None

if __name__ == "__main__":
    for fn in (scores, later, lambda x: x in {"p", "q", "r"}, lambda x: x in {"p", "q", "s"}):
        stages = {"y": {"run": fn}, "t": {"gather": 0, "of": "y"}}
        print(digest(load({"pipedist": 1, "dataset": {"range": 4, "batch": 2}, "stages": stages})))
"""


def test_a_function_of_a_script_is_the_same_in_each_process(tmp_path: Path) -> None:
    """Compiled or read from its bytecode, and whatever the hashes of its texts and the ids of its classes are."""
    (tmp_path / "script.py").write_text(BY_VALUE)
    found = []
    for seed in ("1", "2", "3"):
        env = {name: each for name, each in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(
            [sys.executable, "-m", "script"], cwd=tmp_path, env={**env, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert list((tmp_path / "__pycache__").glob("script.*.pyc"))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 4


@pytest.mark.parametrize(
    "values",
    [
        ({("a", "b"), ("c", "d")}, {("a", "c"), ("b", "d")}),
        (("a" * 32, None), ("b" * 32, None)),  # as the id of a class
        ([one := [1], other := [1], one], [one, other, other]),
    ],
)
def test_functions_that_capture_other_values_have_other_digests(values: tuple[object, object]) -> None:
    def digest(value: object) -> str:
        return pickle_digest.digest_of_pickle(cloudpickle.dumps(lambda: value))

    assert digest(values[0]) != digest(values[1])


def test_code_that_was_typed_in_is_known_whatever_the_process_and_the_number_of_its_input() -> None:
    def digest_in(file: str) -> str:
        names: dict[str, Any] = {}
        exec(compile("def f(x):\n    return x", file, "exec"), names)
        return pickle_digest.digest_of_pickle(cloudpickle.dumps(names["f"]))

    assert digest_in("/tmp/ipykernel_11/7.py") == digest_in("/tmp/ipykernel_12/8.py")
    assert (
        digest_in("<ipython-input-1-0a>")
        == digest_in("<ipython-input-2-0b>")
        == digest_in("<python-input-3>")
    )


HELPED = """
import pipedist
import pack.values, helper
from pack.values import value

def direct(x):
    return x + value()

def late(x):
    import later
    return x + later.value()

if __name__ == "__main__":
    source = {"function": {"call": helper.source}, "batch": 2}
    stages = {"y": {"run": len}, "t": {"reduce": "sum", "of": "y", "axis": None}}
    for name, run in {
        "direct": lambda out: pipedist.map(direct, [1, 2], batch=1, per_element=True, workers=1, output=out),
        "late": lambda out: pipedist.map(late, [1, 2], batch=1, per_element=True, workers=1, output=out),
        "source": lambda out: pipedist.run(
            {"pipedist": 1, "dataset": source, "stages": stages}, workers=1, output=out, resume=True
        ),
    }.items():
        try:
            run(f"out/{name}")
        except pipedist.UsageError as error:
            print(name, str(error).partition("module ")[2].partition(":")[0])
"""


def test_the_modules_that_functions_of_a_script_use_are_compared(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HELPED)
    (tmp_path / "pack").mkdir()
    used = (tmp_path / "pack/values.py", tmp_path / "later.py", tmp_path / "helper.py")
    for number in (1, 22):
        for file in used:
            file.write_text(f"def value(): return {number}\ndef source(): return iter([value()] * 4)\n")
        done = run_module("script", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "direct pack.values has changed",
        "late later has changed",
        "source helper has changed",
    ]


def test_a_function_that_captures_very_many_objects_is_known_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = {"a", "b", "c"}
    pickled = cloudpickle.dumps(lambda x: x in words)
    read = pickle_digest.digest_of_pickle(pickled)
    monkeypatch.setattr(pickle_digest, "OPCODES_MAX", 10)
    assert pickle_digest.digest_of_pickle(pickled) == hashlib.sha256(pickled).hexdigest() != read


def test_ctrl_c_without_a_folder_has_no_note(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED.replace('"out/mp"', "None"))
    assert run_module("script", cwd=tmp_path).stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_a_traceback_begins_with_the_users_frames() -> None:
    calls: list[Any] = [
        lambda: pipedist.map(above, [1.0, 3.0], per_element=True, workers=1),
        lambda: list(pipedist.imap(above, [1.0, 3.0], per_element=True, workers=1)),
    ]
    for call in calls:
        with pytest.raises(pipedist.CallError) as caught:
            call()
        files = [Path(str(entry.path)).name for entry in caught.traceback]
        assert files[:2] == ["test_mapping.py"] * 2
        assert len(files) <= 4, files
        lines = caught.value.remote_traceback.splitlines()
        assert lines[1].endswith("in above")
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_defect_of_pipedist_keeps_its_frames() -> None:
    async def main() -> None:
        raise pipedist.errors.LocalProtocolError("internal error")

    with pytest.raises(pipedist.errors.LocalProtocolError) as caught:
        api.blocking(main, None, "pipedist.map")
    assert caught.traceback[-1].name == "main"
