"""The page about tf.distribute's names speaks only of pipedist names that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipedist

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "tf-distribute-names.md"

HOLDERS: dict[str, Any] = {
    "Strategy": pipedist.Strategy,
    "ctx": pipedist.ReplicaContext,
    "ClusterCoordinator": pipedist.ClusterCoordinator,
    "ClusterResolver": pipedist.ClusterResolver,
    "RemoteValue": pipedist.RemoteValue,
}


def rows() -> Iterator[list[str]]:
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| tf.distribute |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize(
    ("holder", "attribute", "here"),
    [
        (pipedist.get_strategy(), "experimental_distribute_dataset", "`distribute_dataset`"),
        (pipedist.get_strategy(), "extended", "methods of the strategy itself"),
        (pipedist.Dataset.range(3), "shuffle", "permutation"),
        (pipedist.Variable(1.0), "read_value", "`value()`"),
        (pipedist.Variable(1.0), "scatter_sub", "`w.assign_sub(d)`"),
    ],
)
def test_the_error_for_a_name_of_tensorflow_contains_its_counterpart(
    holder: Any, attribute: str, here: str
) -> None:
    with pytest.raises(AttributeError, match=re.escape(here)) as caught:
        getattr(holder, attribute)
    assert caught.value.name == attribute
    assert "docs/migrate/tf-distribute-names.md" in str(caught.value)
    with pytest.raises(AttributeError, match=r"has no attribute 'shufle'$"):
        holder.shufle  # noqa: B018


def test_what_is_offered_in_their_place_exists() -> None:
    for cls in (pipedist.Strategy, pipedist.Dataset, pipedist.Variable):
        for text in cls._tf_names.values():
            name = re.match(r"`(\w+)[`(]", text)
            assert name is None or hasattr(cls, name[1]), text


def test_every_row_has_a_status() -> None:
    found = list(rows())
    assert len(found) > 80
    for row in found:
        assert len(row) == 3, row
        assert re.search(r"\b(same|improved|not offered|new|see below)\b", row[2]), row
        if row[1] == "-":
            assert "not offered" in row[2], row


def test_every_name_of_pipedist_exists() -> None:
    checked = 0
    for _, ours, _ in rows():
        for name in re.findall(r"`(?:await )?pipedist\.(\w+)", ours):
            assert hasattr(pipedist, name), name
            checked += 1
        for holder, name in re.findall(r"`(?:await )?(\w+)\.(\w+)", ours):
            if holder in HOLDERS:
                known = HOLDERS[holder]
                assert hasattr(known, name) or name in getattr(known, "__slots__", ()), (holder, name)
                checked += 1
    assert checked > 80


def test_options_that_are_named_exist() -> None:
    for kind in set(re.findall(r'implementation="(\w+)"', PAGE.read_text())):
        assert pipedist.CommunicationOptions(implementation=kind)  # type: ignore[arg-type]
