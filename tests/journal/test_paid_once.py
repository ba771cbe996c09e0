"""Answers of a server are durable soon, in any order: after a kill of the driver, none of those is asked for again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipedist.journal.history import audit, read_history
from pipedist.journal.log_format import read_log
from tests import preloaded
from tests.journal.paid import PROCESS, CountingServer
from tests.preloaded import ROOT, run_module
from tests.transport.memory import children

DURABLE_S = 0.5
"""Answers are durable after this time, by the documentation."""

CONCURRENCY = 32

LATE_S = 2.5
"""How much later, if the machine is busy with other tests."""


def spec_of(port: int, *, n: int, batch: int, replicas: int, per: str | None) -> dict[str, Any]:
    function = "ask" if per else "ask_shard"
    return {
        "pipedist": 1,
        "code": str(ROOT),
        "replicas": replicas,
        "dataset": {"range": n, "batch": batch},
        "stages": {
            "y": {
                "run": f"tests.journal.paid:{function}",
                "with": {"port": port},
                "per": per,
                "concurrency": CONCURRENCY,
            },
            "rows": {"gather": 0, "of": "y"},
        },
        "outputs": {"rows": "rows.json"},
    }


COMMAND = [sys.executable, "-m", "pipedist", "run", "spec.yaml", "--output", "out", "--workers", "2"]


def begin(folder: Path, number: int) -> subprocess.Popen[bytes]:
    """Start the driver process `number` of a run."""
    command = [*COMMAND, *(["--resume"] if number else [])]
    environment = {**os.environ, PROCESS: str(number)}
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        return preloaded.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)


def wait_until(is_reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tree_of(pid: int) -> list[int]:
    """Return a process, its fork server, and its workers."""
    below = [each for child in children(pid) for each in tree_of(child)]
    return [pid, *below]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per", "batch", "replicas"), [("element", 200, 2), ("element", 40, 1), (None, 40, 40)]
)
def test_no_durable_answer_is_asked_for_again(
    tmp_path: Path, per: str | None, batch: int, replicas: int
) -> None:
    """The driver is killed, and then the driver with its workers."""
    n, times = 300, random.Random(batch + replicas)
    killed_at: list[float] = []
    durable: list[set[int]] = []
    with CountingServer((0.02, 0.4)) as server:
        spec = spec_of(server.port, n=n, batch=batch, replicas=replicas, per=per)
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        for number in range(2):
            until = len(server.answered) + times.randrange(60, 120)
            with begin(tmp_path, number) as process:
                wait_until(lambda: len(server.answered) >= until, process)  # noqa: B023
                killed_at.append(time.monotonic())
                for pid in tree_of(process.pid) if number else [process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            durable.append(durable_places(tmp_path, per))
        with begin(tmp_path, 2) as process:
            assert process.wait(60) == 0
    assert json.loads((tmp_path / "out" / "rows.json").read_text()) == [f"answer {i}" for i in range(n)]
    assert audit(tmp_path / "out" / ".pipedist" / "journal", finished=True, ledger=None).problems == ()
    answers: dict[int, list[tuple[int, float]]] = {}
    for element, number, at in server.answered:
        answers.setdefault(element, []).append((number, at))
    assert sorted(answers) == list(range(n))
    for found in answers.values():
        assert len({number for number, _ in found}) == len(found), "asked twice by one process"
    for element, number, _ in server.answered:
        assert all(element not in durable[earlier] for earlier in range(number)), "a durable answer"
    for found in answers.values():
        for (number, at), _ in itertools.pairwise(sorted(found)):
            assert at > killed_at[number] - DURABLE_S - LATE_S
    late = sum(
        number < 2 and at > killed_at[number] - DURABLE_S - LATE_S for _, number, at in server.answered
    )
    assert server.asked.total() - n <= late + CONCURRENCY * len(killed_at)


@pytest.mark.parametrize(("per", "replicas"), [("element", 1), (None, 64)])
def test_finished_places_of_an_unfinished_step_are_durable(
    tmp_path: Path, per: str | None, replicas: int
) -> None:
    """Killed when the journal has a part of the only step: the resumed run asks for the rest only."""
    n = 64
    with CountingServer((0.05, 0.2)) as server:
        spec = spec_of(server.port, n=n, batch=n, replicas=replicas, per=per)
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        with begin(tmp_path, 0) as process:
            wait_until(lambda: bool(durable_places(tmp_path, per)), process)
            process.kill()
        durable = durable_places(tmp_path, per)
        with begin(tmp_path, 1) as process:
            assert process.wait(60) == 0
    asked = {element for element, number, _ in server.answered if number == 1}
    assert asked == set(range(n)) - durable
    assert server.asked[1] == n - len(durable)


def durable_places(folder: Path, per: str | None) -> set[int]:
    """Return the elements that a run's journal has: of finished steps, and single ones, or calls of one element."""
    journal = folder / "out" / ".pipedist" / "journal"
    history = read_history(journal) if (journal / "journal").exists() else None
    found: set[int] = set()
    for before in () if history is None else history.passes.values():
        found |= set(range(before.elements))
        for name, end in before.logs.items():
            if ".calls." in name:
                metas = [entry.meta for entry, _ in read_log(journal / name, end)][1:]
                found |= {meta[2] if per else meta for meta in metas if isinstance(meta, list) == bool(per)}
    return found


