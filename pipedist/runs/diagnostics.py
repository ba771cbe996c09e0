"""Reports what a run waits for, as a document, as text, and on a socket.

`Run.why` returns the document, and `pipedist why` reads it from another process, through a unix socket in a private
folder (mode 0700) in the run's output folder. Only users with access to the folder can connect. The run sends the
document to each connection and reads nothing from it. The folder is removed when the run ends. If the run is
killed, the folder stays until the next run replaces it, and connections to its socket are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedist.errors import UsageError

if TYPE_CHECKING:
    from pipedist.runs.execution import Execution

VERSION = 1  # version of the document

STATUS_BYTES_MAX = 16 * 2**20
_SOCKET_NAME = "why"
_BACKLOG_MAX = 16

Document = dict[str, Any]  # plain JSON values; docs/how-to/stalls.md describes them


def document(run: str, name: str, state: str, execution: Execution | None) -> Document:
    """Return what a run waits for.

    `state` is "starting", "running" or "ended". `execution` is None if the run has not begun, or has ended.
    """
    head: Document = {"pipedist_why": VERSION, "run": run, "name": name, "state": state}
    if execution is None:
        return head
    stall, waits = execution.waits()
    progress = execution.progress()
    entries = [_entry(asdict(wait)) for wait in waits]
    committing_s = execution.committing_s
    if committing_s is not None:
        text = "the disk has not confirmed a commit of the journal"
        entries.append({"reason": "journal", "for_s": round(committing_s, 3), "text": text})
    if state == "running" and not entries:
        text = "all calls are done: values and files are completed"
        entries.append({"reason": "outputs", "for_s": None, "text": text})
    scheduler = stall.scheduler
    return head | {
        "phase": progress.phase + 1,
        "phases": progress.phases,
        "elapsed_s": round(progress.elapsed_s, 3),
        "silent_s": round(scheduler.silent_s, 3),
        "passes": [
            {
                "stages": each.name,
                "dataset": each.dataset,
                "steps_done": each.steps_done,
                "steps_total": each.steps_total,
                "calls_done": each.calls_done,
                "elements_ahead": each.elements_ahead,
            }
            for each in progress.passes
        ],
        "workers": {
            "ready": scheduler.ready,
            "busy": scheduler.busy,
            "suspended": list(scheduler.suspended),
            "starting": list(scheduler.starting),
        },
        "waits": entries,
    }


def _entry(wait: dict[str, Any]) -> dict[str, Any]:
    del wait["pass_id"]
    if wait["reason"] != "running":
        del wait["stage"]
    if wait["for_s"] is not None:
        wait["for_s"] = round(wait["for_s"], 3)
    for name in ("pid", "host"):
        if not wait[name]:
            del wait[name]
    return wait


def lines(report: Document) -> list[str]:
    """Return a document as lines of text."""
    head = f"run {report['run']} of {report['name']}: {report['state']}"
    if "waits" not in report:
        return [head]
    workers = report["workers"]
    head += (
        f" for {_seconds(report['elapsed_s'])}, phase {report['phase']} of {report['phases']}; "
        f"no progress for {_seconds(report['silent_s'])}"
    )
    summary = f"  workers: {workers['ready']} ready, {workers['busy']} of them busy"
    for what, names in (("starting", workers["starting"]), ("suspended", workers["suspended"])):
        if names:
            summary += f"; {what}: {', '.join(names)}"
    return [head, summary, *(f"  {_line(wait)}" for wait in report["waits"])]


def _line(wait: Document) -> str:
    reason, text = wait["reason"], wait["text"]
    duration = "" if wait["for_s"] is None else f" for {_seconds(wait['for_s'])}"
    if "step" not in wait:
        return f"waits for {reason}{duration}: {text}"
    where = f"{wait['stages']}: step {wait['step']}, replica {wait['replica']}"
    if wait["calls"] > 1:
        more = wait["calls"] - 1
        where += " and the call after it" if more == 1 else f" and the {more:,} calls after it"
    if wait["attempt"]:
        where += f", attempt {wait['attempt'] + 1}"
    at = f" on {wait['worker']}" if wait["worker"] else ""
    if reason == "running" and "pid" in wait:
        host = f" of {wait['host']}" if "host" in wait else ""
        at += f" (process {wait['pid']}{host})"
    verb = "" if reason in ("running", "queued") else "waits for "
    return f"{where}: {verb}{reason}{at}{duration}{'; ' if text else ''}{text}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


async def _send_status(
    status: Callable[[], bytes],
    connections: set[asyncio.WriteTransport],
    over: asyncio.Event,
    _: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Send the status on a new connection, and close it."""
    if over.is_set():  # the connection was accepted during shutdown
        writer.transport.abort()
        return
    connections.add(writer.transport)
    with contextlib.suppress(OSError):  # the client has left
        writer.write(status())
        writer.close()
        await writer.wait_closed()
    connections.discard(writer.transport)


@contextlib.asynccontextmanager
async def serve_status(folder: Path, status: Callable[[], bytes]) -> AsyncIterator[bool]:
    """Serve the status of a run on a socket while this context is open.

    `folder` is created here, and removed at the end; the caller holds the run's lock. Yields whether the socket
    exists: there is none on a file system without sockets.
    """
    connections: set[asyncio.WriteTransport] = set()
    over = asyncio.Event()
    server: asyncio.Server | None = None
    try:
        with contextlib.suppress(OSError):  # the run works without the socket
            _make(folder)
            with _socket_path(folder) as path, socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                answer = partial(_send_status, status, connections, over)
                # Not started at once, which waits: a cancellation would leave it open.
                server = await asyncio.start_unix_server(
                    answer, sock=listening.dup(), backlog=_BACKLOG_MAX, start_serving=False
                )
                await server.start_serving()
        yield server is not None
    finally:
        over.set()
        if server is not None:
            server.close()
        for transport in list(connections):
            transport.abort()
        with contextlib.suppress(OSError):
            _remove(folder)


def query_status(folder: Path, timeout_s: float) -> bytes | None:
    """Return the status that a run sends; None if no run is listening."""
    status = bytearray()
    try:
        with _socket_path(folder) as path, socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout_s)
            client.connect(path)
            while part := client.recv(2**16):
                status += part
                if len(status) > STATUS_BYTES_MAX:
                    raise UsageError(f"{folder}: the run's status is longer than {STATUS_BYTES_MAX} bytes")
    except (TimeoutError, BlockingIOError):
        raise UsageError(
            f"the run in {folder.parent.parent} is alive, but has not answered within {timeout_s:g} s. Its "
            "driver process is busy, perhaps in a dataset function that blocks"
        ) from None
    except PermissionError:
        raise UsageError(f"can't connect to the run: {folder} belongs to another user") from None
    except OSError:  # there is no socket, or no process listens on it
        return None
    return bytes(status) or None


@contextlib.contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """Yield a short path of the socket: socket paths have a length limit."""
    if not sys.platform.startswith("linux"):
        yield str(folder / _SOCKET_NAME)
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET_NAME}"
    finally:
        os.close(fd)


def _make(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(mode=0o700)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)
