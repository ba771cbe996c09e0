from __future__ import annotations

import pytest

from pipedist.errors import UsageError
from pipedist.testing import combinations
from pipedist.testing.combining import missing_here

SEEN: list[tuple[str, int, bool]] = []


@combinations(strategy=["mirrored"], workers=[1, 3], shared=[True, False])
def test_each(request: pytest.FixtureRequest, strategy: str, workers: int, shared: bool) -> None:
    name = "shared" if shared else "not_shared"
    assert request.node.name == f"test_each[mirrored-{workers}_workers-{name}]"
    SEEN.append((strategy, workers, shared))


def test_all_of_them_were_tests() -> None:
    assert set(SEEN) == {("mirrored", n, s) for n in (1, 3) for s in (True, False)}


def test_some_are_skipped_with_the_reason() -> None:
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


def test_what_this_machine_can_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedist.testing.combining.accelerators", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_here({"accelerators": 2, "workers": 4}) == "needs 2 accelerators, there are 1"
    assert missing_here({"implementation": "gloo"}) == "needs torch, which is not installed"
    assert not missing_here({"implementation": "auto", "accelerators": 1})
    monkeypatch.setattr("pipedist.testing.combining.accelerators", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing_here({"backend": "nccl"}) == "nccl needs an accelerator, there is none"


def test_of_nothing() -> None:
    with pytest.raises(UsageError, match="combinations of nothing: workers"):
        combinations(replicas=[1], workers=[])
    with pytest.raises(UsageError, match="no arguments"):
        combinations()
