"""The results of the runs of these tests without any disturbance."""

from __future__ import annotations

import pytest

from tests.reattach.jobs import Job, Outcome


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    with job.run() as run:
        run.hears("waiting for workers")
        with job.worker() as worker:
            assert run.ends() == 0, run.said
            assert worker.ends() == 0, worker.said
    assert set(job.calls().values()) == {1}
    return job.outcome()
