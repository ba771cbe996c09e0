"""What people are told while a worker waits for its scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipedist.worker import joining
from pipedist.worker.joining import SILENT_S, Joining


def test_that_it_waits_is_told_once_and_not_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(joining, "time", clock)
    told: list[str] = []
    patient, hasty = (
        Joining(told.append, threads=1, join_s=join_s, doubt=lambda: "; nobody knows it")
        for join_s in (20.0, 0.2)
    )
    for each in (patient, hasty):
        each.begin()
        each.look()
    clock.now = SILENT_S
    for each in (hasty, patient, patient):  # the hasty one had no turn until now, and gives up
        each.look()
    assert told == ["waiting for a scheduler, for at most 20 s; nobody knows it"]
