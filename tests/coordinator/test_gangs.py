"""Gangs in the coordinator: sent leases, accepted results, exchanges between members, states, segments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import pipedist
from pipedist.collectives.steps import ATTEMPTS_REMEMBERED
from pipedist.coordinator.gang_relay import SEGMENTS_MAX, Segment, SegmentPool
from pipedist.coordinator.worker_pool import WorkerPool
from pipedist.errors import LocalProtocolError, WorkerDied
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import UnsendableError
from pipedist.scheduler import SchedulerLimits
from pipedist.worker.process_setup import make_hello
from tests.coordinator.test_worker_pool import Record
from tests.coordinator.wire import Wire, gang_pass, named, wired


async def begun(handle: Any, values: list[Any], **how: Any) -> asyncio.Future[Any]:
    """Begin a step, and return the future of its result."""
    step: asyncio.Future[Any] = asyncio.ensure_future(handle.call_step(values, **how))
    await asyncio.sleep(0)
    return step


# -- steps ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_gang_is_sent_to_all_its_members_and_returns_as_a_whole() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        step = await begun(gang_pass(wire), [10, 11])
        assert wire.sent_to("a.0", msg.AssignGang) == [msg.AssignGang(1, 1, 0, 1, 0, 1, 0, 2, "")]
        assert wire.sent_to("b.0", msg.AssignGang) == [msg.AssignGang(2, 1, 1, 2, 0, 1, 1, 2, "")]
        assert wire.payload("b.0", msg.AssignGang) == [None, None, [11], None]
        wire.done("b.0", "second")
        await asyncio.sleep(0)
        assert not step.done()
        wire.done("a.0", "first")
        assert await step == [{"v": "first"}, {"v": "second"}]


@pytest.mark.asyncio
async def test_results_of_an_attempt_that_lost_a_member_never_count() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        handle = gang_pass(wire)
        step = await begun(handle, [1, 2])
        wire.done("b.0", "of the first attempt")
        name, proof = named("a")
        wire.say("a.0", msg.Goodbye(name, 0, "signal 9", crashed=True, proof=proof))
        assert wire.last("b.0", msg.AssignGang) == msg.AssignGang(3, 1, 0, 2, 1, 2, 0, 1, "")
        wire.done("b.0", "x", "y")
        assert await step == [{"v": "x"}, {"v": "y"}]
        assert wire.coordinator._gangs._gangs == {}
        assert wire.coordinator._gangs._by_lease == {}
        assert handle._store._results == {}


@pytest.mark.asyncio
async def test_the_error_is_that_of_the_replica_that_raised() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        step = await begun(gang_pass(wire), [1, 2])
        wire.failed("a.0", "ended by another one", aborted=True)
        wire.failed("b.0", "it was me")
        with pytest.raises(pipedist.CallError) as caught:
            await step
        assert caught.value.replica == 1
        assert str(caught.value.__cause__) == "it was me"


@pytest.mark.asyncio
async def test_an_unsendable_part_fails_its_step_and_no_part_is_sent() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        handle = gang_pass(wire)
        step = await begun(handle, [1, object()])
        with pytest.raises(pipedist.CallError) as caught:
            await step
        assert caught.value.replica == 1
        assert isinstance(caught.value.__cause__, UnsendableError)
        assert wire.sent_to("a.0", msg.AssignGang) == []
        step = await begun(handle, [1, 2])
        wire.done("a.0", 1)
        wire.done("b.0", 2)
        assert await step == [{"v": 1}, {"v": 2}]


@pytest.mark.asyncio
async def test_a_call_of_a_gang_may_lack_slots_but_have_no_others() -> None:
    async with wired() as wire:
        wire.join("a")
        step = await begun(gang_pass(wire), [1, 2])
        wire.say("a.0", msg.Results(1, 0, 2, 0), [{"v": 1}, {}])
        assert await step == [{"v": 1}, {}]
        await begun(gang_pass(wire), [1, 2])
        wire.say("a.0", msg.Results(2, 0, 2, 0), [{"v": 1}, {"odd": 2}])
        assert wire.dropped == ["a.0"]


@pytest.mark.asyncio
async def test_a_pass_closed_in_the_middle_cancels_its_gang() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        handle = gang_pass(wire)
        step = await begun(handle, [1, 2])
        wire.done("a.0", 1)
        handle.close()
        with pytest.raises(pipedist.RunCancelled):
            await step
        assert wire.sent_to("b.0", msg.Cancel) == [msg.Cancel(2)]
        assert wire.sent_to("a.0", msg.Cancel) == []
        assert wire.coordinator._gangs._gangs == {}


# -- exchanges -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_members_part_is_forwarded_unchanged_to_all_others() -> None:
    async with wired() as wire:
        wire.join("a", "b", "c")
        await begun(gang_pass(wire, 3), [1, 2, 3])
        wire.bring("b.0", msg.Exchange(2, 1), b"word", b"\xc1 not msgpack")
        for identity, lease in (("a.0", 1), ("c.0", 3)):
            assert wire.sent_to(identity, msg.Relay) == [msg.Relay(lease, 1, 1, "")]
        assert wire.sent_to("b.0", msg.Relay) == []
        frames = [payload for _, m, payload in wire.sent if isinstance(m, msg.Relay)]
        assert [[bytes(f) for f in payload] for payload in frames] == [[b"word", b"\xc1 not msgpack"]] * 2


@pytest.mark.asyncio
async def test_parts_under_other_leases_are_not_forwarded() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        step = await begun(gang_pass(wire), [1, 2])
        before = wire.coordinator.rejected
        wire.bring("a.0", msg.Exchange(2, 1), b"another's lease")
        wire.bring("a.0", msg.Exchange(77, 1), b"no lease")
        wire.done("a.0", 1)
        wire.bring("a.0", msg.Exchange(1, 1), b"a lease that is over")
        wire.done("b.0", 1)
        await step
        wire.bring("b.0", msg.Exchange(2, 1), b"a gang that is over")
        assert wire.coordinator.rejected == before + 4
        assert [m for _, m, _ in wire.sent if isinstance(m, msg.Relay)] == []
        assert wire.dropped == []


@pytest.mark.parametrize("number", [0, 1, 3, -1])
@pytest.mark.asyncio
async def test_exchanges_out_of_order_cost_their_sender_the_connection(number: int) -> None:
    async with wired() as wire:
        wire.join("a", "b")
        await begun(gang_pass(wire), [1, 2])
        wire.bring("a.0", msg.Exchange(1, 1), b"x")
        wire.bring("b.0", msg.Exchange(2, 1), b"x")
        wire.bring("a.0", msg.Exchange(1, number), b"x")
        assert wire.dropped == ["a.0"]


@pytest.mark.asyncio
async def test_no_member_is_more_than_one_exchange_ahead() -> None:
    """Otherwise a worker could fill this process, or another worker, with parts."""
    async with wired() as wire:
        wire.join("a", "b")
        await begun(gang_pass(wire), [1, 2])
        wire.bring("a.0", msg.Exchange(1, 1), b"x")
        assert wire.dropped == []
        wire.bring("a.0", msg.Exchange(1, 2), b"x")
        assert wire.dropped == ["a.0"]


@pytest.mark.parametrize("waits_first", [True, False])
@pytest.mark.parametrize("how", ["returned", "raised"])
@pytest.mark.asyncio
async def test_waiting_members_are_notified_once_of_members_that_have_ended(
    waits_first: bool, how: str
) -> None:
    async with wired() as wire:
        wire.join("a", "b", "c")
        await begun(gang_pass(wire, 3), [1, 2, 3])

        def ends() -> None:
            if how == "returned":
                wire.done("b.0", 1)
            else:
                wire.failed("b.0", "oh no")

        if not waits_first:
            ends()
            assert [m for _, m, _ in wire.sent if isinstance(m, msg.Relay)] == [], "no member waits"
        wire.bring("a.0", msg.Exchange(1, 1), b"x")
        if waits_first:
            ends()
        text = "returned" if how == "returned" else "ValueError: oh no"
        notices = [m for m in wire.sent_to("a.0", msg.Relay) if m.number == 0]
        assert notices == [msg.Relay(1, 1, 0, text)]
        assert [m for m in wire.sent_to("c.0", msg.Relay) if m.number == 0] == []
        wire.bring("c.0", msg.Exchange(3, 1), b"x")
        assert [m for m in wire.sent_to("c.0", msg.Relay) if m.number == 0] == [msg.Relay(3, 1, 0, text)]
        assert [m for m in wire.sent_to("a.0", msg.Relay) if m.number == 0] == notices


# -- members that do not come --------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_member_that_does_not_come_is_put_out_and_the_gang_restarts() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        step = await begun(gang_pass(wire), [1, 2])
        wire.say("a.0", msg.Stalled(1, ("1",), "replica 0 waits at train.py:12"))
        assert "replica 0 waits at train.py:12" in wire.last("b.0", msg.Refuse).reason
        assert wire.sent_to("a.0", msg.Cancel) == [msg.Cancel(1)]
        wire.done("a.0", 1, 2)
        assert await step == [{"v": 1}, {"v": 2}]


@pytest.mark.asyncio
async def test_a_step_whose_members_never_arrive_fails_with_the_text() -> None:
    async with wired(SchedulerLimits(deaths_max=1)) as wire:
        wire.join("a", "b")
        step = await begun(gang_pass(wire), [1, 2])
        wire.say("a.0", msg.Stalled(1, ("1",), "replica 0 waits at train.py:12"))
        with pytest.raises(pipedist.CallError, match=r"waits at train\.py:12") as caught:
            await step
        assert isinstance(caught.value.__cause__, WorkerDied)
        assert caught.value.replica == 1


@pytest.mark.parametrize("member", ["", "-1", "x", "9" * 5000])
@pytest.mark.asyncio
async def test_malformed_members_cost_the_connection(member: str) -> None:
    async with wired() as wire:
        wire.join("a", "b")
        await begun(gang_pass(wire), [1, 2])
        wire.say("a.0", msg.Stalled(1, (member,), ""))
        assert wire.dropped == ["a.0"]


# -- states --------------------------------------------------------------------------------


def states_sent(wire: Wire, identity: str) -> list[tuple[int, int]]:
    return [(m.space, m.version) for m in wire.sent_to(identity, msg.StateVersion)]


async def run_step(wire: Wire, handle: Any, states: dict[str, Any], *members: str, **how: Any) -> Any:
    step = await begun(handle, [1, 2], states=states, **how)
    for member in members:
        part = wire.last(member, msg.AssignGang)
        wire.done(member, *range(part.hi - part.lo))
    return await step


@pytest.mark.asyncio
async def test_a_state_is_sent_once_a_version_and_before_the_lease_that_reads_it() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        handle, coordinator = gang_pass(wire), wire.coordinator
        space = coordinator.states.open_space()
        for version in (3, 4):
            coordinator.states.put(space, version, {"w": version})
            for _ in range(2):
                await run_step(wire, handle, {"w": (space, version)}, "a.0", "b.0")
        kinds = [type(m).__name__ for to, m, _ in wire.sent if to == "b.0"]
        assert kinds == [
            "Welcome",
            "Bind",
            "StateVersion",
            "AssignGang",
            "AssignGang",
            "StateVersion",
            "AssignGang",
            "AssignGang",
        ]
        assert states_sent(wire, "a.0") == [(space, 3), (space, 4)]
        assert wire.payload("b.0", msg.StateVersion) == {"w": 4}
        assert wire.payload("b.0", msg.AssignGang)[3] == {"w": [space, 4]}
        await run_step(wire, handle, {"w": (space, 3)}, "a.0", "b.0")  # kept here and there
        assert len(states_sent(wire, "a.0")) == 2
        coordinator.states.put(space, 5, {"w": 5})
        with pytest.raises(
            pipedist.CallError, match=r"version 3 of space 1, which is not kept: only \[4, 5\]"
        ):
            await run_step(wire, handle, {"w": (space, 3)})


@pytest.mark.asyncio
async def test_a_worker_that_comes_back_holds_nothing() -> None:
    async with wired() as wire:
        wire.join("a")
        handle, coordinator = gang_pass(wire), wire.coordinator
        space = coordinator.states.open_space()
        coordinator.states.put(space, 1, 7)
        await run_step(wire, handle, {"w": (space, 1)}, "a.0")
        wire.join("a", incarnation=1)
        await run_step(wire, handle, {"w": (space, 1)}, "a.1")
        assert states_sent(wire, "a.1") == [(space, 1)]


@pytest.mark.asyncio
async def test_versions_that_a_step_produced_are_not_sent_to_its_workers() -> None:
    async with wired() as wire:
        wire.join("a", "b")
        handle, coordinator = gang_pass(wire), wire.coordinator
        space = coordinator.states.open_space()
        coordinator.states.put(space, 1, 7)
        produced_from: list[Any] = []

        def produced(results: Any) -> dict[int, int]:
            produced_from.append(results)
            return {space: 2}

        await run_step(wire, handle, {"w": (space, 1)}, "a.0", "b.0", produced=produced)
        assert produced_from == [[{"v": 0}, {"v": 0}]]
        coordinator.states.put(space, 2, 8)
        wire.join("b", incarnation=1)
        await run_step(wire, handle, {"w": (space, 2)}, "a.0", "b.1")
        assert states_sent(wire, "a.0") == [(space, 1)]
        assert states_sent(wire, "b.1") == [(space, 2)]


@pytest.mark.asyncio
async def test_a_dropped_state_is_dropped_in_workers_that_hold_it() -> None:
    async with wired() as wire:
        wire.join("a")
        handle, coordinator = gang_pass(wire), wire.coordinator
        one, two = coordinator.states.open_space(), coordinator.states.open_space()
        coordinator.states.put(one, 1, 7)
        coordinator.states.put(two, 1, 7)
        await run_step(wire, handle, {"w": (one, 1)}, "a.0")
        for space in (one, two, one, 99):
            coordinator.states.drop(space)
        assert wire.sent_to("a.0", msg.DropState) == [msg.DropState(one)]
        with pytest.raises(LocalProtocolError, match="which is not open"):
            coordinator.states.put(one, 2, 7)


@pytest.mark.asyncio
async def test_wrong_uses_of_states_are_rejected() -> None:
    async with wired() as wire:
        coordinator = wire.coordinator
        space = coordinator.states.open_space()
        coordinator.states.put(space, 2, 7)
        with pytest.raises(LocalProtocolError, match=r"version 2 of state 1, which has the versions \[2\]"):
            coordinator.states.put(space, 2, 7)
        with pytest.raises(UnsendableError):
            coordinator.states.put(space, 3, {"w": object()})
        coordinator.states.put(space, 3, 7)
        handle = gang_pass(wire)
        handle.settings = replace(handle.settings, gang=False)
        with pytest.raises(LocalProtocolError, match="only a gang reads states"):
            await handle.call_step([1, 2], {"w": (space, 3)})


# -- shared memory -------------------------------------------------------------------------


@pytest.fixture
def pool() -> WorkerPool:
    record: Any = Record()
    pool = WorkerPool(
        record.events.append,
        cluster_id="c",
        router=record,
        names=("w0", "w1", "w2"),
        dial_in=True,
        boot=make_hello("w0", 0).boot,
        heartbeat_timeout_s=4.0,
    )
    pool.launcher = record
    for name in pool.names:
        pool.start(name, 0)
        pool.on_hello(f"{name}.0".encode(), make_hello(name, 0))
    pool.on_hello(b"far", make_hello("far", 0))
    return pool


@pytest.fixture
def segments(pool: WorkerPool) -> Iterator[SegmentPool]:
    segments = SegmentPool(pool, enabled=True)
    yield segments
    segments.close()


def begin(segments: SegmentPool, serial: int, *names: str, replicas: int = 2) -> Segment | None:
    peers = [segments._pool.of(name) for name in names]
    return segments.begin(serial, [peer for peer in peers if peer is not None], replicas)


def test_members_that_were_started_here_share_one_segment_for_all_their_gangs(segments: SegmentPool) -> None:
    first = begin(segments, 1, "w0", "w1")
    assert first is not None
    assert first.owner.where
    first.end(1, aborted=False)
    assert begin(segments, 2, "w0", "w1") is first
    assert begin(segments, 3, "w0", "w2") is not first
    assert begin(segments, 4, "w0", "w1", replicas=3) is not first


def test_other_members_share_no_segment(pool: WorkerPool, segments: SegmentPool) -> None:
    assert begin(segments, 1, "w0", "far") is None
    assert begin(segments, 2, "w0") is None
    assert begin(SegmentPool(pool, enabled=False), 3, "w0", "w1") is None


def test_without_a_segment_members_use_messages(segments: SegmentPool) -> None:
    segment = begin(segments, 1, "w0", "w1", replicas=10**6)
    assert segment is not None
    assert segment.owner is None
    segment.end(1, aborted=True)


def test_the_segment_of_a_lost_worker_is_closed_when_no_gang_uses_it(
    pool: WorkerPool, segments: SegmentPool
) -> None:
    first = begin(segments, 1, "w0", "w1")
    assert first is not None
    assert first.owner is not None
    pool.evict("w1", 0, "it hangs")
    segments.close_unused()
    assert first.owner.where, "a gang uses it"
    assert len(segments._segments) == 1
    first.end(1, aborted=True)
    segments.close_unused()
    assert len(segments._segments) == 0


def test_a_few_segments_are_kept(segments: SegmentPool) -> None:
    for serial in range(2 * SEGMENTS_MAX):
        segment = begin(segments, serial, "w0", "w1", replicas=2 + serial)
        assert segment is not None
        segment.end(serial, aborted=False)
    assert len(segments._segments) == SEGMENTS_MAX


class Aborts:
    where = "somewhere"

    def __init__(self) -> None:
        self.serials: list[int] = []

    def abort(self, serial: int) -> None:
        self.serials.append(serial)


def test_aborting_a_gang_waits_for_those_before_it() -> None:
    """The segment's word ends all attempts up to a serial."""
    owner = Aborts()
    segment = Segment((), owner, {4, 5, 6, 7})  # type: ignore[arg-type]
    segment.end(6, aborted=True)
    segment.end(5, aborted=True)
    assert owner.serials == []
    segment.end(4, aborted=False)
    assert owner.serials == [6]
    segment.end(7, aborted=True)
    assert owner.serials == [6, 7]


def test_fewer_gangs_wait_at_a_member_than_a_segment_remembers_the_ends_of() -> None:
    assert SchedulerLimits().gangs_queued_max < ATTEMPTS_REMEMBERED
