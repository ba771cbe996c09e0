"""Kills runs at every record of their journals, and resumes each; flips every bit of a journal.

    python -m tests.journal.chaos [--steps STEPS] [--every N]

A training (5 steps an epoch, 3 epochs), a gang (10 steps, 2 epochs) and a job of two phases, STEPS batches
each (100: of 200 in all). After each kill: the same bytes, and no journalled call is done again. Takes a few
seconds a record; `--every N` has every N-th record, and every N-th bit.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from tests.journal.killing import GANG, MANY, NEVER, STREAMED, TRAINING, Job, Kind, kill_and_resume
from tests.journal.test_log_format import check_flips


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.journal.chaos", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    begin = time.monotonic()
    check_flips(range(0, 1, args.every))
    which = "every bit" if args.every == 1 else f"every {args.every}th bit"
    print(f"{which} of 100 records: {time.monotonic() - begin:.0f} s", flush=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # power failures are not simulated
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="pipedist-chaos-", dir=memory) as name:
        for kind, length in ((TRAINING, 5), (GANG, 10), (STREAMED, 10), (MANY, args.steps)):
            wrong += chaos(Path(name), kind, length, args.every, begin)
    return min(1, wrong)


def chaos(base: Path, kind: Kind, steps: int, every: int, begin: float) -> int:
    """Kill jobs of one kind at every record, or every `every`-th; return how many came to other bytes."""
    straight = Job(base / "straight", kind.spec(base / "straight", steps))
    assert straight.run(kill_at=NEVER) == 0, straight.stderr
    count, want = straight.history().count, straight.outcome()
    wrong = 0
    records = range(1, count + 1, every)
    for done, record in enumerate(records, 1):
        folder = base / "killed"
        spec, workers = kind.spec(folder, steps), 1 + record % 3
        job = kill_and_resume(folder, spec, record, kind.passes, workers, or_end=kind is TRAINING)
        if job.outcome() != want:
            wrong += 1
            print(f"record {record}: other bytes", flush=True)
        shutil.rmtree(folder)
        if done % 20 == 0:
            print(f"{done} of {len(records)} records, {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(straight.folder)
    name = kind.spec.__name__
    which = "each" if every == 1 else f"{len(records)}"
    seconds = time.monotonic() - begin
    print(
        f"{name}: killed at {which} of {count} records: {wrong} with other bytes, {seconds:.0f} s", flush=True
    )
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
