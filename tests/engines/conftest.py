"""What the runs of these tests come to, when nothing happens to them."""

from __future__ import annotations

import pytest

from tests.reattach.jobs import Outcome
from tests.reattach.local_jobs import local_job


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with local_job(tmp_path_factory.mktemp("undisturbed"), rejoin_s=None) as job:
        with job.start() as run:
            assert run.ends() == 0, run.said
        return job.outcome()
