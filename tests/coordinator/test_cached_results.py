"""Cached results in a worker's Hello, and the passes that they belong to."""

from __future__ import annotations

import pytest

from pipedist.coordinator.results import CachedResultIndex, key_of
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.messages import CACHED_RANGES_MAX, Hello
from pipedist.scheduler import events as ev

A, B = key_of("run a", [b"program"]), key_of("run b", [b"program"])


def hello(*cached: str, incarnation: int = 1) -> Hello:
    return Hello("far", incarnation, 1, "h", "b", 1, "3", "2", "0", "c", cached)


def test_the_key_depends_on_run_and_program() -> None:
    assert len({A, B, key_of("run a", [b"another"]), key_of("run a", [b"prog", b"ram"])}) == 4
    assert key_of("run a", [memoryview(b"program")]) == A


def test_cached_results_belong_to_the_pass_with_their_key_whenever_it_opens() -> None:
    index = CachedResultIndex()
    message = hello(f"{A}:4-6", f"{A}:0-2", f"{B}:7-8")
    assert index.add(message, {A: 5}) == [ev.CallsCached("far", 1, 5, ((0, 2), (4, 6)))]
    assert list(index.of_pass(B, 6)) == [ev.CallsCached("far", 1, 6, ((7, 8),))]
    assert list(index.of_pass("", 6)) == []
    assert list(index.of_pass(key_of("run c", []), 6)) == []


def test_the_latest_incarnation_counts_and_a_rejected_worker_has_no_cached_results() -> None:
    index = CachedResultIndex()
    index.add(hello(f"{A}:0-2"), {})
    index.forget("far", 0)
    assert list(index.of_pass(A, 1))
    index.add(hello(incarnation=2), {})
    assert not list(index.of_pass(A, 1))
    index.add(hello(f"{A}:0-2", incarnation=3), {})
    index.forget("far", 3)
    assert not list(index.of_pass(A, 1))


@pytest.mark.parametrize(
    "cached",
    [
        ("x",),
        (f"{A}:2-2",),
        (f"{A}:3-2",),
        (f"{A}:-1-2",),
        (f"{A}:1-{10**30}",),
        ("z" * 32 + ":1-2",),
        (f"{A}:\u0661-2",),
    ],
)
def test_malformed_ranges_are_rejected(cached: tuple[str, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed cached results"):
        CachedResultIndex().add(hello(*cached), {})


def test_too_many_ranges_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="too many"):
        CachedResultIndex().add(
            hello(*[f"{A}:{2 * i}-{2 * i + 1}" for i in range(CACHED_RANGES_MAX + 1)]), {}
        )
