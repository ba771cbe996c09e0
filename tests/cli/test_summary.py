from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipedist.cli.rendering import Row, render
from pipedist.cli.run_command import _quarantine_text
from pipedist.outputs import open_sink
from pipedist.outputs.summary import Records, records, summarize, summarize_file
from pipedist.runs.timings import StageTimings, Timings

LEDGER = {"elements": 4096, "committed": 4000, "quarantined": 96, "lost": 0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.1), "0.1"),
        (np.int64(2**62), str(2**62)),
        (float("nan"), "NaN"),
        (None, "null"),
        (True, "true"),
        ("text [bold]", "text [bold]"),
        ("x" * 1000, "x" * 120 + "..."),
        (b"abc", "3 bytes"),
        (np.array([1, 2]), "[1, 2]"),
        (np.zeros((1000, 3), np.float32), "float32[1000, 3]"),
        ({"n": 3, "mean": np.float32(2.5)}, '{"n": 3, "mean": 2.5}'),
        ({"w": np.zeros(100), "n": 1}, "n: 1\nw: float64[100]"),
        ([1.5, 2.5], "[1.5, 2.5]"),
    ],
)
def test_summaries(value: Any, text: str) -> None:
    assert summarize(value) == text


def test_a_value_of_many_leaves_is_cut() -> None:
    lines = summarize({f"k{index:03}": index for index in range(1000)}).splitlines()
    assert lines[0] == "k000: 0"
    assert lines[-1] == "... 988 more"
    assert len(lines) == 13


@pytest.mark.parametrize(
    ("value", "last"),
    [
        ({index: float(index) for index in range(100_000)}, "... 99,988 more"),
        ({f"k{index}": [index, {"n": None}] for index in range(100_000)}, "... more"),
        ([[index] for index in range(100_000)], "... more"),
        ({"few": 1, "words": dict.fromkeys(map(str, range(100_000)), 1)}, "... 99,989 more"),
        ([{"n": index} for index in range(100_000)], "... more"),
        ([dict.fromkeys(range(100_000), 1)] * 2, "... 199,988 more"),
    ],
)
def test_a_preview_visits_few_entries_of_a_large_value(value: Any, last: str) -> None:
    visited = 0

    def count(_frame: object, _event: str, _argument: object) -> None:
        nonlocal visited
        visited += 1

    sys.setprofile(count)
    try:
        text = summarize(value)
        records(value)
    finally:
        sys.setprofile(None)
    assert text.splitlines()[-1] == last
    assert visited < 50_000


def test_records() -> None:
    value = {"AA": {"n": 1, "mean": 0.5}, "UA": {"mean": np.float32(0.1), "n": 2}}
    assert records(value) == Records(2, ["n", "mean"], [["AA", "1", "0.5"], ["UA", "2", "0.1"]])
    assert records([{"n": 1}, {"n": 2}]) == Records(2, ["n"], [["0", "1"], ["1", "2"]])
    assert records([{"x": 1 / 3}, {"x": 1234567.89}]) == Records(
        2, ["x"], [["0", "0.3333333"], ["1", "1,234,568"]]
    )
    many = records({index: {"n": index} for index in range(50)})
    assert many is not None
    assert many.rows[-1] == ["... 30 more", ""]
    assert many.count == 50
    for other in [
        {"a": 1, "b": 2},
        {"a": {"n": 1}, "b": {"m": 1}},
        {"a": {"n": np.zeros(3)}, "b": {}},
        3,
        {},
    ]:
        assert records(other) is None


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".npy", "float64[5, 2]"),
        (".npz", "data: float64[5, 2]"),
        (".jsonl", "5 rows"),
        (".json", "[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]"),
    ],
)
def test_files_are_described_by_their_headers(tmp_path: Path, suffix: str, text: str) -> None:
    sink = open_sink(tmp_path / f"a{suffix}", shape="run", gather=True)
    sink.append(np.zeros((5, 2)))
    assert summarize_file(sink.finish()) == text


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    sink = open_sink(tmp_path / "rows.npz", shape="run", gather=True)
    sink.append({"x": np.zeros((5, 2))})
    rows = [
        Row("late", "reduce sum", np.float32(0.1), Path("/elsewhere/late.json")),
        Row("rows", "gather 0", sink.finish(), tmp_path / "rows.npz"),
        Row("[red]by[/red]", "reduce m:f", {"AA": {"n": 1}, "UA": {"n": 22}}),
    ]
    text = render(rows, LEDGER, {"phase 1": 15.25, "total": 75.0})
    assert text.splitlines() == [
        "stage           verb         value              file",
        "─" * 68,
        "late            reduce sum   0.1                /elsewhere/late.json",
        "rows            gather 0     x: float64[5, 2]   rows.npz",
        "[red]by[/red]   reduce m:f   2 records, below",
        "",
        "[red]by[/red]    n",
        "──────────────────",
        "AA               1",
        "UA              22",
        "",
        "4,096 elements: 4,000 committed, 96 quarantined, 0 lost",
        "phase 1 15 s, start and end 60 s, total 1:15",
    ]
    assert capsys.readouterr().out == ""


