"""Images and tar archives: files of one element each, and several."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import pipedist
from pipedist.datasets.element import described
from pipedist.datasets.sources import Source, SourceError, open_source
from pipedist.testing import check_source
from tests.datasets.sources.reading import read_elsewhere
from tests.datasets.sources.test_reader_classes import ByIds

R = "tests.datasets.sources.sample_readers"


def picture(number: int, size: tuple[int, int] = (6, 4)) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))


def png(number: int) -> bytes:
    data = io.BytesIO()
    picture(number).save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(10):
        place = tmp_path / "pets" / ("cat" if number < 5 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        picture(number, (6, 4 + number % 2)).save(place / f"{number}.png")
    return tmp_path


def images(folder: Path, **config: Any) -> Source:
    return open_source("images", {"path": "pets/*/*.png", **config}, folder=folder)


def test_images_are_those_of_pillow(folder: Path) -> None:
    source = images(folder, label="folder")
    shard = read_elsewhere(source, np.array([9, 2]))
    assert shard["label"].tolist() == ["dog", "cat"]
    assert shard["path"].tolist() == ["pets/dog/9.png", "pets/cat/2.png"]
    for image, number in zip(shard["image"], (9, 2), strict=True):
        assert (image == np.asarray(picture(number, (6, 4 + number % 2)))).all()
    assert described(source.element_spec) == "{image: object, label: str, path: str}"
    resized = images(folder, size=[3, 5], mode="L")
    assert described(resized.element_spec) == "{image: uint8[3, 5], path: str}"
    want = picture(1, (6, 5)).convert("L").resize((5, 3), Image.Resampling.BILINEAR)
    assert (read_elsewhere(resized, range(1, 2))["image"][0] == np.asarray(want)).all()
    check_source(ByIds(resized), make=lambda: ByIds(images(folder, size=[3, 5], mode="L")))
    with pytest.raises(SourceError, match=r"9\.png: the file is in no folder, so it has no label"):
        open_source("images", {"path": "9.png", "label": "folder"}, folder=folder / "pets/dog")


def test_a_damaged_image_is_quarantined_by_its_name(folder: Path) -> None:
    whole = (folder / "pets/cat/3.png").read_bytes()
    (folder / "pets/cat/3.png").write_bytes(whole[: len(whole) // 2])
    (folder / "pets/dog/7.png").write_bytes(b"no image")
    spec = folder / "s.yaml"
    spec.write_text(json.dumps({
        "pipedist": 1,
        "dataset": {"images": {"path": "pets/*/*.png", "size": [4, 6], "label": "folder"}, "batch": 5},
        "stages": {"read": {"run": f"{R}:numbers", "on_error": "quarantine"}, "all": {"gather": 0, "of": "read"}},
    }))  # fmt: skip
    result = pipedist.run(spec, workers=2)
    assert [(each["element"], each["cause"].partition(" image")[0]) for each in result.quarantined] == [
        (3, "SourceError: pets/cat/3.png: not a readable"),
        (7, "SourceError: pets/dog/7.png: not a readable"),
    ]
    assert result["all"]["image"].shape == (8, 4, 6, 3)
    assert result["all"]["label"].tolist() == ["cat"] * 4 + ["dog"] * 4


def write_tar(path: Path, files: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def shards(folder: Path) -> None:
    for shard in range(2):
        files = []
        for number in range(shard * 5, shard * 5 + 5):
            files += [
                (f"./train/{number:03}.png", png(number)),
                (f"./train/{number:03}.cls", b"%d\n" % number),
            ]
            files += [(f"./train/{number:03}.meta.json", json.dumps({"n": number}).encode())] * (number != 4)
        write_tar(folder / ("1.tgz" if shard else "0.tar"), files, "w:gz" if shard else "w")


def tar(folder: Path, path: str = "*.t*", **config: Any) -> Source:
    return open_source("tar", {"path": path, **config}, folder=folder)


def test_tar_elements_are_files_with_one_key(tmp_path: Path) -> None:
    shards(tmp_path)
    source = tar(tmp_path)
    assert source.length == 10
    assert described(source.element_spec) == "{cls: object, key: str, meta.json: object, png: object}"
    shard = read_elsewhere(source, np.array([9, 4, 0]))
    assert shard["key"].tolist() == ["train/009", "train/004", "train/000"]
    assert shard["png"].tolist() == [png(9), png(4), png(0)]
    with tarfile.open(tmp_path / "0.tar") as archive:
        assert shard["cls"][1] == archive.extractfile("./train/004.cls").read()  # type: ignore[union-attr]
    assert shard["meta.json"].tolist() == [b'{"n": 9}', b"", b'{"n": 0}']
    source.close()

    def typed() -> Source:
        return tar(tmp_path, columns={"cls": "int64", "meta.json": "json"})

    source = typed()
    found = read_elsewhere(source, range(3, 7))
    source.close()
    assert found["cls"].tolist() == [3, 4, 5, 6]
    assert found["meta.json"].tolist() == [{"n": 3}, None, {"n": 5}, {"n": 6}]
    check_source(ByIds(typed()), make=lambda: ByIds(typed()))


def test_damaged_archives_and_parts_are_named(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar", [("1.cls", b"1"), ("1.txt", b"x" * 2000), ("2.cls", b"cat"), ("2.txt", b"y")]
    )
    source = tar(tmp_path, columns={"cls": "int8"})
    with pytest.raises(SourceError, match=r"a\.tar: 2\.cls: 'cat' is not of type int8"):
        source.read(source.locate(range(2)))
    with pytest.raises(SourceError, match=r"no element of a\.tar has the part 'clss'") as caught:
        tar(tmp_path, columns={"clss": "int8"})
    assert caught.value.nearest == "cls"
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:2600])
    with pytest.raises(
        SourceError, match=r"a\.tar: the archive ends within 1\.txt; it was not written completely"
    ):
        tar(tmp_path)
    (tmp_path / "a.tar").write_bytes(data[:1024] + b"?" * 512 + data[1536:])
    with pytest.raises(SourceError, match=r"a\.tar: damaged after 1\.cls"):
        tar(tmp_path)
    (tmp_path / "a.tar").write_bytes(data + data)
    with pytest.raises(SourceError, match=r"a\.tar: there is data behind the end of the archive"):
        tar(tmp_path)
    (tmp_path / "a.tar").write_bytes(png(1))
    with pytest.raises(SourceError, match=r"a\.tar: not a readable tar file"):
        tar(tmp_path)
    write_tar(tmp_path / "a.tar", [("1.key", b"1"), ("1.txt", b"x")])
    with pytest.raises(SourceError, match=r"the part 'key' of a\.tar can't be read"):
        tar(tmp_path)
    assert tar(tmp_path, columns={"txt": "str"}).length == 1
