"""Keys of a cluster whose programs all run on this host, for the same user; they need no copying.

Every user of a host can connect to its loopback addresses, so these need keys too. They are in a folder
that only this user can enter; the first program makes them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from pipedist.errors import UsageError
from pipedist.transport.keys import write_key_file

_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach an address."""
    return host in _HOSTS or host.startswith("127.")


def loopback_key_file(port: int) -> str:
    """Return the key file of the cluster at a port of this host; it is made if there is none.

    Raises:
        UsageError: the folder of such files belongs to another user, or can't be made.
    """
    folder = os.path.join(tempfile.gettempdir(), f"pipedist-keys-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise UsageError(f"can't make a folder for keys, {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{folder} is not a folder of yours alone (mode 0700): remove it, or name a key file"
        )
    path = os.path.join(folder, f"{port}.key")
    if not os.path.exists(path):
        made = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        write_key_file(made)
        try:
            with contextlib.suppress(FileExistsError):  # another program was first: its keys count
                os.link(made, path)
        finally:
            os.unlink(made)
    return path
