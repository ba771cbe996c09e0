"""Auto-sharding and rebatching: nothing is lost, nothing is doubled, everything where the contract says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedist.datasets.division import Division
from pipedist.datasets.element import split
from pipedist.datasets.input import AutoShardPolicy
from pipedist.datasets.logical import Dataset
from pipedist.datasets.sharding import MISSING, auto_shard, divide, rebatch, steps
from tests.conformance.families.auto_shard import batch_sizes_for_worker

SMALL = st.integers(1, 5)


def lists(dataset: Dataset) -> list[Any]:
    return [element.tolist() for element in dataset]


@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_rebatching_is_the_division_of_the_contract(size: int, batch: int, replicas: int, drop: bool) -> None:
    division = Division(length=size, batch=batch, replicas=replicas, drop_remainder=drop)
    expected = [
        list(division.ids(step, replica)) if replica < division.parts(step) else []
        for step in range(division.steps_per_epoch)
        for replica in range(replicas)
    ]
    chunks = rebatch(Dataset.range(size).batch(batch, drop), replicas)
    assert lists(chunks) == expected
    assert chunks.cardinality() == len(expected)


@given(st.integers(0, 40), SMALL, SMALL, SMALL)
def test_data_divides_every_step_exactly(size: int, batch: int, pipelines: int, replicas: int) -> None:
    parts = [lists(part) for part in divide(Dataset.range(size).batch(batch), pipelines, replicas)]
    assert len({len(part) for part in parts}) == 1, "every pipeline has the same number of steps"
    for step in range(len(parts[0]) // replicas):
        chunks = [parts[w][step * replicas + r] for r in range(replicas) for w in range(pipelines)]
        together = [number for chunk in chunks for number in chunk]
        assert together == list(range(size))[step * batch : (step + 1) * batch]


@settings(max_examples=40)
@given(files=st.lists(st.integers(0, 4), min_size=1, max_size=6), pipelines=SMALL, reader=st.booleans())
def test_file_and_auto_read_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, files: list[int], pipelines: int, reader: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    lines = [[f"{name}{row}" for row in range(count)] for name, count in zip("abcdef", files, strict=False)]
    for name, content in zip("abcdef", lines, strict=False):
        (folder / name).write_text("".join(line + "\n" for line in content))
    paths = [folder / name for name, _ in zip("abcdef", files, strict=False)]
    dataset = Dataset.text_files(paths) if reader else Dataset.file_names(paths).flat_map(Dataset.text_files)
    parts = [lists(auto_shard(dataset, pipelines, w)) for w in range(pipelines)]
    everything = [line for content in lines for line in content]
    assert sorted(line for part in parts for line in part) == sorted(everything)
    if len(files) >= pipelines:
        whole = [[line for content in lines[w::pipelines] for line in content] for w in range(pipelines)]
        assert parts == whole
        assert [lists(auto_shard(dataset, pipelines, w, "FILE")) for w in range(pipelines)] == whole
    else:
        assert parts == [everything[w::pipelines] for w in range(pipelines)], "as DATA"
        for w in range(pipelines):
            with pytest.raises(
                ValueError, match=r"fewer than there are pipelines; use AutoShardPolicy\.DATA"
            ):
                auto_shard(dataset, pipelines, w, "FILE")


def test_a_dataset_that_mixes_files_with_more_is_divided_by_elements(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name}0\n{name}1\n{name}2\n")
    lines = Dataset.text_files([tmp_path / "a", tmp_path / "b"])
    zipped = Dataset.zip(lines, Dataset.range(6))
    parts = [[int(number) for _, number in auto_shard(zipped, 2, w)] for w in range(2)]
    assert parts == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match=r"not files \(Range\)"):
        auto_shard(zipped, 2, 0, AutoShardPolicy.FILE)


def test_elements_that_are_numbered_are_numbered_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name}0\n{name}1\n{name}2\n")
    lines = Dataset.file_names([tmp_path / "a", tmp_path / "b"]).flat_map(Dataset.text_files).enumerate()
    parts = [[(int(number), str(line)) for number, line in auto_shard(lines, 2, w)] for w in range(2)]
    assert parts == [[(0, "a0"), (2, "a2"), (4, "b1")], [(1, "a1"), (3, "b0"), (5, "b2")]]
    with pytest.raises(ValueError, match="enumerate numbers the elements of all files"):
        auto_shard(lines, 2, 0, AutoShardPolicy.FILE)


@given(st.integers(0, 20), SMALL, SMALL, SMALL)
def test_off_duplicates_and_keeps_batches(size: int, batch: int, pipelines: int, replicas: int) -> None:
    dataset = Dataset.range(size).batch(batch).repeat(2).with_options(auto_shard_policy="off")
    parts = [lists(part) for part in divide(dataset, pipelines, replicas)]
    assert parts == [lists(rebatch(dataset, pipelines * replicas))] * pipelines


@given(st.integers(0, 20), SMALL)
def test_hints_are_filled_in_where_they_stand(size: int, pipelines: int) -> None:
    hinted = Dataset.range(size).shard(Dataset.SHARD_HINT, Dataset.SHARD_HINT).map(lambda x: x * 2)
    for w in range(pipelines):
        assert lists(auto_shard(hinted, pipelines, w, "HINT")) == [2 * x for x in range(size)[w::pipelines]]
        with pytest.raises(RuntimeError, match="policy HINT"):
            list(auto_shard(hinted, pipelines, w, "OFF"))


@pytest.mark.parametrize(("pipelines", "index"), [(0, 0), (2, 2), (2, -1), (-1, 0)])
def test_pipelines_that_do_not_exist(pipelines: int, index: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        auto_shard(Dataset.range(4), pipelines, index)
    with pytest.raises(ValueError, match="expected"):
        batch_sizes_for_worker(4, pipelines, 1, index)


@given(st.integers(0, 40), SMALL, SMALL)
def test_batch_sizes_for_worker_add_up_in_every_step(batch: int, pipelines: int, replicas: int) -> None:
    sizes = [batch_sizes_for_worker(batch, pipelines, replicas, w) for w in range(pipelines)]
    assert all(len(one) == pipelines * replicas and sum(one) == batch for one in sizes)
    assert max(map(max, sizes)) - min(map(min, sizes)) <= 1
    for step in range(pipelines):
        assert sum(sum(one[step * replicas : (step + 1) * replicas]) for one in sizes) == batch


def test_chunks_are_read_only_views_cut_leaf_by_leaf() -> None:
    whole = np.arange(8).reshape(4, 2)
    chunks = split((whole, np.arange(2)), 3)
    assert [(len(a), len(b)) for a, b in chunks] == [(2, 1), (2, 1), (0, 0)]
    assert chunks[2][0].shape == (0, 2)
    assert all(np.shares_memory(a, whole) and not a.flags.writeable for a, _ in chunks[:2])
    assert whole.flags.writeable


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(4),
        Dataset.from_tensor_slices(np.zeros((4, 4))),
        Dataset.from_tensors(np.zeros(4)),
        Dataset.range(4).batch(2).unbatch(),
        Dataset.zip(Dataset.range(4).batch(2), Dataset.range(4)),
        Dataset.range(4).flat_map(Dataset.range),
    ],
)
def test_an_unbatched_dataset_is_not_divided(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=r"add \.batch\(global_batch_size\)"):
        divide(dataset, 1, 2)


def test_batches_inside_flat_map_and_behind_other_stages_count() -> None:
    inner = Dataset.range(2).flat_map(lambda i: Dataset.range(4).batch(2))
    outer = Dataset.range(8).batch(2).batch(2).unbatch().take(9).cache().prefetch(1).map(lambda x: x)
    for dataset in (inner, outer):
        assert len(lists(divide(dataset, 1, 2)[0])) == 8


def test_a_scalar_in_a_batch_is_named() -> None:
    numbered = Dataset.range(4).batch(2).enumerate()
    with pytest.raises(ValueError, match=r"scalar among replicas \(leaf '0'\): batch the dataset last"):
        list(divide(numbered, 1, 2)[0])


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), SMALL)
def test_steps_go_on_until_every_pipeline_has_ended(sizes: list[int], replicas: int) -> None:
    pipelines = [Dataset.range(size) for size in sizes]
    rows = list(steps(pipelines, replicas))
    assert len(rows) == max(-(-size // replicas) for size in sizes)
    for index, size in enumerate(sizes):
        own = [element for row in rows for element in row[index * replicas : (index + 1) * replicas]]
        assert [int(element) for element in own if element is not MISSING] == list(range(size))
        assert all(element is MISSING for element in own[size:])
