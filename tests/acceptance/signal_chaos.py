"""Signals at seeded times: the right exit code, no remains, and a run that can be resumed.

    python -m tests.acceptance.signal_chaos [--count 200] [--seed N]

Each seed starts `pipedist run`, sends SIGINT or SIGTERM at some time of its life (starting, first phase,
second phase, writing, ending), a second time in two of five cases, and then resumes it: the files' bytes
must be those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.acceptance.watch import session, shared_memory
from tests.cluster.launchers.processes import wait_gone

COUNT = 200
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
SPEC = f"""
pipedist: 1
name: interrupted
replicas: 2
seed: 3
code: {ROOT}
cluster: {{grace_s: 2}}
dataset: {{range: 800, batch: 10, shuffle: true}}
stages:
  y: {{run: "tests.acceptance.functions:floats", with: {{pause_s: 0.004}}}}
  total: {{reduce: sum, of: y, axis: 0}}
  rows: {{gather: 0, of: y}}
  each: {{reduce: max, of: y, axis: 0, per: step}}
  again: {{run: "tests.acceptance.functions:minus_total", of: y, with: {{total: "${{stages.total}}"}}}}
  later: {{gather: 0, of: again}}
outputs: {{total: total.json, rows: rows.npy, each: each.jsonl, later: later.npz}}
"""


class Wrong(Exception):
    """A signal had a wrong effect; the text contains the seed."""


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "pipedist",
        "run",
        "spec.yaml",
        "--workers",
        "2",
        "--output",
        "out",
        *flags,
    ]
    return subprocess.Popen(
        [*command, *flags],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in (folder / "out").iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def undisturbed(folder: Path) -> tuple[dict[str, str], float]:
    """Run without a signal; return the files' digests, and the seconds that it took."""
    (folder / "spec.yaml").write_text(SPEC)
    begin = time.monotonic()
    process = start(folder)
    _, told = process.communicate(timeout=WAIT_S)
    if process.returncode:
        raise Wrong(f"without a signal: {told.decode()}")
    return digests(folder), time.monotonic() - begin


def disturb(seed: int, folder: Path, want: dict[str, str], took_s: float) -> tuple[str, float]:
    """Send the signals of one seed.

    Returns:
        The exit code, the number of signals, and the current estimate of a run's duration: on a machine that
        has become less busy, later signals would otherwise be sent after the end.

    Raises:
        Wrong: the exit code, what is left behind, or the bytes after the resume.
    """
    random = Random(seed)
    (folder / "spec.yaml").write_text(SPEC)
    signals = [random.choice((signal.SIGINT, signal.SIGTERM))]
    if random.random() < 0.4:
        signals.append(random.choice([*signals, signal.SIGINT]))
    begin = time.monotonic()
    process = start(folder)
    time.sleep(random.random() * took_s * 1.05)
    sent = 0
    for number in signals:
        if process.poll() is None:
            process.send_signal(number)
            sent += 1
        time.sleep(random.choice((0.0, 0.02, 0.2)))
    try:
        _, told = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Wrong(f"seed {seed}: not over {WAIT_S:g} s after {sent} signals") from None
    code = process.returncode
    if not code:
        took_s = min(took_s, time.monotonic() - begin)
    allowed = {128 + number for number in signals[:sent]}
    if sent:  # before Python runs, the kernel ends the process, which shells show as 128 + n
        allowed |= {-number for number in signals[:sent]}
    if b"Fatal Python error: init_" in told:  # and so does the interpreter while it starts
        allowed.add(1)
    if code not in allowed | {0}:
        raise Wrong(f"seed {seed}: exit code {code}: {told.decode()}")
    left = wait_gone(session(process.pid))
    if left:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise Wrong(f"seed {seed}: {len(left)} processes were left")
    if code and b"Traceback" in told and b"KeyboardInterrupt" not in told:
        raise Wrong(f"seed {seed}: {told.decode()}")
    again = start(folder, "--resume")
    _, told = again.communicate(timeout=WAIT_S)
    if again.returncode:
        raise Wrong(f"seed {seed}: resumed, exit code {again.returncode}: {told.decode()}")
    if digests(folder) != want:
        raise Wrong(f"seed {seed}: other bytes after the resume")
    return f"exit {code} after {sent}", took_s


def chaos(seeds: range, folder: Path) -> Counter[str]:
    """Disturb one run for each seed; return the number of each outcome."""
    before = shared_memory()
    (folder / "straight").mkdir()
    want, took_s = undisturbed(folder / "straight")
    told: Counter[str] = Counter()
    for seed in seeds:
        place = folder / f"seed-{seed}"
        place.mkdir()
        what, took_s = disturb(seed, place, want, took_s)
        told[what] += 1
        if len(seeds) > 20 and (seed + 1) % 20 == 0:
            print(f"{seed + 1} of {len(seeds)}", flush=True)
    if left := shared_memory() - before:
        raise Wrong(f"in /dev/shm: {left}")
    missed = sum(count for what, count in told.items() if what.startswith("exit 0"))
    if len(seeds) > 20 and missed > len(seeds) / 2:
        raise Wrong(f"{missed} of {len(seeds)} runs came to their end as if there had been no signal")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.signal_chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, help="this one alone")
    told = parser.parse_args()
    seeds = range(told.count) if told.seed is None else range(told.seed, told.seed + 1)
    # A process that a shell starts in the background ignores this signal, and so would the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="pipedist-signals-") as folder:
            found = chaos(seeds, Path(folder))
    except Wrong as wrong:
        print(f"WRONG: {wrong}", flush=True)
        return 1
    shown = ", ".join(f"{what} signals: {count}" for what, count in sorted(found.items()))
    print(f"{len(seeds)} runs interrupted and resumed to the same bytes, no process left ({shown}); "
          f"{time.monotonic() - begin:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
