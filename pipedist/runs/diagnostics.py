"""What a run waits for, as one document: for `Run.why`, for people, and for `pipedist why`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedist.errors import UsageError
from pipedist.runs.result import Progress

if TYPE_CHECKING:
    from pipedist.runs.execution import Execution

VERSION = 1
"""Of the document."""

Document = dict[str, Any]
"""Plain JSON values; docs/stalls.md says which."""


def document(run: str, name: str, state: str, execution: Execution | None) -> Document:
    """Return what a run waits for.

    Args:
        run, name: its id, and its name.
        state: "starting", "running", "ending" (its steps are done, its files are not) or "ended".
        execution: None where it has not begun.
    """
    said: Document = {"pipedist_why": VERSION, "run": run, "name": name, "state": state}
    if execution is None:
        return said
    stall, waits = execution.waits()
    progress = execution.progress()
    told = [_told(asdict(wait)) for wait in waits]
    committing_s = execution.committing_s
    if committing_s is not None:
        text = "the disk has not confirmed what the journal was given"
        told.append({"reason": "journal", "for_s": round(committing_s, 3), "text": text})
    if state == "running" and not told:
        told.append(
            {"reason": "outputs", "for_s": None, "text": "no call is left: values and files are completed"}
        )
    scheduler = stall.scheduler
    return said | {
        "phase": progress.phase + 1,
        "phases": progress.phases,
        "elapsed_s": round(progress.elapsed_s, 3),
        "silent_s": round(scheduler.silent_s, 3),
        "passes": [_counted(progress, place) for place in range(len(progress.passes))],
        "workers": {
            "ready": scheduler.ready,
            "busy": scheduler.busy,
            "suspended": list(scheduler.suspended),
            "starting": list(scheduler.starting),
        },
        "waits": told,
    }


def _told(wait: dict[str, Any]) -> dict[str, Any]:
    del wait["pass_id"]
    if wait["reason"] != "running":
        del wait["stage"]
    if wait["for_s"] is not None:
        wait["for_s"] = round(wait["for_s"], 3)
    return wait


def _counted(progress: Progress, place: int) -> dict[str, Any]:
    count = progress.passes[place]
    steps = {"steps_done": count.steps_done, "steps_total": count.steps_total}
    return {"stages": count.name, "dataset": count.dataset, **steps, "calls_done": count.calls_done}


def lines(said: Document) -> list[str]:
    """Return a document for people."""
    if "waits" not in said:
        return [f"run {said['run']} of {said['name']}: {said['state']}"]
    workers = said["workers"]
    head = (
        f"run {said['run']} of {said['name']}: {said['state']} for {_seconds(said['elapsed_s'])}, phase "
        f"{said['phase']} of {said['phases']}; nothing has moved for {_seconds(said['silent_s'])}"
    )
    there = f"  workers: {workers['ready']} ready, {workers['busy']} of them busy"
    for what, names in (("starting", workers["starting"]), ("laid off", workers["suspended"])):
        if names:
            there += f"; {what}: {', '.join(names)}"
    return [head, there, *(f"  {_line(wait)}" for wait in said["waits"])]


def _line(wait: Document) -> str:
    reason, text = wait["reason"], wait["text"]
    lasting = "" if wait["for_s"] is None else f" for {_seconds(wait['for_s'])}"
    if "step" not in wait:
        return f"waits for {reason}{lasting}: {text}"
    where = f"{wait['stages']}: step {wait['step']}, replica {wait['replica']}"
    if wait["calls"] > 1:
        more = wait["calls"] - 1
        where += " and the call after it" if more == 1 else f" and the {more:,} calls after it"
    if wait["attempt"]:
        where += f", attempt {wait['attempt'] + 1}"
    at = f" on {wait['worker']}" if wait["worker"] else ""
    what = f"{reason}{at}{lasting}" if reason in ("running", "queued") else f"waits for {reason}{at}{lasting}"
    return f"{where}: {what}{'; ' if text else ''}{text}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


NAME = "why"
"""Of the socket."""

ANSWER_BYTES_MAX = 16 * 2**20

_ASKERS_MAX = 16
"""That wait at one time."""

Answer = Callable[[], bytes]


class _StatusProtocol(asyncio.Protocol):
    """Sends the answer to whoever connects, and hangs up."""

    def __init__(self, answer: Answer, open_: set[asyncio.Transport], over: asyncio.Event) -> None:
        self._answer = answer
        self._open = open_
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a connection that can't be written to")
        if self._over.is_set():  # who came in the very moment of the end
            transport.abort()
            return
        self._transport = transport
        self._open.add(transport)
        transport.write(self._answer())
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._open.discard(self._transport)


@contextlib.asynccontextmanager
async def serve_status(folder: Path, answer: Answer) -> AsyncIterator[bool]:
    """While this context is open, answer whoever asks.

    Args:
        folder: made here, removed at the end; whoever enters holds the run's lock.
        answer: returns what is sent.

    Yields:
        Whether anybody can ask; not on a file system without sockets.
    """
    open_: set[asyncio.Transport] = set()
    over = asyncio.Event()
    server: asyncio.Server | None = None
    try:
        with contextlib.suppress(OSError):  # then nobody can ask; the run needs no answers
            _make(folder)
            with _door(folder) as path, socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                server = await asyncio.get_running_loop().create_unix_server(
                    lambda: _StatusProtocol(answer, open_, over), sock=listening.dup(), backlog=_ASKERS_MAX
                )
        yield server is not None
    finally:
        over.set()
        if server is not None:
            server.close()
        for transport in list(open_):
            transport.abort()
        with contextlib.suppress(OSError):
            _remove(folder)


def query_status(folder: Path, timeout_s: float) -> bytes | None:
    """Return what a run says; None where none is there.

    Args:
        folder: that the run has made.

    Raises:
        UsageError: a run is there and does not answer, or may not be asked.
    """
    said = bytearray()
    try:
        with _door(folder) as path, socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(timeout_s)
            asking.connect(path)
            while part := asking.recv(2**16):
                said += part
                if len(said) > ANSWER_BYTES_MAX:
                    raise UsageError(f"{folder}: the run's answer is longer than {ANSWER_BYTES_MAX} bytes")
    except (TimeoutError, BlockingIOError):
        raise UsageError(
            f"the run in {folder.parent.parent} is alive, and has not answered within {timeout_s:g} s: its "
            "own process is busy, perhaps in a dataset function that blocks"
        ) from None
    except PermissionError:
        raise UsageError(f"{folder} belongs to another user, who alone may ask") from None
    except OSError:  # it is not there, or nobody listens
        return None
    return bytes(said) or None


@contextlib.contextmanager
def _door(folder: Path) -> Iterator[str]:
    """Give a path of the socket which is short enough, however long that of the folder is."""
    if not sys.platform.startswith("linux"):
        yield str(folder / NAME)
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


def _make(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(mode=0o700)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)
