from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipedist.datasets.sources import SourceError, open_source
from tests.datasets.sources.reading import assert_sealed, read_elsewhere


def _save(folder: Path, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    whole = np.arange(33, dtype=np.int16).reshape(11, 3)
    _save(tmp_path, a=whole[:4], b=whole[4:4], c=whole[4:5], d=whole[5:])
    source = open_source("npy", {"path": ["*.npy"]}, folder=tmp_path)
    assert source.length == 11
    for start in range(11):
        for stop in range(start, 12):
            assert np.array_equal(read_elsewhere(source, range(start, stop)), whole[start:stop])
    order = np.random.default_rng(0).permutation(11)
    assert np.array_equal(read_elsewhere(source, order), whole[order])
    assert read_elsewhere(source, range(0)).shape == (0, 3)
    source.close()


def test_rows_of_one_file_are_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    _save(tmp_path, a=np.arange(1000.0))
    source = open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    one, other = source.read(range(10, 20)), source.read(range(15, 25))
    assert np.shares_memory(one, other)
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    source.close()
    assert one.tolist() == list(range(10, 20))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    array=hnp.arrays(
        dtype=st.sampled_from(["<f4", ">f8", ">i2", "<U5", ">U3", "S4", "?", "<c16", "<M8[ns]"]),
        shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6),
    ),
    fortran=st.booleans(),
    data=st.data(),
)
def test_any_array_is_read_as_numpy_reads_it(
    tmp_path: Path, array: np.ndarray, fortran: bool, data: st.DataObject
) -> None:
    array = np.asfortranarray(array) if fortran else array
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", x=array, n=np.arange(len(array)))
    np.savez_compressed(tmp_path / "y.npz", x=array, n=np.arange(len(array)))
    ids = data.draw(hnp.arrays(np.int64, st.integers(1, 9), elements=st.integers(0, len(array) - 1)))
    expected = np.load(tmp_path / "x.npy")
    native = expected.astype(expected.dtype.newbyteorder("="))
    for path in ("x.npy", "x.npz", "y.npz"):
        source = open_source(path[-3:], {"path": path}, folder=tmp_path)
        shards = [read_elsewhere(source, each) for each in (range(len(array)), ids)]
        source.close()
        for shard, rows in zip(shards, (native, native[ids]), strict=True):
            found = shard["x"] if path.endswith("npz") else shard
            assert found.dtype == native.dtype
            assert found.shape == rows.shape
            assert found.tobytes() == np.ascontiguousarray(rows).tobytes()


def test_arrays_of_npz_files_are_one_dataset(tmp_path: Path) -> None:
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    np.savez(tmp_path / "a.npz", x=x[:2], y=y[:2])
    np.savez_compressed(tmp_path / "b.npz", y=y[2:], x=x[2:])
    source = open_source("npz", {"path": "*.npz"}, folder=tmp_path)
    shard = read_elsewhere(source, range(1, 4))
    assert shard["x"].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert shard["y"].tolist() == [1, 2, 3]
    source.close()


def test_members_of_npz_are_aligned_though_zip_does_not_align_them(tmp_path: Path) -> None:
    for length in range(1, 9):
        np.savez(tmp_path / "a.npz", **{"n" * length: np.arange(3.0)})
        source = open_source("npz", {"path": "a.npz"}, folder=tmp_path)
        assert_sealed(source.read(range(3)))
        source.close()


