"""The pytest plugin, in separate pytest processes."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

SPEC = """
SPEC = {
    "pipedist": 1,
    "replicas": 2,
    "dataset": {"range": 40, "batch": 4},
    "stages": {"total": {"reduce": "sum", "of": "dataset", "axis": 0}},
}
"""

ASYNC = (
    "import pipedist, pytest"
    + SPEC
    + """
MARK
@pytest.mark.pipedist_cluster(workers=3)
async def test_cluster(pipedist_cluster):
    async with pipedist_cluster() as cluster:
        await cluster.ready()
        assert cluster.workers == 3
        await cluster.restart(0)
        cluster.kill(1)
        cluster.cut(2)
        async with pipedist.open(SPEC, cluster=cluster) as run:
            assert (await run.results())["total"] == 780

MARK
async def test_faults(pipedist_faults):
    with pipedist_faults(drop=0.05, crash=0.05, seed=7) as simulated:
        assert simulated.run(SPEC)["total"] == 780
        assert simulated.injected
"""
)

PLAIN = (
    "import pytest"
    + SPEC
    + """
@pytest.mark.pipedist_faults(crash=0.1, seeds=3)
def test_marked(pipedist_faults):
    with pipedist_faults() as simulated:
        assert simulated.run(SPEC)["total"] == 780
        assert set(simulated.injected) == {"crash"}
    with pipedist_faults(crash=0.0, delay=0.1) as simulated:
        simulated.run(SPEC)
        assert set(simulated.injected) == {"delay"}
    assert pipedist_faults().run(SPEC)["total"] == 780

def test_unmarked(pipedist_faults):
    simulated = pipedist_faults(seeds=5)
    simulated.run(SPEC)
    assert len(simulated.injected) > 2

def test_wrong(pipedist_faults):
    with pipedist_faults(crush=0.1):
        pass

def test_that_simulates_nothing(pipedist_faults):
    with pipedist_faults():
        pass

@pytest.mark.pipedist_faults(0.1)
def test_wrong_marker(pipedist_faults):
    pass

@pytest.mark.pipedist_cluster(wrkers=2)
def test_mistyped_marker(pipedist_cluster):
    pass

@pytest.mark.pipedist_faults(sead=2)
def test_mistyped_faults(pipedist_faults):
    pass

def test_mistyped_argument(pipedist_cluster):
    pipedist_cluster(wrkers=2)

@pytest.mark.parametrize("how", [{"seeds": 0}, {"seed": -1}, {"seed": "7"}, {"workers": 0}, {"workers": 2.5}])
def test_counts(pipedist_faults, how):
    ((name, value),) = how.items()
    with pytest.raises(Exception, match=f"pipedist_faults: {name} must be an integer >= [01], got {value!r}"):
        pipedist_faults(**how)

def test_without_async(pipedist_cluster):
    with pipedist_cluster():
        pass
"""
)


@pytest.mark.parametrize("mode", ["strict", pytest.param("auto", marks=pytest.mark.slow)])
def test_under_pytest_asyncio(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makepyfile(ASYNC.replace("MARK", "@pytest.mark.asyncio" if mode == "strict" else ""))
    result = pytester.runpytest_subprocess(
        *plugin(pytester), "--strict-markers", "-Werror", "-o", f"asyncio_mode={mode}",
        "-o", "asyncio_default_fixture_loop_scope=function",
    )  # fmt: skip
    result.assert_outcomes(passed=2)


def test_in_plain_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN)
    result = pytester.runpytest_subprocess(*plugin(pytester), "--strict-markers")
    result.assert_outcomes(passed=7, failed=4, errors=3)
    for line in (
        "*pipedist_faults() has no argument 'crush'; did you mean 'crash'? There are: drop, *, workers*",
        "*@pytest.mark.pipedist_cluster has no argument 'wrkers'; did you mean 'workers'? There are: *",
        "*@pytest.mark.pipedist_faults has no argument 'sead'; did you mean 'seed'? There are: *",
        "*TypeError: pipedist_cluster() has no argument 'wrkers'; did you mean 'workers'? *",
        "*UsageError: the block of pipedist_faults simulated no run, so it tested nothing. Call `run` of*",
        "*TypeError: LocalCluster is opened with `async with`, in a coroutine (async def), not with `with`*",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.fnmatch_lines(["*takes only keyword arguments*"])


def test_the_plugin_imports_almost_no_modules(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_modules():\n"
        "    ours = {m for m in sys.modules if m.startswith('pipedist.')}\n"
        "    light = {'testing', 'testing.pytest_plugin', '_version'}\n"
        "    assert ours <= {f'pipedist.{name}' for name in light}, ours\n"
    )
    pytester.runpytest_subprocess(*plugin(pytester)).assert_outcomes(passed=1)


FAILING = (
    SPEC
    + """
from pipedist.testing import SpecSimulation, run_in_processes

class Forgetful:
    def __init__(self):
        self.seen = 0
    def __call__(self, x):
        self.seen += len(x)
        return x + self.seen

SPEC["stages"] |= {"y": {"run": Forgetful}, "total": {"reduce": "sum", "of": "y", "axis": 0}}

def test_faults(pipedist_faults):
    with pipedist_faults(crash=0.1, seed=7) as simulated:
        simulated.run(SPEC)

def test_processes():
    run_in_processes(lambda: 1 / 0, workers=1)

def test_simulation():
    SpecSimulation(SPEC).check(0)
"""
)


def test_a_failure_shows_the_test_and_not_the_harness(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILING)
    # Without the summary: CI changes the length of its lines.
    result = pytester.runpytest_subprocess(*plugin(pytester), "-rN")
    result.assert_outcomes(failed=3)
    for line in (">*simulated.run(SPEC)", ">*run_in_processes(*", ">*SpecSimulation(SPEC).check(0)"):
        result.stdout.fnmatch_lines([line])
    assert len(result.outlines) < 70
    assert not [line for line in result.outlines if line.startswith(">       raise ")]


def plugin(pytester: pytest.Pytester) -> list[str]:
    """Load the plugin by name, unless it is installed as an entry point."""
    from importlib.metadata import entry_points

    names = {point.value for point in entry_points(group="pytest11")}
    return [] if "pipedist.testing.pytest_plugin" in names else ["-p", "pipedist.testing.pytest_plugin"]
