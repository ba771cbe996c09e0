"""Seeded simulations of schedulers that die and workers that survive; and planted mistakes, which they find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipedist.coordinator.results import CachedResultIndex
from pipedist.errors import PipedistError
from pipedist.protocol.messages import Hello
from pipedist.scheduler import Scheduler
from pipedist.scheduler import events as ev
from pipedist.scheduler.leases import Lease, Worker
from pipedist.scheduler.membership import Membership
from pipedist.worker.result_cache import ResultCache
from tests.reattach.generations import World, Wrong

SEEDS = 150


def test_every_call_counts_once_and_no_stale_result_does() -> None:
    taken = executed = 0
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        taken, executed = taken + world.taken, executed + world.executed
    assert taken > SEEDS  # otherwise nothing was tried
    assert executed > 10 * SEEDS


def _any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator accepts results of other code."""
    add = CachedResultIndex.add

    def blind(self: CachedResultIndex, hello: Hello, passes: dict[str, int]) -> list[ev.CallsCached]:
        keys = {text.partition(":")[0] for text in hello.cached}
        return add(self, hello, dict.fromkeys(keys, 1) | passes)

    monkeypatch.setattr(CachedResultIndex, "add", blind)


def _any_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler recalls results that another incarnation has cached."""

    def blind(self: Membership, worker: str, _incarnation: int) -> Worker | None:
        found = self.workers.get(worker)
        return found if found is not None and found.state.value == "ready" else None

    monkeypatch.setattr(Membership, "current", blind)
    monkeypatch.setattr(Scheduler, "_forget_cached", lambda _self, _worker, _incarnation: None)


def _nothing_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler recalls calls that have been settled."""
    grant = Membership.grant

    def twice(self: Membership, *args: Any, **kwargs: Any) -> Lease:
        lease = grant(self, *args, **kwargs)
        lease.lo = lease.next = max(0, lease.lo - 1)
        return lease

    monkeypatch.setattr(Membership, "grant", twice)


def _forgets_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker forgets results that it has reported as cached."""
    load = ResultCache.load

    def forgetful(self: ResultCache, file: int) -> None:
        load(self, file)
        offers = self.offers()
        self._passes.clear()
        self.offers = lambda: offers  # type: ignore[method-assign]

    monkeypatch.setattr(ResultCache, "load", forgetful)


def _assigned_although_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler assigns calls whose results are cached."""
    handlers = "pipedist.scheduler.assignment.Assigner._recall_all"
    monkeypatch.setattr(handlers, lambda self: None)


@pytest.mark.parametrize(
    "mistake", [_any_key, _any_incarnation, _nothing_settled, _forgets_too_soon, _assigned_although_cached]
)
def test_mistakes_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    for seed in range(SEEDS):
        try:
            World(seed, scheduler=Scheduler).run()
        except (Wrong, PipedistError, KeyError, AssertionError):
            return
    raise AssertionError(f"{SEEDS} seeds did not find the mistake: {mistake.__doc__}")
