"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from pipedist.worker import boot
from tests.preloaded import Popen

# How long an example takes, or takes to be made, says nothing here: others use the machine, too.
settings.register_profile("pipedist", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipedist")

# A suite that is started in the background has these ignored, and so would have every process
# that the tests start: but what those do with a signal is what is tested.
for number, disposition in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, disposition)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among thousands of tests, neither while they are collected nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that take long to `make test-slow`, and say so."""
    if os.environ.get("PIPEDIST_TEST_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-slow"))


@pytest.fixture(scope="session", autouse=True)
def fork_workers() -> Iterator[None]:
    """Fork workers and their servers from a process that has imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "Popen", Popen)
        yield
