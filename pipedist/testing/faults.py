"""Which faults a simulation injects, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from random import Random
from typing import Self

from pipedist.errors import UsageError

PER_MESSAGE = ("drop", "duplicate", "delay", "reorder", "cut", "partition")
"""Kinds whose rate is a probability for each message."""

PER_TURN = ("crash", "pause")
"""Kinds whose rate is a probability for each turn of a worker: a message, or a slice of calls."""

_DRAWN_RATES = (0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each kind of fault happens, as a probability from 0 to 1.

    ZeroMQ neither loses nor reorders messages of a connection that lives: what it can lose is the
    connection, with all that is under way. So it is in simulations of a spec; the machines alone
    also have to stand what it never does.

    Args:
        drop: a message is lost, and its connection with it; to the machines alone later ones arrive still.
        duplicate: a message arrives twice; soon after, its connection is lost.
        delay: a message, and all after it on its connection, arrives late.
        reorder: a message is overtaken by others; with the machines alone, also by its connection's own.
        cut: a connection is lost; its worker ends, and is replaced.
        partition: nothing gets through for a while, in both directions or only in one.
        crash: a worker's process is killed (SIGKILL).
        pause: a process is stopped (SIGSTOP); awake again it executes what has been waiting for it.
        error: a call raises, and is tried again.
        slow: a call takes twenty times as long.

    Raises:
        UsageError: a rate is no number from 0 to 1.
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
        """Return the faults as `parse` reads them: "drop=0.1,crash=0.05"; "none" if there are none."""
        return ",".join(f"{kind}={float(rate)!r}" for kind, rate in self.rates().items() if rate) or "none"

    def rates(self) -> dict[str, float]:
        """Return the rate of each kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the faults that a text names: "drop=0.1,crash=0.05", or "none".

        Raises:
            UsageError: a kind is unknown or named twice, or a rate is no probability.
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
                raise UsageError(f"faults: {part!r} was not understood; expected KIND=RATE, each kind once")
            rates[kind] = rate
        return cls.of(rates)

    @classmethod
    def of(cls, rates: Mapping[str, float]) -> Self:
        """Return faults by kind.

        Raises:
            UsageError: a kind is unknown, or a rate is no probability.
        """
        kinds = [field.name for field in fields(cls)]
        for kind in rates:
            if kind not in kinds:
                near = get_close_matches(kind, kinds, 1)
                hint = f"; did you mean {near[0]!r}? There are" if near else "; there are"
                raise UsageError(f"faults: there is no kind {kind!r}{hint}: {', '.join(kinds)}")
        return cls(**rates)

    @classmethod
    def draw(cls, random: Random) -> Self:
        """Return a mixture of some kinds."""
        return cls(**{f.name: random.choice(_DRAWN_RATES) for f in fields(cls) if random.random() < 0.3})
