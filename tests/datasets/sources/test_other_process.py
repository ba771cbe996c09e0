"""A worker on the same host reads what the driver located, while the driver has the source open."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipedist.core import trees
from pipedist.core.types import Tree
from pipedist.datasets.sources import open_source
from pipedist.protocol.codec import encode
from tests import preloaded

WORKER = """
import msgpack, sys
from pipedist.protocol.codec import decode
from pipedist.datasets import open_reader
from tests.datasets.sources.test_other_process import digest
for frames in msgpack.Unpacker(sys.stdin.buffer):
    config, locations = decode(frames)
    reader = open_reader(config)
    print(*(digest(reader.read(location)) for location in locations))
    reader.close()
"""


def digest(shard: Tree) -> str:
    """Return what tells two shards apart."""
    leaves, structure = trees.flatten(shard)
    text = repr(
        (structure, [(leaf.dtype, leaf.tolist()) if hasattr(leaf, "dtype") else leaf for leaf in leaves])
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _write(folder: Path) -> None:
    table = "n,s\n" + "".join(f'{i},"x,{i}"\n' for i in range(100))
    (folder / "a.csv.gz").write_bytes(gzip.compress(table.encode()))
    (folder / "a.txt").write_text(table)
    (folder / "a.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(100)))
    np.save(folder / "a.npy", np.arange(300.0).reshape(100, 3))
    np.savez_compressed(folder / "a.npz", x=np.arange(100), y=np.arange(200).reshape(100, 2))
    for i in range(100):
        (folder / f"{i:02}.bin").write_bytes(bytes([i]))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("range", {"stop": 100}),
        ("csv", {"path": "a.csv.gz", "columns": {"n": "int32", "s": "str"}}),
        ("text", {"path": "a.txt"}),
        ("jsonl", {"path": "a.jsonl"}),
        ("npy", {"path": "a.npy"}),
        ("npz", {"path": "a.npz"}),
        ("files", {"path": "*.bin"}),
    ],
)
def test_a_worker_reads_the_same(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    import msgpack

    _write(tmp_path)
    source = open_source(kind, config, folder=tmp_path)
    shards = [range(10, 20), np.array([99, 3, 50]), range(0)]
    locations = [source.locate(ids) for ids in shards]
    message = msgpack.packb([bytes(frame) for frame in encode([source.config, locations])])
    # In another folder: what a reader needs must not depend on where it runs.
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{WORKER}"]
    done = preloaded.run(command, input=message, capture_output=True, cwd=tmp_path, timeout=60, check=True)
    assert done.stdout.decode().split() == [digest(source.read(location)) for location in locations]
    source.close()


def test_a_reader_imports_only_what_it_uses() -> None:
    heavy = ["pyarrow", "pandas", "pydantic", "gzip", "zipfile", "cloudpickle", "ruamel", "rich", "click"]
    code = (
        "import sys\nfrom pipedist.datasets import open_reader\n"
        "open_reader({'kind': 'range', 'start': 0, 'stop': 3, 'step': 1}).read(range(3))\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
