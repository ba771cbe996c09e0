from __future__ import annotations

import pytest

from pipedist.cli.simulate_command import EVERYTHING, SimulateOptions, execute, parse_costs
from pipedist.errors import UsageError
from pipedist.harness import Faults


def test_costs() -> None:
    assert parse_costs("a=0.05, b=2") == {"a": 0.05, "b": 2.0}
    assert parse_costs(None) == {}


@pytest.mark.parametrize("text", ["a", "a=x", "a=-1", "a=1,a=2", "a=inf", "a=nan"])
def test_wrong_costs(text: str) -> None:
    with pytest.raises(UsageError, match="expected STAGE=SECONDS"):
        parse_costs(text)


def test_the_faults_that_are_the_default_can_be_read() -> None:
    assert str(Faults.parse(EVERYTHING)) == EVERYTHING


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(SimulateOptions("specs/total.yaml", seeds=3, faults="crash=0.2")) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["seeds"], lines["workers"], lines["violations"]) == ("3", "3", "0")
    assert lines["faults"].startswith("crash ")
