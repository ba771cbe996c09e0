"""Everything here needs root and network namespaces; elsewhere it is skipped, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.networks.hosts import Network, network, why_not
from tests.networks.runs import Work

FULL = "PIPEDIST_TEST_NETWORKS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_not() if here else ""
    is_full = os.environ.get(FULL) == "full"
    for item in here:
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"{reason}; as root on Linux: make test-networks"))
        elif item.get_closest_marker("networks_full") and not is_full:
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-networks"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Network]:
    """A scheduler's host and three workers'."""
    with network(tmp_path, ["scheduler", "one", "two", "three"]) as made:
        yield made


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "work")


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing disturbs, on local processes."""
    return Work(tmp_path_factory.mktemp("networks") / "local").execute_locally()
