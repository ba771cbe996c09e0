"""The passes of a simulation, and the fate of each of their calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from pipedist.scheduler import PassSettings
from pipedist.testing import Faults

ALWAYS = 1_000_000
STAGES = ("s", "t")
"""The stages of a call: each may raise, and has its own retries."""

SMALL_CALLS = 100
"""Simulations of more calls are larger ones."""

REPLICAS = ((1, 2, 3, 4, 8), (1, 4, 10, 20))
"""Replicas of a pass: in small simulations, and in larger ones."""

_SPECULATION = (1.0, 0.0, 3.0)
_AT_ONCE = (0, 0, 0, 3, 32)

ELEMENTS = (0, 1, 2, 3, 7, 8, 13)
"""Elements of a call with poison."""

COLLECTIVES_REPLICAS_MAX = 5
"""Larger gangs rarely call collectives, in which each member exchanges messages with each other one."""


@dataclass(slots=True)
class Poison:
    """Elements of a call that cannot be processed.

    Args:
        how: "raises", "kills" or "takes too long".
        culprits: positions of the elements that fail alone.
        together: positions of elements that fail if all of them are present.
        elements: number of elements; 0: the call cannot be divided.
    """

    how: str
    culprits: frozenset[int]
    together: frozenset[int]
    elements: int

    def fails(self, spans: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a call with these spans of elements fails; no spans: all elements."""
        present = {p for lo, hi in spans or ((0, max(1, self.elements)),) for p in range(lo, hi)}
        if not self.elements:
            return True
        return bool(present & self.culprits) or (len(self.together) > 0 and self.together <= present)

    def expected(self) -> tuple[frozenset[int], bool]:
        """Return the elements that must be found as culprits, and whether all elements are quarantined."""
        if self.elements == 1:
            return frozenset({0}), False
        rest = tuple((p, p + 1) for p in range(self.elements) if p not in self.culprits)
        whole = not self.culprits or (len(rest) > 0 and self.fails(rest))
        return (frozenset(), True) if whole else (self.culprits, False)


