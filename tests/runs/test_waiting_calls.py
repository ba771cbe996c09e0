"""Calls that wait: at the same time, for each element, again, at a rate, and with a time limit."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import pipedist
from pipedist.plan import compile_plan
from pipedist.plan.callables import exception_names
from pipedist.plan.view import as_text
from pipedist.runs.call_keys import CallKey
from pipedist.runs.identity import meaning
from pipedist.runs.replay import open_replay
from pipedist.spec import load

F = "tests.runs.waiting_functions"


def document(run: str, *, n: int = 12, batch: int = 1, replicas: int = 1, **keys: Any) -> dict[str, Any]:
    return {
        "pipedist": 1,
        "replicas": replicas,
        "dataset": {"range": n, "batch": batch},
        "stages": {"y": {"run": f"{F}:{run}", **keys}, "out": {"gather": 0, "of": "y"}},
    }


@pytest.mark.parametrize("function", ["all_there", "Client"])
def test_calls_wait_at_the_same_time_over_all_workers(tmp_path: Path, function: str) -> None:
    spec = document(function, n=40, concurrency=40, **{"with": {"folder": str(tmp_path), "count": 40}})
    assert pipedist.run(spec, workers=2)["out"].tolist() == list(range(0, 80, 2))


def test_32_calls_of_an_async_function_wait_in_a_worker_by_default(tmp_path: Path) -> None:
    spec = document("all_there", n=33, **{"with": {"folder": str(tmp_path), "count": 32}})
    assert pipedist.run(spec, workers=1)["out"].tolist() == list(range(0, 66, 2))


def test_concurrency_of_a_plain_function_is_an_error_of_the_plan() -> None:
    with pytest.raises(
        pipedist.PlanError, match=r"stages.y.concurrency.*needs an async function, and .*plain"
    ):
        pipedist.run(document("plain", concurrency=4), workers=1)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_function_of_one_element_gives_batches_in_order(workers: int) -> None:
    spec = document("element", n=22, batch=8, replicas=2, per="element", concurrency=5)
    out = pipedist.run(spec, workers=workers)["out"]
    assert out["text"].tolist() == [f"answer {n}" for n in range(22)]
    assert out["n"].tolist() == list(range(22))
    assert out["raw"].tolist() == [b"x" * n + b"\0" for n in range(22)]
    assert out["vector"].tolist() == [[n, n + 1] for n in range(22)]


def test_each_element_has_its_own_random_numbers_in_any_division() -> None:
    one = pipedist.run(document("plain_element", n=8, batch=8, per="element"), workers=1)["out"]
    two = pipedist.run(document("plain_element", n=8, batch=8, per="element"), workers=2)["out"]
    assert one["text"].tolist() == [f"{n}-{n}" for n in range(8)]
    assert one["draw"].tolist() == two["draw"].tolist()
    assert len(set(one["draw"].tolist())) == 8


def test_results_of_different_shapes_can_not_be_batched() -> None:
    with pytest.raises(pipedist.CallError, match=r"is int64\[\d\] in that of element 1, .*`ragged: lists`"):
        pipedist.run(document("ragged", n=3, batch=3, per="element"), workers=1)


def test_only_the_element_that_fails_is_quarantined_and_others_are_called_once(tmp_path: Path) -> None:
    note = tmp_path / "note"
    spec = document("bad_element", n=16, batch=8, per="element", on_error="quarantine")
    spec["stages"]["y"]["with"] = {"note": str(note), "bad": [3, 4, 12]}
    result = pipedist.run(spec, workers=2)
    assert result["out"].tolist() == [float(n) for n in range(16) if n not in (3, 4, 12)]
    assert [(x["element"], x["cause"]) for x in result.quarantined] == [
        (n, f"ValueError: no {n}") for n in (3, 4, 12)
    ]
    assert Counter(note.read_text().split()) == dict.fromkeys(map(str, range(16)), 1)


def test_an_input_without_elements_gives_none_and_failures_are_those_of_their_elements(
    tmp_path: Path,
) -> None:
    spec = document("bad_element", n=24, batch=8, per="element", on_error="quarantine", of="x")
    spec["stages"]["x"] = {"run": f"{F}:above", "with": {"least": 13}}
    spec["stages"]["y"]["with"] = {"note": str(tmp_path / "note"), "bad": [14]}
    result = pipedist.run(spec, workers=1)
    assert result["out"].tolist() == [13.0, *map(float, range(15, 24))]
    assert [x["element"] for x in result.quarantined] == [14]


def test_only_the_element_whose_result_differs_is_quarantined(tmp_path: Path) -> None:
    note = tmp_path / "note"
    spec = document("none_of", n=8, batch=8, per="element", on_error="quarantine")
    spec["stages"]["y"]["with"] = {"note": str(note), "bad": 0}
    result = pipedist.run(spec, workers=1)
    assert result["out"].tolist() == [float(n) for n in range(1, 8)]
    assert [x["element"] for x in result.quarantined] == [0]
    assert Counter(note.read_text().split()) == dict.fromkeys(map(str, range(8)), 1)


def test_the_failure_of_the_lowest_element_ends_the_run(tmp_path: Path) -> None:
    spec = document("bad_element", n=8, batch=8, per="element")
    spec["stages"]["y"]["with"] = {"note": str(tmp_path / "note"), "bad": [2, 5]}
    with pytest.raises(pipedist.CallError, match="no 2"):
        pipedist.run(spec, workers=1)


def test_attempts_follow_the_backoff_and_the_wait_that_the_function_names(tmp_path: Path) -> None:
    note = tmp_path / "note"
    retry = {"attempts": 3, "backoff_s": 0.1, "on": ["OSError"]}
    spec = document("flaky", n=4, batch=4, per="element", retry=retry, **{"with": {"note": str(note)}})
    assert pipedist.run(spec, workers=1)["out"].tolist() == [0.0, 1.0, 2.0, 3.0]
    times: dict[str, list[float]] = {}
    for line in note.read_text().splitlines():
        element, at = line.split()
        times.setdefault(element, []).append(float(at))
    for first, second, third in times.values():
        assert second - first >= 0.05
        assert third - second >= 0.2


@pytest.mark.parametrize("retry", [None, {"attempts": 2}, {"attempts": 5, "on": "KeyError"}])
def test_without_another_attempt_the_call_fails(tmp_path: Path, retry: dict[str, Any] | None) -> None:
    spec = document("flaky", n=1, retry=retry, per="element", **{"with": {"note": str(tmp_path / "note")}})
    error = "retry after 0.2 s" if retry == {"attempts": 2} else "ConnectionError: reset"
    with pytest.raises(pipedist.CallError, match=error):
        pipedist.run(spec, workers=1)


def test_a_time_limit_cancels_one_call_and_its_neighbours_go_on(tmp_path: Path) -> None:
    note = tmp_path / "note"
    spec = document("hangs", n=12, batch=6, per="element", timeout_s=3, concurrency=6)
    spec["stages"]["y"] |= {"retry": {"attempts": 2, "backoff_s": 0}, "with": {"note": str(note)}}
    assert pipedist.run(spec, workers=1)["out"].tolist() == [float(n) for n in range(12)]
    calls = [line.split() for line in note.read_text().splitlines()]
    assert Counter(element for element, _ in calls) == {str(n): 1 + (n == 3) for n in range(12)}
    assert len({pid for _, pid in calls}) == 1


def test_a_call_that_blocks_the_thread_beyond_its_time_limit_costs_its_worker(tmp_path: Path) -> None:
    spec = document(
        "blocks", n=8, timeout_s=0.2, retries=1, concurrency=8, **{"with": {"note": str(tmp_path / "n")}}
    )
    spec["stages"]["y"]["per"] = "element"
    assert pipedist.run(spec, workers=1)["out"].tolist() == [float(n) for n in range(8)]


def test_a_rate_holds_over_all_workers(tmp_path: Path) -> None:
    note = tmp_path / "note"
    spec = document("timed", n=8, batch=4, per="element", rate={"calls": 8, "per_s": 1})
    spec["stages"]["y"]["with"] = {"note": str(note)}
    began = time.monotonic()
    pipedist.run(spec, workers=2)
    times = sorted(map(float, note.read_text().split()))
    assert len(times) == 8
    assert times[-1] - began >= 3 / 4, "a worker has four calls at least, and begins four in a second"


@pytest.mark.parametrize(("workers", "batch"), [(3, 2), (2, 4), (3, 1)])
def test_concurrency_holds_exactly_over_the_workers_that_have_elements(
    tmp_path: Path, workers: int, batch: int
) -> None:
    spec = document("meets", n=4 if batch > 1 else 12, batch=batch, per="element", concurrency=4)
    spec["stages"]["y"]["with"] = {"folder": str(tmp_path), "count": 4}
    assert pipedist.run(spec, workers=workers)["out"].tolist() == list(range(4 if batch > 1 else 12))


@pytest.mark.parametrize("concurrency", [2, 5])
def test_concurrency_is_not_exceeded_when_a_worker_dies(tmp_path: Path, concurrency: int) -> None:
    spec = document("dies", n=40, batch=4, per="element", concurrency=concurrency)
    spec["stages"]["y"]["with"] = {"folder": str(tmp_path), "most": concurrency}
    assert pipedist.run(spec, workers=3)["out"].tolist() == list(range(40))
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"retry": {"attempts": 3, "backoff_s": 60}},
        {"retry": {"attempts": 3}, "with": {"seconds": 60}},
        {"retry": {"attempts": 3, "backoff_s": 60}, "per": None},
        {"rate": {"calls": 1, "per_s": 60}},
    ],
)
def test_a_stop_does_not_wait_for_attempts_or_the_rate(tmp_path: Path, keys: dict[str, Any]) -> None:
    note = tmp_path / "note"
    spec = document("refuses", n=4, batch=4 if keys.get("per", "") is not None else 1, per="element")
    spec["stages"]["y"] |= keys
    spec["stages"]["y"]["with"] = {"note": str(note), "seconds": 0, **keys.get("with", {})}
    spec["cluster"] = {"grace_s": 600}

    async def main() -> None:
        async with pipedist.open(spec, workers=1, output=tmp_path / "out") as run:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:

                    async def stop() -> None:
                        while not note.exists():  # noqa: ASYNC110 - written by another process
                            await anyio.sleep(0.01)
                        run.drain()

                    tasks.start_soon(stop)
                    with pytest.raises(pipedist.RunCancelled, match="the run was stopped"):
                        await run.results()

    anyio.run(main)
    begun = Counter(note.read_text().split())
    assert max(begun.values()) == 1
    if "with" in keys:
        Path(f"{note}-is-up").touch()
        result = pipedist.run(spec, workers=1, output=tmp_path / "out", resume=True)
        assert result["out"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert (Counter(note.read_text().split()) - begun)["0"] == 0, "the finished element is kept"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"retry": {"attempts": 2}, "retries": 1}, "`retry` and `retries` both say how often"),
        (
            {"concurrency": 2, "collectives": True},
            "`concurrency` is for calls that are executed by themselves",
        ),
        ({"concurrency": 0}, "`concurrency` must be an integer from 1 to 65536"),
        ({"rate": 3}, "`rate` must be a mapping {calls: N, per_s: S}"),
        ({"retry": {"attempts": 1}}, "`attempts` must be an integer from 2 to 1000"),
        ({"retry": {"attempts": 2, "on": "not a name"}}, "`on` must be the name of an exception"),
        ({"per": "step"}, "`per` must be element"),
    ],
)
def test_mistakes_have_a_place(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(pipedist.SpecError) as caught:
        pipedist.run(document("element", **keys), workers=1)
    assert message in str(caught.value)
    assert "stages.y" in str(caught.value)


@pytest.mark.parametrize("keys", [{"concurrency": 2}, {"rate": {"calls": 50}}, {"per": "element"}])
@pytest.mark.parametrize("first", ["y", "gang"])
def test_calls_with_a_limit_are_not_those_of_a_gang(keys: dict[str, Any], first: str) -> None:
    """With a `batch` in the stage that reads the other one, both have calls of their own."""
    last = "y" if first == "gang" else "gang"
    spec = document("doubled", n=4, batch=2, **keys)
    spec["stages"]["gang"] = {"run": f"{F}:plus_sum", "collectives": True}
    spec["stages"][last]["of"] = first
    spec["stages"]["out"]["of"] = last
    [key] = keys
    with pytest.raises(pipedist.PlanError, match=rf"stages.y.{key}: .*\n *expected a `batch` for the one"):
        pipedist.run(spec, workers=1)
    spec["stages"][last]["batch"] = 2
    assert pipedist.run(spec, workers=1)["out"].tolist() == [2, 4, 14, 16]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("TimeotError", "no exception 'TimeotError' is known (.|\\n)*did you mean 'TimeoutError'"),
        (
            ["KeyError", "asyncio.CanceledError"],
            r"asyncio has no exception 'CanceledError'(.|\n)*CancelledError",
        ),
        ("htpx.ConnectError", "htpx can't be imported: No module named 'htpx'"),
        ("os.path", "os has no exception 'path'"),
    ],
)
def test_a_name_of_no_exception_is_an_error_of_the_plan(names: Any, message: str) -> None:
    spec = load(document("element", per="element", retry={"attempts": 2, "on": names}))
    with pytest.raises(pipedist.PlanError, match=f"stages.y.retry.on.*{message}"):
        compile_plan(spec, workers=1)


def test_an_exception_may_have_the_name_under_which_it_is_imported() -> None:
    assert exception_names(["OSError", "CollectorError", "pipedist.RunCancelled"]) == (
        "OSError",
        "CollectorError",
        "pipedist.RunCancelled",
        "pipedist.errors.RunCancelled",
    )


@pytest.mark.parametrize(
    ("function", "kind"), [("generates", "a generator"), ("generates_late", "an async generator")]
)
def test_a_generator_function_is_an_error_of_the_plan(function: str, kind: str) -> None:
    with pytest.raises(
        pipedist.PlanError, match=f"has a `yield`, so its calls return {kind}, .*`return` a list"
    ):
        compile_plan(load(document(function, per="element")), workers=1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lazy", "lazy returned an object of type generator for element 0, .*: return a list"),
        (
            "late",
            r"ValueError: RetryAfter\(4000\): .* at most 3600 s; raise RetryAfter\(min\(seconds, 3600\)\)",
        ),
    ],
)
def test_a_result_that_is_none_names_what_to_return(function: str, message: str) -> None:
    with pytest.raises(pipedist.CallError, match=message) as caught:
        pipedist.run(document(function, n=1, per="element", retry={"attempts": 2}), workers=1)
    assert "cannot pickle" not in str(caught.value)


def test_the_plan_counts_one_call_in_the_singular() -> None:
    plan = compile_plan(load(document("element", rate={"calls": 1, "per_s": 2})), workers=1)
    assert "at most 1 call per 2 s" in as_text(plan)
    plan.close()


def test_the_plan_shows_how_calls_wait() -> None:
    keys = {"per": "element", "concurrency": 8, "rate": {"calls": 50, "per_s": 2}, "retry": {"attempts": 3}}
    plan = compile_plan(load(document("element", **keys)), workers=2)
    line = next(line for line in as_text(plan).splitlines() if line.strip().startswith("run "))
    limits = (
        "for each element, 8 elements at once over all workers, at most 50 elements per 2 s, up to 3 attempts"
    )
    assert line.endswith(f"waiting_functions:element of dataset, {limits}")
    plan.close()
    other = meaning(load(document("element", per="element", concurrency=3, retry={"attempts": 3})))
    assert other == meaning(plan.spec), "limits never change a result, so a run is resumed with others"


def test_a_call_of_elements_is_replayed(tmp_path: Path) -> None:
    spec = document("element", n=8, batch=8, per="element", retry={"attempts": 2}, concurrency=4)
    (tmp_path / "spec.yaml").write_text(json.dumps({**spec, "code": str(Path(__file__).parents[2])}))
    pipedist.run(tmp_path / "spec.yaml", workers=1, output=tmp_path / "out")
    with open_replay(tmp_path / "out", CallKey.of("y/0/0"), ()) as replay:
        assert replay.execute().value["text"].tolist() == [f"answer {n}" for n in range(8)]
    with open_replay(tmp_path / "out", CallKey.of("y/0/0"), (5,)) as replay:
        assert replay.execute().value["text"].tolist() == ["answer 5"]


def test_the_results_do_not_depend_on_the_workers() -> None:
    spec = document("element", n=30, batch=10, replicas=3, per="element")
    spec["stages"]["total"] = {"reduce": "sum", "of": "y", "axis": 0}
    del spec["stages"]["out"]
    spec["stages"]["y"]["run"] = f"{F}:timed_numbers"
    results = [pipedist.run(spec, workers=workers)["total"] for workers in (1, 3)]
    assert np.array_equal(*results)
