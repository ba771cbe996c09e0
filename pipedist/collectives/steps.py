"""How members that share memory synchronise: the block of each member, and the barrier.

A member's block (512 bytes in `pipedist.collectives.segment`; only that member writes it), as 64-bit
words:

    0        ARRIVAL   serial << 32 | step: the attempt it has entered, and its steps done there
    1        BEFORE    its last ARRIVAL in the previous attempt
    2        FLAG      serial << 32 | step: an event in that step (a fold has overflowed)
    8        SLEEPS    not 0 while it sleeps on another member's ARRIVAL word
    16, 24   its note of parity 0, 1: its part of an exchange (word: 2 words, bytes, frames)
    32..47   ENDED     at 32 + serial % 16: serial << 32 | n << 2 | 1 (its replicas returned) or 2 (one failed or
                       was aborted), after n arrivals with that at step 0; covers members that are up to 15
                       attempts ahead

Rules
- In step s a member writes only data of parity s % 2 (its note, its replicas' packs, its slice of the
  result), then ARRIVES: ARRIVAL becomes s. It reads the data of other members for s after all have arrived
  at s, and before it arrives at s + 1. So no member overwrites data that another may still read: to write
  parity s % 2 again a member must be in step s + 2, which requires that all have arrived at s + 1.
- Of two members, one may also write, in step s, to packs of the other one of parity (s - 1) % 2, which that one
  wrote in step s - 1, and reads in step s + 1, before it writes them again.
- A member ENTERS an attempt with its first exchange: BEFORE = ARRIVAL, ARRIVAL = serial << 32; it then
  waits until all members have entered, before its first write. A member still in an earlier attempt,
  however long it was stopped there, can thus neither read data written for this one nor overwrite it. If
  it never enters, it is stalled, its process is killed, and the next attempt has another group and
  segment.
- A member that sees another one in a LATER attempt reads BEFORE, to know whether that one had arrived,
  and ENDED, to know that of one which is two attempts ahead, and whether it returned. If neither, this attempt is
  over: GangAborted. The data of a member that had arrived is still there: it writes in no attempt before all have
  entered that.
- A failed member has its own ENDED value. It aborts others only if its part is missing: a waiting member
  that sees it checks once more whether all have arrived. The member may have failed after arriving, and
  whether the others get the result must not depend on timing.

Order. The stores of a step must be visible before the ARRIVAL that announces them, and be loaded after
it. On x86-64 (TSO) they are. Elsewhere (aarch64) `fence` separates them: data, fence, ARRIVAL; and
ARRIVAL load, fence, data. Words are 8 bytes, aligned, written by one store each. x86-64 needs a fence
only before sleeping: SLEEPS = 1, fence, load ARRIVAL again; against ARRIVAL = s, fence, load SLEEPS. At
least one of both sees the other's store. No sleep is longer than `SLICE_S`.

Waiting. First spin for some microseconds, the fastest if every member has its own core; then yield the
core between loads; then sleep on the ARRIVAL word of a missing member (futex; the low half of the word is
the step, which changes). Only then check the abort word, ended members, and the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from pipedist.collectives import futex
from pipedist.collectives.channel import GangAborted, StallPolicy
from pipedist.collectives.segment import ABORT_AT, BLOCK_BYTES, GangSegment
from pipedist.core.memory_order import IS_TSO, fence

SLICE_S: Final = 0.02  # longest sleep, seconds: bounds how late an abort or the end of a member is noticed
_ARRIVAL, _BEFORE, _FLAG, _SLEEPS, _NOTES, _NOTE_WORDS, _ENDED = 0, 1, 2, 8, 16, 8, 32
ATTEMPTS_REMEMBERED: Final = 16  # whose ENDED words are kept; more than `gangs_queued_max`
_FIRST_BLOCK: Final = 4096 // 8
_BLOCK: Final = BLOCK_BYTES // 8
_RETURNED, _FAILED, _CODE_MASK = 1, 2, 3
_SPINS: Final = 150  # loads before yielding the core; one takes about 50 ns
_YIELDS: Final = 150  # yields before sleeping
_STEP_MASK: Final = 0xFFFFFFFF


class Steps:
    """One member's progress through one attempt; raises GangAborted if that is over."""

    def __init__(self, segment: GangSegment, *, serial: int, member: int, members: int) -> None:
        self._words = segment.words
        self._address = segment.address
        self.member = member
        self._mine = _FIRST_BLOCK + member * _BLOCK
        self._others = [m for m in range(members) if m != member]
        self._arrivals = [_FIRST_BLOCK + m * _BLOCK for m in self._others]
        self._sleeps = [arrival + _SLEEPS for arrival in self._arrivals]
        self._notes = [
            range(_FIRST_BLOCK + of, _FIRST_BLOCK + of + members * _BLOCK, _BLOCK)
            for of in (_NOTES, _NOTES + _NOTE_WORDS)
        ]
        self._spins = _SPINS if len(os.sched_getaffinity(0)) >= members else 1
        self.begin(serial)

    def begin(self, serial: int) -> None:
        """Begin a later attempt of the same members."""
        self.serial = serial
        self._begin = serial << 32
        self._last = self._begin | _STEP_MASK
        self._ended = _ENDED + serial % ATTEMPTS_REMEMBERED
        self.step = 0
        self._has_entered = False
        if self._words[self._mine + _ARRIVAL] > self._last:
            raise GangAborted(self._over())

    def enter(self, policy: StallPolicy) -> None:
        """Enter the attempt at its first exchange; nothing may be written before."""
        if not self._has_entered:
            self._has_entered = True
            self._words[self._mine + _BEFORE] = self._words[self._mine + _ARRIVAL]
            self._announce(self._begin)
            self._await(self._begin, policy, may_end=True)

    def arrive(self) -> None:
        """Announce that all data of the next step is written."""
        self.step += 1
        self._announce(self._begin | self.step)

    def await_others(self, policy: StallPolicy, *, may_end: bool = False) -> Sequence[int]:
        """Wait for all members to arrive at this member's step; return the members that have returned instead.

        `may_end`: this is the first step of an exchange, which members that returned do not reach. Raises
        GangAborted if a member failed, or the attempt is over.
        """
        return self._await(self._begin | self.step, policy, may_end=may_end)

    def notes(self) -> range:
        """Return the index of the first word of each member's note for this step."""
        return self._notes[self.step & 1]

    def next_note(self) -> int:
        """Return the index of the first word of this member's note for the next step."""
        return self._mine + _NOTES + (self.step + 1 & 1) * _NOTE_WORDS

    def raise_flag(self) -> None:
        self._words[self._mine + _FLAG] = self._begin | (self.step + 1)

    def is_flagged(self, since: int) -> bool:
        """Return whether any member raised its flag in the steps from `since` to this one."""
        low, high = self._begin | since, self._begin | self.step
        arrivals = (*self._arrivals, self._mine)
        return any(low <= self._words[arrival + _FLAG] <= high for arrival in arrivals)

    def end(self, *, returned: bool) -> None:
        """Announce that this member reaches no further step."""
        words = self._words
        arrivals = self.step + 1 if self._has_entered else 0
        words[self._mine + self._ended] = self._begin | arrivals << 2 | (_RETURNED if returned else _FAILED)
        fence()
        for sleeps in self._sleeps:  # as `_wake`
            if words[sleeps]:
                futex.wake(self._address + 8 * self._mine)
                return

    def _announce(self, arrival: int) -> None:
        words = self._words
        if not IS_TSO:
            fence()
        words[self._mine] = arrival
        self._wake()

    def _wake(self) -> None:
        """Wake members that sleep until this one arrives or ends."""
        words = self._words
        fence()
        for sleeps in self._sleeps:
            if words[sleeps]:
                futex.wake(self._address + 8 * self._mine)
                return

    def _await(self, target: int, policy: StallPolicy, *, may_end: bool) -> Sequence[int]:
        words, last = self._words, self._last
        returned: list[int] = []
        for place, arrival in enumerate(self._arrivals):
            value = words[arrival]
            spins = self._spins
            while value < target and spins:
                spins -= 1
                value = words[arrival]
            if target <= value <= last or self._await_long(place, target, policy):
                continue
            if not may_end:
                raise GangAborted(f"member {self._others[place]} left during a collective")
            returned.append(self._others[place])
        if not IS_TSO:
            fence()
        return returned

    def _await_long(self, place: int, target: int, policy: StallPolicy) -> bool:
        """Wait for one member; return False if it returned instead."""
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
                if missing:  # check again: they may have arrived while this process was not scheduled
                    policy.on_stalled(tuple(missing))
                    deadline = time.monotonic() + policy.timeout_s
                continue
            words[mine] = 1
            fence()
            value = words[arrival]
            if value < target:
                futex.wait(self._address + 8 * arrival, value & _STEP_MASK, min(SLICE_S, deadline - now))
            words[mine] = 0

    def _status(self, place: int, target: int) -> bool | None:
        """Return True if a member has arrived, False if it returned, None if neither, or raise GangAborted."""
        words, arrival = self._words, self._arrivals[place]
        # A member ends after its last arrival, so a reader that sees the end also sees that arrival.
        ended = words[arrival + self._ended]
        code = self._end_code(ended)
        fence()
        value = words[arrival]
        if value > self._last:
            value = words[arrival + _BEFORE]
            if value < self._begin and ended < self._begin:
                raise GangAborted(self._over())
        if target <= value <= self._last:
            return True
        arrivals = (ended & _STEP_MASK) >> 2
        if code and arrivals > target - self._begin:  # it is two attempts ahead, or has just arrived
            return True
        if code == _RETURNED:
            return False
        if value > self._last or ended > self._last:
            raise GangAborted(self._over())
        return None

    def _failed(self) -> str | None:
        """Return why this attempt cannot complete while a member is missing; None if it can."""
        words = self._words
        if words[ABORT_AT // 8] >= self.serial:
            return f"attempt {self.serial} of the gang was aborted by the scheduler"
        for other, arrival in zip(self._others, self._arrivals, strict=True):
            if self._end_code(words[arrival + self._ended]) == _FAILED:
                return f"a replica of member {other} failed"
        return None

    def _end_code(self, ended: int) -> int:
        """Return how an ENDED word says that its member ended in this attempt; 0: it is of another one."""
        return ended & _CODE_MASK if self._begin < ended <= self._last else 0

    def _over(self) -> str:
        return f"attempt {self.serial} of the gang is over: a later one has started"

    def _missing(self, target: int) -> list[int]:
        return [other for place, other in enumerate(self._others) if self._status(place, target) is None]
