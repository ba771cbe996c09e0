from __future__ import annotations

import pytest

from pipedist.errors import UsageError
from pipedist.testing import combinations
from pipedist.testing.parametrize import unavailable


@combinations(strategy=["mirrored"], workers=[1, 3], shared=[True, False])
def test_one_combination(request: pytest.FixtureRequest, strategy: str, workers: int, shared: bool) -> None:
    name = "shared" if shared else "not_shared"
    assert request.node.name == f"test_one_combination[mirrored-{workers}_workers-{name}]"
    assert strategy == "mirrored"


def test_each_combination_is_a_test() -> None:
    (mark,) = test_one_combination.pytestmark
    _, cases = mark.args
    assert {case.values for case in cases} == {("mirrored", n, s) for n in (1, 3) for s in (True, False)}


def test_combinations_are_skipped_with_the_reason() -> None:
    def unless(replicas: int, workers: int) -> str | None:
        return "more workers than replicas" if workers > replicas else None

    _, cases = combinations(replicas=[1, 2], workers=[1, 2], unless=unless).args
    skipped = {case.id: [mark.kwargs["reason"] for mark in case.marks] for case in cases}
    assert skipped == {
        "1_replicas-1_workers": [],
        "1_replicas-2_workers": ["more workers than replicas"],
        "2_replicas-1_workers": [],
        "2_replicas-2_workers": [],
    }


def test_combinations_that_this_machine_cannot_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedist.testing.parametrize.accelerators", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unavailable({"accelerators": 2, "workers": 4}) == "needs 2 accelerators, but 1 are available"
    assert unavailable({"implementation": "gloo"}) == "needs torch, which is not installed"
    assert not unavailable({"implementation": "auto", "accelerators": 1})
    monkeypatch.setattr("pipedist.testing.parametrize.accelerators", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert unavailable({"backend": "nccl"}) == "nccl needs an accelerator, but none is available"


def test_combinations_need_values() -> None:
    with pytest.raises(UsageError, match="needs values for: workers"):
        combinations(replicas=[1], workers=[])
    with pytest.raises(UsageError, match="at least one argument"):
        combinations()
