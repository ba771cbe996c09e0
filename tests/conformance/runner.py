"""Replays cases one after the other and keeps the account."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.conformance import families, jax_deviations
from tests.conformance.cases import Case, Deviation, Json, Outcome, Skip
from tests.conformance.compare import describe, difference
from tests.conformance.families import Family
from tests.conformance.namedtuples import importable, shapes
from tests.conformance.session import Session

CLOSE_S = 30.0
"""How long closing a cluster may take before the runner gives up."""

NOTHING_TO_COPY = frozenset({"ProcessCrash", "CaseTimeout"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one case.

    Args:
        reason: why it was skipped, or how the outcome differs.
        expected: what was expected, the deviations applied.
        outcome: what happened, in one line; "" where nothing was replayed.
        deviations: names of the rules that changed the expectation.
        replayed: what happened; None where nothing was replayed.
    """

    case: Case
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""
    expected: Json = None
    outcome: str = ""
    deviations: tuple[str, ...] = ()
    replayed: Outcome | None = field(default=None, repr=False)


@dataclass(slots=True)
class Account:
    """All verdicts of a run."""

    verdicts: list[Verdict] = field(default_factory=list)

    def count(self, status: str, family: str | None = None) -> int:
        """Return the number of cases with a status, of one family or of all."""
        return sum(
            verdict.status == status and (family is None or verdict.case.family == family)
            for verdict in self.verdicts
        )

    @property
    def closing_line(self) -> str:
        """`N passed, N failed, N skipped`."""
        return ", ".join(f"{self.count(status)} {status}" for status in ("passed", "failed", "skipped"))

    def deviation_counts(self) -> Counter[str]:
        """Return how many cases each rule changed, passed and failed ones."""
        return Counter(name for verdict in self.verdicts for name in verdict.deviations)

    def skip_counts(self) -> Counter[str]:
        """Return how many cases were skipped for each reason."""
        return Counter(verdict.reason for verdict in self.verdicts if verdict.status == "skipped")


async def replay_all(
    cases: Iterable[Case],
    *,
    timeout_s: float,
    registry: Mapping[str, Family] | None = None,
    session: Session | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Account:
    """Replay cases in order, with one session.

    Args:
        cases: what to replay.
        timeout_s: limit of one case.
        registry: the families; default: all.
        session: default: a new one.
        on_verdict: called after each case.
    """
    registry = families.registry() if registry is None else registry
    account = Account()
    cases = list(cases)
    classes = {shape for case in cases for shape in shapes(dict(case.call))}
    with importable(classes):
        async with session or Session() as live:
            for case in cases:
                verdict = await replay_one(case, registry, live, timeout_s)
                account.verdicts.append(verdict)
                on_verdict(verdict)
    return account


async def replay_one(
    case: Case, registry: Mapping[str, Family], session: Session, timeout_s: float
) -> Verdict:
    """Replay one case and judge it."""
    if isinstance(case.expect, Mapping) and case.expect.get("error") in NOTHING_TO_COPY:
        return Verdict(case, "skipped", f"TensorFlow itself ended with {case.expect['error']}")
    family = registry.get(case.family)
    if family is None:
        return Verdict(case, "skipped", f"unknown family {case.family}")
    try:
        rules = [*family.deviations, *(jax_deviations.RULES if session.jax else ())]
        expected, local_results, names = expectation(case, rules)
    except Skip as skip:
        return Verdict(case, "skipped", str(skip))
    except Exception as error:
        return Verdict(case, "failed", f"a rule raised {type(error).__name__}: {error}", case.expect)
    # A replay that blocks the event loop can't be cancelled: then the whole run ends, and says where.
    faulthandler.dump_traceback_later(2 * timeout_s + CLOSE_S, exit=True, file=sys.__stderr__)
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await family.replay(case, session)
    except Skip as skip:
        return Verdict(case, "skipped", str(skip))
    except TimeoutError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await session.discard()
        return Verdict(case, "failed", f"no outcome within {timeout_s:g} s", expected, "", names)
    except Exception as error:
        reason = f"the replay itself raised {type(error).__name__}: {error}"
        return Verdict(case, "failed", reason, expected, "", names)
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        reason = judge(case, outcome, expected, local_results, exact=bool(names))
    except Exception as error:
        reason = f"the comparison raised {type(error).__name__}: {error}"
    status: Literal["passed", "failed"] = "failed" if reason else "passed"
    return Verdict(case, status, reason, expected, describe(outcome.result), names, outcome)


def expectation(case: Case, deviations: Iterable[Deviation]) -> tuple[Json, Json, tuple[str, ...]]:
    """Return what pipedist must answer, for `expect` and `expect_local_results`, and by which rules.

    Raises:
        TypeError: what a rule answers is no JSON.
    """
    expected, local_results, names = case.expect, case.expect_local_results, []
    for rule in deviations:
        changed = rule.expected(case, expected)
        if changed != expected:
            names.append(rule.name)
            expected = changed
            if rule.expected_local_results is not None and local_results is not None:
                local_results = rule.expected_local_results(case, expected)
    json.dumps([expected, local_results])
    return expected, local_results, tuple(names)


def judge(case: Case, outcome: Outcome, expected: Json, local_results: Json, *, exact: bool) -> str:
    """Return how an outcome differs from the expectation, "" where it does not.

    Args:
        exact: only `expected` will do, because a deviation is pipedist's own word; otherwise what
            TensorFlow answered when traced is as good.
    """
    own_error = raises_on_purpose(case.call)
    reason = difference(expected, outcome.result, exact_error=own_error) or ""
    if reason and not exact:
        for other in (case.expect_function, case.expect_outer_function):
            if other is not None and difference(other, outcome.result, exact_error=own_error) is None:
                reason = ""
    if not reason and local_results is not None and outcome.local_results is not None:
        reason = (
            difference(local_results, outcome.local_results, exact_error=own_error, path="local_results")
            or ""
        )
    return reason


def raises_on_purpose(call: Json) -> bool:
    """Return whether a call contains a program with `["raise", CLASS, TEXT]`."""
    if isinstance(call, Mapping):
        return any(raises_on_purpose(part) for part in call.values())
    if isinstance(call, list):
        if len(call) == 3 and call[0] == "raise":
            return True
        return any(raises_on_purpose(part) for part in call)
    return False
