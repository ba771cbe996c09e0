"""The fork server, in a process that controls the order of its events."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

BEGINNING = """
import os, select, signal, socket, types
from msgspec.structs import asdict

from pipedist.cluster.launchers import forkserver
from pipedist.worker.process_setup import WorkerSettings
from tests.cluster.launchers.processes import wait_state

settings = asdict(WorkerSettings(endpoint="", worker="", incarnation=0, key_file="", threads=1, join_s=1.0))
launcher, control = socket.socketpair()
server = forkserver.ForkServer(control, os.getppid())
"""


def runs(script: str) -> None:
    command = [sys.executable, "-c", BEGINNING + script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_launcher_knows_a_workers_process_before_that_begins() -> None:
    runs("""
begun, begins = os.pipe()
forkserver.worker_process.run_process = lambda *_: os.write(begins, b"x")
send = server._send

def slowly(kind, *items):
    seen, _, _ = select.select([begun], [], [], 0.2)
    assert not seen, f"it runs before its launcher knows that it has {kind}"
    send(kind, *items)

server._send = slowly
server._fork("w0", 0, settings)
assert os.read(begun, 1) == b"x"
server._send = send
server._kill_all()
""")


def test_a_stopped_worker_that_goes_on_is_not_killed_by_a_server_that_looks_late() -> None:
    """The server was stopped too: the time is up, and it does not know yet which worker runs again."""
    runs("""
forkserver.worker_process.run_process = lambda *_: signal.pause()
clock = forkserver.time = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
server._stopped_s_max = 3.0
server._fork("goes on", 0, settings)
server._fork("stays", 0, settings)
goes_on, stays = server._children.values()
for child in (goes_on, stays):
    os.kill(child.pid, signal.SIGSTOP)
    wait_state(child.pid, "T")
server._reap()
clock.now = 2.9
server._kill_late()
assert not goes_on.was_killed and not stays.was_killed
os.kill(goes_on.pid, signal.SIGCONT)
clock.now = 3.1
server._kill_late()
assert not goes_on.was_killed and stays.was_killed
clock.now = 100.0
server._kill_late()
assert not goes_on.was_killed
server._kill_all()
""")


def test_a_worker_that_replaces_its_program_is_killed() -> None:
    """Its process lives on, but executes no call any more."""
    runs("""
import time
forkserver.worker_process.run_process = lambda *_: os.execv("/bin/sleep", ["sleep", "60"])
sent = []
server._send = lambda *items: sent.append(items)
server._fork("w0", 0, settings)
(child,) = server._children.values()
while not child.was_killed:
    server._step()
server._kill_all()
assert sent[-1][6] == "replaced by another program (exec), then killed with signal 9 (SIGKILL)", sent
""")


def test_a_launcher_that_reads_nothing_blocks_no_kill() -> None:
    runs("""
forkserver.worker_process.run_process = lambda *_: signal.pause()
server._control.setblocking(False)
server._selector.register(control, forkserver.selectors.EVENT_READ, server._on_control)
server._fork("w0", 0, settings)
(child,) = server._children.values()
for number in range(200):
    server._send("text", number, "x" * 10_000)
launcher.sendall(forkserver.msgpack.packb(["kill", "w0", 0]))
assert server._selector.select(0) == [], "it reads requests, whose replies have no room"
server._kill("w0", 0)
os.waitpid(child.pid, 0)
server._children.clear()
read = forkserver.msgpack.Unpacker()
frames = []
while len(frames) < 201:
    for key, _ in server._selector.select(0):
        key.data()
    read.feed(launcher.recv(65_536))
    frames += read
assert frames[0][0] == "started"
assert [number for _, number, _ in frames[1:]] == list(range(200))
assert not server._unsent
""")


def test_a_worker_that_ends_by_itself_is_not_called_replaced() -> None:
    runs("""
forkserver.worker_process.run_process = lambda *_: 3
sent = []
server._send = lambda *items: sent.append(items)
server._fork("w0", 0, settings)
while server._children:
    server._step()
    server._reap()
assert sent[-1][6] == "exit code 3", sent
""")
