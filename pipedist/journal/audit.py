"""Verifies a journal by its own records, and against the state and the results of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from pipedist.errors import JournalError
from pipedist.journal.history import History, read_history


class Audit(Struct, frozen=True):
    """The result of an audit.

    Args:
        history: the journal's content; None if it can't be read.
        problems: inconsistencies, with offsets; none: all elements are accounted for.
    """

    history: History | None
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        lines = []
        if self.history is not None:
            header = self.history.header
            lines.append(
                f"run {header.run} of {header.name}: {self.history.count:,} records, hash chain intact"
            )
            replicas = header.replicas
            for key, each in header.passes.items():
                found = self.history.passes.get(key)
                state = "not begun" if found is None else "complete" if found.complete else "not complete"
                steps, elements = (0, 0) if found is None else (found.steps, found.elements)
                lines.append(
                    f"  {each['name']} (of {each['dataset']}): {state}; calls [0, {steps * replicas:,}) in "
                    f"{steps:,} steps, {elements:,} elements"
                )
            ledger = self.history.ledger()
            sum_text = " + ".join(f"{ledger[name]:,} {name}" for name in ("committed", "quarantined", "lost"))
            state = "the run has ended" if self.history.ended is not None else "the run has not ended"
            lines.append(f"  {ledger['elements']:,} elements = {sum_text}; {state}")
            if self.history.torn:
                lines.append(f"  {self.history.torn:,} bytes of an incomplete last record: not counted")
        lines += [f"WRONG: {problem}" for problem in self.problems]
        lines.append("the journal is inconsistent" if self.problems else "the journal is consistent")
        return lines


def audit(folder: Path, *, finished: bool = False, ledger: Mapping[str, int] | None = None) -> Audit:
    """Verify a journal.

    Args:
        finished: `run.json` has the state "finished".
        ledger: of the run's results document.
    """
    try:
        history = read_history(folder)
    except JournalError as error:
        return Audit(None, (str(error),))
    if history is None:
        return Audit(None, ("the journal has no complete record",))
    problems = list(history.problems)
    if finished and history.ended is None:
        problems.append(
            f"the run is finished, but its journal ends at offset {history.size} without a record of "
            "the end: records were removed"
        )
    if finished and history.torn:
        problems.append(
            f"the run is finished, but {history.torn} bytes follow the journal's last good record"
        )
    if ledger is not None and dict(ledger) != history.ledger():
        problems.append(f"the results have {dict(ledger)}, but the journal's calls give {history.ledger()}")
    return Audit(history, tuple(problems))
