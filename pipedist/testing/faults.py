"""The faults that a simulation injects, and their rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Self

from pipedist.core.names import did_you_mean
from pipedist.errors import UsageError

# Kinds whose rate is a probability for each message.
PER_MESSAGE = ("drop", "duplicate", "delay", "reorder", "cut", "partition")
SLOW_TIMES = 20  # a slow call takes this many times as long
PAUSE_S_MAX = 12.0  # the longest time for which a fault stops a process
STOPPED_S_MAX = 3.0  # a launcher kills a process that is stopped for longer
_DRAWN_RATES = (0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Faults:
    """The probability of each kind of fault, from 0 to 1.

    On an open connection, ZeroMQ neither loses nor reorders messages; it can lose the connection, with all
    messages in flight. A simulation of a spec keeps to that (a `faithful` network). Other networks also
    lose, repeat and reorder messages of a connection that stays open.

    Args:
        drop: a message is lost, and in a faithful network its connection too.
        duplicate: a message arrives twice; soon after, its connection is lost.
        delay: a message, and all after it on its connection, arrive late.
        reorder: messages of other connections overtake a message; in an unfaithful network also later ones of
            its own connection.
        cut: a connection is lost; its worker ends, and is replaced.
        partition: no message arrives for a while, in both directions or only in one.
        crash: a worker's process is killed (SIGKILL).
        pause: a process is stopped (SIGSTOP); later it continues with the messages that have arrived.
        error: a call raises, and is retried.
        slow: a call takes twenty times as long.

    Raises:
        UsageError: a rate is not a number from 0 to 1.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    cut: float = 0.0
    partition: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    error: float = 0.0
    slow: float = 0.0

    def __post_init__(self) -> None:
        for kind, rate in self.rates().items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
                raise UsageError(f"faults: {kind} is {rate!r}; expected a probability from 0 to 1")

    def __str__(self) -> str:
        """Return the faults as text that `parse` reads: "drop=0.1,crash=0.05", or "none"."""
        return ",".join(f"{kind}={float(rate)!r}" for kind, rate in self.rates().items() if rate) or "none"

    def rates(self) -> dict[str, float]:
        """Return the rate of each kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse faults: "drop=0.1,crash=0.05", or "none".

        Raises:
            UsageError: a kind is unknown or named twice, or a rate is not a probability.
        """
        rates: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            kind, equals, value = part.partition("=")
            if part == "none":
                continue
            try:
                rate = float(value) if equals else None
            except ValueError:
                rate = None
            if rate is None or kind in rates:
                raise UsageError(f"faults: cannot parse {part!r}; expected KIND=RATE, each kind once")
            rates[kind] = rate
        return cls.of(rates)

    @classmethod
    def of(cls, rates: Mapping[str, float]) -> Self:
        """Return faults with these rates by kind.

        Raises:
            UsageError: a kind is unknown, or a rate is not a probability.
        """
        kinds = [field.name for field in fields(cls)]
        for kind in rates:
            if kind not in kinds:
                hint = did_you_mean(kind, kinds) or "."
                raise UsageError(f"faults: there is no kind {kind!r}{hint} There are: {', '.join(kinds)}")
        return cls(**rates)

    @classmethod
    def draw(cls, random: Random) -> Self:
        """Draw some kinds of faults, and their rates."""
        return cls(**{f.name: random.choice(_DRAWN_RATES) for f in fields(cls) if random.random() < 0.3})


USUAL_FAULTS = Faults(
    drop=0.01, duplicate=0.01, delay=0.02, cut=0.01, partition=0.01, crash=0.02, pause=0.02, slow=0.05
)
"""Faults of the simulation of a spec for which none are chosen."""
