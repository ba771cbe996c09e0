"""Workers placed by a real Ray: several nodes, one of which is killed; also through its client server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import pipedist
from pipedist.cluster.launchers.ray import make_group
from pipedist.errors import UsageError, WorkersLost
from tests.engines.placing import (
    check_the_commands,
    document,
    processes_with,
    run_that_fails,
    run_that_loses,
    steps_begun,
    undisturbed,
    wait_until,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),  # Ray starts many processes; it bounds hangs only
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed here: make test-engines"
    ),
    pytest.mark.filterwarnings("default"),  # Ray's own
]

STORE_BYTES = 80 * 2**20
EARLIER = set(Path("/tmp").glob("pipedist-ray-*"))
SHARED_BY_OTHERS = set(os.listdir("/dev/shm"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(
        "GRPC_ENABLE_FORK_SUPPORT", "0"
    )  # its hooks now and then kill what the client server forks


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray of a head without room, and three nodes of one CPU."""
    import ray
    from ray.cluster_utils import Cluster

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = {
        "num_cpus": 0,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "ray_client_server_port": port,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield cluster
    finally:
        ray.shutdown()  # a test that failed may have left this process connected
        cluster.shutdown()


def address_of(nodes: Any, door: str) -> str:
    """Where a driver connects: to the control store, as one of the nodes does, or to the client server."""
    if door == "node":
        return str(nodes.address)
    return f"ray://127.0.0.1:{nodes.head_node._ray_params.ray_client_server_port}"


def fail_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first connection come to nothing, as where the client server's new process dies."""
    import ray

    connect, calls = ray.init, iter(range(9))

    def init(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            raise ConnectionError("Starting Ray client server failed")
        return connect(*args, **kwargs)

    monkeypatch.setattr(ray, "init", init)


DOORS = ("node", "client")
PLACE_S = 240.0


@pytest.mark.asyncio
@pytest.mark.parametrize("door", DOORS)
async def test_a_node_killed_in_mid_run_changes_nothing(
    nodes: Any,
    tmp_path: Path,
    door: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if door == "client":
        fail_first(monkeypatch)

    async def lose() -> None:
        lost = next(iter(nodes.worker_nodes))
        await anyio.to_thread.run_sync(lambda: nodes.remove_node(lost, allow_graceful=False))
        nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES, wait=False)

    async with pipedist.RayCluster(
        3, address=address_of(nodes, door), placement="spread", place_s=PLACE_S
    ) as cluster:
        await cluster.ready()
        found = await run_that_loses(cluster, tmp_path, lose)
        await cluster.ready()  # Ray has started the actor again, on the new node
    assert found == await anyio.to_thread.run_sync(undisturbed)
    assert len(workers_in(tmp_path)) >= 3, "each node's worker took part"
    assert "a worker placed by Ray has left" not in capfd.readouterr().err, "Ray brings it back"


@pytest.mark.asyncio
@pytest.mark.parametrize("door", DOORS)
async def test_nothing_is_left_behind_of_a_ray_that_stays(
    nodes: Any, tmp_path: Path, door: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    address = address_of(nodes, door)

    here, sent = tmp_path / "here", tmp_path / "sent"
    for folder in (here, sent):
        folder.mkdir()
        (folder / f"mine_{door}.py").write_text(
            "import os\ndef where(shard): return [__file__, os.environ.get('PYTHONPATH', '')]\n"
        )
    spec = {
        "pipedist": 1,
        "code": str(here),
        "dataset": {"range": 4, "batch": 4},
        "stages": {
            "w": {"run": f"mine_{door}:where"},
            "all": {"reduce": "tests.engines.test_ray:first", "of": "w"},
        },
    }
    async with pipedist.RayCluster(2, address=address, code=sent, place_s=PLACE_S) as cluster:
        await cluster.ready()
        endpoint = cluster.coordinator.endpoint
        assert len(dialling(endpoint)) == 4, "two supervisors and their workers"
        async with pipedist.open(spec, cluster=cluster) as run:
            (here / f"mine_{door}.py").unlink()  # as on another host
            file, path = (await run.results())["all"]
        await run_that_fails(cluster)
    assert "working_dir_files" in file, "the modules came with Ray, not from this host's folder"
    assert "working_dir_files" not in path, "they come after what is installed"
    assert not ray.is_initialized()
    assert dialling(endpoint) == set()
    assert scratch() == []
    assert shared_memory() == set()
    said = capfd.readouterr().err
    assert "Callback error" not in said, said  # what was cancelled is ours alone, and not Ray's
    assert "Traceback" not in said, said
    ray.init(address=address, log_to_driver=False)
    try:
        from ray.util import placement_group_table

        states = {group["state"] for group in placement_group_table().values()}
        assert states <= {"REMOVED"}
        async with pipedist.RayCluster(1) as cluster:  # this process's connection is used, and stays
            await cluster.ready()
        assert ray.is_initialized()
        with pytest.raises(UsageError, match="connected to Ray already"):
            async with pipedist.RayCluster(1, address="local"):
                pass
    finally:
        ray.shutdown()


def first(a: Any, _b: Any) -> Any:
    return a


def dialling(endpoint: str) -> set[int]:
    """The supervisors and worker processes on this host that were started for an endpoint."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and endpoint.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def scratch() -> list[Path]:
    """The files of clusters on Ray on this host, without those of killed runs."""
    return list(set(Path("/tmp").glob("pipedist-ray-*")) - EARLIER)


def workers_in(begun: Path) -> set[str]:
    return {path.name.split("-")[2] for path in begun.iterdir()}


def shared_memory() -> set[str]:
    found = set(os.listdir("/dev/shm")) - SHARED_BY_OTHERS
    return {
        name for name in found if "plasma" in name
    }  # of pipedist's, only names of other runs are to be seen


@pytest.mark.asyncio
async def test_a_ray_without_resources_is_reported(nodes: Any) -> None:
    with pytest.raises(UsageError, match=r"no room for 4 workers of 1 CPU each within 1 s; it has 3 CPU"):
        async with pipedist.RayCluster(4, address=nodes.address, place_s=1):
            pass


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing_in_a_connection_that_stays(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray creates the placement group after the wait for it was cancelled."""
    import ray
    from ray.util import placement_group_table

    begun, goes_on = threading.Event(), threading.Event()

    def slow(room: Any) -> Any:
        begun.set()
        goes_on.wait()
        return make_group(room)

    async def enter() -> None:
        async with pipedist.RayCluster(1):
            raise AssertionError("it was cancelled")

    monkeypatch.setattr("pipedist.cluster.launchers.ray.make_group", slow)
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        entering = asyncio.create_task(enter())
        await anyio.to_thread.run_sync(begun.wait)
        entering.cancel()
        await asyncio.sleep(0)  # it is cancelled before there is a group
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    finally:
        ray.shutdown()


@pytest.mark.asyncio
async def test_a_ray_of_another_version_is_reported(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with monkeypatch.context() as patch:
        patch.setattr(ray, "__version__", "2.0.0")
        with pytest.raises(UsageError, match=r"can't join the Ray cluster at (?s:.*)Version mismatch"):
            async with pipedist.RayCluster(1, address=nodes.address):
                pass
    async with pipedist.RayCluster(1, address=nodes.address, place_s=PLACE_S) as cluster:
        await cluster.ready()  # nothing of the attempt is in the way


@pytest.mark.asyncio
async def test_a_lost_client_server_ends_the_run(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the actors of a client that it has lost, so no workers can be placed."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "2")
    spec = document("slow_roots", begun=str(tmp_path))
    async with pipedist.RayCluster(2, address=address_of(nodes, "client"), place_s=PLACE_S) as cluster:
        await cluster.ready()
        async with pipedist.open(spec, cluster=cluster) as run:
            for pid in client_servers():
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkersLost, match="the connection to Ray was lost"):
                await run.results()


def client_servers() -> set[int]:
    """The processes of which Ray's client server starts one for each client, below this process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if b"specific-server" in line and descends(int(entry.name)):
                    found.add(int(entry.name))
    return found


def descends(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


@pytest.mark.asyncio
async def test_the_ray_that_the_environment_names_is_not_replaced_by_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UsageError, match=f"can't reach a Ray cluster at {address}"):
            async with pipedist.RayCluster(1):
                pass


@pytest.mark.asyncio
async def test_an_address_without_ray_is_reported() -> None:
    with pytest.raises(UsageError, match=r"can't reach a Ray cluster at 127\.0\.0\.1:1"):
        async with pipedist.RayCluster(1, address="127.0.0.1:1"):
            pass


def test_the_example_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    words = ("--cluster", "ray:local", "--workers", "2")
    check_the_commands(tmp_path, "ray_cluster.py", "launcher ray at local, pack", *words)
    assert wait_until(lambda: not processes_with(mark)), processes_with(mark)
    assert scratch() == []


def test_a_killed_driver_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own processes go with the thread that started them, ours with Ray's actors."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PIPEDIST_TEST_MARK", mark)
    script = (
        "import pipedist\n"
        "from tests.engines.placing import document\n"
        f"pipedist.run(document('slow_roots', begun={str(tmp_path)!r}), cluster='ray:local', workers=2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2]) as driver:
        try:
            assert wait_until(lambda: steps_begun(tmp_path) > 5)
        finally:
            driver.kill()
    # Ray's agents look for its raylet now and then, and end by themselves.
    assert wait_until(lambda: all("Agent" in text for text in processes_with(mark).values()))
