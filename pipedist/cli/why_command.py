"""The command `pipedist why`: what does a run wait for?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipedist.cli import exits
from pipedist.cli.streams import write_out
from pipedist.errors import UsageError

ANSWER_S = 10.0
"""How long a run may take to answer."""


def explain_run(run: str, *, as_json: bool) -> int:
    """Ask the run in an output folder what it waits for, and print it.

    Args:
        run: the folder.
        as_json: one JSON document instead of lines.

    Returns:
        0; 1 if the run is not going on: then what its journal knows is printed.

    Raises:
        UsageError: there is no run in the folder, or it does not answer.
    """
    from pipedist.outputs.run_record import LIVE, PRIVATE, read_record
    from pipedist.pipeline.inquiry import ask
    from pipedist.pipeline.why import VERSION, lines

    path = Path(run)
    record = read_record(path, path)
    if record is None:
        raise UsageError(
            f"there is no run in {path}: RUN is the output folder of one, as out/NAME. A run without outputs "
            "has none: kill -USR1 PID has it say on its own standard error what it waits for"
        )
    answer = ask(path / PRIVATE / LIVE, ANSWER_S)
    if answer is not None:
        try:
            said: dict[str, Any] = json.loads(answer)
        except ValueError:
            raise UsageError(f"the run in {path} broke off while it answered: ask again") from None
        if said.get("pipedist_why") != VERSION:
            raise UsageError(f"the run in {path} is of another version of pipedist, and answers otherwise")
        write_out((answer.decode() if as_json else "\n".join(lines(said))) + "\n")
        return exits.OK
    state = record.state if record.state in ("finished", "failed") else "unfinished"
    journal = _journal(path / PRIVATE / "journal", finished=state == "finished")
    said = {"pipedist_why": VERSION, "run": record.run, "state": state, "journal": journal}
    write_out((json.dumps(said) if as_json else "\n".join([_ended(said, path), *journal])) + "\n")
    return exits.FAILED


def _ended(said: dict[str, Any], path: Path) -> str:
    why = {
        "finished": "has finished: it waits for nothing",
        "failed": "has failed, and is over: --resume continues it with the cause mended",
        "unfinished": "is not going on: no process on this host answers for it (it was interrupted, killed, "
        "or runs on another host); --resume continues it",
    }
    return f"run {said['run']} in {path} {why[said['state']]}"


def _journal(folder: Path, *, finished: bool) -> list[str]:
    """Return what a journal knows, for people."""
    from pipedist.journal.audit import audit
    from pipedist.outputs.run_record import is_there

    if not is_there(folder / "journal", folder.parent.parent):
        return ["it has no journal"]
    return audit(folder, finished=finished).lines()
