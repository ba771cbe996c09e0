"""all_reduce beside mpi4py and torch gloo, interleaved round by round.

    python -m benchmarks.collectives [--rounds 5] [--replicas 2,4] [--systems mpi4py,gloo] [--boost] [--smoke]

Latency at 4 KiB, bandwidth at 1 MiB and 64 MiB, float32, SUM. Each measurement is a fresh process (or
one per replica) that is warmed up, and gives the median of its runs; the table has the medians of the
rounds, and what is judged against a goal is the median of the ratios within a round. Peers reduce in
place; pipedist returns arrays of the replica's own. mpi4py comes with `make bench-peers`, torch with
`make bench-torch`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.boost import boosted
from benchmarks.collectives_systems import MARK
from benchmarks.systems import HOME, PEER_PYTHON

TIMEOUT_S = 180.0
LATENCY, LARGE = 4 << 10, 64 << 20


@dataclass(frozen=True, slots=True)
class System:
    """One system.

    Args:
        module: in `benchmarks.collectives_systems`.
        python: its interpreter.
        needs: what must be installed there.
        workers: worker processes that share the replicas; 0: one each.
        settings: more of its environment.
    """

    module: str
    python: str = sys.executable
    needs: str = "pipedist"
    workers: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)


SYSTEMS = {
    "pipedist": System("pipedist_strategy"),
    "pipedist-gang": System("pipedist_gang"),
    "pipedist-threads": System("pipedist_strategy", workers=1),
    "pipedist-transport": System("pipedist_strategy", settings={"PIPEDIST_SHARED_MEMORY": "0"}),
    "mpi4py": System("mpi4py_ranks", str(PEER_PYTHON), "mpi4py"),
    "gloo": System("torch_gloo", str(PEER_PYTHON), "torch"),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What pipedist is to reach with two replicas, as a ratio of times in the same round.

    Args:
        system: whose time is in the numerator.
        of: whose is in the denominator.
        bytes_: of the vector.
        at_most: bound of the ratio.
    """

    system: str
    of: str
    bytes_: int
    at_most: float


GOALS = (
    Goal("pipedist", "mpi4py", LATENCY, 4.0),
    Goal("pipedist", "gloo", LATENCY, 0.1),
    Goal("pipedist", "mpi4py", LARGE, 1.0),
    Goal("pipedist", "gloo", LARGE, 1.0),
    Goal("pipedist-threads", "gloo", LATENCY, 1.0),
)

Times = dict[tuple[str, int, int], list[float | None]]
"""(system, replicas, bytes) -> seconds, by round."""


def is_installed(system: System) -> bool:
    """Whether a system can be measured here."""
    command = [
        system.python,
        "-c",
        f"import importlib.util as u; exit(u.find_spec({system.needs!r}) is None)",
    ]
    try:
        return subprocess.run(command, check=False, cwd=HOME.parent, capture_output=True).returncode == 0
    except OSError:
        return False


def measure(system: System, replicas: int, *, smoke: bool, mark: str) -> tuple[dict[int, float], str]:
    """Return seconds by bytes, and what was the matter."""
    command = [system.python, "-m", f"benchmarks.collectives_systems.{system.module}", str(replicas)]
    env = {
        **os.environ,
        "PYTHONPATH": str(HOME.parent),
        "PATH": os.pathsep.join([str(Path(system.python).parent), os.environ.get("PATH", "")]),
        "PIPEDIST_BENCHMARK": mark,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **({"PIPEDIST_BENCHMARK_WORKERS": str(system.workers)} if system.workers else {}),
        **system.settings,
    }
    if os.geteuid() == 0:  # Open MPI wants to be told twice
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        [*command, *(["--smoke"] if smoke else [])],
        cwd=HOME.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {TIMEOUT_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    line = next((line for line in out.splitlines() if line.startswith(MARK)), "")
    if line and process.returncode == 0:
        return {int(key): value for key, value in json.loads(line.removeprefix(MARK)).items()}, ""
    return {}, (error.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def spell(bytes_: int, seconds: float) -> str:
    """Return a time as what people compare: a latency, or a bandwidth."""
    if bytes_ <= LATENCY:
        return f"{seconds * 1e6:.1f} us"
    return f"{bytes_ / seconds / 2**30:.2f} GiB/s"


def table(times: Times, systems: tuple[str, ...]) -> str:
    """Return all medians as Markdown."""
    columns = sorted({(replicas, bytes_) for _, replicas, bytes_ in times})
    heads = [f"n={replicas}, {bytes_ >> 10} KiB" for replicas, bytes_ in columns]
    lines = ["| system | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for system in systems:
        cells = []
        for replicas, bytes_ in columns:
            found = [t for t in times.get((system, replicas, bytes_), []) if t is not None]
            cells.append(spell(bytes_, statistics.median(found)) if found else "")
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def judge(times: Times) -> str:
    """Return the goals as Markdown: the median of the ratios within a round."""
    lines = ["| goal, two replicas | ratio of times | at most | met |", "|---|---|---|---|"]
    for goal in GOALS:
        pairs = zip(
            times.get((goal.system, 2, goal.bytes_), []),
            times.get((goal.of, 2, goal.bytes_), []),
            strict=False,
        )
        ratios = [mine / its for mine, its in pairs if mine is not None and its is not None]
        what = f"{goal.system} / {goal.of} at {goal.bytes_ >> 10} KiB"
        if ratios:
            ratio = statistics.median(ratios)
            met = "yes" if ratio <= goal.at_most else "**no**"
            lines.append(f"| {what} | {ratio:.2f} | {goal.at_most:g} | {met} |")
        else:
            lines.append(f"| {what} | | {goal.at_most:g} | not measured |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="default: 5; 1 with --smoke")
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--systems", default=",".join(SYSTEMS), metavar="A,B", help=", ".join(SYSTEMS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--boost", action="store_true", help="raise the measured processes' priority (root)")
    parser.add_argument("--out", type=Path, default=HOME / "results" / "collectives.jsonl")
    given = parser.parse_args()
    wanted = tuple(given.systems.split(","))
    unknown = set(wanted) - set(SYSTEMS)
    if unknown:
        raise SystemExit(f"there is no system {sorted(unknown)[0]!r}; there are: {', '.join(SYSTEMS)}")
    systems = tuple(name for name in wanted if is_installed(SYSTEMS[name]))
    for name in set(wanted) - set(systems):
        print(f"{name} is not installed: make bench-peers, make bench-torch")
    mark = f"collectives-{os.getpid()}"
    times: Times = defaultdict(list)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        boosted(f"PIPEDIST_BENCHMARK={mark}") if given.boost else contextlib.nullcontext(),
        given.out.open("w") as lines,
    ):
        for round_ in range(given.rounds or (1 if given.smoke else 5)):
            for replicas in map(int, given.replicas.split(",")):
                turn = round_ % len(systems)
                for name in (*systems[turn:], *systems[:turn]):
                    found, error = measure(SYSTEMS[name], replicas, smoke=given.smoke, mark=mark)
                    for bytes_ in found:
                        times[name, replicas, bytes_] += [None] * (
                            round_ - len(times[name, replicas, bytes_])
                        )
                        times[name, replicas, bytes_].append(found[bytes_])
                    shown = error or ", ".join(spell(b, s) for b, s in found.items())
                    print(f"round {round_} n={replicas} {name:18} {shown}", flush=True)
                    line = {"round": round_, "system": name, "replicas": replicas, "s": found, "error": error}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
    print("\n" + table(times, systems) + "\n\n" + judge(times))


if __name__ == "__main__":
    main()
