"""One file for each row: `"thumbs/{key}.png"`.

The names in braces are columns of text or integers, the one other column is the content: bytes and text as they are,
arrays encoded as the ending says.

| ending | array |
|---|---|
| .npy | any |
| .json | any, as in a `.json` output |
| .png, .jpg, .webp, .tif, ... | uint8 [height, width], or with a last axis of 1, 3 or 4 channels; written by Pillow |
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from pipedist.core import ragged
from pipedist.core.files import AtomicPath
from pipedist.core.types import Tree
from pipedist.errors import OutputError
from pipedist.outputs import encoding
from pipedist.outputs.row_files import RowSink
from pipedist.outputs.sink import Target, imported
from pipedist.outputs.spool import Array

_FIELD = re.compile(r"\{([^{}]+)\}")
_CHANNELS = (1, 3, 4)


class FilesSink(RowSink):
    """A folder of files; `names` of the options is their template below it."""

    flat = False
    plain = False
    _writes = AtomicPath
    _out: AtomicPath

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._names: str = target.options["names"]
        self._fields = list(dict.fromkeys(_FIELD.findall(self._names)))
        self._ending = PurePosixPath(self._names).suffix.lower()
        self._out.written.mkdir()

    def _append(self, value: Tree) -> None:
        if not (isinstance(value, np.ndarray) and ragged.is_blank(value)):  # no call found a row
            super()._append(value)

    def _check(self, columns: dict[str, Array], dtypes: dict[str, Any]) -> None:
        super()._check(columns, dtypes)
        self._content(columns)
        for name in self._fields:
            if columns[name].ndim > 1 or columns[name].dtype.kind not in "iuUO":
                raise OutputError(
                    f"{self.label}: column {name!r} of dtype {columns[name].dtype} can't name files: use text or "
                    "integers"
                )

    def _content(self, columns: Mapping[str, Array]) -> str:
        """Return the column that has the content."""
        if missing := [name for name in self._fields if name not in columns]:
            raise OutputError(
                f"{self.label}: there is no column {missing[0]!r}: the columns are {', '.join(columns)}"
            )
        others = [name for name in columns if name not in self._fields]
        if len(others) != 1:
            found = f"there are {', '.join(others)}" if others else "there is none"
            raise OutputError(
                f"{self.label}: a file has the content of one column beside those of its name, and {found}"
            )
        return others[0]

    def _rows(self, columns: dict[str, Array]) -> None:
        content = self._content(columns)
        names = [columns[name].tolist() for name in self._fields]
        for row in range(len(columns[content])):
            values = {name: cells[row] for name, cells in zip(self._fields, names, strict=True)}
            self._file(self._name_of(values), columns[content][row])

    def _name_of(self, values: Mapping[str, Any]) -> str:
        name = _FIELD.sub(lambda found: str(values[found[1]]), self._names)
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\0" in name or name.endswith("/") or "//" in name:
            raise OutputError(f"{self.label}: {name!r} is not the name of a file below the folder")
        if PurePosixPath(name).name.startswith("."):
            raise OutputError(f"{self.label}: {name!r} would be a hidden file: a part of its name is empty")
        return name

    def _file(self, name: str, content: Any) -> None:
        path = self._out.written / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self._encoded(name, content)
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            raise OutputError(f"{self.label}: two rows have the file {name!r}") from None

    def _encoded(self, name: str, content: Any) -> bytes:
        if isinstance(content, bytes | np.bytes_):
            return bytes(content)
        if self._ending == ".json":
            return encoding.dumps(content).encode() + b"\n"
        if isinstance(content, str):
            return content.encode()
        buffer = io.BytesIO()
        if self._ending == ".npy":
            np.save(buffer, np.asarray(content), allow_pickle=False)
            return buffer.getvalue()
        self._save_image(name, np.asarray(content), buffer)
        return buffer.getvalue()

    def _save_image(self, name: str, pixels: Array, buffer: io.BytesIO) -> None:
        if pixels.dtype != np.uint8 or not (
            pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in _CHANNELS)
        ):
            raise OutputError(
                f"{self.label}: {name!r} needs bytes, or an image: uint8 [height, width], or with 1, 3 or 4 "
                f"channels; got {pixels.dtype}{list(pixels.shape)}"
            )
        pillow = imported("PIL.Image", self.label, self._ending, "images")
        image = pillow.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
        kind = pillow.registered_extensions().get(self._ending)
        if kind is None:
            raise OutputError(
                f"{self.label}: {self._ending or 'a name without ending'!r} is no format of images; return bytes"
            )
        try:
            image.save(buffer, kind)
        except (OSError, ValueError, KeyError) as error:
            raise OutputError(f"{self.label}: {name!r} can't be encoded: {error}") from error

    def _complete(self) -> None:
        """Do nothing: all files are written."""
