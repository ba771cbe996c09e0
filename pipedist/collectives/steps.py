"""How members that share memory move in step: the block of each member, and the barrier.

A member's block (512 bytes in `pipedist.collectives.segment`; only that member writes it), as 64-bit
words:

    0        ARRIVAL   serial << 32 | step: the attempt it has entered, and the steps it has done there
    1        BEFORE    its last ARRIVAL in the attempt before
    2        FLAG      serial << 32 | step: something to tell in that step (a fold has overflowed)
    8        SLEEPS    not 0 while it sleeps on somebody's ARRIVAL word
    16, 24   its note of parity 0, 1: what it brings to an exchange (word: 2 words, bytes, frames)
    32..47   ENDED     at 32 + serial % 16: serial << 32 | 1 (its replicas returned) or 2 (one failed, or was
                       aborted). So much is known of members that are up to 15 attempts ahead

Rules
- In step s a member writes only what belongs to parity s % 2 (its note, its replicas' packs, its slice
  of the result), then ARRIVES: ARRIVAL becomes s. It reads what others have written for s when all have
  arrived at s, and until it arrives at s + 1. So nobody writes what somebody may still read: to write
  parity s % 2 again a member must be in step s + 2, and for that everybody has arrived at s + 1.
- A member ENTERS an attempt with its first exchange: BEFORE = ARRIVAL, ARRIVAL = serial << 32, and it waits
  for everybody to have entered, before its first write. A member that is still in an earlier attempt,
  however long it has been stopped there, can thus neither read what is written for this one, nor spoil
  it: until it comes, there is nothing to spoil. If it never comes, it is stalled, its process is killed,
  and the next attempt has another group and another segment.
- A member that finds another one in a LATER attempt looks at BEFORE, whether that one had arrived; and at
  ENDED, whether it has returned. If neither, this attempt is over: GangAborted.
- A member that failed has an ENDED of its own. It ends others only if its part is missing: who finds it
  while waiting looks once more whether everybody has arrived. For it may have failed afterwards, and
  whether the others get the result must not depend on who looks first.

Order. The stores of a step must be seen before the ARRIVAL that announces them, and be loaded after it.
On x86-64 (TSO) they are, since stores are seen in program order and loads are made in it. Elsewhere
(aarch64) `futex.fence` stands between: data, fence, ARRIVAL; and ARRIVAL as loaded, fence, data. Words
are 8 bytes, aligned, written by one store each. The one place where x86-64 needs a fence too is going
to sleep: SLEEPS = 1, fence, look at ARRIVAL again; against ARRIVAL = s, fence, look at SLEEPS. One of
both sees the other's store. And no sleep is longer than `SLICE_S`.

Waiting. First by looking again and again for some microseconds, which is the fastest where every member
has a core of its own; then, giving the core away between looks; then asleep on the ARRIVAL word of a
member that is missing (futex; the word's low half is the step, which is what changes). Only then
are the abort word, members that ended, and the clock looked at.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Final

from pipedist.collectives import futex
from pipedist.collectives.channel import GangAborted, StallPolicy
from pipedist.collectives.segment import ABORT_AT, BLOCK_BYTES, GangSegment

SLICE_S: Final = 0.02
"""The longest sleep: so soon an abort, or the end of another member, is noticed in any case."""

_ARRIVAL, _BEFORE, _FLAG, _SLEEPS, _NOTES, _NOTE_WORDS, _ENDED = 0, 1, 2, 8, 16, 8, 32
ATTEMPTS_REMEMBERED: Final = 16
"""How many attempts' ends a segment remembers: fewer gangs wait at a member (`gangs_queued_max`)."""
_FIRST_BLOCK: Final = 4096 // 8
_BLOCK: Final = BLOCK_BYTES // 8
_RETURNED, _FAILED = 1, 2
_LOOKS: Final = 150
"""Looks before the core is given away; one takes about 50 ns."""
_YIELDS: Final = 150
"""Looks before going to sleep."""
_IS_TSO: Final = platform.machine() in ("x86_64", "AMD64")
_STEP_MASK: Final = 0xFFFFFFFF


