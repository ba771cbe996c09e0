"""What the seeded worlds are made of, and the oracle's books about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from pipedist.scheduler import PassSettings
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

ALWAYS = 1_000_000


class Violation(AssertionError):
    """The scheduler did something that it must not, or did not do what it must."""


@dataclass(slots=True)
class Fate:
    """What happens when a call is executed."""

    raises: int = 0
    kills: int = 0
    retries: int = 0
    hangs: int = 0

    @property
    def hopeless(self) -> bool:
        return self.raises >= ALWAYS or self.kills >= ALWAYS


@dataclass(slots=True)
class Held:
    """The oracle's own entry of a lease."""

    id: int
    pass_id: int
    next: int
    hi: int
    serial: int = 0
    """Of its gang."""


@dataclass(slots=True)
class GangBook:
    """The oracle's own entry of a gang that is not over."""

    pass_id: int
    lo: int
    hi: int
    parts: tuple[cmd.GangPart, ...]
    reported: set[int] = field(default_factory=set)
    raised: list[ev.CallFailed] = field(default_factory=list)
    bytes: int = 0
    doomed: bool = False
    """Too many workers have died under it."""

    @property
    def calls(self) -> set[int]:
        return set(range(self.lo, self.hi))

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(part.worker for part in self.parts)


@dataclass(slots=True)
class Errand:
    """A lease as its worker sees it."""

    lease: int
    pass_id: int
    lo: int
    hi: int
    serial: int = 0
    members: int = 0


@dataclass(slots=True)
class Seat:
    """What the oracle knows of a worker's name."""

    managed: bool
    incarnation: int = 0
    ready: bool = False
    leases: list[Held] = field(default_factory=list)
    bound: set[int] = field(default_factory=set)
    unsure: bool = False


@dataclass(slots=True)
class Process:
    """One incarnation of a worker, executing leases in order."""

    name: str
    incarnation: int
    supervised: bool
    alive: bool = True
    joined: bool = False
    busy: bool = False
    stalled_until: float = 0.0
    hung: bool = False
    waits: bool = False
    """In a gang, for other members."""
    queue: list[Errand] = field(default_factory=list)
    lease: int = 0
    next_call: int = 0
    finished_lo: int = 0
    """Calls [finished_lo, next_call) of `lease`, the first one, are executed and not reported."""
    busy_ns: int = 0
    last_arrival: float = 0.0
    heard_at: float = 0.0


@dataclass(slots=True)
class Reading:
    """One pass as the world and the oracle see it."""

    id: int
    settings: PassSettings
    parts: list[int]
    fates: dict[int, Fate]
    call_s: float
    step_bytes: int
    call_bytes: int
    meets: bool = False
    """A gang's replicas wait for each other before they end."""
    passed_over: int = 0
    """How often another pass was dealt while this one waited."""
    offered: int = 0
    requested: int = 0
    visible: int = 0
    consumed: int = 0
    result_bytes: int = 0
    waiting: set[int] = field(default_factory=set)
    """Offered calls that no worker has; those beyond a failed step may be forgotten."""
    accepted: set[int] = field(default_factory=set)
    shown: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    raised: Counter[int] = field(default_factory=Counter)
    deaths: Counter[int] = field(default_factory=Counter)
    last_call: int = ALWAYS
    """Calls beyond this one are of no use: one of its step failed for good."""
    ended: bool = False
    over: str = ""
    held: bool = False
    quiet: bool = False
    closed: bool = False

    def tried(self, call: int) -> int:
        if self.settings.gang:
            call -= call % self.settings.replicas
        return self.raised[call] + self.deaths[call]

    @property
    def deals(self) -> bool:
        return not self.held and not self.closed and any(c <= self.last_call for c in self.waiting)

    def give_up(self, call: int) -> None:
        if self.settings.fail_fast:
            replicas = self.settings.replicas
            self.last_call = min(self.last_call, (call // replicas + 1) * replicas - 1)

    @property
    def steps(self) -> int:
        return len(self.parts)

    def hopeless(self, step: int) -> list[int]:
        first = step * self.settings.replicas
        calls = range(first, first + self.parts[step])
        return [c for c in calls if c in self.fates and self.fates[c].hopeless]

    @property
    def limit(self) -> int:
        """Steps from this one on are of no use."""
        if not self.settings.fail_fast:
            return self.steps
        return next((s + 1 for s in range(self.steps) if self.hopeless(s)), self.steps)

    @property
    def all_shown(self) -> bool:
        return len(self.shown) + len(self.failed) >= self.limit


def draw_reading(pass_id: int, random: Random) -> Reading:
    """Return a pass with its steps and the fates of its calls."""
    replicas = random.randint(1, 4)
    ordered = random.random() < 0.8
    retries = random.randint(0, 2)
    settings = PassSettings(
        replicas,
        ordered=ordered,
        fail_fast=ordered and random.random() < 0.6,
        pulled=ordered and random.random() < 0.8,
        priority=random.choice([1, 1, 0]),
        gang=random.random() < 0.4,
    )
    meets = settings.gang and random.random() < 0.7
    parts = [
        replicas if settings.gang or random.random() < 0.8 else random.randint(0, replicas)
        for _ in range(random.choice([0, 3, 8, 16]))
    ]
    calls = [step * replicas + r for step, n in enumerate(parts) for r in range(n)]
    fates: dict[int, Fate] = {}
    doomed = random.random() < 0.4
    kinds = ["raises", "kills", "both", *(["always", "never again"] if doomed else [])]
    for call in random.sample(calls, min(len(calls), random.choice([0, 2, 6]))):
        kind = random.choice([*kinds, *(["hangs"] if meets else [])])
        if settings.gang and any(c // replicas == call // replicas for c in fates):
            continue  # with one of a step it is known which errors there are
        if kind == "hangs":
            fates[call] = Fate(hangs=1)
        elif kind == "raises":
            fates[call] = Fate(raises=random.randint(0, retries), retries=retries)
        elif kind in ("kills", "both"):
            fates[call] = Fate(retries if kind == "both" else 0, kills=1, retries=retries)
        else:
            fates[call] = Fate(raises=ALWAYS, retries=retries if kind == "always" else 0)
    if calls and pass_id == 1 and random.random() < 0.15:
        call = random.choice(calls)
        if settings.gang:
            fates = {c: fate for c, fate in fates.items() if c // replicas != call // replicas}
        fates[call] = Fate(kills=ALWAYS)
    return Reading(
        pass_id,
        settings,
        parts,
        fates,
        call_s=random.choice([0.0, 0.002, 0.02, 0.04, 1.0]),
        step_bytes=random.choice([0, 0, 60]),
        call_bytes=random.choice([0, 10, 200]),
        meets=meets,
    )
