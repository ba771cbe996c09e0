"""Shared memory of a gang: how it is found, what is refused, and that attempts do not spoil each other."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipedist.collectives import folding, futex, steps
from pipedist.collectives.channel import GangAborted, StallPolicy
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.segment import (
    GangSegments,
    SegmentOwner,
    SegmentUnavailable,
    attach,
    pack_bytes_for,
)
from pipedist.collectives.shared import SharedChannel
from tests.collectives.gangs import Replica, run_gang, run_member, spans_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
SPANS = spans_of([1, 1])


@pytest.fixture
def owner() -> Any:
    made = SegmentOwner(2)
    yield made
    made.close()


def test_it_is_found_and_let_go(owner: SegmentOwner) -> None:
    before = set(os.listdir("/proc/self/fd"))
    segment = attach(owner.where)
    assert (segment.replicas, segment.pack_bytes) == (2, 1 << 20)
    segment.close()
    segment.close()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("where", ["", "1:2:3", "x:1:2:00", "1:2:3:zz", "../../etc:1:2:00"])
def test_a_place_that_is_none(where: str) -> None:
    with pytest.raises(SegmentUnavailable, match="is not the address of a segment"):
        attach(where)


def test_what_is_over_is_not_found(owner: SegmentOwner) -> None:
    where = owner.where
    owner.close()
    with pytest.raises(SegmentUnavailable, match="cannot be opened"):
        attach(where)


def test_another_file_under_its_number_is_not_taken_for_it(owner: SegmentOwner) -> None:
    """The number of a closed descriptor is used again soon."""
    pid, descriptor, size, token = owner.where.split(":")
    other = SegmentOwner(2)
    number = other.where.split(":")[1]
    with pytest.raises(SegmentUnavailable, match="is not the memory of this gang"):
        attach(":".join([pid, number, size, token]))
    with pytest.raises(SegmentUnavailable, match="is not the memory of this gang"):
        attach(":".join([pid, descriptor, str(int(size) + 4096), token]))
    other.close()
    read, write = os.pipe()
    with pytest.raises(SegmentUnavailable, match="is not the memory of this gang"):
        attach(":".join([pid, str(read), size, token]))
    os.close(read)
    os.close(write)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, int(size))
    with pytest.raises(SegmentUnavailable, match="is not the memory of this gang"):
        attach(":".join([pid, str(plain), size, token]))
    os.close(plain)


def test_memory_that_could_shrink_is_refused(owner: SegmentOwner) -> None:
    """Its size could shrink while a member has it mapped: SIGBUS."""
    pid, descriptor, size, token = owner.where.split(":")
    with open(os.memfd_create("copy", os.MFD_ALLOW_SEALING), "r+b") as copy:
        copy.write(os.pread(int(descriptor), 4096, 0))
        copy.truncate(int(size))
        with pytest.raises(SegmentUnavailable, match="is not the memory of this gang"):
            attach(":".join([pid, str(copy.fileno()), size, token]))
        fcntl.fcntl(copy, 1033, 0x7)
        attach(":".join([pid, str(copy.fileno()), size, token])).close()


def test_nobody_can_shrink_it(owner: SegmentOwner) -> None:
    descriptor = int(owner.where.split(":")[1])
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, 1033, 0x8)


@pytest.mark.parametrize("replicas", [0, 1025])
def test_too_many_replicas_for_one(replicas: int) -> None:
    with pytest.raises(SegmentUnavailable, match=f"{replicas} replicas"):
        SegmentOwner(replicas)


def test_its_size_is_bounded() -> None:
    for replicas in (1, 2, 7, 8, 64, 1024):
        pack = pack_bytes_for(replicas)
        assert pack % mmap.PAGESIZE == 0
        assert 2 * (replicas + 1) * pack <= max(16 << 20, 2 * (replicas + 1) * (64 << 10))


def test_a_worker_keeps_the_last_few(owner: SegmentOwner) -> None:
    segments = GangSegments()
    first = segments.get(owner.where)
    assert segments.get(owner.where) is first
    others = [SegmentOwner(1) for _ in range(4)]
    for other in others:
        segments.get(other.where)
    assert segments.get(owner.where) is not first
    segments.close()
    for other in others:
        other.close()


# Attempts


def policy(timeout_s: float = 60.0) -> StallPolicy:
    def stalled(members: tuple[int, ...]) -> None:
        raise TimeoutError(f"{members}")

    return StallPolicy(timeout_s, stalled)


def reduce_in(segment: Any, serial: int, member: int, value: float, hook: Any = None) -> Any:
    """Run one all_reduce of one member of an attempt; the outcome."""
    channel = SharedChannel(segment, serial=serial, member=member, spans=SPANS)
    if hook is not None:
        awaited = channel._await_same

        def hooked(*arguments: Any) -> Any:
            found = awaited(*arguments)
            hook()
            return found

        channel._await_same = hooked  # type: ignore[method-assign]
    gang = LocalGang(replicas=2, local=SPANS[member], channel=channel)

    def function(replica: Replica) -> Any:
        return replica.all_reduce("sum", np.full(1000, value)).tolist()

    (outcome,) = run_member(gang, SPANS[member], function)
    return outcome


def test_a_member_that_was_stopped_in_an_attempt_neither_reads_nor_spoils_the_next(
    owner: SegmentOwner,
) -> None:
    """Member 1 has arrived in attempt 1, and is stopped before it reads; member 0 goes on to attempt 2."""
    segments = [attach(owner.where) for _ in range(2)]
    stopped, wake = threading.Event(), threading.Event()
    outcomes: dict[tuple[int, int], Any] = {}

    def stop() -> None:
        stopped.set()
        assert wake.wait(60)

    def zero() -> None:
        outcomes[1, 0] = reduce_in(segments[0], 1, 0, 1.0)
        assert stopped.wait(60)
        outcomes[2, 0] = reduce_in(segments[0], 2, 0, 100.0)

    def one() -> None:
        outcomes[1, 1] = reduce_in(segments[1], 1, 1, 2.0, hook=stop)
        outcomes[2, 1] = reduce_in(segments[1], 2, 1, 200.0)

    threads = [threading.Thread(target=zero), threading.Thread(target=one)]
    for thread in threads:
        thread.start()
    assert stopped.wait(60)
    looks = 6000
    while segments[1].words[512] >> 32 != 2:  # until member 0 is in attempt 2
        looks -= 1
        assert looks
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)  # it would write now, if it did not wait
    assert (2, 0) not in outcomes
    wake.set()
    for thread in threads:
        thread.join()
    assert outcomes == {
        (1, 0): [3.0] * 1000,
        (1, 1): [3.0] * 1000,
        (2, 0): [300.0] * 1000,
        (2, 1): [300.0] * 1000,
    }
    for segment in segments:
        segment.close()


def arrived(segment: Any) -> list[steps.Steps]:
    """Return both members of attempt 1, which have entered it and arrived at its step 1."""
    both = [steps.Steps(segment, serial=1, member=m, members=2) for m in range(2)]
    for member in both:
        segment.words[512 + 64 * member.member] = 1 << 32
        member._has_entered = True
        member.arrive()
    return both


def test_who_is_left_behind_in_an_attempt_hears_of_it(owner: SegmentOwner) -> None:
    """Member 0 has left attempt 1 for attempt 2, without having called anything: as if it were cancelled."""
    segment = attach(owner.where)
    later = steps.Steps(segment, serial=2, member=0, members=2)
    with pytest.raises(TimeoutError):
        later.enter(policy(0.01))
    left = steps.Steps(segment, serial=1, member=1, members=2)
    with pytest.raises(GangAborted, match="attempt 1 of the gang is over"):
        left.enter(policy())
    with pytest.raises(GangAborted, match="attempt 1 of the gang is over"):
        steps.Steps(segment, serial=1, member=0, members=2)
    segment.close()


def test_an_end_is_known_although_the_member_is_attempts_ahead(owner: SegmentOwner) -> None:
    """Gangs that call nothing go by without anybody's waiting."""
    segment = attach(owner.where)
    for serial in range(1, 10):
        steps.Steps(segment, serial=serial, member=0, members=2).end(returned=True)
    behind = steps.Steps(segment, serial=1, member=1, members=2)
    behind.enter(policy())
    behind.arrive()
    assert behind.await_others(policy(), may_end=True) == [0]
    segment.close()