class Steps:
    """One member's way through one attempt.

    Args:
        segment: of the group.
        serial: of the attempt.
        member: which one this is.
        members: how many there are.

    Raises:
        GangAborted: the attempt is over already.
    """

    def __init__(self, segment: GangSegment, *, serial: int, member: int, members: int) -> None:
        self._words = segment.words
        self._address = segment.address
        self._serial = serial
        self.member = member
        self._mine = _FIRST_BLOCK + member * _BLOCK
        self._others = [m for m in range(members) if m != member]
        self._arrivals = [_FIRST_BLOCK + m * _BLOCK for m in self._others]
        self._sleeps = [arrival + _SLEEPS for arrival in self._arrivals]
        self._notes = [
            range(_FIRST_BLOCK + of, _FIRST_BLOCK + of + members * _BLOCK, _BLOCK)
            for of in (_NOTES, _NOTES + _NOTE_WORDS)
        ]
        self._begin = serial << 32
        self._last = self._begin | _STEP_MASK
        self._ended = _ENDED + serial % ATTEMPTS_REMEMBERED
        self._looks = _LOOKS if len(os.sched_getaffinity(0)) >= members else 1
        self.step = 0
        self._has_entered = False
        if self._words[self._mine + _ARRIVAL] > self._last:
            raise GangAborted(self._over())

    def enter(self, policy: StallPolicy) -> None:
        """Enter the attempt, if this is its first exchange; nothing may be written before."""
        if not self._has_entered:
            self._has_entered = True
            self._words[self._mine + _BEFORE] = self._words[self._mine + _ARRIVAL]
            self._announce(self._begin)
            self._await(self._begin, policy, may_end=True)

    def arrive(self) -> None:
        """Say that all is written that belongs to the next step."""
        self.step += 1
        self._announce(self._begin | self.step)

    def await_others(self, policy: StallPolicy, *, may_end: bool = False) -> Sequence[int]:
        """Wait for everybody to arrive where this member is.

        Args:
            may_end: it is the first step of an exchange, to which members that returned do not come.

        Returns:
            The members that have returned instead.

        Raises:
            GangAborted: a member failed, or the attempt is over.
        """
        return self._await(self._begin | self.step, policy, may_end=may_end)

    def note(self, member: int) -> int:
        """Return the index of the first word of a member's note for this step."""
        return self._notes[self.step & 1][member]

    def notes(self) -> range:
        """Return the same for all members."""
        return self._notes[self.step & 1]

    def next_note(self) -> int:
        """Return the index of the first word of this member's note for the step that it prepares."""
        return self._mine + _NOTES + (self.step + 1 & 1) * _NOTE_WORDS

    def raise_flag(self) -> None:
        """Tell something in the step that this member prepares."""
        self._words[self._mine + _FLAG] = self._begin | (self.step + 1)

    def is_flagged(self, since: int) -> bool:
        """Whether a member has raised its flag in the steps from `since` to this one."""
        low, high = self._begin | since, self._begin | self.step
        arrivals = (*self._arrivals, self._mine)
        return any(low <= self._words[arrival + _FLAG] <= high for arrival in arrivals)

    def end(self, *, returned: bool) -> None:
        """Say that this member comes to no step any more."""
        self._words[self._mine + self._ended] = self._begin | (_RETURNED if returned else _FAILED)
        futex.fence()
        futex.wake(self._address + 8 * self._mine)

    def _announce(self, arrival: int) -> None:
        words = self._words
        if not _IS_TSO:
            futex.fence()
        words[self._mine] = arrival
        futex.fence()
        for sleeps in self._sleeps:
            if words[sleeps]:
                futex.wake(self._address + 8 * self._mine)
                return

    def _await(self, target: int, policy: StallPolicy, *, may_end: bool) -> Sequence[int]:
        words, last = self._words, self._last
        returned: list[int] = []
        for place, arrival in enumerate(self._arrivals):
            value = words[arrival]
            looks = self._looks
            while value < target and looks:
                looks -= 1
                value = words[arrival]
            if target <= value <= last or self._await_long(place, target, policy):
                continue
            if not may_end:
                raise GangAborted(f"member {self._others[place]} left in the middle of a collective")
            returned.append(self._others[place])
        if not _IS_TSO:
            futex.fence()
        return returned

    def _await_long(self, place: int, target: int, policy: StallPolicy) -> bool:
        """Wait for one member; False: it has returned instead."""
        words, arrival = self._words, self._arrivals[place]
        for _ in range(_YIELDS):
            if words[arrival] >= target:
                break
            os.sched_yield()
        mine = self._mine + _SLEEPS
        deadline = time.monotonic() + policy.timeout_s
        while True:
            status = self._status(place, target)
            if status is not None:
                return status
            failed = self._failed()
            if failed is not None:
                status = self._status(place, target)
                if status is not None:
                    return status
                raise GangAborted(failed)
            now = time.monotonic()
            if now >= deadline:
                missing = self._missing(target)
                if missing:  # still: they may have come while this process had no core
                    policy.on_stalled(tuple(missing))
                    deadline = time.monotonic() + policy.timeout_s
                continue
            words[mine] = 1
            futex.fence()
            value = words[arrival]
            if value < target:
                futex.wait(self._address + 8 * arrival, value & _STEP_MASK, min(SLICE_S, deadline - now))
            words[mine] = 0

    def _status(self, place: int, target: int) -> bool | None:
        """Return whether a member has arrived; False: it has returned instead; None: not yet.

        Raises:
            GangAborted: it has gone on to a later attempt without.
        """
        words, arrival = self._words, self._arrivals[place]
        # It ends after its last arrival; so whoever sees the end first sees that arrival too.
        ended = words[arrival + self._ended]
        futex.fence()
        value = words[arrival]
        if value > self._last:
            value = words[arrival + _BEFORE]
            if value < self._begin and ended < self._begin:
                raise GangAborted(self._over())
        if target <= value <= self._last:
            return True
        if ended == self._begin | _RETURNED:
            return False
        if value > self._last or ended > self._begin | _FAILED:
            raise GangAborted(self._over())
        return None

    def _failed(self) -> str | None:
        """Return why nothing can come of this attempt, as far as somebody is still missing; or None."""
        words = self._words
        if words[ABORT_AT // 8] >= self._serial:
            return f"attempt {self._serial} of the gang was ended by the scheduler"
        for other, arrival in zip(self._others, self._arrivals, strict=True):
            if words[arrival + self._ended] == self._begin | _FAILED:
                return f"a replica of member {other} failed"
        return None

    def _over(self) -> str:
        return f"attempt {self._serial} of the gang is over: a later one has begun"

    def _missing(self, target: int) -> list[int]:
        return [other for place, other in enumerate(self._others) if self._status(place, target) is None]
