"""What the scheduler costs: CPU time a call and bytes an outstanding call, by the number of workers.

The real state machine is driven without I/O, in virtual time: simulated workers take every lease that they
are sent, and bring it back after a time drawn from a seed. Only `Scheduler.handle` is measured.

    python -m benchmarks.scheduler_cost [--workers 10,100,1000,10000] [--calls N]
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pipedist
from pipedist.scheduler import PassSettings, Scheduler, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

REPLICAS = 8
HEARTBEAT_S = 5.0
NS = 1e9
PARTS = 5
"""A measurement has so many parts, of which the best counts: others use the machine too."""
LIMITS = SchedulerLimits(bytes_in_flight_max=2**40, steps_in_flight_max=2**20)
"""The valve is open: what is measured is the work with all workers busy."""


@dataclass(frozen=True)
class Row:
    """What was measured with one number of workers.

    Args:
        call_us, lease_us: CPU microseconds of the scheduler a call, and a lease.
        calls_per_lease: on average.
        bytes_per_call: that it holds for a call that is leased and has not come back.
    """

    workers: int
    call_us: float
    lease_us: float
    calls_per_lease: float
    bytes_per_call: float


class Cluster:
    """Simulated workers around a real scheduler.

    Args:
        workers: how many; each dialled in, and is heard every `HEARTBEAT_S`.
        call_s: how long a call takes on average; each lease takes half as long to twice as long as that.
    """

    def __init__(self, workers: int, call_s: float) -> None:
        self.workers = workers
        self._random = random.Random(0)
        self._scheduler = Scheduler(LIMITS)
        self._call_s = call_s
        self._now = 0.0
        self._offered = 0
        self._pending: deque[ev.Event] = deque()
        self._busy_until = dict.fromkeys((f"w{i}" for i in range(workers)), 0.0)
        self._due: list[tuple[float, int, ev.Event]] = []
        self._serial = 0
        self.cpu_ns = 0
        self.calls = 0
        self.leases = 0
        self.outstanding = 0
        for place, name in enumerate(self._busy_until):
            self._handle(ev.WorkerJoined(name, 0, supervised=True))
            self._later(place * HEARTBEAT_S / workers, ev.HeartbeatReceived(name, 0))

    def open_pass(self) -> None:
        """Begin a pass; every worker has a call as soon as this returns."""
        self._handle(ev.PassOpened(1, PassSettings(replicas=REPLICAS)))

    def run(self, calls: int) -> None:
        """Go on until so many more calls came back."""
        end = self.calls + calls
        while self.calls < end:
            at, _, event = heapq.heappop(self._due)
            self._now = max(self._now, at)
            if isinstance(event, ev.CallsDone):
                self.calls += event.hi - event.lo
                self.outstanding -= event.hi - event.lo
                self.leases += 1
            else:
                self._later(self._now + HEARTBEAT_S, event)
            self._handle(event)

    def _later(self, at: float, event: ev.Event) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at, self._serial, event))

    def _handle(self, event: ev.Event) -> None:
        self._pending.append(event)
        while self._pending:
            event = self._pending.popleft()
            began = time.thread_time_ns()
            commands = self._scheduler.handle(event, self._now)
            self._scheduler.deadline()  # as the driver asks after each event
            self.cpu_ns += time.thread_time_ns() - began - CLOCK_NS
            for command in commands:
                self._carry_out(command)

    def _carry_out(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.SendAssign):
            calls = command.hi - command.lo
            takes_s = self._call_s * calls * self._random.uniform(0.5, 2.0)
            begins = max(self._now, self._busy_until[command.worker])
            self._busy_until[command.worker] = begins + takes_s
            self.outstanding += calls
            done = ev.CallsDone(
                command.worker, 0, command.lease, command.lo, command.hi, round(takes_s * NS), 100 * calls
            )
            self._later(begins + takes_s, done)
        elif isinstance(command, cmd.RequestSteps):
            first, self._offered = self._offered, self._offered + command.count
            self._pending.append(ev.StepsAvailable(1, first, self._offered, REPLICAS, 1000 * command.count))
        elif isinstance(command, cmd.StepsReady):
            self._pending.append(
                ev.StepsConsumed(1, command.last, 100 * REPLICAS * (command.last - command.first))
            )


def _clock_ns() -> int:
    """Return what looking at the clock costs by itself."""
    looks = sorted(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(10_001))
    return looks[len(looks) // 2]


CLOCK_NS = _clock_ns()


def measure(workers: int, calls: int, call_s: float) -> Row:
    """Drive a scheduler with so many workers for so many calls, and return what the best part cost.

    Leases grow with what came back: so a warm-up goes before, of several leases a worker.

    Args:
        call_s: how long a call takes: it decides how many are bundled in a lease.
    """
    cluster = Cluster(workers, call_s)
    cluster.open_pass()
    cluster.run(max(calls // 4, 20 * workers))
    bytes_per_call = _bytes_per_call(workers, call_s)
    gc.collect()
    gc.disable()
    try:
        return min((_part(cluster, calls // PARTS, bytes_per_call) for _ in range(PARTS)), key=_cost)
    finally:
        gc.enable()


def _part(cluster: Cluster, calls: int, bytes_per_call: float) -> Row:
    cluster.cpu_ns = cluster.calls = cluster.leases = 0
    cluster.run(calls)
    return Row(
        cluster.workers,
        cluster.cpu_ns / cluster.calls / 1000,
        cluster.cpu_ns / cluster.leases / 1000,
        cluster.calls / cluster.leases,
        bytes_per_call,
    )


def _cost(row: Row) -> float:
    return row.lease_us


def _bytes_per_call(workers: int, call_s: float) -> float:
    """Return the bytes that the scheduler holds for a call while all workers are busy."""
    scheduler_files = tracemalloc.Filter(True, f"{Path(pipedist.__file__).parent}/*")

    def held() -> int:
        gc.collect()
        taken = tracemalloc.take_snapshot().filter_traces([scheduler_files])
        return sum(entry.size for entry in taken.statistics("filename"))

    tracemalloc.start()
    try:
        cluster = Cluster(workers, call_s)
        idle = held()
        cluster.open_pass()
        cluster.run(4 * workers)
        return (held() - idle) / cluster.outstanding
    finally:
        tracemalloc.stop()


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| workers | us a call | us a lease | calls a lease | bytes an outstanding call |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.workers:,} | {row.call_us:.1f} | {row.lease_us:.1f} | {row.calls_per_lease:.1f} "
        f"| {row.bytes_per_call:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="10,100,1000,10000", help="numbers of workers, with commas")
    parser.add_argument("--calls", type=int, default=100_000, help="calls that are measured")
    options = parser.parse_args()
    counts = [int(text) for text in options.workers.split(",")]
    for title, call_s in (("Calls of 100 ms: each travels alone", 0.1), ("Calls of 1 ms: bundled", 0.001)):
        print(f"\n{title}\n")
        print(table([measure(workers, options.calls, call_s) for workers in counts]))


if __name__ == "__main__":
    main()
