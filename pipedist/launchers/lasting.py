"""Workers on this host that may outlive the process of their run: each is a `pipedist worker` that dials in.

No fork server starts them: it would take them with it. Each is a supervisor with its worker process
(`pipedist.worker.supervisor`), in a session of its own, so that neither the terminal's Ctrl-C nor its end
is theirs. It dials in over the run's ipc socket (`pipedist.launchers.meeting`), like one on another host:
the protocol, what is kept and how it is fenced are the same.

| who ends | what follows |
|---|---|
| the run's process, in order | it tells them to stop, and kills who has not left in time |
| the run's process, by a signal | they wait for the next one, as long as the run has said, and leave |
| a worker process | its supervisor starts the next one |
| a supervisor | its worker process goes with it, and another one takes the slot |

A run that is resumed takes over who waits, slot by slot. Who has a slot that is not wanted any more hands
back what it has finished, and is sent away; who was started with other terms is sent away at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from msgspec import Struct

from pipedist.accelerators import VISIBLE
from pipedist.launchers.engines import OnFailed, Watchers
from pipedist.launchers.meeting import Holder, Meeting, Slot, leave
from pipedist.launchers.server import stderr
from pipedist.version import __version__
from pipedist.worker import boot

STOP_S = 0.5
"""How long workers may take to leave that their run has told to, before they get a signal, seconds."""

GRACE_S = 3.0
"""How long they may take to leave then; then they are killed, seconds."""

HAND_BACK_S = 2.0
"""How long a worker that is not wanted any more takes part, to hand back what it has finished, seconds."""

ASSEMBLE_S = 10.0
"""How long it is waited at most before those seconds begin, for all workers to be there."""

JOIN_S_MIN = 10.0
"""How long a worker waits at least for the first answer of its run, seconds."""

STARTS_FAILED_MAX = 5
"""Supervisors in a row that left a slot before they have lived for `LIVED_S`; then it stays empty."""

LIVED_S = 10.0

_open: weakref.WeakSet[LastingWorkers] = weakref.WeakSet()
"""Whose workers would outlive this process."""

_LOOK_S = 0.1
"""How soon it is looked again who has a slot, where that could not be seen."""


class LastingTerms(Struct, frozen=True):
    """What the worker of a slot is started with.

    Args:
        threads: BLAS and OpenMP threads.
        visible: the GPUs that it sees, as CUDA_VISIBLE_DEVICES; None: what this process sees.
        gpus: how many it owns.
    """

    threads: int = 1
    visible: str | None = None
    gpus: float = 0.0

    @property
    def text(self) -> str:
        """What must be the same for a worker that has stayed to be as good as a new one."""
        seen = os.environ.get(VISIBLE) if self.visible is None else self.visible
        return json.dumps(
            [__version__, sys.executable, os.path.dirname(__file__), self.threads, seen, self.gpus]
        )


class LastingWorkers:
    """Keeps a worker in each slot, inside `async with`; leaving ends them.

    Args:
        place: where they meet the run.
        terms: of each slot.
        rejoin_s: how long they wait for another process of the run, seconds.
        tell: told, for people, who is sent away, and why.
    """

    def __init__(
        self, place: Meeting, terms: Sequence[LastingTerms], rejoin_s: float, tell: Callable[[str], None]
    ) -> None:
        self._place = place
        self._terms = terms
        self._rejoin_s = rejoin_s
        self._tell = tell
        self._watchers = Watchers()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Supervisors that were started here and not waited for, by process id."""
        self._given_up: set[int] = set()
        """Slots that nobody is put into any more."""
        self._scopes: list[anyio.CancelScope] = []
        self._rests = False
        self._assembled = anyio.Event()
        self._on_failed: OnFailed = _ignore
        self.stayed = 0
        """Workers that another process of this run has left, and that are taken over."""

    async def __aenter__(self) -> Self:
        await self._watchers.__aenter__()
        _open.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._watchers.__aexit__()
        try:
            with anyio.CancelScope(shield=True):
                await self._end_all()
        except BaseException:  # asyncio's own cancellation gets through the shield
            self.kill()
            for child in self._children.values():
                child.kill()
                child.wait()
            raise
        finally:
            _open.discard(self)

    def start(self, on_failed: OnFailed) -> None:
        """Take over who is there, and put workers into the other slots; returns at once.

        Args:
            on_failed: told when no slot can be kept.
        """
        self._on_failed = on_failed
        for number, holder in self._place.taken.items():
            if number >= len(self._terms):
                self._watchers.start(self._until_rest, self._send_away, number)
            if number >= len(self._terms) or holder.terms == self._terms[number].text:
                self.stayed += 1
        for number in range(len(self._terms)):
            self._watchers.start(self._until_rest, self._keep, number)

    def assembled(self) -> None:
        """Take note that all workers are there that are waited for: those that are not wanted may go soon."""
        self._assembled.set()

    def rest(self) -> None:
        """Put nobody into a slot any more: the workers are about to be told to leave."""
        self._rests = True
        for scope in self._scopes:
            scope.cancel()

    async def _until_rest(self, work: Callable[[int], Coroutine[Any, Any, None]], number: int) -> None:
        """Do something about a slot until there is to be rest.

        The scope of the watchers would not do: that is also who waits for the cluster to be closed.
        """
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            if not self._rests:
                await work(number)

    def kill(self) -> None:
        """Kill all of them, and remove the place where they would wait; from any thread, also a signal's."""
        for number, holder in self._place.taken.items():
            _signal(self._place.slot(number), holder, signal.SIGKILL)
        self._place.remove()

    # -- one slot ------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """See to it that a slot has a worker."""
        slot, terms = self._place.slot(number), self._terms[number]
        failed, why = 0, "they ended; what they said is on stderr"
        while failed < STARTS_FAILED_MAX:
            holder = slot.holder
            if holder is None:
                failed += 1
                try:
                    began = self._start(slot, terms)
                except OSError as error:
                    began, why = False, f"they can't be started: {error.strerror}"
                if not began:
                    await anyio.sleep(_LOOK_S)
            elif holder.terms != terms.text:
                self._tell(f"w{number}, of the killed process, was started with other terms, and is replaced")
                await self._dismiss(slot, holder)
            else:
                since = time.monotonic()
                await self._gone(slot, holder)
                failed = 0 if time.monotonic() - since >= LIVED_S else failed
        self._given_up.add(number)
        if len(self._given_up) == len(self._terms):
            self._on_failed(f"no worker lives for {LIVED_S:g} s, {failed} in a row: {why}")

    def _start(self, slot: Slot, terms: LastingTerms) -> bool:
        """Start the worker of a slot; return whether it was free."""
        held = slot.take(terms.text)
        if held is None:
            return False
        arguments = {
            "endpoint": self._place.endpoint,
            "directory": str(self._place.directory),
            "slot": slot.number,
            "threads": terms.threads,
            "gpus": terms.gpus,
            "join_s": max(self._rejoin_s, JOIN_S_MIN),
        }
        environment = boot.environment(terms.threads)
        if terms.visible is not None:
            environment[VISIBLE] = terms.visible
        try:
            process = subprocess.Popen(
                boot.command("pipedist.launchers.lasting", arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr(),  # what user code writes to descriptor 1 must not mix with our output
                start_new_session=True,
                pass_fds=(held,),
            )
            slot.write(held, Holder(process.pid, terms.text))
        finally:
            os.close(held)
        self._children[process.pid] = process
        return True

    async def _send_away(self, number: int) -> None:
        """Let the worker of a slot that is not wanted any more hand back what it has, and leave."""
        self._tell(
            f"w{number}, of the killed process, is not wanted any more (workers: {len(self._terms)}): "
            "it hands back what it has finished, and is sent away"
        )
        with anyio.move_on_after(ASSEMBLE_S):
            await self._assembled.wait()
        await anyio.sleep(HAND_BACK_S)
        slot = self._place.slot(number)
        if (holder := slot.holder) is not None:
            _signal(slot, holder, signal.SIGTERM)
            await self._gone(slot, holder)

    async def _dismiss(self, slot: Slot, holder: Holder) -> None:
        """End the worker of a slot: twice asked, it does not wait for its call; then it is killed."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if slot.holder != holder:
                return
            _signal(slot, holder, number)
            with anyio.move_on_after(GRACE_S / 2):
                await self._gone(slot, holder)

    async def _gone(self, slot: Slot, holder: Holder) -> None:
        """Return as soon as a worker has left its slot."""
        while slot.holder == holder:
            with _process(holder) as ended:
                if ended is None or slot.holder != holder:  # it leaves, or has not said yet who it is
                    await anyio.sleep(_LOOK_S)
                else:
                    await _readable(ended)
        child = self._children.get(holder.pid)
        if child is not None and child.poll() is not None:
            del self._children[holder.pid]

    async def _end_all(self) -> None:
        """Wait for who was told to stop; end who does not."""
        async with anyio.create_task_group() as group:
            for number, holder in self._place.taken.items():
                group.start_soon(self._see_off, self._place.slot(number), holder)
        for child in self._children.values():  # some have just left their slots
            await anyio.to_thread.run_sync(_reap, child)

    async def _see_off(self, slot: Slot, holder: Holder) -> None:
        with anyio.move_on_after(STOP_S):
            await self._gone(slot, holder)
        await self._dismiss(slot, holder)  # it had not joined when the others were told, or is in a call


def kill_all() -> None:
    """Kill all workers that would outlive this process, which is about to end out of order."""
    for workers in list(_open):
        with contextlib.suppress(OSError):
            workers.kill()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    event = anyio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def _process(holder: Holder) -> Iterator[int | None]:
    """Give a descriptor that is readable when a process has ended; None where it has, or is not known."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(holder.pid) if holder.pid else None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _signal(slot: Slot, holder: Holder, number: signal.Signals) -> None:
    """Send a signal to who holds a slot, and to no other process that has its number by now."""
    with _process(holder) as process, contextlib.suppress(ProcessLookupError):
        if process is not None and slot.holder == holder:
            signal.pidfd_send_signal(process, number)


def _reap(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _ignore(_reason: str) -> None:
    return


def main(arguments: Mapping[str, Any]) -> None:
    """Be the supervisor of a worker that may outlive its run's process.

    Args:
        arguments: `endpoint`, of the run; `directory` and `slot`, see `pipedist.launchers.meeting`;
            `threads`, `gpus`, `join_s`, as for `Supervisor`.
    """
    from pipedist.errors import PipedistError
    from pipedist.worker.supervisor import Supervisor

    directory, slot = str(arguments["directory"]), int(arguments["slot"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code, asked = 1, False
    try:
        supervisor = Supervisor(
            str(arguments["endpoint"]),
            "",
            threads=int(arguments["threads"]),
            join_s=float(arguments["join_s"]),
            gpus=float(arguments["gpus"]),
            worker=f"w{slot}.{os.getpid()}",
            tells=False,
            folder=directory,
        )

        def on_sigterm(_number: int, _frame: object) -> None:
            nonlocal asked
            asked = True
            supervisor.leave()

        signal.signal(signal.SIGTERM, on_sigterm)
        code = supervisor.run()
    except PipedistError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{error}\n")
        code = error.exit_code
    finally:
        if code or asked:  # otherwise its run has told it to stop, and removes the directory
            leave(Path(directory), slot)
    raise SystemExit(code)
