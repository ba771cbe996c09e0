"""The actor that keeps a run's workers with Ray is lost: its process is killed, or its whole node.

It runs on Ray's head, whose loss is the end of that Ray. The tests of lost nodes have it on another one
(`tests.engines.off_the_head`), where it is too if Ray does not say which node the head is.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.off_the_head import BESIDE
from tests.engines.placing import processes_with, wait_until
from tests.engines.staying import RAY_HAS, WORKERS, EngineJob, engine_job
from tests.reattach.jobs import PATIENCE_S, Outcome, until
from tests.reattach.local_jobs import LocalRun

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),  # Ray starts many processes; it bounds hangs only
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed here: make test-engines"
    ),
    pytest.mark.filterwarnings("default"),  # Ray's own
]

NODE = {"object_store_memory": 80 * 2**20}
STEPS = 12


class Nodes:
    """A Ray of a head without room, and as many nodes of one CPU as there are workers.

    So there is room for workers anew only when that of the old ones was given back.

    Args:
        mark: in the environment of its processes.
    """

    def __init__(self, mark: str) -> None:
        from ray.cluster_utils import Cluster

        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        self.mark = mark
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(WORKERS):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        self._cluster.add_node(**NODE, num_cpus=1, resources={BESIDE: 1})

    def lose(self, node: Any) -> None:
        """Lose a node: each of its processes is killed."""
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_the_keepers(self) -> None:
        """Lose the node of the keeper."""
        raylet = int(Path(f"/proc/{self.keeper()}/stat").read_text().rpartition(")")[2].split()[1])
        (node,) = [each for each in self.others if raylet_of(each) == raylet]
        self.lose(node)

    @property
    def others(self) -> list[Any]:
        """The nodes that are not the head."""
        return list(self._cluster.worker_nodes)

    def keeper(self) -> int:
        """Return the process of the keeper, 0 where there is none."""
        found = [pid for pid, line in processes_with(self.mark).items() if line.startswith("ray::RayKeeper")]
        return found[0] if len(found) == 1 else 0

    def shutdown(self) -> None:
        self._cluster.shutdown()


def raylet_of(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


@pytest.fixture(scope="module")
def shared() -> Iterator[Nodes]:
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDIST_TEST_MARK", mark)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes = Nodes(mark)
        try:
            yield nodes
        finally:
            nodes.shutdown()


@pytest.fixture
def nodes(shared: Nodes) -> Nodes:
    """As many as at first, whatever the test before has lost."""
    while len(shared.others) < WORKERS:
        shared.add()
    return shared


@contextmanager
def job_on(nodes: Nodes, folder: Path, rejoin_s: float = 60.0) -> Iterator[EngineJob]:
    at = {"launcher": "ray", "address": nodes.address, "mark": nodes.mark, "has": RAY_HAS}
    with engine_job(folder, at, rejoin_s=rejoin_s, steps=STEPS) as job:
        yield job


def placed(job: EngineJob, other_than: set[int]) -> set[int]:
    """Return the supervisors as soon as each worker has one, none of them of these."""
    seen: set[int] = set()

    def are_there() -> bool:
        seen.clear()
        seen.update(job.kept())
        return len(seen) == WORKERS and not seen & other_than

    until(are_there)
    return set(seen)


def killed_at(job: EngineJob, step: int) -> set[int]:
    """Kill the run when its workers execute a step and have finished others; return their supervisors."""
    held = job.hold(step)
    with job.start() as run:
        job.reaches(step)
        there = placed(job, set())
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.ends() == -signal.SIGKILL
    held.unlink()
    return there


def is_right(job: EngineJob, run: LocalRun, undisturbed: Outcome) -> None:
    """See that a run ends with the same bytes, each call executed, some anew, and nothing left."""
    assert run.ends() == 0, run.said
    assert job.outcome() == undisturbed
    calls = job.calls()
    assert set(calls) == {(step, replica) for step in range(STEPS) for replica in range(2)}
    assert max(calls.values()) <= 2, "what was lost is executed once more, and nothing else"
    assert not job.ours()
    until(lambda: job.in_engine() == [])
    assert not job.pointer.exists()


def test_the_keepers_node_is_lost_in_mid_run(tmp_path: Path, nodes: Nodes, undisturbed: Outcome) -> None:
    """Also the worker on the other node is placed anew: who has made it is gone."""
    with job_on(nodes, tmp_path) as job:
        job.module = "tests.engines.off_the_head"
        held = job.hold(4)
        with job.start() as run:
            job.reaches(4)
            before = placed(job, set())
            nodes.lose_the_keepers()
            nodes.add()
            placed(job, before)
            held.unlink()
            is_right(job, run, undisturbed)


@pytest.mark.parametrize("comes", ["at once", "later"])
def test_the_keepers_node_is_lost_while_there_is_no_run(
    tmp_path: Path, nodes: Nodes, undisturbed: Outcome, comes: str
) -> None:
    """The next process comes before Ray has noticed anything, or finds a keeper that was started again."""
    with job_on(nodes, tmp_path) as job:
        job.module = "tests.engines.off_the_head"
        before = killed_at(job, 4)
        nodes.lose_the_keepers()
        if comes == "later":
            nodes.add()
            placed(job, before)
        with job.start("--resume") as run:
            if comes == "at once":
                nodes.add()
            is_right(job, run, undisturbed)


def test_the_keepers_node_is_lost_and_nobody_comes(tmp_path: Path, nodes: Nodes) -> None:
    """Without a node instead: the keeper that Ray starts again has no room for all workers, and ends too."""
    with job_on(nodes, tmp_path, rejoin_s=2.0) as job:
        job.module = "tests.engines.off_the_head"
        killed_at(job, 4)
        nodes.lose_the_keepers()
        assert wait_until(lambda: job.in_engine() == [], 3 * PATIENCE_S)
        assert not job.ours()


def test_the_keepers_process_is_killed_in_mid_run(tmp_path: Path, nodes: Nodes, undisturbed: Outcome) -> None:
    with job_on(nodes, tmp_path) as job:
        held = job.hold(4)
        with job.start() as run:
            job.reaches(4)
            before = placed(job, set())
            os.kill(nodes.keeper(), signal.SIGKILL)
            placed(job, before)
            held.unlink()
            is_right(job, run, undisturbed)


def test_the_keepers_process_is_killed_while_there_is_no_run(
    tmp_path: Path, nodes: Nodes, undisturbed: Outcome
) -> None:
    with job_on(nodes, tmp_path) as job:
        before = killed_at(job, 4)
        os.kill(nodes.keeper(), signal.SIGKILL)
        placed(job, before)
        with job.start("--resume") as run:
            is_right(job, run, undisturbed)


def test_the_keeper_is_on_the_head(tmp_path: Path, nodes: Nodes, undisturbed: Outcome) -> None:
    """All others may be lost: who executes on what is left stays, with what it has finished."""
    with job_on(nodes, tmp_path) as job:
        before = killed_at(job, 4)
        there = nodes.keeper()
        nodes.lose(nodes.others[0])
        nodes.add()
        after: set[int] = set()
        until(lambda: after.update(job.kept()) or len(after - before) == 1)  # type: ignore[func-returns-value]
        assert nodes.keeper() == there
        assert before & job.kept(), "the worker of the other node has stayed"
        with job.start("--resume") as run:
            is_right(job, run, undisturbed)
