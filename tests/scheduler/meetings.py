"""How the workers of the seeded worlds execute their parts of a gang, and wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipedist.scheduler import events as ev
from tests.scheduler.books import ALWAYS, STAGES, Errand, Fate, Process

if TYPE_CHECKING:
    from tests.scheduler.world import World

PATIENCE_S = 3.0


@dataclass(slots=True)
class Meeting:
    """One gang, as its members see it: nobody ends before all have come, unless somebody raised."""

    came: dict[int, tuple[Process, Errand, set[int]]] = field(default_factory=dict)
    """By lease: who waits, and which of its calls raise."""
    raised: bool = False


def begin_part(world: World, process: Process, errand: Errand) -> None:
    """Execute a member's calls; they are reported when all of them are over."""
    reading = world.readings[errand.pass_id]
    took = reading.call_s * world.random.uniform(0.5, 1.5)
    process.busy, process.waits = True, False
    process.lease, process.busy_ns = errand.lease, int(took * 1e9)
    start = max(world.now, process.stalled_until)
    world.at(start + took, lambda: _part_over(world, process, errand))


def _part_over(world: World, process: Process, errand: Errand) -> None:
    if not process.alive:
        return
    if not any(x.id == errand.lease for x in world.seats[process.name].leases):
        _next(world, process)  # cancelled meanwhile: nothing of it is reported
        return
    fates = world.readings[errand.pass_id].fates
    own = {call: fates[call] for call in range(errand.lo, errand.hi) if call in fates}
    for fate in own.values():
        if fate.kills > 0 or (fate.hangs > 0 and errand.members == 1):
            fate.kills -= 0 < fate.kills < ALWAYS
            fate.hangs = 0
            world._die(process)
            return
        if fate.hangs > 0:
            fate.hangs -= 1
            process.hung = True
            return
    raisers = {call for call, fate in own.items() if fate.raises > 0}
    for call in raisers:
        own[call].raises -= own[call].raises < ALWAYS
    if not world.readings[errand.pass_id].meets:
        _report_part(world, process, errand, raisers, aborted=False)
        return
    meeting = world.meetings.setdefault(errand.serial, Meeting())
    meeting.came[errand.lease] = process, errand, raisers
    meeting.raised = meeting.raised or bool(raisers)
    process.waits = True
    _wait(world, process, errand)
    if meeting.raised or len(meeting.came) == errand.members:
        for who, its, raising in list(meeting.came.values()):
            if who.alive and who.waits and who.lease == its.lease:
                who.waits = False
                _report_part(world, who, its, raising, aborted=meeting.raised)


def _wait(world: World, process: Process, errand: Errand) -> None:
    """Tell of members that hang, again and again as long as they are waited for."""

    def look() -> None:
        if not (process.alive and process.waits and process.lease == errand.lease):
            return
        gang = world.gangs.get(errand.serial)
        parts = gang.parts if gang is not None else ()
        missing = tuple(m for m, part in enumerate(parts) if world.peers[part.worker].hung)
        if missing:
            lease = errand.lease
            if world.random.random() < 0.3:
                lease -= 1  # of nobody, or of another one
            world.handle(ev.GangStalled(process.name, process.incarnation, lease, missing[:1], "waits"))
        _wait(world, process, errand)

    world.at(world.now + PATIENCE_S * world.random.uniform(0.5, 1.5), look)


def _report_part(world: World, process: Process, errand: Errand, raisers: set[int], *, aborted: bool) -> None:
    """Report all calls in order: those that raised, and the others as done or as aborted."""
    reading = world.readings[errand.pass_id]
    lo = errand.lo
    for call in range(errand.lo, errand.hi):
        last = call + 1 == errand.hi
        if call in raisers or aborted:
            world._report(process, errand, lo, call, reading)
            fate = reading.fates.get(call, Fate(retries=world.random.choice([0, 5])))
            failed = ev.CallFailed(
                process.name,
                process.incarnation,
                errand.lease,
                call,
                fate.retries,
                aborted=call not in raisers,
                quarantine=fate.quarantine,
                stage=world.stages.choice(STAGES),
            )
            world._deliver(process, failed, last=last)
            lo = call + 1
        elif last or world.random.random() < 0.3:
            world._report(process, errand, lo, call + 1, reading)
            lo = call + 1
    _next(world, process)


def _next(world: World, process: Process) -> None:
    process.busy = process.waits = False
    process.queue.pop(0)
    world._next_call(process)
