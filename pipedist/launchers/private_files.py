"""JSON documents in a run's folder that are this user's alone: they say where its workers wait."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipedist.errors import UsageError

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
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump(document, file)
        new.replace(path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None
