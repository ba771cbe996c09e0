"""`python -m tests.conformance DIR`: replays conformance cases on real worker processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import families, jax_deviations
from tests.conformance.cases import Deviation, read_cases
from tests.conformance.corruption import Corruptions
from tests.conformance.runner import Account, Verdict, replay_all
from tests.conformance.session import Session

FAILURES_SHOWN_MAX = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print the account, and return the exit code: 1 if any case failed, 2 for a usage error."""
    options = _parser().parse_args(arguments)
    if options.list_deviations:
        _list_deviations()
        return 0
    if options.directory is None or not options.directory.is_dir():
        print(f"not a folder of case files: {options.directory}", file=sys.stderr)
        return 2
    try:
        cases = list(read_cases(options.directory))
    except (OSError, ValueError, KeyError) as error:
        print(f"the cases can't be read: {error}", file=sys.stderr)
        return 2
    if options.family:
        cases = [case for case in cases if case.family in options.family]
    if options.id:
        cases = [case for case in cases if case.id == options.id]
    if not cases:
        print("no case is selected", file=sys.stderr)
        return 2
    # With `--json -` standard output is the document; the account for people goes to standard error.
    out = sys.stderr if options.json == "-" else sys.stdout

    def on_verdict(verdict: Verdict) -> None:
        if options.id:
            print(f"{verdict.case.id} {verdict.status}: {verdict.reason or verdict.outcome}", file=out)

    if options.jax:  # on CPU devices, as many as the largest case has replicas
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    session = Session(jax=options.jax)
    account = asyncio.run(
        replay_all(cases, timeout_s=options.timeout_s, session=session, on_verdict=on_verdict)
    )
    if options.json:
        document = json.dumps(summary(account), indent=1)
        if options.json == "-":
            print(document)
        else:
            Path(options.json).write_text(document + "\n")
    print(report(account), file=out)
    if options.corrupt is not None:
        corrupted = Corruptions()
        registry = families.registry()
        for verdict in account.verdicts:
            corrupted.add(verdict, registry[verdict.case.family], options.corrupt)
        print(corrupted.report(), file=out)
        return 1 if account.count("failed") or corrupted.unnoticed else 0
    return 1 if account.count("failed") else 0


def summary(account: Account) -> dict[str, object]:
    """Return the account as plain JSON."""
    rules = {rule.name: rule for rule in _rules()}
    names = sorted({verdict.case.family for verdict in account.verdicts})
    statuses = ("passed", "failed", "skipped")
    return {
        "format": 1,
        "totals": {status: account.count(status) for status in statuses},
        "families": {name: {status: account.count(status, name) for status in statuses} for name in names},
        "failures": [
            {
                "id": verdict.case.id,
                "family": verdict.case.family,
                "title": verdict.case.title,
                "reason": verdict.reason,
                "expected": verdict.expected,
                "outcome": verdict.outcome,
                "deviations": list(verdict.deviations),
            }
            for verdict in account.verdicts
            if verdict.status == "failed"
        ],
        "deviations": [
            {"rule": name, "row": rules[name].row if name in rules else None, "cases": count}
            for name, count in sorted(account.deviation_counts().items())
        ],
        "skips": [
            {"id": verdict.case.id, "reason": verdict.reason}
            for verdict in account.verdicts
            if verdict.status == "skipped"
        ],
    }


def report(account: Account) -> str:
    """Return the account for people; its last line is `N passed, N failed, N skipped`."""
    lines = []
    failed = [verdict for verdict in account.verdicts if verdict.status == "failed"]
    for verdict in failed[:FAILURES_SHOWN_MAX]:
        lines.append(f"FAILED {verdict.case.id} ({verdict.case.title}): {verdict.reason}")
        lines += [f"    by the rule {name!r}" for name in verdict.deviations]
    if len(failed) > FAILURES_SHOWN_MAX:
        lines.append(f"... and {len(failed) - FAILURES_SHOWN_MAX} more failures (--json lists all)")
    lines.append("")
    lines.append(f"{'family':24} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for name in sorted({verdict.case.family for verdict in account.verdicts}):
        passed, bad, skipped = (account.count(status, name) for status in ("passed", "failed", "skipped"))
        lines.append(f"{name:24} {passed:7} {bad:7} {skipped:8}")
    if account.deviation_counts():
        lines += ["", "deviations (cases checked against pipedist's own expectation):"]
        rows = {rule.name: rule.row for rule in _rules()}
        lines += [
            f"{count:6}  row {rows.get(name, '?'):>2}  {name}"
            for name, count in sorted(account.deviation_counts().items())
        ]
    if account.skip_counts():
        lines += ["", "skipped:"]
        lines += [f"{count:6}  {reason}" for reason, count in sorted(account.skip_counts().items())]
    lines += ["", account.closing_line]
    return "\n".join(lines)


def _list_deviations() -> None:
    for family in families.registry().values():
        for rule in family.deviations:
            print(f"{family.name:24} row {rule.row:>2}  {rule.name}")
    for rule in jax_deviations.RULES:
        print(f"{'all, with --jax':24} row {rule.row:>2}  {rule.name}")


def _rules() -> list[Deviation]:
    own = [rule for family in families.registry().values() for rule in family.deviations]
    return [*own, *jax_deviations.RULES]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="folder with *.json case files")
    parser.add_argument(
        "--json", metavar="FILE", help="write a machine-readable account; - for standard output"
    )
    parser.add_argument("--family", action="append", metavar="F", help="only this family; may be repeated")
    parser.add_argument("--jax", action="store_true", help="replay the mirrored cases on a TPUStrategy")
    parser.add_argument("--id", help="only this case")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of one case (default 60)")
    parser.add_argument(
        "--corrupt",
        type=int,
        metavar="SEED",
        help="also corrupt what passed cases expect, and count what is noticed",
    )
    parser.add_argument("--list-deviations", action="store_true", help="print the deviation rules and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
