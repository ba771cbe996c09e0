"""The results of a run: a JSON document, files in six formats, and the folder that holds them.

Entry points: `open_folder` for the output folder of a run, `open_sink` for a file in it, and `run_document` for the
results document. All of it runs in the driver process; commands such as `pipedist audit` read the folder later.

| module | content |
|---|---|
| `document` | the document that reports how a run ended, and the files of its large values |
| `encoding` | trees as JSON |
| `summary` | values as short text, and records as a table |
| `formats` | the formats, and `open_sink` |
| `sink` | the interface through which values are written to a file |
| `parts` | the files of the parts of one value |
| `spool` | arrays that grow piece by piece |
| `array_files`, `row_files` | sinks of the formats |
| `dataframes` | results as DataFrames |
| `run_folder`, `run_record` | the output folder: its lock, its states, `run.json` |
"""

from __future__ import annotations

from pipedist.outputs.document import run_document, store_large
from pipedist.outputs.encoding import to_json
from pipedist.outputs.formats import missing_package, open_sink
from pipedist.outputs.run_folder import FinishedRun, RunFolder, open_folder

__all__ = [
    "FinishedRun",
    "RunFolder",
    "missing_package",
    "open_folder",
    "open_sink",
    "run_document",
    "store_large",
    "to_json",
]