def test_a_run_without_results_says_why() -> None:
    assert render([], LEDGER, {}).splitlines() == [
        "The spec has no reduce, gather or update, so the run has no results.",
        "",
        "4,096 elements: 4,000 committed, 96 quarantined, 0 lost",
    ]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl", ".json"])
def test_a_streamed_table_shows_its_rows(tmp_path: Path, suffix: str) -> None:
    sink = open_sink(tmp_path / f"a{suffix}", shape="run", gather=True)
    sink.append(np.array(["a\nb", 'c"', "", *map(str, range(997))]))
    assert summarize_file(sink.finish()) == ("1,000 values" if suffix == ".json" else "1,000 rows")
    empty = open_sink(tmp_path / f"b{suffix}", shape="run", gather=True)
    assert summarize_file(empty.finish()) == ("null" if suffix == ".json" else "0 rows")


def test_one_element_is_one_element() -> None:
    one = {"elements": 1, "committed": 1, "quarantined": 0, "lost": 0}
    assert "\n1 element: 1 committed, 0 quarantined, 0 lost\n" in render([], one, {})


def test_long_paths_stay_whole_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = tmp_path.joinpath(*["a-long-folder"] * 12, "rows.npy")
    text = render([Row("rows", "gather 0", "x" * 110, path)], LEDGER, {})
    assert str(path) in text
    assert max(len(line) for line in text.splitlines() if str(path) not in line and "─" not in line) < 100


def test_rows_are_counted_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('note\né\n"ü\nö"\n', encoding="utf-8")
    code = f"from pipedist.outputs.summary import *; print(summarize_file(Path({str(path)!r})))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    counted = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, check=True)
    assert counted.stdout == b"2 rows\n"


@pytest.mark.parametrize("columns", [60, 120])
def test_the_table_of_stages_keeps_replay_keys_and_many_stages_readable(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    zeros: dict[str, Any] = dict.fromkeys(StageTimings.__struct_fields__, 0)
    name = " -> ".join(f"normalize_and_decode_{number}" for number in range(12))
    key = "normalize_and_decode_0/123456/3"
    given = {"name": name, "calls": 1_234_567, "elements": 9, "seconds": 2.0, "slowest": key, "max_s": 0.2}
    text = render([], LEDGER, Timings({"total": 1.0}, [StageTimings(**zeros | given)], [], "A limit."))
    table = text[text.index("stages") :]
    assert all(len(line) <= columns for line in table.splitlines())
    assert "…" not in table, "what is cut can't be replayed"
    assert len(table.splitlines()) < 14
    if columns == 120:
        assert key in table
        assert "normalize_and_decode_11, 12 stages" in table


def test_watch_cuts_no_number_in_a_narrow_terminal() -> None:
    from rich.console import Console

    from pipedist.cli.watch_command import screen_of

    stage = {
        "name": "a -> b", "calls": 7, "elements_per_s": 1725.0, "busy_s": 0.0391, "p50_s": 0.000211,
        "slowest": "a/1/0", "max_s": 0.0248, "failed": 2,
    }  # fmt: skip
    process = {"stages": [stage], "workers": []}
    console = Console(width=50, record=True, file=io.StringIO())
    console.print(screen_of({"name": "job", "state": "failed", "status": None, "processes": [process]}))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 50
    assert text.splitlines()[3].split() == ["a", "->", "b", "7", "1,725", "39.1", "ms", "2"], (
        "no number is broken"
    )


def test_a_cause_of_several_lines_takes_one_line_of_the_list() -> None:
    cause = "HTTPStatusError: 400 Bad Request\nFor more information check: https://example.org"
    entry = {"element": 7, "stage": "answers", "cause": cause}
    result = SimpleNamespace(quarantined=[entry], quarantine_file=None)
    text = _quarantine_text(cast(Any, result), replays=False)
    assert text.splitlines()[1:] == ["  element 7, stage answers: HTTPStatusError: 400 Bad Request ..."]