@pytest.mark.parametrize("second", [np.zeros((3, 2), np.float64), np.zeros((3, 4), np.float32)])
def test_files_that_differ_are_both_named(tmp_path: Path, second: np.ndarray) -> None:
    _save(tmp_path, a=np.zeros((3, 2), np.float32), b=second)
    with pytest.raises(SourceError, match=r"a\.npy has elements float32\[2\], b\.npy has") as caught:
        open_source("npy", {"path": "*.npy"}, folder=tmp_path)
    assert caught.value.key == "path"


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([None]), "dtype object"),
        (np.float32(3), "scalar"),
        (np.zeros(3, [("a", "i4")]), "can't be read"),
    ],
)
def test_arrays_that_are_no_dataset_are_refused(tmp_path: Path, array: np.ndarray, text: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(SourceError, match=text):
        open_source("npy", {"path": "a.npy"}, folder=tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, a=np.arange(100))
    data = (tmp_path / "a.npy").read_bytes()
    for cut in (0, 3, 20, len(data) - 1):
        (tmp_path / "a.npy").write_bytes(data[:cut])
        with pytest.raises(SourceError, match=r"^a\.npy: "):
            open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(SourceError, match="npz"):
        open_source("npz", {"path": "a.npz"}, folder=tmp_path)


@pytest.mark.filterwarnings("ignore")  # Python's, of the header's text
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_damaged_byte_is_always_a_source_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "npy":
        np.save(path, np.zeros(2, np.uint8))
    else:
        np.savez(path, a=np.zeros(2, np.uint8))
    data = path.read_bytes()
    messages = []
    for at in range(len(data)):
        for byte in {*b"(\xff"} - {data[at]}:
            path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            try:
                open_source(kind, {"path": path.name}, folder=tmp_path).close()
            except SourceError as error:
                messages.append(str(error))
    assert len(messages) > 50
    assert all(each.startswith(path.name) for each in messages)


def test_npz_files_must_agree(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(SourceError, match="'x' has 3, 'y' has 4"):
        open_source("npz", {"path": "a.npz"}, folder=tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    np.savez(tmp_path / "b.npz", z=np.zeros(3))
    with pytest.raises(SourceError, match=r"a\.npz has the arrays x; b\.npz has z"):
        open_source("npz", {"path": "*.npz"}, folder=tmp_path)
    with zipfile.ZipFile(tmp_path / "c.npz", "w"):
        pass
    with pytest.raises(SourceError, match="no array"):
        open_source("npz", {"path": "c.npz"}, folder=tmp_path)


def test_nothing_behind_or_in_place_of_an_array_is_passed_over(tmp_path: Path) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    with pytest.raises(SourceError, match=r"^a\.npy: 160 bytes follow its array; was another one saved"):
        open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    np.save(tmp_path / "b.npy", np.arange(3))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.write(tmp_path / "b.npy", "x.npy")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.write(tmp_path / "b.npy", "x.npy")
    with pytest.raises(SourceError, match=r"^b\.npz: array 'x' is in it twice"):
        open_source("npz", {"path": "b.npz"}, folder=tmp_path)


@pytest.mark.parametrize("kind", ["U", "S"])
def test_texts_of_different_widths_are_one_dataset(tmp_path: Path, kind: str) -> None:
    texts = ["a", "bb", "long", "c"]
    _save(tmp_path, a=np.array(texts[:2], kind), b=np.array(texts[2:], kind).astype(f">{kind}5"))
    source = open_source("npy", {"path": "*.npy"}, folder=tmp_path)
    expected = np.array(texts, kind)
    for ids in (range(4), range(1, 3), range(2), np.array([2, 0, 3, 1]), np.array([1, 0])):
        assert read_elsewhere(source, ids).tolist() == expected[np.asarray(ids)].tolist()
    source.close()


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path) -> None:
    _save(tmp_path, a=np.arange(10))
    source = open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    _save(tmp_path, a=np.arange(10) + 1)
    os.utime(tmp_path / "a.npy", ns=(1, 1))
    with pytest.raises(SourceError, match="has changed"):
        source.read(range(3))
    os.remove(tmp_path / "a.npy")
    with pytest.raises(SourceError, match="can't be opened: No such file"):
        source.read(range(3))
    source.close()


def test_a_file_that_is_written_to_while_it_is_mapped_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10))
    source = open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    assert source.read(range(3)).tolist() == [0, 1, 2]
    np.save(tmp_path / "b.npy", np.arange(10) + 1)
    opened = os.open(path, os.O_WRONLY)
    os.pwrite(opened, (tmp_path / "b.npy").read_bytes(), 0)  # in place, and no byte longer
    os.close(opened)
    os.utime(path, ns=(1, 1))  # where the clock of the files is coarse
    for ids in (range(3, 5), np.array([7, 2])):
        with pytest.raises(SourceError, match=r"^a\.npy: the file has changed since the run began"):
            source.read(ids)
    source.close()


def test_a_file_that_is_replaced_while_it_is_mapped_is_still_there(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    source = open_source("npy", {"path": "a.npy"}, folder=tmp_path)
    assert source.read(range(3)).tolist() == [0, 1, 2]
    np.save(tmp_path / "b.npy", np.arange(10) + 1)
    os.replace(tmp_path / "b.npy", tmp_path / "a.npy")
    assert source.read(range(3, 5)).tolist() == [3, 4]
    source.close()


def test_many_files_keep_few_descriptors_open(tmp_path: Path) -> None:
    for number in range(200):
        np.save(tmp_path / f"{number:03}.npy", np.array([number]))
    before = len(os.listdir("/proc/self/fd"))
    source = open_source("npy", {"path": "*.npy"}, folder=tmp_path)
    assert [int(source.read(range(i, i + 1))[0]) for i in range(200)] == list(range(200))
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 64 + 6  # a file that is mapped has two
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
