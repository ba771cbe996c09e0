from __future__ import annotations

import subprocess

import pytest

from pipedist.worker import boot


@pytest.fixture(autouse=True)
def execute_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as outside of tests: how they start and end is tested here."""
    monkeypatch.setattr(boot, "Popen", subprocess.Popen)
