"""Cases beside those of the collection: neighbours in kind.

`more_cases/*.json` are of the collection's schema. Each stands for a rule that the collection decides by
few cases, or by none. What they expect was recorded from TensorFlow, or derived from its source code, which
`derived` names then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conformance import families
from tests.conformance.cases import read_cases
from tests.conformance.corruption import Corruptions
from tests.conformance.runner import Account, replay_all

SEEDS = range(8)


@pytest.fixture(scope="module")
def account() -> Account:
    return asyncio.run(replay_all(read_cases(Path(__file__).with_name("more_cases")), timeout_s=60))


def test_more_cases_pass(account: Account) -> None:
    wrong = {verdict.case.id: verdict.reason for verdict in account.verdicts if verdict.status != "passed"}
    assert account.verdicts
    assert not wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_every_corruption_is_noticed_where_no_rule_replaces_the_result(account: Account, seed: int) -> None:
    registry = families.registry()
    corrupted = Corruptions()
    for verdict in account.verdicts:
        corrupted.add(verdict, registry[verdict.case.family], seed)
    assert not corrupted.unnoticed
    assert {"number", "shape", "dtype", "error", "text", "list", "key", "none"} <= set(corrupted.noticed)
    rules = {rule.name for family in registry.values() for rule in family.deviations}
    assert {rule for rule, _ in corrupted.excused} <= rules
