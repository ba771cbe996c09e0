"""What workers offer in their Hello, and which pass it is good for."""

from __future__ import annotations

import pytest

from pipedist.coordinator.cached_results import Offers, key_of
from pipedist.errors import RemoteProtocolError
from pipedist.protocol.messages import CACHED_RANGES_MAX, Hello
from pipedist.scheduler import events as ev

A, B = key_of("run a", [b"program"]), key_of("run b", [b"program"])


def hello(*kept: str, incarnation: int = 1) -> Hello:
    return Hello("far", incarnation, 1, "h", "b", 1, "3", "2", "0", "c", kept)


def test_run_code_and_program_make_the_key() -> None:
    assert len({A, B, key_of("run a", [b"another"]), key_of("run a", [b"prog", b"ram"])}) == 4
    assert key_of("run a", [memoryview(b"program")]) == A


def test_an_offer_is_for_the_pass_of_its_key_whenever_that_begins() -> None:
    offers = Offers()
    message = hello(f"{A}:4-6", f"{A}:0-2", f"{B}:7-8")
    assert offers.take(message, {A: 5}) == [ev.CallsCached("far", 1, 5, ((0, 2), (4, 6)))]
    assert list(offers.of_pass(B, 6)) == [ev.CallsCached("far", 1, 6, ((7, 8),))]
    assert list(offers.of_pass("", 6)) == []
    assert list(offers.of_pass(key_of("run c", []), 6)) == []


def test_the_latest_incarnation_counts_and_who_may_not_join_offers_nothing() -> None:
    offers = Offers()
    offers.take(hello(f"{A}:0-2"), {})
    offers.forget("far", 0)
    assert list(offers.of_pass(A, 1))
    offers.take(hello(incarnation=2), {})
    assert not list(offers.of_pass(A, 1))
    offers.take(hello(f"{A}:0-2", incarnation=3), {})
    offers.forget("far", 3)
    assert not list(offers.of_pass(A, 1))


@pytest.mark.parametrize(
    "kept",
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
def test_what_is_malformed_is_refused(kept: tuple[str, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="offered"):
        Offers().take(hello(*kept), {})


def test_too_many_ranges_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="too many"):
        Offers().take(hello(*[f"{A}:{2 * i}-{2 * i + 1}" for i in range(CACHED_RANGES_MAX + 1)]), {})
