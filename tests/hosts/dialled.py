"""Worker processes that dial in as from another host: in a mount namespace where folders are hidden."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import preloaded

_HIDE = 'mount -t tmpfs none "$1" && shift && exec "$@"'


@functools.cache
def _can_hide() -> bool:
    try:
        tried = subprocess.run(
            ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$1"', "sh", "/mnt"],
            capture_output=True,
            timeout=60,
            check=False,
        )
    except OSError:
        return False
    return tried.returncode == 0


def needs_namespaces() -> None:
    """Skip where a test can't have a host of its own."""
    if not _can_hide():
        pytest.skip(
            "no mount namespaces here; in a container that allows them: "
            "docker run --cap-add SYS_ADMIN ... make test-hosts"
        )


@contextmanager
def worker(
    endpoint: str, key_file: Path, *, hidden: Path | None, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start `pipedist worker`; it sees an empty folder where `hidden` is."""
    command: Sequence[str] = (
        sys.executable, "-m", "pipedist", "worker", "--connect", endpoint, "--key-file", str(key_file),
    )  # fmt: skip
    if hidden is not None:
        command = ("unshare", "-rm", "sh", "-c", _HIDE, "sh", str(hidden), *command)
    process = preloaded.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
