"""What a run leaves behind: JSON documents, files in six formats, and the folder they stand in.

| module | what it decides |
|---|---|
| `document` | the one document that says how a run ended |
| `encoding` | how a tree becomes JSON |
| `formats` | the formats, and what a path below the folder may be |
| `sink` | the one interface through which values reach a file, atomically |
| `folder` | who may write into an output folder, and what a finished one is |
"""

from __future__ import annotations

from pipedist.outputs.document import run_document
from pipedist.outputs.encoding import dumps, to_json
from pipedist.outputs.folder import FinishedRun, RunFolder, open_folder
from pipedist.outputs.formats import SUFFIXES, missing_package
from pipedist.outputs.sink import Sink, open_sink

__all__ = [
    "SUFFIXES",
    "FinishedRun",
    "RunFolder",
    "Sink",
    "dumps",
    "missing_package",
    "open_folder",
    "open_sink",
    "run_document",
    "to_json",
]