def test_failed_after_having_arrived_is_no_abort(owner: SegmentOwner) -> None:
    """Who fails after a collective has not kept the others from its result."""
    segment = attach(owner.where)
    both = arrived(segment)
    both[1].end(returned=False)
    assert both[0].await_others(policy()) == []
    both[0].arrive()
    with pytest.raises(GangAborted, match="a replica of member 1 failed"):
        both[0].await_others(policy())
    segment.close()


def test_nor_if_it_arrives_and_fails_while_one_looks(
    owner: SegmentOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = attach(owner.where)
    words = segment.words
    me = steps.Steps(segment, serial=1, member=0, members=2)
    me._has_entered = True
    me.arrive()
    look = steps.Steps._failed

    def late(self: steps.Steps) -> str | None:
        words[512 + 64] = 1 << 32 | 1
        words[512 + 64 + 32 + 1] = 1 << 32 | 2
        return look(self)

    monkeypatch.setattr(steps.Steps, "_failed", late)
    assert me.await_others(policy()) == []
    segment.close()


def test_nor_is_it_late_if_it_arrives_while_one_looks_at_the_clock(
    owner: SegmentOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this process had no core when the time was over."""
    segment = attach(owner.where)
    looks = iter((0.0, 3600.0))

    def monotonic() -> float:
        now = next(looks)
        segment.words[512 + 64] = 1 << 32 | (now > 0)
        return now

    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=monotonic))
    me = steps.Steps(segment, serial=1, member=0, members=2)
    me._has_entered = True
    me.arrive()
    assert me.await_others(policy()) == []
    segment.close()


def test_who_has_arrived_may_be_in_the_next_attempt_already(owner: SegmentOwner) -> None:
    """Gangs wait at their workers in advance: member 0 has its result, and goes on."""
    segment = attach(owner.where)
    both = arrived(segment)
    assert both[0].await_others(policy()) == []
    both[0].end(returned=True)
    with pytest.raises(TimeoutError):
        steps.Steps(segment, serial=2, member=0, members=2).enter(policy(0.01))
    assert both[1].await_others(policy()) == []
    both[1].arrive()
    assert both[1].await_others(policy(), may_end=True) == [0]
    segment.close()


def test_who_has_arrived_may_be_two_attempts_ahead(owner: SegmentOwner) -> None:
    """Member 0 returns, and the attempt after that is aborted before member 1 has looked."""
    segment = attach(owner.where)
    both = arrived(segment)
    assert both[0].await_others(policy()) == []
    both[0].end(returned=True)
    for serial in (2, 3):
        both[0].begin(serial)
        with pytest.raises(TimeoutError):
            both[0].enter(policy(0.01))
        both[0].end(returned=False)
    assert both[1].await_others(policy(), may_end=True) == []
    both[1].arrive()
    assert both[1].await_others(policy(), may_end=True) == [0]
    segment.close()


def test_abort_is_for_the_attempts_up_to_it(owner: SegmentOwner) -> None:
    segment = attach(owner.where)
    owner.abort(7)
    owner.abort(3)
    with pytest.raises(GangAborted, match="attempt 7 of the gang was aborted by the scheduler"):
        steps.Steps(segment, serial=7, member=0, members=2).enter(policy())
    with pytest.raises(TimeoutError):
        steps.Steps(segment, serial=8, member=0, members=2).enter(policy(0.01))
    segment.close()


def test_it_works_without_futex_and_with_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose numbers we do not know, and one that reorders stores."""
    monkeypatch.setattr(futex, "_futex", None)
    monkeypatch.setattr(steps, "IS_TSO", False)
    monkeypatch.setattr(steps, "_YIELDS", 1)

    def function(replica: Replica) -> Any:
        return [float(replica.all_reduce("sum", float(part))) for part in range(20)]

    assert run_gang([1, 1, 1], function) == [[3.0 * part for part in range(20)]] * 3


def test_a_sleeper_is_woken(owner: SegmentOwner) -> None:
    segment = attach(owner.where)
    came = threading.Event()

    def sleep() -> None:
        while not segment.words[5]:
            futex.wait(segment.address + 40, 0, 60.0)
        came.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    segment.words[5] = 1
    while not came.wait(0.01):
        futex.wake(segment.address + 40)
    thread.join()
    segment.close()


def test_serials_and_spans_are_checked(owner: SegmentOwner) -> None:
    segment = attach(owner.where)
    for serial, spans in ((0, SPANS), (1 << 32, SPANS), (1, spans_of([1, 2]))):
        with pytest.raises(ValueError, match="replicas"):
            SharedChannel(segment, serial=serial, member=0, spans=spans)
    channel = SharedChannel(segment, serial=1, member=0, spans=SPANS)
    with pytest.raises(ValueError, match="attempt 4294967296"):
        channel.begin(1 << 32)
    segment.close()


def test_a_channel_begins_later_attempts(owner: SegmentOwner) -> None:
    """Attempts in one channel give the results of attempts in a channel each, also after one that was left."""
    segments = [attach(owner.where) for _ in range(2)]
    channels = [
        SharedChannel(segment, serial=1, member=member, spans=SPANS)
        for member, segment in enumerate(segments)
    ]

    def reduce_again(serial: int, member: int) -> Any:
        if serial > 1:
            channels[member].begin(serial)
        gang = LocalGang(replicas=2, local=SPANS[member], channel=channels[member])

        def function(replica: Replica) -> Any:
            if serial == 2 and member == 1:
                raise ValueError("left")
            return replica.all_reduce("sum", np.full(1000, serial + member)).tolist()

        return run_member(gang, SPANS[member], function)[0]

    with ThreadPoolExecutor(2) as threads:
        for serial in range(1, 5):
            found = list(threads.map(reduce_again, [serial] * 2, range(2)))
            if serial == 2:
                assert isinstance(found[0], GangAborted)
                assert isinstance(found[1], ValueError)
            else:
                assert found == [[2 * serial + 1] * 1000] * 2
    with pytest.raises(GangAborted):
        channels[0].begin(3)
    for segment in segments:
        segment.close()


# Memory for results


def test_large_results_are_recycled_only_when_nobody_sees_them() -> None:
    size = (1 << 20) + 123
    first = folding.empty(size, np.dtype(np.uint8))
    address = first.ctypes.data
    row = first[5:9]
    del first
    second = folding.empty(size, np.dtype(np.uint8))
    assert second.ctypes.data != address
    del row
    third = folding.empty((size,), np.dtype(np.uint8))
    assert third.ctypes.data == address
    view = memoryview(third)
    del third
    assert folding.empty(size, np.dtype(np.uint8)).ctypes.data != address
    view.release()


def test_small_ones_are_not_kept() -> None:
    array = folding.empty((3, 4), np.dtype(np.float32))
    assert array.shape == (3, 4)
    assert array.base is None
    assert sys.getrefcount(array) == 2
