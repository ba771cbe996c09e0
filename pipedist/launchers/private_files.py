"""JSON documents in a run's folder that are this user's alone: they say where its workers wait."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipedist.errors import UsageError
from pipedist.files import replace_file

_BYTES_MAX: Final = 16_384


def read_document(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON document in a file that is this user's alone; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
                return None
            document = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document into a file with mode 0600, all of it or nothing.

    Raises:
        UsageError: it can't be written.
    """
    try:
        replace_file(path, json.dumps(document).encode("ascii"), 0o600)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None
