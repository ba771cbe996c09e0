"""Measures pipedist, the installed peers and the machine's limits, interleaved round by round.

    python -m benchmarks.run [--only W1,W2] [--rounds 5] [--systems pool,ray] [--boost] [--write-docs]
    python -m benchmarks.run --smoke              tiny sizes, one round: does everything work?
    python -m benchmarks.run --table FILE         the tables of an earlier run

Within a round each workload is measured for one system after the other, each in a fresh process,
so that what disturbs the machine disturbs all alike; the order is turned from round to round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import pages, report
from benchmarks.apps.jobs import APPS
from benchmarks.boost import boosted
from benchmarks.data import make_data
from benchmarks.goals import GOALS, best_peer
from benchmarks.limits import FOR_WORKLOAD
from benchmarks.one import MARK
from benchmarks.sizes import FULL, SMOKE
from benchmarks.systems import HOME, SUBJECT, SYSTEMS, Installed, installed, mpiexec
from benchmarks.workloads import WORKLOADS

ROOT = HOME.parent
BEHIND = 4.0
"""A peer so many times behind the best one is not measured again in later rounds, unless a goal names it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run measures, and how.

    Args:
        workloads, systems: their keys, in order.
        rounds: how often.
        smoke: tiny sizes.
        all_rounds: also peers that are far behind are measured in every round.
        data: folder of the files that are read.
        out: file of the lines.
        boost: give the measured processes priority.
    """

    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    rounds: int
    smoke: bool
    all_rounds: bool
    data: Path
    out: Path
    boost: bool


class Session:
    """One run of the benchmarks."""

    def __init__(self, options: Options, found: dict[str, Installed]) -> None:
        self._options = options
        self._found = found
        self._records: list[report.Record] = []
        self._mark = f"benchmarks-{os.getpid()}"

    def run(self) -> list[report.Record]:
        """Measure everything; returns the lines, which are in the file too."""
        options = self._options
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.unlink(missing_ok=True)
        self._keep({"environment": environment(self._found, options)})
        data = options.data
        if {"FN", "FP"} & {*options.workloads}:
            data = make_data(options.data, SMOKE if options.smoke else FULL)
        with boosted(f"PIPEDIST_BENCHMARK={self._mark}") if options.boost else contextlib.nullcontext():
            for round_ in range(options.rounds):
                for workload in options.workloads:
                    self._limits(round_, workload)
                    turned = (
                        options.systems[round_ % len(options.systems) :]
                        + (options.systems[: round_ % len(options.systems)])
                    )
                    for system in turned:
                        if self._is_due(system, workload):
                            self._measure(round_, system, workload, data)
        return self._records

    def _keep(self, record: report.Record) -> None:
        self._records.append(record)
        with self._options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _is_due(self, system: str, workload: str) -> bool:
        """Return whether a system is measured (again): not if it can't be, or is far behind."""
        if workload not in SYSTEMS[system].answers:
            return False
        figures = report.collect(self._records)
        mine = figures.get((system, workload))
        if mine is None:
            return True
        if system == SUBJECT:
            return True
        if not mine.values or (WORKLOADS[workload].once and SYSTEMS[system].kind == "peer"):
            return False
        if self._options.all_rounds or SYSTEMS[system].kind != "peer":
            return True
        if system in {goal.of for goal in GOALS if (goal.at or goal.workload) == workload}:
            return True
        best = best_peer(report.medians_of(figures), workload)
        if best is None:
            return True
        behind = best[1] / mine.median if WORKLOADS[workload].higher else mine.median / best[1]
        return behind <= BEHIND

    def _limits(self, round_: int, workload: str) -> None:
        names = FOR_WORKLOAD.get(workload, ())
        if not names:
            return
        command = [sys.executable, "-m", "benchmarks.limits", *names]
        out, _ = self._process(
            [*command, *(["--smoke"] if self._options.smoke else [])], 120.0, sys.executable
        )
        for line in out.splitlines():
            if line.startswith("{"):
                self._keep({"round": round_, **json.loads(line)})

    def _measure(self, round_: int, system: str, workload: str, data: Path) -> None:
        found, work = self._found[system], WORKLOADS[workload]
        command = [found.python, "-m", "benchmarks.one", system, workload, "--data", str(data)]
        if self._options.smoke:
            command.append("--smoke")
        if SYSTEMS[system].prefix and work.starts:  # this process is one of several: not W5's
            module = ["-m", "mpi4py.futures", "-m", *command[2:]]
            command = [str(mpiexec()), *SYSTEMS[system].prefix[1:], found.python, *module]
        began = time.monotonic()
        out, error = self._process(command, work.timeout_s, found.python)
        line = next((x for x in out.splitlines() if x.startswith(MARK)), None)
        result: dict[str, Any]
        if line is not None:
            result = json.loads(line.removeprefix(MARK))
        else:
            result = {"value": None, "outcome": error or "no answer", "detail": {}}
        shown = result["outcome"] if result["value"] is None else f"{result['value']:.5g} {work.unit}"
        seconds = time.monotonic() - began
        print(f"round {round_} {workload:8} {system:12} {shown[:100]}  ({seconds:.1f} s)", flush=True)
        fixed = {"round": round_, "system": system, "workload": workload, "unit": work.unit}
        self._keep({**fixed, "version": found.version, **result})

    def _process(self, command: Sequence[str], timeout_s: float, python: str) -> tuple[str, str]:
        """Return a process's stdout, and what was the matter with it ("": nothing)."""
        path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "PIPEDIST_BENCHMARK": self._mark}
        if os.geteuid() == 0:  # Open MPI wants to be told twice
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            return out, f"hangs: no answer in {timeout_s:g} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left behind must not disturb the next
                os.killpg(process.pid, signal.SIGKILL)
        last = error.strip().splitlines()[-1:] or [""]
        return out, f"exit code {process.returncode}: {last[0]}" if process.returncode else ""


