"""The launcher of workers on this host, which a fork server forks.

The launcher may be in any thread and any running event loop (a notebook's, a test's): it installs no signal
handler and forks nothing itself. If the fork server is killed, its workers are reported as ended, and the
next `start` starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import anyio
import anyio.to_thread
import msgpack
from msgspec.structs import asdict

from pipedist.cluster.launchers.server import END_S, ServerProcess, take
from pipedist.coordinator.launcher import WorkerExit
from pipedist.errors import LocalProtocolError, UsageError
from pipedist.transport.endpoints import private_directory_of
from pipedist.worker.boot import describe_exit, kill_group
from pipedist.worker.process_setup import WorkerSettings
from pipedist.worker.progress import Running, unpack_running

_READ_BYTES = 65_536

_GONE_S = 0.05  # how long a server whose socket has ended may take to end


class LocalLauncher:
    """Starts workers on this host.

    `gpus`: by worker, its CUDA_VISIBLE_DEVICES and the number of GPUs that it owns; other workers see what this
    process sees.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        threads: int = 1,
        grace_s: float = 1.0,  # how long leaving `async with` waits for workers that were sent a Stop
        join_s: float = 30.0,  # how long the scheduler may take to reply to a worker
        stopped_s_max: float = 3.0,  # how long a worker may be stopped (SIGSTOP) before it is killed
        gpus: Mapping[str, tuple[str, float]] = MappingProxyType({}),
    ) -> None:
        if isinstance(threads, bool) or threads < 1:
            raise UsageError(f"`threads` must be an integer of 1 or more, got {threads!r}")
        self.on_exit: Callable[[WorkerExit], None] = lambda _exit: None
        self._endpoint = endpoint
        self._threads = threads
        self._grace_s = grace_s
        self._join_s = join_s
        self._stopped_s_max = stopped_s_max
        self._gpus = gpus
        self._workers: dict[tuple[str, int], int] = {}  # process id of each (worker, incarnation); 0: unknown
        self._memories: dict[tuple[str, int], int] = {}  # server's descriptor of each `Progress`; -1: none
        self._server: _Connection | None = None
        self._old_servers: list[_Connection] = []  # servers that have ended, whose process is not reaped yet
        self._check_s: float | None = None
        self._open = False
        self._closing = False
        self._empty = anyio.Event()

    async def __aenter__(self) -> Self:
        self._open = True
        self._server = self._start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(self._grace_s)

    @property
    def pids(self) -> Mapping[str, int]:
        return {worker: pid for (worker, _), pid in sorted(self._workers.items()) if pid}

    @property
    def server_pid(self) -> int:
        """The fork server's process id; 0: there is none."""
        return self._server.process.pid if self._server is not None else 0

    def running(self, worker: str) -> Running | None:
        latest = max((number for name, number in self._memories if name == worker), default=None)
        memory = -1 if latest is None else self._memories[worker, latest]
        if memory < 0 or self._server is None:
            return None
        try:  # the worker may just have ended, and its descriptor belong to another file
            return unpack_running(Path(f"/proc/{self._server.process.pid}/fd/{memory}").read_bytes())
        except OSError:
            return None

    def start(self, worker: str, incarnation: int) -> None:
        if not self._open or self._closing:
            raise LocalProtocolError("a launcher that is not open can't start a worker")
        if (worker, incarnation) in self._workers:
            raise LocalProtocolError(f"incarnation {incarnation} of worker {worker} was started twice")
        for name, previous in list(self._workers):
            if name == worker:
                self.kill(name, previous)
        self._workers[worker, incarnation] = 0
        if self._server is None:
            self._server = self._start_server()
        visible, gpus = self._gpus.get(worker, (None, 0.0))
        settings = WorkerSettings(
            endpoint=self._endpoint,
            worker=worker,
            incarnation=incarnation,
            key_file="",
            threads=self._threads,
            join_s=self._join_s,
            visible=visible,
            gpus=gpus,
        )
        self._server.send("start", worker, incarnation, asdict(settings))

    def kill(self, worker: str, incarnation: int | None = None) -> None:
        alive = [number for name, number in self._workers if name == worker]
        if incarnation is None:
            incarnation = max(alive, default=None)
        if incarnation in alive and self._server is not None:
            self._server.send("kill", worker, incarnation)

    def watch(self, every_s: float) -> None:
        known, self._check_s = self._check_s, every_s
        if self._server is not None and known != every_s:
            self._server.send("watch", every_s)

    async def close(self, grace_s: float) -> None:
        if not self._open:
            return
        self._closing = True
        try:
            with anyio.CancelScope(shield=True):
                if self._workers and self._server is not None:
                    self._empty = anyio.Event()
                    with anyio.move_on_after(grace_s):
                        await self._empty.wait()
                if self._server is not None:
                    self._server.end()
                    with anyio.move_on_after(END_S):
                        await self._server.ended.wait()
                self._kill_server()
                for server in self._old_servers:
                    if server.process.code() is None:  # its socket ends just before
                        await anyio.to_thread.run_sync(server.process.wait)
        finally:
            self._kill_server()  # asyncio's own cancellation gets through the shield
            self._old_servers.clear()
            self._open = False

    # -- the fork server ---------------------------------------------------------------

    def _start_server(self) -> _Connection:
        server = _Connection(take(self._threads), self._on_frame, self._on_server_end)
        server.send("serve", private_directory_of(self._endpoint), self._stopped_s_max)
        if self._check_s is not None:
            server.send("watch", self._check_s)
        return server

    def _kill_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._on_server_end(self._server)

    def _on_frame(self, frame: list[Any]) -> None:
        kind, worker, incarnation, pid, *rest = frame
        if kind == "started":
            if (worker, incarnation) in self._workers:
                self._workers[worker, incarnation] = pid
                (self._memories[worker, incarnation],) = rest
            return
        code, signum, text, running, timed_out = rest
        ran = tuple(running) if running else None
        self._report_exit(WorkerExit(worker, incarnation, pid, code, signum, text, ran, timed_out))

    def _report_exit(self, exit_: WorkerExit) -> None:
        self._workers.pop((exit_.worker, exit_.incarnation), None)
        self._memories.pop((exit_.worker, exit_.incarnation), None)
        if not self._workers:
            self._empty.set()
        self.on_exit(exit_)

    def _on_server_end(self, server: _Connection) -> None:
        """Report the workers of a server that has ended: the kernel kills them, but not what they started."""
        self._old_servers = [old for old in self._old_servers if old.process.code() is None]
        self._old_servers.append(server)
        self._server = None
        code = server.process.code(within_s=_GONE_S)
        how = "unknown" if code is None else describe_exit(code)
        text = f"its fork server, process {server.process.pid}, ended ({how})"
        for (worker, incarnation), pid in list(self._workers.items()):
            if pid:
                kill_group(pid)
            self._report_exit(WorkerExit(worker, incarnation, pid, None, signal.SIGKILL, text))


class _Connection:
    """The connection to a running fork server; `on_frame` gets its messages, `on_end` is called when it is gone."""

    def __init__(
        self,
        process: ServerProcess,
        on_frame: Callable[[list[Any]], None],
        on_end: Callable[[_Connection], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._unpacker = msgpack.Unpacker()
        self._loop = asyncio.get_running_loop()
        self.ended = anyio.Event()
        self._unsent = bytearray()
        self.process = process
        self._socket = process.socket
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._on_readable)

    def send(self, *items: object) -> None:
        """Send a message; never wait."""
        was_empty = not self._unsent
        self._unsent += msgpack.packb(items)
        if was_empty:
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return  # the server is gone: `_on_readable` handles that
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._unpacker.feed(data)
            for frame in self._unpacker:
                self._on_frame(frame)
        else:
            self._close()
            self._on_end(self)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self.ended.set()

    def end(self) -> None:
        """Have the server kill its workers and end."""
        self.send("end")
        with contextlib.suppress(OSError):  # the server is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the server; the kernel kills its workers."""
        self._close()
        self.process.kill()
