"""Cases recorded from TensorFlow beside those of the collection: what its neighbours in kind do.

`more_cases/*.json` are of the collection's schema. Each stands for a rule that the collection decides by
few cases, or by none.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.conformance.cases import read_cases
from tests.conformance.runner import replay_all


def test_more_cases_pass() -> None:
    account = asyncio.run(replay_all(read_cases(Path(__file__).with_name("more_cases")), timeout_s=60))
    wrong = {verdict.case.id: verdict.reason for verdict in account.verdicts if verdict.status != "passed"}
    assert account.verdicts
    assert not wrong
