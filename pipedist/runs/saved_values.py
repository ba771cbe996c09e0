"""The values of a run in its folder, as they were returned: a later `resume` of the finished run returns the same.

The document of a run has them as JSON, and those with outputs as paths. Here each value is a record of its stage and
itself, in the form in which workers send theirs. A value has no record if it is only in its file, is larger than
VALUE_BYTES_MAX, or has objects that can't be sent, as a table by key has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipedist.core import record_format
from pipedist.core.types import Tree
from pipedist.errors import RemoteProtocolError
from pipedist.outputs.run_folder import EXACT
from pipedist.outputs.run_record import writing
from pipedist.protocol.codec import UnsendableError, decode, encode

VALUE_BYTES_MAX = 64 * 2**20


def write_values(folder: Path, results: Mapping[str, Tree]) -> None:
    """Write the values of stages; OutputError if the file can't be written."""
    with writing(folder / EXACT):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / EXACT).open("wb") as file:
            for stage, value in results.items():
                try:
                    record = record_format.pack(encode((stage, value)))
                except UnsendableError:
                    continue
                if record_format.frame_bytes(record) <= VALUE_BYTES_MAX:
                    file.writelines(record)


def read_values(file: Path) -> dict[str, Tree]:
    """Return the values, by stage, up to one that is damaged, and except those of a class that is gone."""
    found: dict[str, Tree] = {}
    data = memoryview(file.read_bytes())
    for head in record_format.whole_records(data):
        try:
            stage, value = decode(record_format.frames_of(data, head))
        except RemoteProtocolError:
            continue
        found[stage] = value
    return found
