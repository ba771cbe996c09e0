"""Kills a run at every record of its journal, and resumes each; flips every bit of a journal.

    python -m tests.journal.chaos [STEPS]

A job of two phases, STEPS batches each (100). After each kill: the same bytes, and no journalled call is
done again. Takes about three seconds a record.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.journal.killing import NEVER, Job, everything, kill_and_resume
from tests.journal.test_frames import check_flips

PASSES = {"numbers": "0/dataset", "centred": "1/numbers"}


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    begin = time.monotonic()
    check_flips(range(1))
    print(f"every bit of 100 records: {time.monotonic() - begin:.0f} s", flush=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # nobody cuts the power here
    with tempfile.TemporaryDirectory(prefix="pipedist-chaos-", dir=memory) as name:
        base = Path(name)
        straight = Job(base / "straight", everything(base / "straight", steps))
        assert straight.run(kill_at=NEVER) == 0, straight.told
        count, want = straight.history().count, straight.outcome()
        wrong = 0
        for record in range(1, count + 1):
            folder = base / "killed"
            job = kill_and_resume(folder, everything(folder, steps), record, PASSES, workers=1 + record % 3)
            if job.outcome() != want:
                wrong += 1
                print(f"record {record}: other bytes", flush=True)
            shutil.rmtree(folder)
            if record % 20 == 0:
                print(f"{record} of {count} records, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"killed at each of {count} records of {2 * steps} batches: {wrong} with other bytes")
    return min(1, wrong)


if __name__ == "__main__":
    raise SystemExit(main())
