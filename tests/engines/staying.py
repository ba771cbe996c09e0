"""Runs on an engine in processes of its own: the run's process is killed and resumed, the workers stay."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engines.placing import processes_with
from tests.reattach.jobs import PATIENCE_S, ROOT, until
from tests.reattach.local_jobs import LocalJob

WORKERS = 2

DASK = f"""
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    settings = dict(threads_per_worker=1, memory_limit=0, dashboard_address=None)
    with LocalCluster(n_workers={WORKERS}, **settings) as dask:
        print(dask.scheduler_address, flush=True)
        sys.stdin.read()
"""

DASK_HAS = """
import json, sys
from distributed import Client

def found(dask_scheduler):
    names = [*dask_scheduler.worker_plugins, *dask_scheduler.plugins]
    return [str(name) for name in names if "pipedist" in str(name)]

with Client(sys.argv[1], set_as_default=False) as client:
    print("has", json.dumps(client.run_on_scheduler(found)))
"""

RAY = f"""
import socket, sys
from ray.cluster_utils import Cluster

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
node = {{"object_store_memory": 80 * 2**20, "include_dashboard": False}}
ray = Cluster(initialize_head=True, head_node_args={{**node, "num_cpus": 0, "ray_client_server_port": port}})
for _ in range({WORKERS}):
    ray.add_node(num_cpus=1, object_store_memory=80 * 2**20)
print(sys.argv[1] == "client" and f"ray://127.0.0.1:{{port}}" or ray.address, flush=True)
sys.stdin.read()
ray.shutdown()
"""

RAY_HAS = """
import json, sys
import ray
from ray.util import list_named_actors, placement_group_table

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
names = [each["name"] for each in list_named_actors(all_namespaces=True)]
states = {group["state"] for group in placement_group_table().values()} - {"REMOVED"}
used = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)
names = [name for name in names if "pipedist" in name]
print("has", json.dumps(names + sorted(states) + [used] * (used > 0)))
"""


@dataclass
class EngineJob(LocalJob):
    """A spec with `launcher: ray` or `dask`, and an engine that is there without the run; see `Job`.

    Args:
        launcher: which.
        address: the engine's.
        mark: what is in the environment of the engine's processes, and of no others.
    """

    launcher: str = ""
    address: str = ""
    mark: str = ""
    has: str = field(default="", repr=False)

    def spec(self) -> str:
        text = super().spec()
        return text.replace(
            "cluster:\n", f'cluster:\n  launcher: {self.launcher}\n  address: "{self.address}"\n'
        )

    def ours(self) -> set[int]:
        """Return the supervisors and worker processes that the engine keeps."""
        return {pid for pid, line in processes_with(self.mark).items() if " -P -c " in line}

    def kept(self) -> set[int]:
        """Return the supervisors; no process that one of them is just about to make a worker process."""
        found: dict[int, int] = {}
        for pid in self.ours():
            with suppress(OSError):  # it has just ended
                if b"pipedist.launchers.hosted" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return {pid for pid, parent in found.items() if parent not in found}

    def in_engine(self) -> list[object]:
        """Return what of ours the engine has: plugins; keepers, room and placement groups."""
        words = [sys.executable, "-c", self.has, self.address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=self.environment)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("has ")]  # Ray tells, too
        found: list[object] = json.loads(line.removeprefix("has "))
        return found

    @property
    def pointer(self) -> Path:
        """The file that says where the workers find the next process of the run."""
        return self.folder / "out/.pipedist/placed.json"


@contextmanager
def engine(kind: str) -> Iterator[dict[str, str]]:
    """Give an engine, in processes of its own: what an `EngineJob` must know of it.

    Args:
        kind: `dask`; `ray`; `ray-client`: Ray, over its client server.
    """
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPEDIST_TEST_MARK": mark,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    script = DASK if kind == "dask" else RAY
    with TemporaryDirectory() as folder:
        file = Path(folder, "engine.py")  # a file: Dask's processes import it
        file.write_text(script)
        process = subprocess.Popen(
            [sys.executable, file, "client" if kind == "ray-client" else ""],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            try:
                address = process.stdout.readline().strip()
                assert address, "it did not start"
                launcher = kind.partition("-")[0]
                has = DASK_HAS if kind == "dask" else RAY_HAS
                yield {"launcher": launcher, "address": address, "mark": mark, "has": has}
            finally:
                process.stdin.close()
                try:
                    process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextmanager
def engine_job(
    folder: Path, at: dict[str, str], rejoin_s: float = 60.0, steps: int = 12
) -> Iterator[EngineJob]:
    """Give a job; whatever becomes of it, no worker of it is left at the end."""
    with TemporaryDirectory(dir="/tmp") as sockets:
        made = {"workers": WORKERS, "rejoin_s": rejoin_s, "steps": steps, "sockets": Path(sockets), **at}
        job = EngineJob(folder, **made)  # type: ignore[arg-type]
        yield job
        until(lambda: not job.ours())
