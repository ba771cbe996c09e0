"""The command `pipedist watch`: show a run that another process executes, until it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedist.cli import terminal
from pipedist.cli.rendering import StagesTable, table
from pipedist.cli.terminal import write_error, write_out
from pipedist.runs.progress import duration
from pipedist.runs.timings import brief

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 0.5
LINE_S = 5.0  # between two lines, if standard output is no terminal
EVENTS_MAX = 6
WAITS_MAX = 8
WORKERS_MAX = 16


def watch_web(run: str, *, live_address: str, live_token_file: str, live_cert: str, live_key: str) -> int:
    """Serve the live page of a run until the run ends."""
    import anyio

    from pipedist.report.live import LiveOptions, serve

    options = LiveOptions(live_address, live_token_file, live_cert, live_key)
    anyio.run(serve, Path(run), options, lambda text: write_out(text + "\n"))
    return terminal.OK


def watch(run: str) -> int:
    """Show a run in the terminal until it ends; return 0 if it finished, else 1."""
    import sys

    path = Path(run)
    data = _watch_live(path) if sys.stdout.isatty() else _watch_lines(path)
    write_out(f"run {data['run']} in {path}: {data['state']}\n")
    if data["state"] == "finished":
        return terminal.OK
    write_error(continuation(data))
    return terminal.FAILED


def continuation(data: dict[str, Any]) -> str:
    """Return why a run did not finish, if that is known, and how to continue it."""
    failed = data["state"] == "failed"
    failure = f"pipedist: {data['failure']}\n" if failed and data["failure"] else ""
    if failure and data["has_advice"]:
        return failure
    text = terminal.CONTINUE if failed else "Continue it with --resume"
    command = data["about"].get("command")
    return f"{failure}{text}\n" + (f"  {command} --resume\n" if command else "")


def _watch_live(path: Path) -> dict[str, Any]:
    from rich.live import Live

    from pipedist.report import collect

    data = collect(path, live=True)
    with Live(screen_of(data), auto_refresh=False) as live:
        while True:
            live.update(screen_of(data), refresh=True)
            if data["state"] != "running":
                return data
            time.sleep(REFRESH_S)
            data = collect(path, live=True)


def _watch_lines(path: Path) -> dict[str, Any]:
    from pipedist.report import collect

    due = 0.0
    while True:
        data = collect(path, live=True)
        if data["state"] != "running":
            return data
        if time.monotonic() >= due:
            write_out(_line(data) + "\n")
            due = time.monotonic() + LINE_S
        time.sleep(REFRESH_S)


def _line(data: dict[str, Any]) -> str:
    status = data["status"]
    if "passes" not in status:
        return f"{data['name']}: {status['state']}"
    done = "; ".join(_steps(each) for each in status["passes"])
    workers = status["workers"]
    return (
        f"{data['name']}: phase {status['phase']} of {status['phases']}, {duration(status['elapsed_s'])}; {done}; "
        f"{workers['busy']} of {workers['ready']} workers busy"
    )


def _steps(pass_: dict[str, Any]) -> str:
    total = "?" if pass_["steps_total"] is None else f"{pass_['steps_total']:,}"
    return f"{pass_['stages']}: {pass_['steps_done']:,} of {total} steps"


def screen_of(data: dict[str, Any]) -> RenderableType:
    """Return what the terminal shows of a run's data."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"{data['name']}  {data['state']}", style="bold")]
    status = data["status"] or {}
    process = data["processes"][-1] if data["processes"] else {}
    if "passes" in status:
        workers = status["workers"]
        parts.append(
            Text(
                f"phase {status['phase']} of {status['phases']}, {duration(status['elapsed_s'])}; "
                f"workers: {workers['ready']} ready, {workers['busy']} busy"
            )
        )
        bars = Table.grid(padding=(0, 2))
        for each in status["passes"]:
            total = each["steps_total"]
            bar = ProgressBar(total=total, completed=each["steps_done"], width=30, pulse=total is None)
            bars.add_row(Text(each["stages"]), bar, Text(_steps(each).rpartition(": ")[2]))
        parts += [bars, Text()]
    if process.get("stages"):
        parts += [_stages(process["stages"]), Text(), _workers(process["workers"]), Text()]
    waits = [wait for wait in status.get("waits", ()) if wait["text"]][:WAITS_MAX]
    parts += [Text(f"{wait.get('stages', '')} {wait['reason']}: {wait['text']}") for wait in waits]
    events = process.get("marks", [])[-EVENTS_MAX:]
    parts += [Text(f"{brief(at)}: {text}", style="yellow") for at, text in events]
    if process.get("limit") and data["state"] != "running":
        parts.append(Text(process["limit"]))
    return Group(*parts)


def _stages(stages: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            each["name"],
            f"{each['calls']:,}",
            f"{each['elements_per_s']:,.0f}",
            brief(each["busy_s"]),
            brief(each["p50_s"]),
            f"{each['slowest']} {brief(each['max_s'])}" if each["slowest"] else "",
            f"{each['failed']:,}",
        )
        for each in stages
    ]
    return StagesTable(("stages", "calls", "elements/s", "busy", "median", "longest call", "failed"), rows)


def _workers(workers: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (each["name"], f"{each['calls']:,}", brief(each["busy_s"]), _memory(each["memory_bytes"]))
        for each in workers[:WORKERS_MAX]
    ]
    if len(workers) > WORKERS_MAX:
        rows.append((f"... {len(workers) - WORKERS_MAX} more", "", "", ""))
    return table(("worker", "calls", "busy", "memory"), rows)


def _memory(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size else ""
