"""The committed cases of mirrored strategies, replayed on a TPUStrategy with CPU devices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tests.conformance
from tests.conformance.cases import read_cases
from tests.conformance.runner import replay_all
from tests.conformance.session import Session

CASES = Path(tests.conformance.__file__).with_name("more_cases")


def test_mirrored_cases_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    account = asyncio.run(replay_all(read_cases(CASES), timeout_s=60, session=Session(jax=True)))
    wrong = {verdict.case.id: verdict.reason for verdict in account.verdicts if verdict.status == "failed"}
    assert not wrong
    assert account.count("passed") > 60
    assert "jax: a branch by replica id is an error" in account.deviation_counts()
