"""Endpoints, and the private directory of ipc sockets.

A second server that binds an ipc path takes over its clients without an error, and every process that
can open the path can connect. So ipc sockets have random names, in directories of mode 0700. TCP is
for other hosts, and always with keys.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from pipedist.core.temp_dirs import ScratchFolder, remove, remove_stale
from pipedist.errors import UsageError

SOCKET_PATH_BYTES_MAX: Final = 107  # bytes of a unix socket's path: `sun_path` is 108, with a final zero
SHARED_MEMORY_SUFFIX: Final = ".mem"  # to an ipc endpoint's path: the socket that shares memory
_TCP: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
_IPV4: Final = re.compile(r"[0-9.]+")
_PREFIX: Final = "pipedist-"
_KIND: Final = "run"
_LONGEST: Final = "/pipedist-run-xxxxxxxx-4194304-xxxx"
_NAME_BYTES: Final = 8  # of randomness in a socket's name
_IPC_TAIL: Final = len("/") + 2 * _NAME_BYTES + len(SHARED_MEMORY_SUFFIX)


class Endpoint(Struct, frozen=True):
    """A parsed endpoint."""

    text: str  # as ZeroMQ takes it
    host: str = ""  # of tcp, without brackets; "" for ipc
    port: int = 0  # of tcp, 0 for any; 0 for ipc
    path: str = ""  # of ipc; "" for tcp

    @property
    def is_tcp(self) -> bool:
        return not self.path

    @property
    def is_name(self) -> bool:
        """Whether the host is a name, which must be looked up."""
        return self.is_tcp and self.host != "*" and ":" not in self.host and not _IPV4.fullmatch(self.host)

    @property
    def is_ipv6(self) -> bool:
        """Whether a socket for it speaks IPv6, and IPv4 only as a part of that.

        An address shows its kind; `*` binds both kinds; a name is looked up, which may take long, and is IPv4 if it
        has such an address, or none yet.
        """
        if not self.is_name:
            return self.host == "*" or ":" in self.host
        import socket  # names are seldom used

        try:
            families = {found[0] for found in socket.getaddrinfo(self.host, None)}
        except (OSError, UnicodeError):
            return False
        return families == {socket.AF_INET6}


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, for ipc sockets; removed at the end.

    It is in TMPDIR, or in /tmp if paths there were too long, or nothing can be written there.
    If all processes that could remove it are killed, the next call that makes such a directory removes it.
    """
    base = _base()
    try:
        directory = ScratchFolder(_KIND, base)
    except OSError as error:
        raise UsageError(
            f"can't make a directory for sockets in {base}: {error.strerror}; set TMPDIR"
        ) from None
    try:
        yield Path(directory.path)
    finally:
        directory.close()


def remove_stale_directories() -> None:
    """Remove private directories of processes that have ended."""
    remove_stale(_KIND, _base())


def _base() -> str:
    base = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    is_long = len(os.fsencode(base)) + len(_LONGEST) + _IPC_TAIL > SOCKET_PATH_BYTES_MAX
    return "/tmp" if is_long or not os.access(base, os.W_OK | os.X_OK) else base


def private_directory_of(endpoint: str) -> str:
    """Return the directory that `private_directory` made for an ipc endpoint, "" if it is none of those."""
    directory = os.path.dirname(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else ""
    return directory if _is_ours(directory) else ""


def remove_private_directory(directory: str) -> None:
    """Remove what `private_directory` made, if its process died before; other folders are left alone."""
    if _is_ours(directory):
        remove(directory)


def _is_ours(directory: str) -> bool:
    """Whether it has the name, mode and owner of a private directory, and is no link to one."""
    if not os.path.basename(directory).startswith(_PREFIX):
        return False
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    )


def ipc_endpoint(directory: Path) -> str:
    return f"ipc://{directory}/{os.urandom(_NAME_BYTES).hex()}"


def parse_endpoint(text: str, *, bind: bool, has_keys: bool) -> Endpoint:
    """Check an endpoint before a socket gets it: `tcp://host:port`, or `ipc://absolute/path`.

    Raise UsageError if it is malformed; tcp without keys; ipc outside a private directory, or with a path that is too
    long or, when binding, taken.
    """
    if text.startswith("ipc://"):
        return _ipc(text, bind)
    match = _TCP.fullmatch(text)
    if match is None:
        raise UsageError(
            f"endpoint {text!r} is malformed; expected tcp://HOST:PORT (of IPv6: tcp://[ADDRESS]:PORT), or "
            "ipc:// with an absolute path"
        )
    host = match[1].strip("[]")
    port = 0 if match[2] == "*" else int(match[2])
    if port > 65535 or (not bind and (port == 0 or host == "*")):
        raise UsageError(f"endpoint {text!r} needs a host and a port from 1 to 65535")
    if not has_keys:
        raise UsageError(
            f"endpoint {text} is reachable by others, so it needs keys; "
            "make a key file and give it to both ends (--key-file FILE)"
        )
    return Endpoint(text, host=host, port=port)


def _ipc(text: str, bind: bool) -> Endpoint:
    path = text.removeprefix("ipc://")
    if not path.startswith("/"):
        raise UsageError(f"endpoint {text!r} needs an absolute path after ipc://")
    size_bytes = len(os.fsencode(path))
    if size_bytes > SOCKET_PATH_BYTES_MAX:
        raise UsageError(
            f"the path of a unix socket has at most {SOCKET_PATH_BYTES_MAX} bytes, "
            f"{path} has {size_bytes}; set TMPDIR to a shorter directory"
        )
    parent = os.path.dirname(path)
    try:
        found = os.lstat(parent)
    except OSError as error:
        raise UsageError(f"the directory of endpoint {text}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"the directory of endpoint {text} must be yours alone (mode 0700): "
            f"it has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}"
        )
    if bind and os.path.lexists(path):
        raise UsageError(f"endpoint {text} exists already; choose another name")
    return Endpoint(text, path=path)
