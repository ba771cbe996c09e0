"""The benchmark of waiting calls measures what it says, in a tiny size; no time is judged."""

from __future__ import annotations

import pytest

from benchmarks import waiting_calls


def test_both_clients_get_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_calls, "RETRY_AFTER_S", 0.01)
    rates = waiting_calls.measure(60, 16, 2, batch=20, speedup=50)
    assert sorted(rates) == ["pipedist", "plain asyncio", "ratio"]
    assert all(rate > 0 for rate in rates.values())
