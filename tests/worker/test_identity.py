"""Reports of a worker that waits for its scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipedist.worker import identity
from pipedist.worker.identity import SILENT_S, JoinReporter


def test_a_wait_is_reported_once_and_not_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(identity, "time", clock)
    reports: list[str] = []
    patient, hasty = (
        JoinReporter(reports.append, threads=1, join_s=join_s, diagnose=lambda: "; the host is unknown")
        for join_s in (20.0, 0.2)
    )
    for each in (patient, hasty):
        each.begin()
        each.check()
    clock.now = SILENT_S
    for each in (hasty, patient, patient):  # the hasty one was not checked until now, beyond its limit
        each.check()
    assert reports == ["waiting for the driver, for at most 20 s; the host is unknown"]
