"""The simulated network: the guarantees of its connections, and the effect of each fault."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from pipedist.testing import Faults, FaultyNetwork, VirtualTime
from pipedist.testing.network import BROKEN_S_MAX, DELAY_S_MAX, LATENCY_S_MAX, NOTICED_S_MAX, Connection


class Wire:
    """One connection, and the messages that arrive at its ends."""

    def __init__(self, faults: Faults | None = None, *, seed: int = 0, faithful: bool = False) -> None:
        self.time = VirtualTime()
        self.network = FaultyNetwork(self.time, Random(seed), faults or Faults(), faithful=faithful)
        self.up: list[int] = []
        self.down: list[int] = []
        self.cut_at: float | None = None
        self.connection: Connection = self.network.connect(
            up=self.up.append, down=self.down.append, on_cut=self._record_cut
        )

    def _record_cut(self) -> None:
        self.cut_at = self.time.now

    def settle(self, until: float = 1e9) -> None:
        self.time.run(lambda: True, until)

    def send(self, count: int = 200, send: Callable[[object], None] | None = None) -> None:
        for number in range(count):
            (send or self.connection.send_up)(number)


def test_without_faults_all_messages_arrive_in_order_within_the_latency() -> None:
    wire = Wire()
    wire.send()
    wire.send(send=wire.connection.send_down)
    wire.settle()
    assert wire.up == wire.down == list(range(200))
    assert wire.time.now <= LATENCY_S_MAX
    assert not wire.network.counts


def test_messages_of_different_connections_overtake_each_other() -> None:
    wire = Wire()
    arrived: list[str] = []
    ends = [
        wire.network.connect(up=arrived.append, down=arrived.append, on_cut=wire._record_cut)
        for _ in range(9)
    ]
    for number, end in enumerate(ends):
        end.send_up(str(number))
    wire.settle()
    assert sorted(arrived) != arrived


@pytest.mark.parametrize("kind", ["drop", "duplicate", "delay", "reorder", "cut", "partition"])
def test_each_fault(kind: str) -> None:
    wire = Wire(Faults.of({kind: 0.05}), seed=3)
    wire.send()
    wire.settle()
    sent = list(range(200))
    assert wire.network.counts[kind]
    if kind in ("delay", "partition"):
        assert wire.up == sent
        assert wire.time.now > 10 * LATENCY_S_MAX
    elif kind == "duplicate":
        assert sorted(set(wire.up)) == sent
        assert len(wire.up) > 200
    elif kind == "reorder":
        assert wire.up != sorted(wire.up)
    elif kind == "drop":
        assert set(wire.up) < set(sent)
        assert max(wire.up) > min(set(sent) - set(wire.up))  # later ones arrive
    else:
        assert wire.up == []  # all were in flight
    assert (wire.cut_at is not None) == (kind in ("drop", "duplicate", "reorder", "cut"))
    if wire.cut_at is not None:
        assert wire.cut_at <= BROKEN_S_MAX + NOTICED_S_MAX + DELAY_S_MAX


@pytest.mark.parametrize("kind", ["drop", "reorder"])
def test_a_faithful_network_does_what_zeromq_does(kind: str) -> None:
    for seed in range(20):
        wire = Wire(Faults.of({kind: 0.05}), seed=seed, faithful=True)
        for number in range(50):
            wire.connection.send_up(number)
            wire.settle(wire.time.now + 1)
        wire.settle()
        assert wire.up == list(range(len(wire.up)))  # nothing is missing in between
        assert kind == "drop" or len(wire.up) == 50
        assert wire.connection.is_open == (kind == "reorder" or len(wire.up) == 50)


def test_last_messages_of_an_ended_process_may_arrive() -> None:
    arrived = set()
    for seed in range(50):
        wire = Wire(seed=seed)
        wire.send(10)
        wire.connection.close()
        wire.connection.send_down(1)
        wire.settle()
        assert wire.up == list(range(len(wire.up)))
        assert wire.down == []
        assert wire.cut_at is None
        arrived.add(len(wire.up))
    assert len(arrived) > 1


def test_no_faults_after_stop_faults() -> None:
    wire = Wire(Faults(drop=1.0))
    wire.network.stop_faults()
    wire.send()
    wire.settle()
    assert wire.up == list(range(200))
