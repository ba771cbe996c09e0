"""HDF5 files and zarr stores, compared with what their libraries read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, is_visible, open_source
from pipedist.testing import check_source
from tests.datasets.sources.reading import read_elsewhere
from tests.datasets.sources.test_reader_classes import ByIds

IMAGES = np.arange(50 * 4 * 3, dtype=">i2").reshape(50, 4, 3)
SCATTERED = np.array([49, 0, 7, 8, 7])


def write_hdf5(path: Path, images: Any = IMAGES, rows: int = 50) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "scan/images", data=images[:rows], chunks=(8, images.shape[1], 3), compression="gzip"
        )
        file["label"] = np.arange(rows) % 5
        file["name"] = [f"é{n}" for n in range(rows)]
        file["scalar"] = 1.0


def hdf5(folder: Path, *datasets: str, path: str = "*.h5") -> Source:
    return open_source("hdf5", {"path": path, "dataset": list(datasets)}, folder=folder)


def test_hdf5_datasets(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "a.h5")
    write_hdf5(tmp_path / "b.h5", rows=9)
    source = hdf5(tmp_path, "scan/images")
    whole = np.concatenate([h5py.File(tmp_path / "a.h5")["scan/images"][:], IMAGES[:9]])
    assert source.length == 59
    assert described(source.element_spec) == "int16[4, 3]"
    for ids in (range(59), range(45, 55), SCATTERED, np.array([58, 1]), range(0)):
        assert (read_elsewhere(source, ids) == whole[np.asarray(ids, int)]).all()
    several = hdf5(tmp_path, "/name", "label")
    shard = read_elsewhere(several, np.array([50, 3]))
    assert shard["name"].tolist() == ["é0", "é3"]
    assert shard["label"].tolist() == [0, 3]
    check_source(ByIds(several), make=lambda: ByIds(hdf5(tmp_path, "/name", "label")))


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        (["lable"], "a.h5 has no dataset 'lable'"),
        (["scan"], "a.h5 has a group, not a dataset, 'scan'"),
        (["scalar"], "'scalar' is a scalar, which has no rows"),
    ],
)
def test_wrong_datasets_are_named(tmp_path: Path, datasets: list[str], message: str) -> None:
    write_hdf5(tmp_path / "a.h5")
    with pytest.raises(SourceError, match=message) as caught:
        hdf5(tmp_path, *datasets)
    assert caught.value.key == "dataset"


def test_damaged_hdf5_files_are_named(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        chunk = file["scan/images"].id.get_chunk_info(1)
    data = bytearray((tmp_path / "a.h5").read_bytes())
    (tmp_path / "b.h5").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"b\.h5: not a readable HDF5 file"):
        hdf5(tmp_path, "label", path="b.h5")
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    (tmp_path / "a.h5").write_bytes(data)
    source = hdf5(tmp_path, "scan/images", path="a.h5")
    assert source.read(range(8)).shape == (8, 4, 3)
    with pytest.raises(SourceError, match=r"a\.h5: row 9 of 'scan/images' can't be read"):
        source.read(range(9, 10))
    write_hdf5(tmp_path / "b.h5", IMAGES[:, :2])
    with pytest.raises(SourceError, match=r"has elements .*\[4, 3\], b\.h5 has .*\[2, 3\]"):
        hdf5(tmp_path, "scan/images")


def write_zarr(path: Path, **options: Any) -> Any:
    import zarr  # takes long, and few workers of the suite run these tests

    group = zarr.open_group(path, mode="w", **options)
    array = group.create_array("images", shape=IMAGES.shape, chunks=(8, 4, 3), dtype="i2")
    array[:] = IMAGES
    group.create_array("label", data=np.arange(50) % 5, chunks=(20,))
    return group


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_arrays(tmp_path: Path, version: int) -> None:
    group = write_zarr(tmp_path / "a.zarr", zarr_format=version)

    def make(path: str = "a.zarr", **config: Any) -> Source:
        return open_source("zarr", {"path": path, **config}, folder=tmp_path)

    source = make()
    assert (source.length, described(source.element_spec)) == (50, "{images: int16[4, 3], label: int64}")
    for ids in (range(50), range(6, 20), SCATTERED, range(0)):
        shard = read_elsewhere(source, ids)
        assert (shard["images"] == group["images"][:][np.asarray(ids, int)]).all()
        assert (shard["label"] == group["label"][:][np.asarray(ids, int)]).all()
    check_source(ByIds(make("a.zarr/images")), make=lambda: ByIds(make("a.zarr/images")))
    assert make(f"file://{tmp_path}/a.zarr").length == 50
    assert is_visible(source.config, [])
    group["label"][0] = 4
    assert make().fingerprint != source.fingerprint
    assert not is_visible(source.config, [])
    with pytest.raises(SourceError, match=r"a\.zarr has no array 'lable'") as caught:
        make(arrays=["lable"])
    assert (caught.value.key, caught.value.nearest) == ("arrays", "label")
    with pytest.raises(SourceError, match=r"there is no 'b\.zarr'"):
        make("b.zarr")


def test_damaged_zarr_chunks_are_named(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a.zarr")
    (tmp_path / "a.zarr/images/c/1/0/0").write_bytes(b"damaged")
    source = open_source("zarr", {"path": "a.zarr"}, folder=tmp_path)
    assert source.read(range(3))["label"].tolist() == [0, 1, 2]
    with pytest.raises(SourceError, match=r"a\.zarr: row 9 of 'images' can't be read"):
        source.read(range(9, 10))


@pytest.mark.parametrize(
    ("module", "kind", "config", "command"),
    [
        (
            "h5py",
            "hdf5",
            {"path": "*", "dataset": ["x"]},
            r"`hdf5` needs h5py: pip install 'pipedist\[hdf5\]'",
        ),
        ("zarr", "zarr", {"path": "."}, r"`zarr` needs zarr: pip install 'pipedist\[zarr\]'"),
        ("PIL", "images", {"path": "*"}, r"`images` needs pillow: pip install 'pipedist\[images\]'"),
        ("datasets", "huggingface", {"path": "."}, r"pip install 'pipedist\[huggingface\]'"),
        ("duckdb", "sql", {"url": "duckdb:///a", "query": "SELECT 1"}, r"pip install 'pipedist\[duckdb\]'"),
    ],
)
def test_a_missing_extra_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, kind: str, config: Any, command: str
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setitem(sys.modules, module, None)
    if module == "PIL":
        monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(SourceError, match=command):
        open_source(kind, config, folder=tmp_path)
