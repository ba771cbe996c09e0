"""Members of gangs in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedist.collectives.segment import SegmentOwner
from tests import preloaded

ROOT = Path(__file__).parents[2]


class Process:
    """One member."""

    def __init__(
        self,
        owner: SegmentOwner,
        serial: int,
        member: int,
        sizes: Sequence[int],
        scenario: str,
        timeout_s: float,
    ) -> None:
        what = [owner.where, str(serial), str(member), json.dumps(sizes), scenario, str(timeout_s)]
        self.process = preloaded.Popen(
            [sys.executable, "-m", "tests.collectives.member_process", *what],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def ready(self, replicas: int = 1) -> None:
        for _ in range(replicas):
            assert "ready" in self.told()

    def outcomes(self) -> list[dict[str, Any]]:
        told = self.told()
        while told and "outcomes" not in told:
            told = self.told()
        self.end()
        return told["outcomes"]

    def end(self) -> None:
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Nursery:
    """Starts members, and leaves none behind."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.owners: list[SegmentOwner] = []

    def owner(self, replicas: int) -> SegmentOwner:
        self.owners.append(SegmentOwner(replicas))
        return self.owners[-1]

    def start(
        self,
        owner: SegmentOwner,
        sizes: Sequence[int],
        scenario: str,
        *,
        timeouts_s: Sequence[float] | None = None,
        serial: int = 1,
    ) -> list[Process]:
        waits = timeouts_s or [60] * len(sizes)
        members = [Process(owner, serial, m, sizes, scenario, waits[m]) for m in range(len(sizes))]
        self.processes += members
        return members

    def close(self) -> None:
        for process in self.processes:
            process.process.kill()
            process.end()
        for owner in self.owners:
            owner.close()
