"""A simulated network: connections to one server, with faults; and the virtual time in which it runs.

Rules
-----
* A connection has two directions. In each, messages arrive in the order in which they were sent,
  after random latencies; so messages of different connections overtake each other.
* A fault affects a message when it is sent; see `pipedist.testing.Faults`. A `faithful` network does to an
  open connection only what ZeroMQ can do: if a message is lost, its connection is lost at once, and a late
  message delays those behind it. In other networks, later messages still arrive; but a connection
  that has lost, repeated or reordered a message is cut at most `BROKEN_S_MAX` later, so that no peer waits
  forever.
* When a connection is cut, its worker's end detects it a little later. The server's end never does: as
  with ZeroMQ, it learns it from other sources, or not at all.
* When a worker's process ends, its last messages may still arrive, or not, but in order.
* After `stop_faults` no new faults happen, and those that last for a while end by themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from pipedist.testing.faults import PER_MESSAGE, Faults

LATENCY_S_MAX = 0.002  # the longest time that a message takes without faults
DELAY_S_MAX = 4.0  # the longest time by which a fault delays a message
PARTITION_S_MAX = 12.0  # the longest partition
BROKEN_S_MAX = 2.0  # the longest life of a connection that has lost, repeated or reordered a message
NOTICED_S_MAX = 0.3  # the longest time that a worker takes to detect that its connection is lost
Receiver = Callable[[Any], None]  # receives a sent object, unchanged


class Clock(Protocol):
    """The clock that the simulated network and processes need."""

    @property
    def now(self) -> float:
        """Seconds since the beginning."""

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Call an action at a time, after all actions scheduled earlier for that time."""


class VirtualTime:
    """A clock with scheduled actions; it stands still while an action runs."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the beginning
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Call an action at a time, after all actions scheduled earlier for that time."""
        self._order += 1
        heappush(self._heap, (when, self._order, action, args))

    def clear(self) -> None:
        """Remove all scheduled actions."""
        self._heap.clear()

    def run(self, goes_on: Callable[[], bool], until: float) -> None:
        """Jump from one scheduled action to the next, as long as there is one.

        Args:
            goes_on: called before each action; the run ends when it returns False.
            until: actions scheduled for later are not called.
        """
        heap = self._heap
        while heap and heap[0][0] <= until and goes_on():
            self.now, _, action, args = heappop(heap)
            action(*args)


class FaultyNetwork:
    """Creates connections, and injects faults into their messages.

    Args:
        time: the clock.
        random: decides which message a fault affects.
        faults: the rates.
        faithful: do only what ZeroMQ can do to an open connection.
    """

    def __init__(self, time: Clock, random: Random, faults: Faults, *, faithful: bool = False) -> None:
        self.time = time
        self.random = random
        self.draw = random.random
        self.latency_s = LATENCY_S_MAX
        self.counts: Counter[str] = Counter()  # number of faults so far, by kind
        self._kinds = [kind for kind in PER_MESSAGE if faults.rates()[kind]]
        self.is_faithful = faithful
        self._weights = [faults.rates()[kind] for kind in self._kinds]
        self.rate = min(1.0, sum(self._weights))  # probability of a fault for each message

    def connect(self, *, up: Receiver, down: Receiver, on_cut: Callable[[], None]) -> Connection:
        """Return a connection of a worker to the server.

        Args:
            up: called with each message that arrives at the server.
            down: called with each message that arrives at the worker.
            on_cut: called when the worker detects that the connection is lost.
        """
        return Connection(self, up, down, on_cut)

    def stop_faults(self) -> None:
        """Inject no faults from now on."""
        self.rate = 0.0

    def draw_kind(self) -> str:
        """Draw the kind of the fault that affects a message, and count it."""
        (kind,) = self.random.choices(self._kinds, self._weights)
        self.counts[kind] += 1
        return kind


class _Direction:
    __slots__ = ("last", "open_until", "receive", "time")

    def __init__(self, time: Clock, receive: Receiver) -> None:
        self.time = time
        self.receive = receive
        self.last = 0.0  # arrival time of the latest message; later ones arrive after it
        self.open_until = math.inf  # messages that would arrive later are lost

    def deliver(self, item: object) -> None:
        if self.time.now <= self.open_until:
            self.receive(item)


class Connection:
    """Carries messages between a worker and the server. Created by `FaultyNetwork.connect`."""

    __slots__ = ("_down", "_network", "_on_cut", "_up")

    def __init__(
        self, network: FaultyNetwork, up: Receiver, down: Receiver, on_cut: Callable[[], None]
    ) -> None:
        self._network = network
        self._up = _Direction(network.time, up)
        self._down = _Direction(network.time, down)
        self._on_cut = on_cut

    @property
    def is_open(self) -> bool:
        return self._down.open_until == math.inf

    @property
    def is_silent(self) -> bool:
        """Whether it is open, and no message is in flight to the worker."""
        return self.is_open and self._down.last <= self._network.time.now

    @property
    def has_delivered(self) -> bool:
        """Whether it is open, and no message is in flight in either direction."""
        return self.is_silent and self._up.last <= self._network.time.now

    def send_up(self, item: object) -> None:
        self._send(self._up, item)

    def send_down(self, item: object) -> None:
        self._send(self._down, item)

    def _send(self, direction: _Direction, item: object) -> None:
        network = self._network
        time, draw = network.time, network.draw
        arrival = time.now + network.latency_s * draw()
        if network.rate > 0.0 and draw() < network.rate:
            self._inject(direction, item, arrival)
            return
        if arrival < direction.last:
            arrival = direction.last
        else:
            direction.last = arrival
        time.at(arrival, direction.deliver, item)

    def _inject(self, direction: _Direction, item: object, arrival: float) -> None:
        network, draw = self._network, self._network.random.random
        kind = network.draw_kind()
        if kind == "cut" or (kind == "drop" and network.is_faithful):
            self.cut()
            return
        if kind == "reorder" and network.is_faithful:
            kind = "delay"
        if kind in ("drop", "duplicate", "reorder"):
            network.time.at(arrival + BROKEN_S_MAX * draw(), self.cut)
        if kind == "drop":
            return
        if kind == "reorder":
            network.time.at(arrival + draw() * BROKEN_S_MAX / 4, direction.deliver, item)
            return
        if kind == "partition":
            heals = network.time.now + PARTITION_S_MAX * draw()
            for each in (direction,) if draw() < 0.5 else (self._up, self._down):
                each.last = max(each.last, heals)
        elif kind == "delay":
            arrival += DELAY_S_MAX * draw()
        direction.last = arrival = max(direction.last, arrival)
        network.time.at(arrival, direction.deliver, item)
        if kind == "duplicate":
            network.time.at(arrival + draw() * 2 * network.latency_s, direction.deliver, item)

    def cut(self) -> None:
        """Lose the connection, with all messages in flight."""
        if self.is_open:
            self._close(0.0)
            when = self._network.time.now + NOTICED_S_MAX * self._network.random.random()
            self._network.time.at(when, self._on_cut)

    def close(self) -> None:
        """Close the connection of a process that ended; some of its last messages are lost."""
        if self.is_open:
            self._close(2 * self._network.latency_s * self._network.random.random())

    def clear(self) -> None:
        """Drop the references to both ends, so that reference cycles are broken."""
        self._up.receive = self._down.receive = _ignore
        self._on_cut = _ignore

    def _close(self, within_s: float) -> None:
        now = self._network.time.now
        self._down.open_until = now
        self._up.open_until = now + within_s


def _ignore(_item: object = None) -> None:
    return
