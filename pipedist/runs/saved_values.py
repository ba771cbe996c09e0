"""The values of a run in its folder, as they were returned: a later `resume` of the finished run returns the same.

The document of a run has them as JSON, and those with outputs as paths. Here each value is a record of its stage and
itself, in the form in which workers send theirs. A value has no record if it is only in its file, is larger than
VALUE_BYTES_MAX, or has objects that can't be sent, as a table by key has. Nor has an array that the document refers to:
its `.npy` is the same array.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipedist.core import record_format
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.outputs.run_folder import EXACT
from pipedist.outputs.run_record import writing
from pipedist.protocol.codec import UnsendableError, decode, encode

VALUE_BYTES_MAX = 64 * 2**20


def write_values(folder: Path, results: Mapping[str, Tree], stored: Mapping[str, Any]) -> None:
    """Write the values of stages; OutputError if the file can't be written.

    `stored` are references to the files of large values, by stage.
    """
    with writing(folder / EXACT):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / EXACT).open("wb") as file:
            for stage, value in results.items():
                if stage in stored and _is_plain(value, stored[stage]["file"]):
                    continue
                try:
                    record = record_format.pack(encode((stage, value)))
                except UnsendableError:
                    continue
                if record_format.frame_bytes(record) <= VALUE_BYTES_MAX:
                    file.writelines(record)


def _is_plain(value: Tree, file: str) -> bool:
    """Return whether a value is an array, and the same in its file; some dtypes become bytes there, objects texts."""
    return type(value) is np.ndarray and value.dtype.kind not in "OV" and file.endswith(".npy")


def read_values(file: Path, stored: Mapping[str, Path]) -> dict[str, Tree]:
    """Return the values, by stage, up to one that is damaged, and except those of a class that is gone.

    `stored` are the files of large values that are one value for the run, by stage.
    """
    found: dict[str, Tree] = {}
    data = memoryview(file.read_bytes())
    for head in record_format.whole_records(data):
        try:
            stage, value = decode(record_format.frames_of(data, head))
        except RemoteProtocolError:
            continue
        found[stage] = value
    for stage, array in stored.items():
        if stage not in found and array.suffix == ".npy" and array.stat().st_size <= VALUE_BYTES_MAX:
            with suppress(OSError, ValueError, EOFError):  # it is damaged: the result is its path
                found[stage] = np.load(array, allow_pickle=False)
    return found
