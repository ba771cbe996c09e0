"""Output folders behind URLs, through fsspec: `s3://bucket/run`, `gs://...`, `file:///mnt/run`.

A run writes to a STAGING FOLDER on this host, which has the journal too. When it is complete there, its files are
uploaded, one after the other, and then MANIFEST:

    {"run": ..., "complete": true, "files": {"late.json": 91, "rows.parquet/part-00000.parquet": 1234}}

It is written with `complete: false` before the first file changes, so a reader that finds `true` has the files of one
complete run. The staging folder records each uploaded file: a resumed run uploads the others. Files of an earlier run
that this one does not have are removed; all other files stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipedist.core.files import replace_file
from pipedist.errors import OutputError, UsageError
from pipedist.outputs.encoding import text
from pipedist.outputs.run_record import PRIVATE

MANIFEST = "pipedist-run.json"  # the file behind a URL that lists the files of a run

_PROGRESS = "uploaded.json"


class RemoteFolder:
    """An output folder behind a URL, and its staging folder.

    Raises:
        UsageError: fsspec, or the package of the URL's file system, is missing; or the folder can't be read, or has
            files and no manifest.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(f"{url}: URLs need fsspec: pip install 'pipedist[fsspec]'") from None
        self.url = url.rstrip("/")
        try:
            self._system, root = url_to_fs(
                self.url, **({"auto_mkdir": True} if url.startswith("file:") else {})
            )
            self._root = str(root)
            manifest = self._manifest()
            if manifest is None and self._has_files():
                raise UsageError(
                    f"{url} is not empty and was not written by pipedist. Choose another folder with --output."
                )
        except UsageError:
            raise
        except Exception as error:  # the file system's package may raise anything
            raise UsageError(f"can't use {url} as output folder: {_text_of(error)}") from error

    @property
    def staging(self) -> Path:
        """The folder of this host where the run writes; the same one for each run with this URL."""
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipedist" / "outputs"
        name = re.sub(r"[^\w.-]+", "-", self.url.rpartition("/")[2]).lstrip("-.") or "run"
        return base / f"{name}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"

    def upload(self, run: str, outputs: Sequence[str]) -> None:
        """Upload the outputs of a complete run, as far as an earlier process has not.

        Args:
            run: the id of the run.
            outputs: files and folders, relative to the staging folder.

        Raises:
            OutputError: a file can't be uploaded; the next `--resume` uploads it.
        """
        with self._errors():
            files = dict(self._files(outputs))
            stamps = {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in files.items()}
            progress = self._progress(run)
            done: dict[str, Any] = progress["files"]
            before = self._manifest() or {"files": {}}
            listed = {name: size for name, (size, _) in stamps.items()}
            is_new = before.get("run") != run or before["files"] != listed
            if not is_new and before.get("complete") and done == stamps:
                return
            if is_new or before.get("complete"):
                self._write_manifest({"run": run, "complete": False, "files": {**before["files"], **listed}})
            for name, path in files.items():
                if done.get(name) != stamps[name]:
                    self._system.put_file(str(path), f"{self._root}/{name}")
                    done[name] = stamps[name]
                    self._save(progress)
            for name in {**before["files"]}.keys() - files.keys():
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{self._root}/{name}")
            self._write_manifest({"run": run, "complete": True, "files": listed})

    def _files(self, outputs: Sequence[str]) -> Iterator[tuple[str, Path]]:
        for output in outputs:
            path = self.staging / output
            inner = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
            for each in inner:
                yield str(each.relative_to(self.staging)), each

    def _progress(self, run: str) -> dict[str, Any]:
        """Return the run, and [bytes, mtime in ns] of each file that is uploaded."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.staging / PRIVATE / _PROGRESS).read_bytes())
            if isinstance(found, dict) and (found.get("run"), found.get("url")) == (run, self.url):
                return found
        return {"run": run, "url": self.url, "files": {}}

    def _save(self, progress: dict[str, Any]) -> None:
        replace_file(self.staging / PRIVATE / _PROGRESS, text(progress).encode())

    def _manifest(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._system.cat_file(f"{self._root}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
            raise ValueError(f"{MANIFEST} is not a manifest of pipedist")
        for name in found["files"]:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{MANIFEST} names a file outside of the folder")
        return found

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        self._system.pipe_file(f"{self._root}/{MANIFEST}", text(manifest, sort_keys=False).encode() + b"\n")

    def _has_files(self) -> bool:
        try:
            return bool(self._system.ls(self._root, detail=False))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the file system's package may raise anything
            failed = OutputError(
                f"can't upload to {self.url}: {_text_of(error)}. The results are in {self.staging}: fix the "
                "problem, and upload the rest with --resume"
            )
            failed.has_advice = True
            raise failed from error


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
