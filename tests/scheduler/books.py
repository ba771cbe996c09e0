"""What the seeded worlds are made of, and the oracle's books about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from pipedist.scheduler import PassSettings, SchedulerLimits
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev

ALWAYS = 1_000_000
STAGES = ("s", "t")
"""Of a call: either may raise, each with the retries of the call's fate."""


class Violation(AssertionError):
    """The scheduler did something that it must not, or did not do what it must."""


@dataclass(slots=True)
class Fate:
    """What happens when a call is executed."""

    raises: int = 0
    kills: int = 0
    retries: int = 0
    hangs: int = 0

    quarantine: bool = False
    """Raised too often, it costs its elements, and not its pass."""
    poison: Poison | None = None

    @property
    def hopeless(self) -> bool:
        return (self.raises >= ALWAYS or self.kills >= ALWAYS) and not self.quarantine


@dataclass(slots=True)
class Poison:
    """Elements of a call that can't be processed.

    Args:
        how: raises, kills or takes too long.
        guilty: positions of those that fail alone.
        together: positions of those that fail where all of them are there.
        elements: how many there are; 0: they can't be told apart.
    """

    how: str
    guilty: frozenset[int]
    together: frozenset[int]
    elements: int

    def fails(self, spans: tuple[tuple[int, int], ...]) -> bool:
        there = {p for lo, hi in spans or ((0, max(1, self.elements)),) for p in range(lo, hi)}
        if not self.elements:
            return True
        return bool(there & self.guilty) or (len(self.together) > 0 and self.together <= there)

    def foretold(self) -> tuple[frozenset[int], bool]:
        """Return the elements that must be found guilty, and whether all of them are set aside."""
        if self.elements == 1:
            return frozenset({0}), False
        rest = tuple((p, p + 1) for p in range(self.elements) if p not in self.guilty)
        whole = not self.guilty or (len(rest) > 0 and self.fails(rest))
        return (frozenset(), True) if whole else (self.guilty, False)


@dataclass(slots=True)
class Held:
    """The oracle's own entry of a lease."""

    id: int
    pass_id: int
    next: int
    hi: int
    serial: int = 0
    """Of its gang."""
    probe: tuple[int, int] | None = None
    """What it tries of its only call."""