def environment(found: dict[str, Installed], options: Options) -> dict[str, Any]:
    """Return what was measured where, and when."""
    load = os.getloadavg()[0]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib()} GiB",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "commit": _commit(),
        "load at the start": f"{load:.2f} (processes that wanted to run, mean of a minute)",
        "run": f"{options.rounds} rounds, 2 workers, priority {'raised' if options.boost else 'normal'}"
        + (", SMOKE SIZES: no figures" if options.smoke else ""),
        "versions": {
            **{name: _version(name) for name in ("numpy", "pyzmq", "msgpack", "anyio", "pyarrow")},
            **{key: found[key].version for key in options.systems},
        },
    }


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True, stderr=subprocess.DEVNULL
        ).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "pipedist"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _names(text: str, known: Iterator[str] | Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    known = list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no {what} {name!r}; there are: {', '.join(known)}")
    return names


def _end(signum: int, _frame: object) -> None:
    """End as after an exception: the process that is being measured is ended too."""
    raise SystemExit(128 + signum)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="W1,W2", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--systems", "--peers", default="", metavar="A,B", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=0, help="default: 5; 1 with --smoke")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--all-rounds", action="store_true", help="also for peers that are far behind")
    parser.add_argument("--boost", action="store_true", help="raise the measured processes' priority (root)")
    parser.add_argument("--data", type=Path, default=HOME / "data", help="folder of the files to read")
    parser.add_argument("--out", type=Path, default=HOME / "results" / "latest.jsonl")
    parser.add_argument("--table", type=Path, help="print the tables of an earlier run")
    parser.add_argument("--write-docs", action="store_true", help="write the pages of docs, and the chart")
    parser.add_argument(
        "--release", default="", metavar="NAME", help="with --write-docs: compare later runs with this one"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    if given.table is not None:
        records = report.read(given.table)
    else:
        found = installed()
        wanted = _names(given.systems, list(SYSTEMS), "system") or tuple(found)
        systems = tuple(dict.fromkeys((SUBJECT, *wanted)))
        missing = [name for name in systems if name not in found]
        if missing:
            raise SystemExit(f"not installed: {', '.join(missing)}; `make bench-peers` installs the peers")
        only = given.only.replace("apps", ",".join(APPS))
        options = Options(
            workloads=_names(only, list(WORKLOADS), "workload") or tuple(WORKLOADS),
            systems=systems,
            rounds=given.rounds or (1 if given.smoke else 5),
            smoke=given.smoke,
            all_rounds=given.all_rounds,
            data=given.data,
            out=given.out,
            boost=given.boost,
        )
        records = Session(options, found).run()
    text = report.markdown(records)
    print("\n" + text)
    if given.write_docs and not given.smoke:  # tiny sizes give no figures
        pages.publish(records, release=given.release)


if __name__ == "__main__":
    main()