def test_elements_that_failed_for_good_are_not_asked_for_again(tmp_path: Path) -> None:
    """Killed while the only step is incomplete; the quarantine of the resumed run is that of an uninterrupted one."""
    n, bad = 40, list(range(0, 40, 7))
    with CountingServer((0.0, 0.0), silent=frozenset({39})) as server:
        spec = spec_of(server.port, n=n, batch=n, replicas=1, per="element")
        spec["stages"]["y"] |= {
            "run": "tests.journal.paid:ask_in_vain",
            "with": {"port": server.port, "bad": bad},
            "on_error": "quarantine",
        }
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        with begin(tmp_path, 0) as process:
            wait_until(lambda: len(durable_places(tmp_path, "element")) == n - 1, process)
            process.kill()
        texts = [run_module("pipedist", command, "out", cwd=tmp_path).stdout for command in ("audit", "why")]
        document = json.loads(run_module("pipedist", "why", "out", "--json", cwd=tmp_path).stdout)
        with begin(tmp_path, 1) as process:
            assert process.wait(60) == 3
    assert server.asked[1] == 1
    for text in texts:
        assert (
            "in 0 steps, 0 elements\n    durable, and not executed again: 0 steps and 39 elements\n" in text
        )
    assert document["passes"][0]["later_elements_done"] == n - 1
    assert "durable: y: 0 steps and 39 elements\n" in (tmp_path / "stderr").read_text()
    table = (tmp_path / "stdout").read_text()
    assert "stage y: 0 steps and 39 elements taken from the journal, not executed again\n" in table
    results = json.loads((tmp_path / "out" / ".pipedist" / "results.json").read_text())
    assert results["resumed"] == {"y": {"steps": 0, "calls": 0, "elements": 39}}
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [(x["element"], x["cause"], x["alone"]) for x in map(json.loads, lines)] == [
        (each, f"ValueError: answer {each} is bad", True) for each in bad
    ]
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert rows == [f"answer {i}" for i in range(n) if i not in bad]


def test_what_has_finished_when_a_run_fails_is_not_asked_for_again(tmp_path: Path) -> None:
    """The first step fails while answers for later ones arrive, which are cancelled."""
    n = 64
    with CountingServer((0.0, 0.2), together=n) as server:
        spec = spec_of(server.port, n=n, batch=2, replicas=1, per="element")
        function = {"run": "tests.journal.paid:ask_and_note", "concurrency": n}
        spec["stages"]["y"] |= {**function, "with": {"port": server.port, "note": str(tmp_path / "note")}}
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        with begin(tmp_path, 0) as process:
            assert process.wait(60) == 1
        noted = set(map(int, (tmp_path / "note").read_text().split()))
        with begin(tmp_path, 1) as process:
            assert process.wait(60) == 0
    assert not noted & {element for element, number, _ in server.answered if number == 1}
    assert server.asked[1] == n - len(noted)
