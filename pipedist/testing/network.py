"""The network of a simulation: connections to one hub, with faults.

Rules
-----
* A connection has two directions. In each, messages arrive in the order in which they were sent,
  after random latencies; so messages of different connections overtake each other.
* A fault strikes a message when it is sent; see `pipedist.testing.Faults`. What ZeroMQ never does to a
  connection that lives, a `faithful` network does not either: with a message that is lost, its
  connection is lost at once, and one that is late makes those behind it late. In others, later messages
  arrive still. But a connection that has lost, repeated or reordered something is cut at most `BROKEN_S`
  later: else somebody might wait for ever.
* When a connection is cut, its worker's end learns of it a little later. The hub's end never does: as
  with ZeroMQ, it hears from others, or not at all.
* When a worker's process is gone, what it sent last may arrive still, or not, but in order.
* `calm` ends the faults: no new ones happen, and those that last a while end by themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from pipedist.testing.faults import PER_MESSAGE, Faults
from pipedist.testing.virtual_time import Time

LATENCY_S = 0.002
"""How long a message takes at most, where no fault strikes it."""

DELAY_S = 4.0
"""How long a fault delays a message at most."""

PARTITION_S = 12.0
"""How long nothing gets through at most."""

BROKEN_S = 2.0
"""How long a connection lives at most that has lost, repeated or reordered something."""

NOTICED_S = 0.3
"""How long a worker takes at most to see that its connection is gone."""

Receiver = Callable[[Any], None]
"""Takes what arrives: whatever was sent, unread."""


class FaultyNetwork:
    """Makes connections, and spoils what they carry.

    Args:
        time: when things happen.
        random: decides which faults happen to what.
        faults: how often.
        faithful: nothing happens inside a connection that ZeroMQ rules out.
    """

    def __init__(self, time: Time, random: Random, faults: Faults, *, faithful: bool = False) -> None:
        self.time = time
        self.random = random
        self.draw = random.random
        self.latency_s = LATENCY_S
        self.counts: Counter[str] = Counter()
        """Faults that have happened, by kind."""
        rates = faults.rates()
        self._kinds = [kind for kind in PER_MESSAGE if rates[kind]]
        self.is_faithful = faithful
        self._weights = [rates[kind] for kind in self._kinds]
        self.rate = min(1.0, sum(self._weights))
        """Of faults of any kind, a message."""

    def connect(self, *, up: Receiver, down: Receiver, on_cut: Callable[[], None]) -> Connection:
        """Return a connection of a worker to the hub.

        Args:
            up: takes what arrives at the hub.
            down: takes what arrives at the worker.
            on_cut: told, at the worker, that the connection is gone.
        """
        return Connection(self, up, down, on_cut)

    def calm(self) -> None:
        """Let no fault happen from now on."""
        self.rate = 0.0

    def draw_kind(self) -> str:
        """Return which fault strikes a message, and count it."""
        (kind,) = self.random.choices(self._kinds, self._weights)
        self.counts[kind] += 1
        return kind


class _Lane:
    """One direction of a connection."""

    __slots__ = ("last", "open_until", "receive", "time")

    def __init__(self, time: Time, receive: Receiver) -> None:
        self.time = time
        self.receive = receive
        self.last = 0.0
        """When the latest message arrives; later ones come after it."""
        self.open_until = math.inf
        """What would arrive later is lost."""

    def deliver(self, item: object) -> None:
        if self.time.now <= self.open_until:
            self.receive(item)


class Connection:
    """Carries messages between a worker and the hub. Made by `FaultyNetwork.connect`."""

    __slots__ = ("_down", "_network", "_on_cut", "_up")

    def __init__(
        self, network: FaultyNetwork, up: Receiver, down: Receiver, on_cut: Callable[[], None]
    ) -> None:
        self._network = network
        self._up = _Lane(network.time, up)
        self._down = _Lane(network.time, down)
        self._on_cut = on_cut

    @property
    def is_open(self) -> bool:
        """Whether it carries anything still."""
        return self._down.open_until == math.inf

    @property
    def is_silent(self) -> bool:
        """Whether it is open, and nothing is on its way to the worker."""
        return self.is_open and self._down.last <= self._network.time.now

    @property
    def has_delivered(self) -> bool:
        """Whether it is open, and nothing is on its way to the worker or from it."""
        return self.is_silent and self._up.last <= self._network.time.now

    def send_up(self, item: object) -> None:
        """Send something to the hub."""
        self._send(self._up, item)

    def send_down(self, item: object) -> None:
        """Send something to the worker."""
        self._send(self._down, item)

    def _send(self, lane: _Lane, item: object) -> None:
        network = self._network
        time, draw = network.time, network.draw
        arrival = time.now + network.latency_s * draw()
        if network.rate > 0.0 and draw() < network.rate:
            self._spoil(lane, item, arrival)
            return
        if arrival < lane.last:
            arrival = lane.last
        else:
            lane.last = arrival
        time.at(arrival, lane.deliver, item)

    def _spoil(self, lane: _Lane, item: object, arrival: float) -> None:
        network, draw = self._network, self._network.random.random
        kind = network.draw_kind()
        if kind == "cut" or (kind == "drop" and network.is_faithful):
            self.cut()
            return
        if kind == "reorder" and network.is_faithful:
            kind = "delay"
        if kind in ("drop", "duplicate", "reorder"):
            network.time.at(arrival + BROKEN_S * draw(), self.cut)
        if kind == "drop":
            return
        if kind == "reorder":
            network.time.at(arrival + draw() * BROKEN_S / 4, lane.deliver, item)
            return
        if kind == "partition":
            heals = network.time.now + PARTITION_S * draw()
            for each in (lane,) if draw() < 0.5 else (self._up, self._down):
                each.last = max(each.last, heals)
        elif kind == "delay":
            arrival += DELAY_S * draw()
        lane.last = arrival = max(lane.last, arrival)
        network.time.at(arrival, lane.deliver, item)
        if kind == "duplicate":
            network.time.at(arrival + draw() * 2 * network.latency_s, lane.deliver, item)

    def cut(self) -> None:
        """Lose the connection, and all that is under way."""
        if self.is_open:
            self._close(0.0)
            when = self._network.time.now + NOTICED_S * self._network.random.random()
            self._network.time.at(when, self._on_cut)

    def close(self) -> None:
        """The worker's process is gone: some of what it sent last is lost."""
        if self.is_open:
            self._close(2 * self._network.latency_s * self._network.random.random())

    def let_go(self) -> None:
        """Know nobody any more."""
        self._up.receive = self._down.receive = _nobody
        self._on_cut = _nobody

    def _close(self, within_s: float) -> None:
        now = self._network.time.now
        self._down.open_until = now
        self._up.open_until = now + within_s


def _nobody(_item: object = None) -> None:
    return
