"""The command `pipedist audit`: do the elements of a run add up?"""

from __future__ import annotations

from pathlib import Path

from pipedist.cli import exits
from pipedist.cli.streams import write_out
from pipedist.errors import UsageError


def audit_run(run: str) -> int:
    """Verify the journal of the run in an output folder, and print what it says.

    Args:
        run: the folder.

    Returns:
        0, or 1 if something does not add up.

    Raises:
        UsageError: there is no run in the folder, or it has no journal.
    """
    from pipedist.journal.audit import audit
    from pipedist.outputs.run_record import PRIVATE, read_record, read_results

    path = Path(run)
    record = read_record(path, path)
    if record is None:
        raise UsageError(f"there is no run in {path}: RUN is the output folder of one, as out/NAME")
    finished = record.state == "finished"
    ledger = None
    if finished:
        ledger = read_results(path, path).get("ledger")
    found = audit(path / PRIVATE / "journal", finished=finished, ledger=ledger)
    write_out("\n".join(found.lines()) + "\n")
    return exits.FAILED if found.problems else exits.OK
