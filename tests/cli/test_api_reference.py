"""The reference of the Python API is complete, and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipedist
from pipedist.cli.api_reference import SECTIONS, reference

FILE = Path(__file__).parents[2] / "docs/api.md"


def test_every_public_name_has_its_place() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted([*listed, "__version__"]) == sorted([*pipedist.__all__, "open"])


def test_the_reference_is_up_to_date() -> None:
    assert FILE.read_text() == reference(), "make docs"


@pytest.mark.parametrize("name", [*pipedist.__all__, "open"])
def test_every_public_name_is_explained(name: str) -> None:
    text = FILE.read_text()
    if name == "__version__":
        assert "`pipedist.__version__`" in text
        return
    _, _, entry = text.partition(f"\n### `{name}`\n")
    assert len(entry.partition("\n#")[0].split()) > 5, name


@pytest.mark.parametrize(
    "place",
    [
        "Dataset.batch(", "Dataset.from_generator(", "ReplicaContext.rng", "ReplicaContext.elements",
        "await `Strategy.run(", "await `Strategy.reduce(", "async for `Run.steps(", "- `stage, step, replica",
        "PerReplica.components", "counter.of(", "moments.std(", "top_k.of(", "by_key.of(", "on_log(worker",
    ],
)  # fmt: skip
def test_what_a_reader_looks_for_is_there(place: str) -> None:
    assert place in FILE.read_text()
