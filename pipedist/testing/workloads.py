"""What a simulation of the machines alone executes: passes whose calls have fates, and no data."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from pipedist.scheduler import PassSettings
from pipedist.testing.faults import Faults

ALWAYS = 1_000_000

SIZES = ((1, 2, 4, 8), (1, 4, 10, 20))
"""Replicas of a pass: of small simulations, and of larger ones."""

_SPECULATION = (1.0, 0.0, 3.0)
"""How many times as long as others a call of a pass may take."""

MEET_OFTEN_MAX = 5
"""Larger gangs seldom meet in collectives, in which every member talks to every other one."""


@dataclass(slots=True)
class Fate:
    """What happens when a call is executed.

    Args:
        raises: so many attempts raise.
        kills: so many attempts kill their worker.
        hangs: so many attempts hang for long; in gangs alone, where others wait for them.
        retries: how often a call that raised may be tried again.
    """

    raises: int = 0
    kills: int = 0
    hangs: int = 0
    retries: int = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether it fails for good."""
        return self.raises > self.retries


@dataclass(slots=True)
class Work:
    """One pass: what it is made of, and how far its reader is.

    Args:
        id: of the pass.
        settings: of the pass.
        parts: calls of each step.
        fates: of calls that are not simply executed.
        call_s: how long a call takes about, seconds.
        step_bytes: input bytes of a step.
        call_bytes: bytes of a call's result.
        collectives: how many each replica of a gang calls.
    """

    id: int
    settings: PassSettings
    parts: list[int]
    fates: dict[int, Fate]
    call_s: float
    step_bytes: int
    call_bytes: int
    collectives: int
    is_ragged: bool = field(init=False)
    """Some steps have fewer calls than others."""
    hopeless: frozenset[int] = field(init=False)
    """Steps that fail for good, if they are executed."""
    end: str = ""
    """How it ended: "complete", "failed", "closed" by its reader, "quiet"; "" while it goes on."""
    is_closed: bool = False
    is_held: bool = False
    offered: int = 0
    requested: int = 0
    """Steps that the scheduler has asked for."""
    consumed: int = 0

    def __post_init__(self) -> None:
        replicas = self.settings.replicas
        self.is_ragged = any(n != replicas for n in self.parts)
        self.hopeless = frozenset(c // replicas for c, fate in self.fates.items() if fate.is_hopeless)

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.parts)

    @property
    def needed(self) -> int:
        """Steps before this one are of use: none comes after one that fails the pass."""
        if self.settings.fail_fast and self.hopeless:
            return min(self.hopeless) + 1
        return self.steps


def draw_works(random: Random, calls: int, faults: Faults) -> list[Work]:
    """Return one or two passes with about so many calls in all."""
    count = random.choice((1, 1, 2))
    return [_draw(number, random, calls // count, faults) for number in range(1, count + 1)]


def _draw(number: int, random: Random, calls: int, faults: Faults) -> Work:
    draw = random.random
    replicas = random.choice(SIZES[calls > 100])
    ordered = draw() < 0.8
    gang = draw() < 0.2
    settings = PassSettings(
        replicas,
        ordered=ordered,
        fail_fast=ordered and draw() < 0.7,
        pulled=ordered and draw() < 0.6,
        priority=1 if draw() < 0.7 else 0,
        gang=gang,
    )
    steps = max(1, calls // replicas)
    parts = [replicas] * steps
    if not gang and draw() < 0.3:
        for step in random.sample(range(steps), min(steps, 3)):
            parts[step] = random.randrange(replicas + 1)
    collectives = random.choice((0, 1, 2) if replicas <= MEET_OFTEN_MAX else (0, 0, 1)) if gang else 0
    fates = _draw_fates(random, parts, settings, faults, meets=collectives > 0)
    if not gang:
        settings = replace(settings, speculation=_SPECULATION[(number + replicas + len(fates)) % 3])
    return Work(
        number,
        settings,
        parts,
        fates,
        call_s=random.choice((0.0, 0.001, 0.002, 0.02, 0.5)),
        step_bytes=random.choice((0, 0, 60)),
        call_bytes=random.choice((0, 10, 200)),
        collectives=collectives,
    )


def _draw_fates(
    random: Random, parts: list[int], settings: PassSettings, faults: Faults, *, meets: bool
) -> dict[int, Fate]:
    """Return the fates of some calls; in a gang at most one a step, so that it is known what raises."""
    replicas, retries = settings.replicas, random.randrange(3)
    steps = len(parts)
    several = 0 if random.random() < 0.4 else random.randrange(4)
    chosen = random.sample(range(steps), min(steps, several + int(faults.error * steps)))
    fates: dict[int, Fate] = {}
    kinds = ["raises", "kills", "both"] + ["hangs"] * meets
    if random.random() < 0.25:
        kinds += ["hopeless", "hopeless"]
    for step in chosen:
        if not parts[step]:
            continue
        call = step * replicas + random.randrange(parts[step])
        kind = random.choice(kinds)
        if kind == "hopeless":
            fates[call] = Fate(raises=ALWAYS, retries=retries)
        elif kind == "hangs":
            fates[call] = Fate(hangs=1)
        else:
            raises = random.randint(0, retries) if kind != "kills" else 0
            fates[call] = Fate(raises, kills=int(kind != "raises"), retries=retries)
    return fates
