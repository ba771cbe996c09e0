"""Tests of replicas on JAX devices: all are skipped without jax."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import pipedist

HERE = Path(__file__).parent
IS_INSTALLED = importlib.util.find_spec("jax") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.jax)
            if not IS_INSTALLED:
                item.add_marker(pytest.mark.skip(reason="jax is not installed here: make test-jax"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[pipedist.LocalCluster]:
    async with pipedist.LocalCluster(workers=1) as opened:
        yield opened
