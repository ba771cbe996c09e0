"""Foresees what the scheduler must do, from books of its own."""

from __future__ import annotations

from pipedist.scheduler import Command, Event, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev
from tests.scheduler.books import GangBook, Held, Process, Reading, Seat, Violation


class Oracle:
    """Keeps books of workers, leases and attempts, and compares them with what the scheduler wants.

    Args:
        limits: the scheduler's.
        readings: the passes of the world.
    """

    def __init__(self, limits: SchedulerLimits, readings: dict[int, Reading]) -> None:
        self.limits = limits
        self.readings = readings
        self.now = 0.0
        self.seats: dict[str, Seat] = {}
        self.gangs: dict[int, GangBook] = {}
        self.peers: dict[str, Process] = {}
        """Who is behind a name: the process that joined last."""

    def must(self, holds: bool, story: str) -> None:
        if not holds:
            raise Violation(story)

    def foresee(self, event: Event) -> list[Command]:
        """Enter an event in the oracle's books, and return the commands of `FORESEEN` it must cause."""
        match event:
            case ev.WorkerExpected(name):
                return [cmd.StartWorker(name, 0)]
            case ev.WorkerJoined(name, incarnation):
                return self._foresee_join(name, incarnation)
            case ev.WorkerLost(name, incarnation, _, graceful):
                seat = self.seats[name]
                if seat.incarnation == incarnation and (seat.ready or seat.managed):
                    return self._lose(name, graceful=graceful, event=event)
            case ev.CallsDone(lo=lo, hi=hi):
                return self._foresee_report(event, lo, hi)
            case ev.CallFailed(call=call):
                return self._foresee_report(event, call, call + 1)
            case ev.StepsAvailable(pass_id, first, last):
                reading = self.readings[pass_id]
                replicas = reading.settings.replicas
                for step in range(first, last):
                    calls = set(range(step * replicas, step * replicas + event.parts))
                    reading.waiting |= calls - {step * replicas + hole for hole in event.skipped_replicas}
            case ev.PassClosed(pass_id):
                self.readings[pass_id].closed = True
            case ev.CancelConfirmed(name, incarnation, lease):
                seat = self.seats[name]
                if seat.incarnation == incarnation and seat.suspended == lease:
                    seat.suspended, seat.unsure = 0, False
            case ev.CallSized(pass_id, call):
                self.readings[pass_id].suspects.add(call)
            case ev.GangStalled():
                return self._foresee_stall(event)
            case ev.Tick():
                return self._foresee_tick()
        return []

    def _foresee_join(self, name: str, incarnation: int) -> list[Command]:
        seat = self.seats[name]
        if incarnation < seat.incarnation or (seat.ready and incarnation == seat.incarnation):
            return [expel(name, incarnation)]
        out: list[Command] = []
        if seat.ready:
            out = [expel(name, seat.incarnation)]
            self._lose(name, graceful=False)
        seat.ready, seat.incarnation = True, incarnation
        return out

    def _foresee_tick(self) -> list[Command]:
        out: list[Command] = []
        for name, process in self.peers.items():
            seat = self.seats[name]
            late = process.heard_at + self.limits.heartbeat_timeout_s <= self.now
            if process.supervised and seat.ready and late:
                out += [expel(name, seat.incarnation), *self._lose(name, graceful=False)]
        roused = [r.rouse(self.now) for r in self.readings.values() if not r.closed]
        self.must(len(out) > 0 or any(roused), "a Tick that was asked for, but changes nothing")
        return out

    def _foresee_report(self, event: ev.CallsDone | ev.CallFailed, lo: int, hi: int) -> list[Command]:
        name, incarnation, lease = event.worker, event.incarnation, event.lease
        seat = self.seats[name]
        held = next((x for x in seat.leases if x.id == lease), None)
        if held is None or incarnation != seat.incarnation or not seat.ready:
            return [cmd.DropResults(name, lease)]
        if held is not seat.leases[0] or lo != held.next or hi > held.hi:
            return [
                cmd.DropResults(name, lease),
                expel(name, incarnation),
                *self._lose(name, graceful=False),
            ]
        seat.unsure = False
        held.next = hi
        if hi == held.hi:
            seat.leases.remove(held)
        if held.serial:
            return self._foresee_part(held.serial, event, lo, hi)
        reading = self.readings[held.pass_id]
        if held.probe is not None:
            self._probe_over(reading, held)
            if isinstance(event, ev.CallFailed) and held.probe[1] - held.probe[0] == 1:
                reading.rest_probe((lo, held.probe), event, self.now, self.limits)
            return []
        if isinstance(event, ev.CallsDone):
            reading.result_bytes += event.bytes
            fresh = set(range(lo, hi))
            self.must(not fresh & reading.accepted, f"calls {fresh & reading.accepted} are accepted twice")
            reading.accepted |= fresh
            return [cmd.AcceptResults(held.pass_id, lo, hi, name)]
        self._blame(reading, lo, event)
        return []

    def _probe_over(self, reading: Reading, held: Held) -> None:
        assert held.probe is not None
        reading.trying.remove((held.hi - 1, held.probe))

    def _blame(self, reading: Reading, call: int, event: ev.CallFailed | ev.WorkerLost) -> None:
        """A call, or a gang whose first it is, raised in a stage, or took too long there."""
        raised = reading.raised[call]
        raised[event.stage] += 1
        if raised[event.stage] <= event.retries:
            size = reading.settings.replicas if reading.settings.gang else 1
            reading.rest(set(range(call, call + size)), raised[event.stage], self.now, self.limits)
        elif not event.quarantine:
            reading.give_up(call)

    def _foresee_part(
        self, serial: int, event: ev.CallsDone | ev.CallFailed, lo: int, hi: int
    ) -> list[Command]:
        """A member of a gang reports; with the last report it is known what becomes of the gang."""
        gang = self.gangs[serial]
        reading = self.readings[gang.pass_id]
        gang.reported |= set(range(lo, hi))
        out: list[Command] = []
        if isinstance(event, ev.CallsDone):
            gang.bytes += event.bytes
            out.append(cmd.StashResults(serial, lo, hi, event.worker))
        else:
            gang.raised.append(event)
        if gang.reported != gang.calls:
            return out
        del self.gangs[serial]
        if not gang.raised:
            self.must(not gang.calls & reading.accepted, f"calls {gang.calls} are accepted twice")
            reading.accepted |= gang.calls
            reading.result_bytes += gang.bytes
        else:
            guilty = min((x for x in gang.raised if not x.aborted), key=lambda x: x.call)
            self._blame(reading, gang.lo, guilty)
        return [*out, cmd.GangEnded(serial, counts=not gang.raised, aborted=False)]

    def _foresee_stall(self, event: ev.GangStalled) -> list[Command]:
        seat = self.seats[event.worker]
        held = next((x for x in seat.leases if x.id == event.lease), None)
        if held is None or not held.serial or not seat.ready or seat.incarnation != event.incarnation:
            return []
        out: list[Command] = []
        for member in event.members:
            _, lease, *_ = part = self.gangs[held.serial].parts[member]
            missing = self.seats[part.worker]
            if part.worker != event.worker and any(x.id == lease for x in missing.leases):
                out += [
                    expel(part.worker, missing.incarnation),
                    *self._lose(part.worker, graceful=False),
                ]
        return out

    def _lose(self, name: str, *, graceful: bool, event: ev.WorkerLost | None = None) -> list[Command]:
        """Give back what a worker had, charge whom it must be charged to, and replace it."""
        seat = self.seats[name]
        blamed = seat.leases[0] if seat.leases and not graceful and not seat.unsure else None
        if event is not None and event.running is not None:
            blamed = next((x for x in seat.leases if x.id == event.running[0]), None)
        for held in seat.leases:
            reading = self.readings[held.pass_id]
            if held.probe is not None:
                self._probe_over(reading, held)
                single = held.probe[1] - held.probe[0] == 1
                if event is not None and event.timed_out and held is blamed and single:
                    reading.rest_probe((held.next, held.probe), event, self.now, self.limits)
                continue
            if held.serial:  # its calls wait again when the gang has ended
                gang = self.gangs[held.serial]
                reading.deaths[gang.lo] += held is blamed
                if held is blamed and reading.deaths[gang.lo] >= self.limits.deaths_max:
                    gang.doomed = True
                    reading.give_up(gang.lo)
                continue
            reading.waiting |= set(range(held.next, held.hi))
            if held is not blamed:
                continue
            if event is not None and event.timed_out and event.running is not None:
                reading.waiting.discard(event.running[1])
                self._blame(reading, event.running[1], event)
                continue
            reading.deaths[held.next] += 1
            if reading.deaths[held.next] >= self.limits.deaths_max:
                reading.waiting.discard(held.next)
                if not reading.settings.quarantine:
                    reading.give_up(held.next)
        seat.leases, seat.bound, seat.unsure, seat.ready, seat.suspended = [], set(), False, False, 0
        if not seat.managed:
            return []
        seat.incarnation += 1
        return [cmd.StartWorker(name, seat.incarnation)]


FORESEEN = (
    cmd.StartWorker,
    cmd.EvictWorker,
    cmd.AcceptResults,
    cmd.StashResults,
    cmd.GangEnded,
    cmd.DropResults,
)


def expel(name: str, incarnation: int) -> Command:
    return cmd.EvictWorker(name, incarnation, "")


def foreseeable(commands: list[Command]) -> list[Command]:
    """Return what the oracle foresees of some commands: without reasons, and in an order of its own."""
    told = [c for c in commands if isinstance(c, FORESEEN)]
    told = [c for c in told if not (isinstance(c, cmd.GangEnded) and c.aborted)]  # checked one by one
    plain = [expel(c.worker, c.incarnation) if isinstance(c, cmd.EvictWorker) else c for c in told]
    return sorted(plain, key=repr) if len(plain) > 1 else plain
