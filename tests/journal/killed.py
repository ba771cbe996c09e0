"""Runs the command line, and kills this process, like `kill -9`, when so many records are durable.

    python -m tests.journal.killed RECORDS run SPEC ...

Steps are taken one by one, each when the one before is durable: so there is a record for each, in every
run the same. RECORDS 0: an ordinary run.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio

from pipedist.coordinator import pass_handle as handle
from pipedist.journal.writer import Journal
from pipedist.runs import pass_execution
from pipedist.runs import pass_journal as durable


def main() -> None:
    kill_at = int(sys.argv.pop(1))
    append, batches, count = Journal._append, handle.PassHandle.batches, 0

    def counted(self: Journal, record: Any) -> None:
        nonlocal count
        append(self, record)
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def one_by_one(self: handle.PassHandle) -> AsyncIterator[handle.Batch]:
        async for batch in batches(self):
            before = count
            yield batch
            while count == before:  # noqa: ASYNC110 - what is counted happens in a thread
                await anyio.sleep(0.0005)

    if kill_at:
        durable.COMMIT_S, durable.COST_SHARE = 0.0, math.inf  # a slow disk makes no pause after each step
        pass_execution.CALLS_S = math.inf
        handle.PassHandle.reported = property(lambda _: 0)  # type: ignore[assignment,method-assign]
        handle.BATCH_STEPS_MAX = 1
        Journal._append = counted  # type: ignore[method-assign]
        handle.PassHandle.batches = one_by_one  # type: ignore[method-assign,assignment]
    from pipedist.cli.app import main as pipedist

    pipedist()


if __name__ == "__main__":
    main()
