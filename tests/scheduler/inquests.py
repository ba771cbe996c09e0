"""How the seeded worlds look on while guilty elements are searched for, and what must come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.scheduler.books import STAGES, Errand, Fate, Held, Process, Reading, Seat

if TYPE_CHECKING:
    from tests.scheduler.world import World


def assign_probe(world: World, command: cmd.SendAssign, seat: Seat, reading: Reading) -> None:
    call, (span,) = command.lo, command.elements
    world.must(command.hi == call + 1 and call <= reading.last_call, f"{command} is no probe")
    world.must((call, span) not in reading.trying, f"{span} of call {call} is tried twice at a time")
    world.must((call, span) not in reading.probes_resting, f"{span} of call {call} has not rested")
    world.must(not seat.leases, "a probe for a worker that is not idle")
    world._dealt(reading)
    reading.trying.add((call, span))
    process = world.peers[command.worker]
    if world._upsets > 0 and world.random.random() < 0.1:
        world._upsets -= 1
        world.at(world.now + reading.call_s * world.random.random(), lambda: world._kill(process))
    seat.leases.append(Held(command.lease, command.pass_id, call, call + 1, probe=span))
    errand = Errand(command.lease, command.pass_id, call, call + 1, elements=command.elements)
    world._send(command.worker, errand)


def size(world: World, reading: Reading, call: int) -> None:
    """Answer at once, or a little later: the driver's queue may have something before it."""
    fate = reading.fates[call]
    world.must(fate.poison is not None and call not in reading.suspects, f"call {call} is bisected")
    assert fate.poison is not None
    sized = ev.CallSized(reading.id, call, fate.poison.elements)
    world.at(world.now, lambda: world._unless_closed(reading, sized))


def clear(reading: Reading, call: int) -> None:
    """A suspect's guilty elements are known: it waits again."""
    poison = reading.fates[call].poison
    assert poison is not None
    innocent = [p for p in range(poison.elements) if p not in poison.guilty]
    spans: list[tuple[int, int]] = []
    for p in innocent:
        if spans and spans[-1][1] == p:
            spans[-1] = (spans[-1][0], p + 1)
        else:
            spans.append((p, p + 1))
    reading.cleared[call] = tuple(spans)
    reading.end_search(call)
    reading.before[call] = reading.tried(call)
    reading.raised[call].clear()
    reading.deaths[call] = 0
    reading.waiting.add(call)


def look_for_cleared(world: World) -> None:
    """Enter suspects that the scheduler has cleared: of all of their elements it was known enough."""
    for id_, kept in world.scheduler._passes.items():
        reading = world.readings[id_]
        for call in kept.suspects.cleared:
            if call in reading.suspects:
                poison = reading.fates[call].poison
                assert poison is not None
                found = kept.suspects.cleared[call].bisection
                world.must(
                    found is not None and found.guilty.keys() == poison.guilty,
                    f"call {call}: {found and found.guilty} are found guilty, not {poison.guilty}",
                )
                clear(reading, call)


def set_aside(world: World, reading: Reading, command: cmd.CallsQuarantined) -> None:
    world.must(command.lo not in reading.aside, f"call {command.lo} is set aside twice")
    replicas = reading.settings.replicas
    if reading.settings.gang:
        whole_step = command.lo % replicas == 0 and command.hi - command.lo == replicas
        world.must(whole_step, f"{command} is not a gang's step")
        guilty: frozenset[int] = frozenset()
        whole = any(reading.foretold(call)[1] for call in range(command.lo, command.hi))
    else:
        world.must(command.hi == command.lo + 1, f"{command} is not one call")
        guilty, whole = reading.foretold(command.lo)
    text = "" if command.whole is None else command.whole.text
    if "probes" in text:  # given up
        world.must(world.limits.probes_max < 10, "given up too early")
        guilty, whole = frozenset(), True
    world.must((command.whole is not None) == whole, f"{command}: all of it: {whole}")
    world.must(frozenset(at for at, _ in command.culprits) == guilty, f"{command}: {guilty} are guilty")
    fate = reading.fates.get(command.lo)
    size = fate.poison.elements if fate is not None and fate.poison is not None else 0
    world.must(command.remains == (not whole and len(guilty) < size), f"{command}: does anything remain?")
    for call in range(command.lo, command.hi):
        reading.aside[call] = command
    reading.end_search(command.lo)


def time_out(world: World, process: Process, lease: Errand, call: int, fate: Fate) -> None:
    """A process is ended because its call takes too long; what it has finished is not reported."""
    process.alive = False
    lost = ev.WorkerLost(
        process.name,
        process.incarnation,
        "timed out",
        running=(lease.lease, call),
        stage=world.stages.choice(STAGES),
        timed_out=True,
        retries=fate.retries,
        quarantine=fate.quarantine,
    )
    world.at(max(process.last_arrival, world.now), lambda: world.handle(lost))
    world._respawn(process)
