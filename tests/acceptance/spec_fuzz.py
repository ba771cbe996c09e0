"""Damaged specs: each is read according to YAML 1.2, or refused quickly, with line and column."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipedist.errors import SpecError
from pipedist.spec import load
from tests.acceptance.decoder_fuzz import Found
from tests.acceptance.spec_mutations import mutated

SPECS = 10_000
READ_S = 0.1
_WEIGHT = 8
"""Copies of valid specs: a mistake in a valid spec is the only one."""

ROOT = Path(__file__).parents[2]


def shipped() -> list[bytes]:
    """Return every spec of this repository; valid ones more than once."""
    paths = [path for folder in ("specs", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]
    return [
        path.read_bytes()
        for path in paths
        if "out" not in path.parts
        for _ in range(1 if "invalid" in path.parts else _WEIGHT)
    ]


def check(path: Path) -> str:
    """Load one file; return the outcome.

    Raises:
        AssertionError: it is refused without a place, or with a place that is not in the file.
    """
    try:
        load(path)
    except SpecError as error:
        problems = error.problems
    else:
        return "read"
    assert problems, "refused without a problem"
    data = path.read_bytes()
    lines = data.count(b"\n") + data.count(b"\r") + 2
    for problem in problems:
        place = re.fullmatch(rf"{re.escape(str(path))}:(\d+):(\d+)", problem.where)
        assert place is not None, f"no line and column: {problem.where!r}: {problem.message}"
        assert 1 <= int(place[1]) <= lines, f"there is no line {place[1]}"
        assert int(place[2]) >= 1, f"column {place[2]}"
        assert problem.message, "no message"
        assert problem.expected, f"nothing was expected: {problem.message}"
        assert len(str(problem)) < 2_000, "it quotes too much"
    return "refused"


def fuzz(corpus: Sequence[bytes], seeds: Sequence[int], folder: Path) -> tuple[Counter[str], float]:
    """Load one damaged spec for each seed.

    Returns:
        How many were read and refused; processor seconds of the slowest.

    Raises:
        Found: a spec raised another error, was refused without a position, or took long.
    """
    told: Counter[str] = Counter()
    slowest_s = 0.0
    path = folder / "spec.yaml"
    for seed in seeds:
        path.write_bytes(mutated(corpus, seed))
        took_s = READ_S
        for _ in range(3):  # the best of several processor times: this machine may be busy
            begin = time.process_time()
            try:
                what = check(path)
            except BaseException as error:
                raise Found(f"seed {seed}: {type(error).__name__}: {error}") from error
            took_s = min(took_s, time.process_time() - begin)
            if took_s < READ_S:
                break
        else:
            raise Found(f"seed {seed}: takes more than {READ_S:g} s")
        told[what] += 1
        slowest_s = max(slowest_s, took_s)
    return told, slowest_s
