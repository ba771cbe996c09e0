"""A folder of the user's modules as it travels to another host: what is in it, and how it is unpacked.

The files of a `code` folder are taken once, in the scheduler's process, and named by a digest of their
names and contents. A worker unpacks them in a folder of its own that is called by that digest. Only
regular files travel: no links, no modes, no times. What does not look like code stays behind, and the
snapshot says what that was:

| left behind | why |
|---|---|
| names that begin with a dot, `__pycache__`, `*.pyc`, `node_modules` | made by tools |
| folders with a `pyvenv.cfg` | virtual environments |
| folders with a `.pipedist` of a run | outputs |
| files larger than `FILE_BYTES_MAX` | data: told by name |
| files with keys of a cluster | secrets: told by name |
| links to what is not in the folder, links to folders, what can't be read | told by name |
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence

from msgspec import Struct

from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.program import Tree

FILE_BYTES_MAX = 1 << 20
"""A larger file is data, and stays behind."""

BYTES_MAX = 32 << 20
"""Bytes of a snapshot; a folder with more is not sent."""

FILES_MAX = 4096
"""Files of a snapshot; a folder with more is not sent."""

ENTRIES_MAX = 20_000
"""Names that are looked at; a folder with more is not sent."""

DEPTH_MAX = 32
"""Folders inside each other."""

_TOLD_MAX = 5
"""Files that are named among those left behind."""

_TOOLS = frozenset({"__pycache__", "node_modules"})
_NOT_CODE = frozenset({".pipedist", "pyvenv.cfg"})
"""What is in folders of outputs, and in virtual environments."""
_KEYS = b'"pipedist_keys"'
_DIGEST = re.compile(r"[0-9a-f]{32}")


class CodeTooLarge(PipedistError):
    """A folder has more than a snapshot may hold."""


class Snapshot(Struct, frozen=True):
    """The files of a code folder.

    Args:
        folder: absolute, where they were taken.
        digest: of names and contents.
        names: relative paths, with "/", sorted.
        contents: of each.
        text: for people: how much it is, and what was left behind.
    """

    folder: str
    digest: str
    names: tuple[str, ...]
    contents: tuple[bytes, ...]
    text: str

    def to_tree(self) -> Tree:
        """Return it as a payload."""
        return [list(self.names), list(self.contents)]


def take(folder: str) -> Snapshot:
    """Return what is in a code folder.

    Args:
        folder: absolute.

    Raises:
        CodeTooLarge: there is more than a snapshot may hold; the text says of what.
        OSError: the folder can't be read.
    """
    found: dict[str, bytes] = {}
    left: list[str] = []
    size = 0
    for name, path in _walk(folder, left):
        content = _content(folder, name, path, left)
        if content is None:
            continue
        found[name] = content
        size += len(content)
        if len(found) > FILES_MAX or size > BYTES_MAX:
            raise CodeTooLarge(
                f"{folder} was not sent: it has more than {FILES_MAX:,} files or {BYTES_MAX >> 20} MiB that "
                "look like code; keep your modules in a folder of their own, and say `code: FOLDER`"
            )
    names = tuple(sorted(found))
    contents = tuple(found[name] for name in names)
    text = f"{len(names)} file{'s' * (len(names) != 1)}, {size:,} bytes"
    if left:
        more = f" and {len(left) - _TOLD_MAX} more" if len(left) > _TOLD_MAX else ""
        text += f"; without {', '.join(left[:_TOLD_MAX])}{more}"
    return Snapshot(folder, digest_of(names, contents), names, contents, text)


def digest_of(names: Sequence[str], contents: Sequence[bytes]) -> str:
    """Return the name of some files: 32 hexadecimal digits."""
    import hashlib  # it loads OpenSSL, and every worker imports this module

    whole = hashlib.sha256()
    for name, content in zip(names, contents, strict=True):
        encoded = name.encode("utf-8", "surrogateescape")
        whole.update(b"%d %d " % (len(encoded), len(content)))
        whole.update(encoded)
        whole.update(content)
    return whole.hexdigest()[:32]


def is_digest(text: str) -> bool:
    """Whether a text can be the digest of a snapshot, and the name of a folder."""
    return _DIGEST.fullmatch(text) is not None


def unpack(tree: Tree, digest: str, folder: str) -> None:
    """Write the files of a snapshot to a new folder, all of them or none.

    Args:
        tree: from `Snapshot.to_tree`, as it was received.
        digest: that its files must have.
        folder: absolute; its parent exists, and belongs to this user alone.

    Raises:
        RemoteProtocolError: the tree is no snapshot of this digest, is too large, or has a name that
            leads out of the folder.
        OSError: the files can't be written.
    """
    names, contents = _checked(tree, digest)
    staged = f"{folder}.{os.urandom(4).hex()}"
    os.mkdir(staged, 0o700)
    try:
        for name, content in zip(names, contents, strict=True):
            path = os.path.join(staged, *name.split("/"))
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # new, and no link: a name that is there already came twice, in another case on some systems
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
        os.rename(staged, folder)
    except BaseException:
        remove(staged)
        raise


def _checked(tree: Tree, digest: str) -> tuple[list[str], list[bytes]]:
    if not (
        isinstance(tree, list)
        and len(tree) == 2
        and all(isinstance(part, list) for part in tree)
        and len(tree[0]) == len(tree[1])
        and all(type(name) is str for name in tree[0])
        and all(type(content) is bytes for content in tree[1])
    ):
        raise RemoteProtocolError("malformed code: expected names and contents")
    names, contents = tree
    if len(names) > FILES_MAX or sum(map(len, contents)) > BYTES_MAX:
        raise RemoteProtocolError(f"code of {len(names)} files, {sum(map(len, contents))} bytes: too much")
    for name in names:
        parts = name.split("/")
        if len(parts) > DEPTH_MAX + 1 or "\0" in name or {"", ".", ".."} & set(parts):
            raise RemoteProtocolError(f"code with a file named {name[:200]!r}")
    if digest_of(names, contents) != digest:
        raise RemoteProtocolError("code whose digest is another one")
    return names, contents


def _walk(folder: str, left: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (relative name, path) of what may be code, in no order; what can't be read is in `left`."""
    pending = [("", folder, 0)]
    looked = 0
    while pending:
        prefix, place, depth = pending.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except OSError as error:
            if not prefix:
                raise
            left.append(f"{prefix!a} ({error.strerror})")
            continue
        looked += len(found)
        if looked > ENTRIES_MAX:
            raise CodeTooLarge(
                f"{folder} was not sent: it has more than {ENTRIES_MAX:,} entries; keep your modules in a "
                "folder of their own, and say `code: FOLDER`"
            )
        if prefix and _NOT_CODE & {entry.name for entry in found}:
            continue
        for entry in found:
            name = prefix + entry.name
            if entry.name.startswith(".") or entry.name in _TOOLS or name.endswith((".pyc", ".pyo")):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < DEPTH_MAX:
                    pending.append((f"{name}/", entry.path, depth + 1))
            else:
                yield name, entry.path


def _content(folder: str, name: str, path: str, left: list[str]) -> bytes | None:
    """Return a file's bytes; None where it stays behind, and why in `left`."""
    try:
        name.encode()
        real = os.path.realpath(path)
        if os.path.islink(path) and (os.path.isdir(real) or not _is_within(real, folder)):
            left.append(f"{name} (a link to {real})")
            return None
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            left.append(f"{name} (no file)")
            return None
        if facts.st_size > FILE_BYTES_MAX:
            left.append(f"{name} ({facts.st_size / 2**20:.1f} MiB)")
            return None
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX)
    except (OSError, UnicodeEncodeError) as error:
        left.append(f"{name!a} ({error.strerror if isinstance(error, OSError) else 'its name is no text'})")
        return None
    if len(content) <= 4096 and _KEYS in content:
        left.append(f"{name} (keys)")
        return None
    return content


def _is_within(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(os.path.realpath(folder), ""))


def remove(folder: str) -> None:
    """Remove a folder of unpacked snapshots; what can't be removed stays."""
    import shutil  # takes milliseconds to import, and most workers are sent no code

    shutil.rmtree(folder, ignore_errors=True)