@dataclass(slots=True)
class Fate:
    """What happens when a call is executed.

    Args:
        raises: number of attempts that raise.
        kills: number of attempts that kill their worker.
        hangs: number of attempts that hang; only in gangs with collectives, where other members wait for them.
        retries: number of retries after errors.
        quarantine: after the last retry its elements are quarantined; otherwise the call fails.
        poison: elements that cannot be processed.
    """

    raises: int = 0
    kills: int = 0
    hangs: int = 0
    retries: int = 0
    quarantine: bool = False
    poison: Poison | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call is simply executed from now on."""
        return not (self.raises or self.kills or self.hangs or self.poison)

    def raise_once(self) -> None:
        """Count an attempt that raised."""
        self.raises -= 0 < self.raises < ALWAYS

    def kill_once(self) -> None:
        """Count an attempt that killed its worker."""
        self.kills -= 0 < self.kills < ALWAYS

    @property
    def is_hopeless(self) -> bool:
        """Whether the call fails permanently."""
        return (self.raises > self.retries or self.kills >= ALWAYS) and not self.quarantine


NO_FATE = Fate()


@dataclass(slots=True)
class Workload:
    """One pass.

    Args:
        id: number of the pass.
        settings: its settings.
        parts: number of calls of each step.
        fates: fates of the calls that are not simply executed.
        call_s: average duration of a call, seconds.
        step_bytes: input bytes of a step.
        call_bytes: bytes of a call's result.
        collectives: number of collectives that each replica of a gang calls.
    """

    id: int
    settings: PassSettings
    parts: list[int]
    fates: dict[int, Fate]
    call_s: float
    step_bytes: int
    call_bytes: int
    collectives: int = 0
    is_ragged: bool = field(init=False)
    """Some steps have fewer calls than others."""
    hopeless: frozenset[int] = field(init=False)
    """Calls that fail permanently when they are executed."""

    def __post_init__(self) -> None:
        replicas = self.settings.replicas
        self.is_ragged = any(n != replicas for n in self.parts)
        self.hopeless = frozenset(call for call, fate in self.fates.items() if fate.is_hopeless)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.parts)

    @property
    def needed(self) -> int:
        """Number of steps that become visible: none after the step that fails the pass."""
        if self.settings.ordered and self.hopeless:
            return min(self.hopeless) // self.settings.replicas + 1
        return self.steps

    def calls(self, step: int) -> range:
        """Return the calls of a step."""
        first = step * self.settings.replicas
        return range(first, first + self.parts[step])

    def hopeless_of(self, step: int) -> list[int]:
        """Return the calls of a step that fail permanently."""
        return [call for call in self.calls(step) if call in self.hopeless]

    def poison(self, call: int) -> Poison | None:
        return self.fates.get(call, NO_FATE).poison

    def quarantined(self, call: int) -> tuple[frozenset[int], bool]:
        """Return the elements of a call that must be quarantined, and whether that is all of them."""
        fate = self.fates.get(call)
        if fate is None:
            return frozenset(), False
        if fate.poison is not None:
            return (frozenset(), True) if self.settings.gang else fate.poison.expected()
        return frozenset(), fate.quarantine and fate.raises >= ALWAYS


def draw_workloads(random: Random, calls: int, faults: Faults, *, few_faults: bool) -> list[Workload]:
    """Draw one or two passes with about this many calls in total.

    Args:
        few_faults: calls may fail because workers die; otherwise only because they raise or take too long.
    """
    count = random.choice((1, 2))
    return [
        _draw(number, random, calls // count, faults, few_faults=few_faults) for number in range(1, count + 1)
    ]


def _draw(number: int, random: Random, calls: int, faults: Faults, *, few_faults: bool) -> Workload:
    draw = random.random
    replicas = random.choice(REPLICAS[calls > SMALL_CALLS])
    ordered = draw() < 0.8
    gang = draw() < 0.3
    settings = PassSettings(
        replicas,
        ordered=ordered,
        pulled=ordered and draw() < 0.7,
        priority=1 if draw() < 0.7 else 0,
        gang=gang,
        quarantine=draw() < (0.4 if few_faults else 0.2),
    )
    steps = max(1, calls // replicas) if draw() < 0.95 else 0
    parts = [replicas] * steps
    if not gang and draw() < 0.3:
        for step in random.sample(range(steps), min(steps, 3)):
            parts[step] = random.randrange(replicas + 1)
    counts = (0, 1, 2) if replicas <= COLLECTIVES_REPLICAS_MAX else (0, 0, 1)
    collectives = random.choice(counts) if gang else 0
    fates = _draw_fates(
        random, parts, settings, faults, collectives=collectives > 0, few_faults=few_faults, number=number
    )
    if not gang and not few_faults:
        settings = replace(settings, speculation=_SPECULATION[(number + replicas + len(fates)) % 3])
    if (
        not gang
        and settings.speculation != 1.0
        and (at_once := _AT_ONCE[(number + 3 * replicas + len(fates)) % len(_AT_ONCE)])
    ):
        concurrency = at_once * (len(fates) % 2)
        speculation = 0.0 if concurrency else settings.speculation
        settings = replace(
            settings,
            at_once=at_once,
            concurrency=concurrency,
            speculation=speculation,
            limits=(at_once, 0, 3) if number % 2 else (),
        )
    return Workload(
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
    random: Random,
    parts: list[int],
    settings: PassSettings,
    faults: Faults,
    *,
    collectives: bool,
    few_faults: bool,
    number: int,
) -> dict[int, Fate]:
    """Draw the fates of some calls; at most one per step of a gang, so that its error is known."""
    replicas, gang, quarantine = settings.replicas, settings.gang, settings.quarantine
    retries = random.randrange(4)
    calls = [step * replicas + r for step, count in enumerate(parts) for r in range(count)]
    is_hopeless = random.random() < (0.5 if quarantine else 0.3)
    several = random.choice((2, 6) if quarantine or is_hopeless else (0, 0, 1, 2, 3, 6))
    kinds = ["raises", "kills", "both"] + ["hangs"] * 4 * (collectives and replicas > 1)
    kinds += ["always", "without retries"] * is_hopeless
    fates: dict[int, Fate] = {}
    steps: set[int] = set()
    for call in random.sample(calls, min(len(calls), several + int(faults.error * len(parts)))):
        if gang and call // replicas in steps:
            continue
        steps.add(call // replicas)
        kind = random.choice(kinds)
        if quarantine and random.random() < (0.3 if gang else 0.7):
            fates[call] = _draw_poison(random, random.randint(0, retries), gang=gang, kills=few_faults)
        elif kind == "hangs":
            fates[call] = Fate(hangs=1)
        elif kind == "always":
            fates[call] = Fate(raises=ALWAYS, retries=retries)
        elif kind == "without retries":
            fates[call] = Fate(raises=ALWAYS)
        else:
            raises = random.randint(0, retries) if kind != "kills" else 0
            fates[call] = Fate(raises, kills=int(kind != "raises"), retries=retries)
    if calls and not gang and is_hopeless:  # while later calls back off, or are bisected
        fates[random.choice(calls[: 1 + len(calls) // 3])] = Fate(raises=ALWAYS, retries=3)
    if calls and few_faults and number == 1 and not quarantine and random.random() < 0.15:
        call = random.choice(calls)
        if gang:
            fates = {c: fate for c, fate in fates.items() if c // replicas != call // replicas}
        fates[call] = Fate(kills=ALWAYS)
    return fates


def _draw_poison(random: Random, retries: int, *, gang: bool, kills: bool) -> Fate:
    """Draw the fate of a call, or of a gang's step, with elements that cannot be processed."""
    if gang:
        return Fate(raises=ALWAYS, retries=retries, quarantine=True)
    elements = random.choice(ELEMENTS)
    places = range(elements)
    culprits = frozenset(random.sample(places, min(elements, random.choice([0, 1, 1, 2, elements]))))
    together = frozenset(random.sample(places, 2)) if elements > 2 and random.random() < 0.3 else frozenset()
    if elements == 1 or (elements and not culprits and not together):
        culprits = frozenset({random.choice(places)})
    how = random.choice(["raises", "raises", "takes too long", *(["kills"] * kills)])
    return Fate(retries=retries, quarantine=True, poison=Poison(how, culprits, together, elements))
