"""Kills runs at every record of their journals, and resumes each; flips every bit of a journal.

    python -m tests.journal.chaos [STEPS]

A job of two phases, STEPS batches each (100), a training and a gang. After each kill: the same bytes, and no
journalled call is done again. Takes a few seconds a record.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.journal.killing import GANG, MANY, NEVER, TRAINING, Job, Kind, kill_and_resume
from tests.journal.test_frames import check_flips


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    begin = time.monotonic()
    check_flips(range(1))
    print(f"every bit of 100 records: {time.monotonic() - begin:.0f} s", flush=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # nobody cuts the power here
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="pipedist-chaos-", dir=memory) as name:
        for kind, length in ((TRAINING, 5), (GANG, 10), (MANY, steps)):
            wrong += chaos(Path(name), kind, length, begin)
    return min(1, wrong)


def chaos(base: Path, kind: Kind, steps: int, begin: float) -> int:
    """Kill jobs of one kind at every record; return how many came to other bytes."""
    straight = Job(base / "straight", kind.spec(base / "straight", steps))
    assert straight.run(kill_at=NEVER) == 0, straight.told
    count, want = straight.history().count, straight.outcome()
    wrong = 0
    for record in range(1, count + 1):
        folder = base / "killed"
        spec, workers = kind.spec(folder, steps), 1 + record % 3
        job = kill_and_resume(folder, spec, record, kind.passes, workers, or_end=kind is TRAINING)
        if job.outcome() != want:
            wrong += 1
            print(f"record {record}: other bytes", flush=True)
        shutil.rmtree(folder)
        if record % 20 == 0:
            print(f"{record} of {count} records, {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(straight.folder)
    name = kind.spec.__name__
    print(f"{name}: killed at each of {count} records: {wrong} with other bytes", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