@dataclass(slots=True)
class GangBook:
    """The oracle's own entry of a gang that is not over."""

    pass_id: int
    lo: int
    hi: int
    parts: tuple[cmd.GangAssignment, ...]
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
    elements: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Seat:
    """What the oracle knows of a worker's name."""

    managed: bool
    incarnation: int = 0
    ready: bool = False
    leases: list[Held] = field(default_factory=list)
    bound: set[int] = field(default_factory=set)
    unsure: bool = False
    suspended: int = 0
    """The lease of no use that it may still run: it is given nothing until it has heard of that."""


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
    cancels: list[int] = field(default_factory=list)
    """Leases whose cancellation it has not read: it reads between calls."""


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
    raised: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By call, how often each stage has raised."""
    deaths: Counter[int] = field(default_factory=Counter)
    resting: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """Calls that are tried again, and from when on."""
    suspects: set[int] = field(default_factory=set)
    """Calls whose guilty elements are looked for."""
    trying: set[tuple[int, tuple[int, int]]] = field(default_factory=set)
    """Probes that a worker has."""
    probe_raised: Counter[tuple[int, tuple[int, int], str]] = field(default_factory=Counter)
    """How often each of them has raised in each stage."""
    probes_resting: dict[tuple[int, tuple[int, int]], float] = field(default_factory=dict)
    """Probes of one element that are tried again, and from when on."""
    before: Counter[int] = field(default_factory=Counter)
    """Attempts of cleared calls, with all elements."""
    cleared: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Calls that are executed without their guilty elements, and with which."""
    aside: dict[int, cmd.CallsQuarantined] = field(default_factory=dict)
    """By call, what was set aside."""
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
        return self.before[call] + self.raised[call].total() + self.deaths[call]

    @property
    def deals(self) -> bool:
        return not self.held and not self.closed and any(c <= self.last_call for c in self.waiting)

    def foretold(self, call: int) -> tuple[frozenset[int], bool]:
        """Return the positions that must be set aside of a call, and whether all of it is."""
        fate = self.fates.get(call)
        if fate is None:
            return frozenset(), False
        if fate.poison is not None:
            return (frozenset(), True) if self.settings.gang else fate.poison.foretold()
        return frozenset(), fate.quarantine and fate.raises >= ALWAYS

    def give_up(self, call: int) -> None:
        if self.settings.fail_fast:
            replicas = self.settings.replicas
            self.last_call = min(self.last_call, (call // replicas + 1) * replicas - 1)
            self.resting = [(due, calls) for due, calls in self.resting if min(calls) <= self.last_call]
            self._forget_probes(lambda call: call > self.last_call)

    def _forget_probes(self, over: Callable[[int], bool]) -> None:
        self.probes_resting = {p: due for p, due in self.probes_resting.items() if not over(p[0])}

    def end_search(self, call: int) -> None:
        """It is known what becomes of a suspect."""
        self.suspects.discard(call)
        self._forget_probes(lambda other: other == call)

    def rest_probe(
        self,
        probe: tuple[int, tuple[int, int]],
        event: ev.CallFailed | ev.WorkerLost,
        now: float,
        limits: SchedulerLimits,
    ) -> None:
        """A probe of one element raised."""
        self.probe_raised[*probe, event.stage] += 1
        raised = self.probe_raised[*probe, event.stage]
        if 1 < raised <= event.retries and probe[0] <= self.last_call:
            self.probes_resting[probe] = now + min(limits.backoff_s_max, limits.backoff_s * 2 ** (raised - 2))

    def rest(self, calls: set[int], raised: int, now: float, limits: SchedulerLimits) -> None:
        """Calls raised for the `raised`-th time, and are tried again."""
        if min(calls) > self.last_call:
            return
        if raised == 1:
            self.waiting |= calls
        else:
            rest_s = min(limits.backoff_s_max, limits.backoff_s * 2 ** (raised - 2))
            self.resting.append((now + rest_s, frozenset(calls)))

    def rouse(self, now: float) -> bool:
        """Let those wait that have rested; return whether there were any."""
        rested: list[object] = [p for p, due in self.probes_resting.items() if due <= now]
        self.probes_resting = {p: due for p, due in self.probes_resting.items() if due > now}
        rested += [calls for due, calls in self.resting if due <= now]
        self.waiting |= {call for due, calls in self.resting if due <= now for call in calls}
        self.resting = [(due, calls) for due, calls in self.resting if due > now]
        return bool(rested)

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
    retries = random.randint(0, 3)
    gang, quarantine = random.random() < 0.45, random.random() < 0.45
    settings = PassSettings(
        replicas,
        ordered=ordered,
        fail_fast=ordered and random.random() < 0.7,
        pulled=ordered and random.random() < 0.8,
        priority=random.choice([1, 1, 0]),
        gang=gang,
        quarantine=quarantine,
    )
    meets = settings.gang and random.random() < 0.7
    parts = [
        replicas if settings.gang or random.random() < 0.8 else random.randint(0, replicas)
        for _ in range(random.choice([0, 3, 8, 16] if not quarantine else [3, 8, 16]))
    ]
    calls = [step * replicas + r for step, n in enumerate(parts) for r in range(n)]
    fates: dict[int, Fate] = {}
    doomed = random.random() < (0.6 if quarantine else 0.4)
    kinds = ["raises", "kills", "both", *(["always", "never again"] if doomed else [])]
    for call in random.sample(calls, min(len(calls), random.choice([0, 2, 6] if not quarantine else [2, 6]))):
        kind = random.choice([*kinds, *(["hangs"] * 4 if meets else [])])
        if settings.gang and any(c // replicas == call // replicas for c in fates):
            continue  # with one of a step it is known which errors there are
        if settings.quarantine and random.random() < (0.3 if settings.gang else 0.7):
            fates[call] = draw_poison(settings, random.randint(0, retries), random)
            continue
        if kind == "hangs":
            fates[call] = Fate(hangs=1)
        elif kind == "raises":
            fates[call] = Fate(raises=random.randint(0, retries), retries=retries)
        elif kind in ("kills", "both"):
            fates[call] = Fate(retries if kind == "both" else 0, kills=1, retries=retries)
        else:
            fates[call] = Fate(raises=ALWAYS, retries=retries if kind == "always" else 0)
    if calls and doomed and settings.quarantine and not settings.gang:
        fates[random.choice(calls[: 1 + len(calls) // 3])] = Fate(raises=ALWAYS, retries=3)
    if calls and pass_id == 1 and not settings.quarantine and random.random() < 0.15:
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


def draw_poison(settings: PassSettings, retries: int, random: Random) -> Fate:
    """Return the fate of a call, or of a gang's step, with elements that can't be processed."""
    if settings.gang:
        return Fate(raises=ALWAYS, retries=retries, quarantine=True)
    elements = random.choice([0, 1, 2, 3, 7, 8])
    places = range(elements)
    guilty = frozenset(random.sample(places, min(elements, random.choice([0, 1, 1, 2, elements]))))
    together = frozenset(random.sample(places, 2)) if elements > 2 and random.random() < 0.3 else frozenset()
    if elements and not guilty and not together:
        guilty = frozenset({random.choice(places)})
    if elements == 1:
        guilty = frozenset({0})
    how = random.choice(["raises", "raises", "kills", "takes too long"])
    return Fate(retries=retries, quarantine=True, poison=Poison(how, guilty, together, elements))
