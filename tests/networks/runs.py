"""A run whose driver and workers are on different hosts, and its expected results."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pipedist
from pipedist.transport.keys import new_keys, write_key_file
from tests import preloaded
from tests.networks.hosts import Host

PATIENCE_S = 90.0
"""Bounds hangs; nothing is expected to take so long."""

PORT = 5555

CODE = '''\
"""Replica functions of the tests; their notes are not part of the result."""
import os, time
import numpy as np

def work(shard, ctx, folder, pace_s, gated_from):
    with open(os.path.join(folder, "begun"), "a") as file:
        file.write(f"{ctx.step} {ctx.replica_id_in_sync_group} {os.uname().nodename}\\n")
    time.sleep(pace_s)
    if ctx.step >= gated_from:
        end = time.monotonic() + 100
        while not os.path.exists(os.path.join(folder, "gate")) and time.monotonic() < end:
            time.sleep(0.01)
    return {"id": shard, "value": np.sin(shard) * ctx.rng.standard_normal(len(shard))}
'''

SPEC = """\
pipedist: 1
name: networks
replicas: 3
cluster: {{{cluster}}}
dataset: {{range: {elements}, batch: 12}}
stages:
  work:
    run: "network_code:work"
    with: {{folder: "{folder}", pace_s: 0.005, gated_from: {gated_from}}}
  total: {{reduce: sum, of: work, axis: 0}}
  rows: {{gather: 0, of: work}}
outputs: {{rows: rows.npz, total: total.json}}
"""


class Work:
    """The run: 40 steps of 3 calls; those from step 30 on wait until `open_gate`.

    So a run lasts as long as a test needs it to, whatever the machine's pace.

    Args:
        folder: made, for everything of it.
    """

    STEPS = 40
    GATED_FROM = 30
    MODULE, CODE, SPEC = "network_code", CODE, SPEC

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / f"{self.MODULE}.py").write_text(self.CODE)
        self.spec = folder / "spec.yaml"
        self.write_spec("")

    def write_spec(self, cluster: str) -> None:
        """Write the spec.

        Args:
            cluster: what it says of its cluster, as in braces.
        """
        # What waits at the gate takes long, and is counted.
        cluster = f"speculation: off, {cluster}" if cluster else "speculation: off"
        self.spec.write_text(
            self.SPEC.format(
                elements=12 * self.STEPS, folder=self.folder, gated_from=self.GATED_FROM, cluster=cluster
            )
        )

    def open_gate(self) -> None:
        """Let the last steps go on."""
        (self.folder / "gate").touch()

    def reaches(self, hosts: set[str], after: int = 0) -> None:
        """Return as soon as each of these hosts has begun a call, after so many calls."""
        end = time.monotonic() + PATIENCE_S
        while not hosts <= {host for _, _, host in self.begun()[after:]}:
            assert time.monotonic() < end, f"{hosts} have not all begun calls: {self.begun()[after:]}"
            time.sleep(0.01)

    def begun(self) -> list[tuple[int, int, str]]:
        """Return step, replica and host of each call that was begun, in order."""
        try:
            lines = (self.folder / "begun").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(step), int(replica), host) for step, replica, host in map(str.split, lines)]

    def execute_locally(self) -> dict[str, bytes]:
        """Return the output files of a run that nothing disturbs, on this host's own processes."""
        self.open_gate()
        output = self.folder / "local"
        pipedist.run(self.spec, workers=2, output=output)
        return files_of(output)


def files_of(output: Path) -> dict[str, bytes]:
    """Return the output files of a run."""
    return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}


class Told:
    """The JSON lines that a process prints, read by a thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def wait_for(self, event: str, **what: object) -> dict[str, Any]:
        """Return the next line of this event, with these values; others before it are passed over."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                told = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} {what} within {PATIENCE_S:g} s") from None
            assert told is not None, f"the process ended before {event} {what}"
            if told["event"] == event and all(told.get(key) == value for key, value in what.items()):
                return told


class NetworkRun:
    """A run on one host, and its workers on others.

    Args:
        work: what is executed.
        at: the scheduler's host.
        heartbeat_timeout_s: how long a worker may be silent.
        rejoin_s: how long a worker waits for a scheduler that is gone.
    """

    def __init__(self, work: Work, at: Host, heartbeat_timeout_s: float, rejoin_s: float) -> None:
        self._work = work
        self._folder = work.folder
        self.output = work.folder / "out"
        keys = new_keys()
        write_key_file(self._folder / "cluster.key", keys)
        write_key_file(self._folder / "cluster.worker.key", type(keys)(keys.client, None))
        self._env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoint = f"tcp://{at.address}:{PORT}"
        times = [str(heartbeat_timeout_s), str(rejoin_s)]
        args = [self.endpoint, self._folder / "cluster.key", self.output, *times]
        process = self._start("scheduler", at, "-m", "tests.networks.scheduler", work.spec, *args)
        assert process.stdout is not None
        self.told = Told(process.stdout)
        assert self.told.wait_for("listening")["endpoint"] == self.endpoint

    def start_worker(
        self, on: Host, key_file: str = "cluster.worker.key", *, gpus: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start `pipedist worker` on a host."""
        args = ("-m", "pipedist", "worker", "--connect", self.endpoint, "--key-file", key_file)
        if not gpus:
            return self._start(on.name, on, *args)
        tool = self._folder / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text('#!/bin/sh\necho "GPU 0: a test\'s"\n')
        tool.chmod(0o755)
        path = f"{tool.parent}:{os.environ['PATH']}"
        return self._start(on.name, on, *args, env={"CUDA_VISIBLE_DEVICES": gpus, "PATH": path})

    def _start(
        self, name: str, on: Host, *args: str | Path, env: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        env = {**self._env, **env}
        with (self._folder / f"{name}.stderr").open("ab") as errors:
            process = on.start([sys.executable, *args], cwd=self._folder, stderr=errors, env=env)
        self._processes[name] = process
        return process

    def said(self, name: str) -> str:
        """Return the standard error of a process."""
        return (self._folder / f"{name}.stderr").read_text()

    def finish(self) -> dict[str, bytes]:
        """Open the gate, wait for the run's end, check its ledger and journal, and return its files."""
        self._work.open_gate()
        ledger = self.told.wait_for("done")["ledger"]
        elements = 12 * Work.STEPS
        assert ledger == {"elements": elements, "committed": elements, "quarantined": 0, "lost": 0}
        assert self._processes["scheduler"].wait(PATIENCE_S) == 0, self.said("scheduler")
        audit = [sys.executable, "-m", "pipedist", "audit", str(self.output)]
        done = preloaded.run(audit, env=self._env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return files_of(self.output)

    def close(self) -> None:
        """Kill the remaining processes."""
        for name, process in self._processes.items():
            print(f"--- {name}\n{self.said(name)}")  # pytest shows it where a test fails
            process.kill()
            process.wait(PATIENCE_S)
            if process.stdout is not None and process is not self._processes["scheduler"]:
                process.stdout.close()


@contextmanager
def running(
    work: Work, at: Host, *, heartbeat_timeout_s: float = 16.0, rejoin_s: float = 60.0
) -> Iterator[NetworkRun]:
    """Begin a run; see `NetworkRun`."""
    run = NetworkRun(work, at, heartbeat_timeout_s, rejoin_s)
    try:
        yield run
    finally:
        run.close()
