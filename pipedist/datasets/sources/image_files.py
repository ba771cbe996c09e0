"""Source `images`: image files, decoded with Pillow.

An element is one file. Images of one `size` are one array; without it they may differ, and are the cells of an object
array. A location names the files, so that workers need not know all.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipedist.core import ragged
from pipedist.core.types import Tree
from pipedist.datasets.element import ArraySpec
from pipedist.datasets.sources.base import Config, Reader, SourceError, imported, sealed
from pipedist.datasets.sources.paths import DataFile, expand
from pipedist.datasets.sources.text_files import RawFilesSource

_CHANNELS = {"L": (), "RGB": (3,), "RGBA": (4,)}


class ImagesReader(Reader):
    """Decodes image files: `size` of the config is [height, width] or None, `label` "folder" or None."""

    def __init__(self, config: Config) -> None:
        self._image = imported("PIL.Image", "images", "images")
        self._size: list[int] | None = config["size"]
        self._mode: str = config["mode"]
        self._label: str | None = config["label"]

    def read(self, location: Tree) -> dict[str, npt.NDArray[Any]]:
        """Return {image, path, and label if the config has one} of the files at `location`."""
        files = msgspec.convert(location, list[DataFile])
        images = [self._decoded(file) for file in files]
        if self._size is None:
            stacked = ragged.objects(images)
        elif images:
            stacked = np.stack(images)
        else:
            stacked = np.empty((0, *self._size, *_CHANNELS[self._mode]), np.uint8)
        shard = {"image": stacked, "path": ragged.of_texts([file.label for file in files])}
        if self._label:
            shard["label"] = ragged.of_texts([folder_of(file) for file in files])
        return {name: sealed(column) for name, column in shard.items()}

    def _decoded(self, file: DataFile) -> npt.NDArray[np.uint8]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", self._image.DecompressionBombWarning
                )  # twice as many are an error
                with self._image.open(io.BytesIO(file.contents())) as image:
                    converted = image.convert(self._mode)
            if self._size is not None and converted.size != (self._size[1], self._size[0]):
                converted = converted.resize((self._size[1], self._size[0]), self._image.Resampling.BILINEAR)
            return np.array(converted, np.uint8)
        except SourceError:
            raise
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
            text = str(error).partition(" <_io")[0] or type(error).__name__
            raise SourceError(f"{file.label}: not a readable image: {text}", key="path") from error


def folder_of(file: DataFile) -> str:
    """Return the name of the folder of a file."""
    return PurePosixPath(file.label.partition("::")[0]).parent.name


class ImageFilesSource(RawFilesSource):
    """Image files."""

    def __init__(self, files: list[DataFile], config: Config) -> None:
        super().__init__(files, config, ImagesReader(config))
        size = config["size"]
        image = (
            ArraySpec(object) if size is None else ArraySpec(np.uint8, (*size, *_CHANNELS[config["mode"]]))
        )
        self.element_spec = {"image": image, "path": ArraySpec(str)}
        if config["label"]:
            self.element_spec["label"] = ArraySpec(str)

    def probe(self) -> None:
        """Decode the first image."""
        if self.length:
            self.read(self.locate(range(1)))


def open_images(config: Config, folder: Path) -> ImageFilesSource:
    """Open image files, one per element: `path`, and optional `size`, `mode` ("RGB") and `label`."""
    files = expand(config["path"], folder)
    label = config.get("label")
    if label and (rootless := next((file for file in files if not folder_of(file)), None)):
        raise SourceError(
            f"{rootless.label}: the file is in no folder, so it has no label",
            key="label",
            expected="a path such as `*/*.png`, with a folder for each label",
        )
    size = config.get("size")
    settings = {
        "kind": "images",
        "size": None if size is None else list(size),
        "mode": config.get("mode", "RGB"),
        "label": label,
    }
    return ImageFilesSource(files, settings)
