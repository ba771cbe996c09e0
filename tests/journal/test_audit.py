"""`pipedist audit` accepts a consistent journal and names every kind of tampering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipedist
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.errors import LocalProtocolError
from pipedist.journal.log_format import read_records
from pipedist.runs import pass_journal as durable
from tests.preloaded import run_module

SPEC = {
    "pipedist": 1,
    "name": "audited",
    "replicas": 2,
    "dataset": {"range": 77, "batch": 4},
    "stages": {
        "y": {"run": "tests.runs.functions:double"},
        "t": {"reduce": "sum", "of": "y", "axis": 0},
        "z": {"run": "tests.runs.functions:plus", "with": {"amount": "${stages.t}"}},
        "rows": {"gather": 0, "of": "z"},
    },
    "outputs": {"rows": "rows.npy"},
}


def audit(run: Path) -> tuple[int, str]:
    done = run_module("pipedist", "audit", run, cwd=run.parent)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audit") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "COMMIT_S", 0.0)
        pipedist.run(SPEC, workers=2, output=out)
    return out


def test_a_finished_run_adds_up(finished: Path) -> None:
    code, stdout = audit(finished)
    assert code == 0
    assert "77 elements = 77 committed + 0 quarantined + 0 lost; the run has ended" in stdout
    assert stdout.count("complete; calls [0, 40) in 20 steps, 77 elements") == 2
    assert stdout.endswith("the journal is consistent\n")


def test_tampering_is_named(finished: Path) -> None:
    path = finished / ".pipedist" / "journal" / "journal"
    good = path.read_bytes()
    placed = list(read_records(good))
    middle, last = placed[len(placed) // 2], placed[-1]
    flipped = bytearray(good)
    flipped[middle.offset + 40] ^= 16
    try:
        for bad, text in (
            (bytes(flipped), f"record {len(placed) // 2} at offset {middle.offset} is damaged"),
            (good[: middle.offset] + good[middle.end :], f"at offset {middle.offset} does not follow"),
            (
                good[: middle.offset] + good[last.offset :] + good[middle.offset : last.offset],
                f"at offset {middle.offset} does not follow",
            ),
            (good[: last.offset], "records were removed"),
            (good[:-3], "without a record of the end"),
            (good + b"more", "4 bytes follow"),
            (b"", "no complete record"),
        ):
            path.write_bytes(bad)
            code, stdout = audit(finished)
            assert code == 1, text
            assert text in stdout
            assert "the journal is inconsistent" in stdout
        path.write_bytes(good)
        results = finished / ".pipedist" / "results.json"
        document = results.read_text()
        results.write_text(json.dumps({**json.loads(document), "ledger": {"elements": 1}}))
        code, stdout = audit(finished)
        assert code == 1
        assert "the results have {'elements': 1}" in stdout
        results.unlink()
        code, stdout = audit(finished)
        assert code == 2
        assert "results.json of the finished run can't be read" in stdout
        results.write_text(document)
    finally:
        path.write_bytes(good)
    assert audit(finished)[0] == 0


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    code, stdout = audit(tmp_path)
    assert code == 2
    assert "there is no run in" in stdout
    (tmp_path / "spec.yaml").touch()
    code, stdout = audit(tmp_path / "spec.yaml")
    assert code == 2
    assert "there is no run in" in stdout


@pytest.mark.parametrize("by", [-1, 1])
def test_a_ledger_that_does_not_add_up_is_a_defect_and_no_result(
    monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    ready = PassHandle.ready

    def miscounted(self: PassHandle, first: int, last: int) -> None:
        ready(self, first, last)
        if first == 0 and self.has_feed:
            self.counts.elements_visible += by

    monkeypatch.setattr(PassHandle, "ready", miscounted)
    with pytest.raises(LocalProtocolError, match="internal error: the counts of pass"):
        pipedist.run({**SPEC, "outputs": {}}, workers=1)
