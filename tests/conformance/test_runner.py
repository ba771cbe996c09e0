"""The runner itself: what it counts as passed, failed and skipped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.errors import CallError
from pipedist.values import PerReplica
from tests.conformance import __main__ as command
from tests.conformance import families, jax_deviations
from tests.conformance.cases import Case, Deviation, Json, Outcome, Raised, Skip, Value, decode, parse_case
from tests.conformance.compare import difference
from tests.conformance.families import Family
from tests.conformance.runner import replay_all
from tests.conformance.session import Session

FLOAT = {"dtype": "float32", "shape": [2], "data": [1.0, 2.0]}


def reduce_entry(expect: Json, **call: Json) -> dict[str, Json]:
    value = {"per_replica": [FLOAT, {"dtype": "float32", "shape": [2], "data": [3.0, "nan"]}]}
    return {
        "id": "reduce-0001",
        "group": "grid",
        "title": "a case",
        "strategy": {"kind": "mirrored", "replicas": 2},
        "call": {"op": "reduce", "reduce_op": "SUM", "axis": None, "value": value, **call},
        "expect": expect,
    }


RIGHT = {"value": {"dtype": "float32", "shape": [2], "data": [4.0, "nan"]}}


def write(folder: Path, *entries: Json, family: str = "reduce") -> Path:
    (folder / f"{family}.json").write_text(
        json.dumps({"schema": "distconf/1", "family": family, "oracle": {}, "cases": entries})
    )
    return folder


def run_command(
    folder: Path, *options: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    report = folder / "account.out"
    code = command.main([str(folder), "--json", str(report), *options])
    out = capsys.readouterr().out
    return code, json.loads(report.read_text()), out.rstrip().splitlines()[-1]


def test_a_right_expectation_passes_and_a_planted_wrong_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        {"value": {"dtype": "float32", "shape": [2], "data": [4.0, 6.0]}},
        {"value": {"dtype": "float64", "shape": [2], "data": [4.0, "nan"]}},
        {"value": {"dtype": "float32", "shape": [1, 2], "data": [4.0, "nan"]}},
        {"value": {"per_replica": [FLOAT, FLOAT]}},
        {"value": {"none": True}},
        {"error": "ValueError", "message": "no"},
    ]
    write(tmp_path, reduce_entry(RIGHT), *map(reduce_entry, wrong))
    code, account, last = run_command(tmp_path, capsys=capsys)
    assert (code, last) == (1, "1 passed, 6 failed, 0 skipped")
    assert account["families"]["reduce"] == {"passed": 1, "failed": 6, "skipped": 0}
    assert [failure["expected"] for failure in account["failures"]] == wrong


def test_all_passed_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, last = run_command(write(tmp_path, reduce_entry(RIGHT)), capsys=capsys)
    assert (code, last) == (0, "1 passed, 0 failed, 0 skipped")


def test_a_deviation_is_counted_and_its_own_expectation_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"dtype": "uint8", "shape": [], "data": [200]}
    wrapped = reduce_entry(
        {"value": {"dtype": "uint8", "shape": [], "data": [144]}}, value={"per_replica": [small, small]}
    )
    code, account, last = run_command(write(tmp_path, wrapped), capsys=capsys)
    assert (code, last) == (0, "1 passed, 0 failed, 0 skipped")
    assert [(rule["row"], rule["cases"]) for rule in account["deviations"]] == [(12, 1)]


@pytest.mark.parametrize(
    ("family", "call", "reason"),
    [
        ("reduce", {"op": "conjure"}, "unknown program conjure"),
        ("run", {"op": "run", "fn": ["conjure"]}, "unknown program conjure"),
        ("run", {"op": "run", "fn": ["list", [["conjure", 1]]]}, "unknown program conjure"),
        ("run", {"op": "run", "fn": ["all_reduce", "SUM", ["conjure"]]}, "unknown program conjure"),
        ("run", {"op": "run", "fn": ["merge_call", ["none"], [["conjure"]]]}, "unknown program conjure"),
        ("values_from_function", {"op": "values_from_function", "value_fn": "odd"}, "unknown program odd"),
        (
            "variables",
            {"op": "create_variable", "note": "conjured"},
            "unknown program create_variable conjured",
        ),
        ("dataset", {"op": "distribute_dataset", "dataset": [["batch", 2]], "iterate": "for"}, "as a source"),
        ("variables", {"op": "variable_program", "vars": {}, "steps": [{"do": "conjure"}]}, "step conjure"),
        ("novel", {"op": "anything"}, "unknown family novel"),
        ("reduce", {"op": "reduce", "value": {"ragged": [[1]], "dtype": "int32"}}, "ragged"),
    ],
)
def test_what_can_not_be_replayed_is_skipped_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, call: Json, reason: str
) -> None:
    entry = reduce_entry(RIGHT)
    entry["call"] = {"reduce_op": "SUM", "axis": None, "value": FLOAT, **call}
    code, account, last = run_command(write(tmp_path, entry, family=family), capsys=capsys)
    assert (code, last) == (0, "0 passed, 0 failed, 1 skipped")
    assert reason in account["skips"][0]["reason"]


@pytest.mark.parametrize("error", ["ProcessCrash", "CaseTimeout"])
def test_crashes_of_the_oracle_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    folder = write(tmp_path, reduce_entry({"error": error, "message": ""}))
    _, account, last = run_command(folder, capsys=capsys)
    assert last == "0 passed, 0 failed, 1 skipped"
    assert error in account["skips"][0]["reason"]


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert command.main([str(tmp_path)]) == 2
    (tmp_path / "bad.json").write_text('{"schema": "other/9"}')
    assert command.main([str(tmp_path)]) == 2
    assert "distconf/1" in capsys.readouterr().err


def test_json_to_standard_output_is_the_only_thing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(write(tmp_path, reduce_entry(RIGHT))), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["totals"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert captured.err.rstrip().endswith("1 passed, 0 failed, 0 skipped")


def test_families_and_ids_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = {**reduce_entry(RIGHT), "id": "reduce-0002"}
    write(tmp_path, reduce_entry(RIGHT), second)
    write(tmp_path, reduce_entry(RIGHT), family="variables")
    for options, count in ((["--family", "reduce"], 2), (["--id", "reduce-0002"], 1)):
        assert command.main([str(tmp_path), *options]) == 0
        assert f"{count} passed, 0 failed, 0 skipped" in capsys.readouterr().out


def test_deviations_have_names_of_their_own_and_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list-deviations"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [rule.name for family in families.registry().values() for rule in family.deviations]
    names += [rule.name for rule in jax_deviations.RULES]
    assert len(set(names)) == len(names) == len(listed)


class Recorder(Session):
    """A session without a cluster, which remembers that it was told to drop it."""

    discards = 0

    async def discard(self) -> None:
        self.discards += 1


def judge(replay: Any, entry: Json, *rules: Deviation, timeout_s: float = 30.0) -> tuple[Any, Recorder]:
    session = Recorder()
    registry = {"reduce": Family("reduce", replay, rules)}
    case = parse_case("reduce", entry)
    account = asyncio.run(replay_all([case], timeout_s=timeout_s, registry=registry, session=session))
    return account.verdicts[0], session


def test_a_hanging_case_hits_the_limit_and_the_next_one_gets_a_fresh_cluster() -> None:
    async def hang(case: Case, session: Session) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    verdict, session = judge(hang, reduce_entry(RIGHT), timeout_s=0.01)
    assert (verdict.status, verdict.reason) == ("failed", "no outcome within 0.01 s")
    assert session.discards == 2  # once for the hang, once at the end


def test_a_replay_that_breaks_is_a_failure_and_not_the_end() -> None:
    async def broken(case: Case, session: Session) -> Outcome:
        raise ZeroDivisionError("oops")

    verdict, _ = judge(broken, reduce_entry(RIGHT))
    assert (verdict.status, verdict.reason) == ("failed", "the replay itself raised ZeroDivisionError: oops")


def test_a_rule_that_breaks_is_a_failure_and_not_the_end() -> None:
    def broken(case: Case, expected: Json) -> Json:
        raise KeyError("max_shard_bytes")

    verdict, _ = judge(answering(Outcome(Value(3))), reduce_entry(RIGHT), Deviation("rule", 1, broken))
    assert (verdict.status, verdict.reason) == ("failed", "a rule raised KeyError: 'max_shard_bytes'")
    no_json = Deviation("rule", 1, lambda case, expected: {"value": {"py": np.int64(3)}})
    verdict, _ = judge(answering(Outcome(Value(4))), reduce_entry(RIGHT), no_json)
    assert (verdict.status, verdict.reason[:23]) == ("failed", "a rule raised TypeError")


def answering(outcome: Outcome) -> Any:
    async def replay(case: Case, session: Session) -> Outcome:
        return outcome

    return replay


def test_what_was_answered_when_traced_is_as_good_but_not_against_a_rule() -> None:
    entry = {**reduce_entry({"value": {"py": 3}}), "expect_function": {"value": {"py": 4}}}
    four = answering(Outcome(Value(4)))
    assert judge(four, entry)[0].status == "passed"
    rule = Deviation("rule", 1, lambda case, expected: {"value": {"py": 5}})
    verdict, _ = judge(four, entry, rule)
    assert (verdict.status, verdict.deviations) == ("failed", ("rule",))
    assert judge(answering(Outcome(Value(5))), entry, rule)[0].status == "passed"
    silent = Deviation("silent", 1, lambda case, expected: expected)
    assert judge(answering(Outcome(Value(3))), entry, silent)[0].deviations == ()


def test_local_results_are_checked_too() -> None:
    entry = {**reduce_entry({"value": {"py": 3}}), "expect_local_results": {"value": {"tuple": [{"py": 3}]}}}
    assert judge(answering(Outcome(Value(3), Value((3,)))), entry)[0].status == "passed"
    verdict, _ = judge(answering(Outcome(Value(3), Value((3, 3)))), entry)
    assert verdict.status == "failed"
    assert verdict.reason.startswith("local_results: ")


def call_error(cause: Exception) -> CallError:
    error = CallError(stage="s", step=0, replica=0, worker="w0", attempts=1, cause="")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("expected", "error", "same"),
    [
        ("ValueError", ValueError("x"), True),
        ("InvalidArgumentError", ValueError("x"), True),
        ("InvalidArgumentError", TypeError("x"), False),
        ("TypeError", AttributeError("x"), True),
        ("RuntimeError", RuntimeError("x"), True),
        ("StopIteration", StopAsyncIteration(), True),
        ("OutOfRangeError", ValueError("x"), False),
        ("KeyError", KeyError("x"), True),
        ("IndexError", ValueError("any clear error"), True),
        ("AssertionError", UnboundLocalError("no clear error"), False),
        ("ValueError", call_error(ValueError("x")), True),
        ("ValueError", call_error(OSError("x")), False),
    ],
)
def test_kinds_of_errors(expected: str, error: Exception, same: bool) -> None:
    assert (difference({"error": expected, "message": "other words"}, Raised(error)) is None) is same


def test_an_error_of_the_cases_own_code_comes_through_with_class_and_text() -> None:
    fn = ["seq", [["raise", "ValueError", "boom"]]]
    entry = reduce_entry({"error": "ValueError", "message": "boom"}, fn=fn)
    assert judge(answering(Outcome(Raised(call_error(ValueError("boom"))))), entry)[0].status == "passed"
    assert judge(answering(Outcome(Raised(call_error(ValueError("bang"))))), entry)[0].status == "failed"


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ({"dtype": "float32", "shape": [], "data": [1.0]}, np.float32(1 + 5e-7), True),
        ({"dtype": "float32", "shape": [], "data": [1.0]}, np.float32(1 + 5e-6), False),
        ({"dtype": "float16", "shape": [], "data": [1.0]}, np.float16(1.0009), True),
        ({"dtype": "float32", "shape": [], "data": [1.0]}, 1.0, False),
        ({"dtype": "string", "shape": [1], "data": ["ab"]}, np.array(["ab"]), True),
        ({"dtype": "string", "shape": [1], "data": ["ab"]}, np.array([b"ab"]), True),
        ({"dtype": "bool", "shape": [1], "data": [True]}, np.array([1]), False),
        ({"dtype": "float64", "shape": [2], "data": ["inf", "-inf"]}, np.array([np.inf, -np.inf]), True),
        ({"dtype": "float64", "shape": [1], "data": ["inf"]}, np.array([1e308]), False),
        ({"py": 3}, 3, True),
        ({"py": 3}, np.int64(3), True),
        ({"py": 3}, np.int32(3), False),
        ({"py": 3}, 3.0, False),
        ({"py": True}, 1, False),
        ({"py": "s"}, "s", True),
        ({"none": True}, None, True),
        ({"list": [{"py": 1}]}, [1], True),
        ({"list": [{"py": 1}]}, (1,), False),
        ({"tuple": [{"py": 1}]}, [1], False),
        ({"dict": {"a": {"py": 1}}}, {"a": 1}, True),
        ({"dict": {"a": {"py": 1}}}, {"b": 1}, False),
        ({"namedtuple": "Pair", "fields": {"x": {"py": 1}}}, (1,), False),
        ({"per_replica": [{"py": 1}, {"py": 2}]}, PerReplica([1, 2]), True),
        ({"mirrored": [{"py": 1}, {"py": 2}]}, PerReplica([1, 3]), False),
        ({"per_replica": [{"py": 1}]}, [1], False),
        ({"object": "Thing"}, object(), False),
    ],
)
def test_values(expected: Json, actual: Any, same: bool) -> None:
    assert (difference({"value": expected}, Value(actual)) is None) is same


def test_decoding_is_the_inverse_of_comparing() -> None:
    tree = {
        "dict": {
            "n": {"namedtuple": "Pair", "fields": {"x": FLOAT, "y": {"none": True}}},
            "t": {"tuple": [{"mirrored": [{"py": 1}, {"py": 1}]}, {"list": []}]},
            "c": {"dtype": "complex64", "shape": [1], "data": [[1.0, 2.0]]},
        }
    }
    assert difference({"value": tree}, Value(decode(tree))) is None
    with pytest.raises(ValueError, match="not a VALUE"):
        decode({"what": 1})
    with pytest.raises(Skip, match="object"):
        decode({"object": "Thing"})


def test_composite_results_are_compared_part_by_part() -> None:
    expected = {"steps": [{"py": 1}, {"py": 2}], "end": {"error": "OutOfRangeError"}, "n": 2, "x": 0.5}
    actual = {"steps": [Value(1), Value(2)], "end": Raised(StopAsyncIteration()), "n": 2, "x": 0.5}
    assert difference(expected, actual) is None
    for key, wrong in (
        ("steps", [Value(1)]),
        ("steps", [Value(1), Value(3)]),
        ("end", "exhausted"),
        ("n", 3),
    ):
        text = difference(expected, {**actual, key: wrong})
        assert text is not None
        assert key in text


def test_programs_and_namedtuples_work_in_real_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argument = {
        "namedtuple": "Trio",
        "fields": {"a": {"per_replica": [{"py": 1.5}, {"py": 2.5}]}, "b": {"py": 1}},
    }
    fn = ["namedtuple", "Other", {"y": ["add", ["getattr", ["arg", 0], "a"], ["kwarg", "k"]], "z": ["none"]}]
    entry = reduce_entry(
        {
            "value": {
                "namedtuple": "Other",
                "fields": {"y": {"per_replica": [{"py": 2.5}, {"py": 3.5}]}, "z": {"none": True}},
            }
        }
    )
    entry["call"] = {"op": "run", "fn": fn, "args": [argument], "kwargs": {"k": {"py": 1.0}}}
    raising = {**entry, "expect": {"error": "KeyError", "message": "'boom'"}}
    raising["call"] = {"op": "run", "fn": ["raise", "KeyError", "boom"]}
    code, account, last = run_command(write(tmp_path, entry, raising, family="run"), capsys=capsys)
    assert (code, last) == (0, "2 passed, 0 failed, 0 skipped"), account["failures"]
