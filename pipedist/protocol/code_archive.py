"""Snapshots of folders of user modules, for workers on other hosts.

The driver reads the files of a `code` folder once, and names the snapshot by a digest of their names and
contents. A worker unpacks it into a folder of its own with that name. Only regular files are sent: no
links, modes or times. Files that do not look like code are skipped, and the snapshot lists them:

| skipped | reason |
|---|---|
| names that begin with a dot, `__pycache__`, `*.pyc`, `node_modules` | made by tools |
| folders with a `pyvenv.cfg` | virtual environments |
| folders with a `.pipedist` of a run | outputs |
| files larger than `FILE_BYTES_MAX` | data; listed by name |
| files with keys of a cluster | secrets; listed by name |
| links out of the folder, links to folders, unreadable files | listed by name |
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence

from msgspec import Struct

from pipedist.core import functions
from pipedist.core.names import plural
from pipedist.core.temp_dirs import ScratchFolder
from pipedist.core.types import Tree
from pipedist.errors import PipedistError, RemoteProtocolError
from pipedist.protocol.codec import decode
from pipedist.protocol.messages import Code

FILE_BYTES_MAX = 1 << 20  # larger files are considered data, and skipped

BYTES_MAX = 32 << 20  # maximum size of a snapshot; a larger folder is not sent

FILES_MAX = 4096  # maximum files of a snapshot; a folder with more is not sent

ENTRIES_MAX = 20_000  # maximum entries of a folder; one with more is not sent

DEPTH_MAX = 32  # maximum depth of nested folders

_LISTED_MAX = 5  # maximum number of skipped files listed by name

_TOOLS = frozenset({"__pycache__", "node_modules"})
_NOT_CODE = frozenset({".pipedist", "pyvenv.cfg"})  # these mark output folders and virtual environments
_KEYS = b'"pipedist_keys"'
_DIGEST = re.compile(r"[0-9a-f]{32}")


class CodeTooLarge(PipedistError):
    """A folder exceeds the limits of a snapshot."""


class CodeSnapshot(Struct, frozen=True):
    """The files of a code folder."""

    folder: str  # the absolute source folder
    digest: str  # digest of names and contents
    names: tuple[str, ...]  # relative paths, with "/", sorted
    contents: tuple[bytes, ...]  # content of each file
    text: str  # size and skipped files, for messages

    def to_tree(self) -> Tree:
        return [list(self.names), list(self.contents)]


def take(folder: str) -> CodeSnapshot:
    """Return a snapshot of a code folder, given as an absolute path, or raise CodeTooLarge."""
    found: dict[str, bytes] = {}
    skipped: list[str] = []
    size = 0
    for name, path in _walk(folder, skipped):
        content = _content(folder, name, path, skipped)
        if content is None:
            continue
        found[name] = content
        size += len(content)
        if len(found) > FILES_MAX or size > BYTES_MAX:
            raise CodeTooLarge(
                f"{folder} was not sent: it has more than {FILES_MAX:,} files or {BYTES_MAX >> 20} MiB that "
                "look like code; move your modules into a separate folder, and set `code: FOLDER`"
            )
    names = tuple(sorted(found))
    contents = tuple(found[name] for name in names)
    text = f"{plural(len(names), 'file')}, {size:,} bytes"
    if skipped:
        more = f" and {len(skipped) - _LISTED_MAX} more" if len(skipped) > _LISTED_MAX else ""
        text += f"; without {', '.join(skipped[:_LISTED_MAX])}{more}"
    return CodeSnapshot(folder, digest_of(names, contents), names, contents, text)


def digest_of(names: Sequence[str], contents: Sequence[bytes]) -> str:
    import hashlib  # loads OpenSSL; every worker imports this module

    whole = hashlib.sha256()
    for name, content in zip(names, contents, strict=True):
        encoded = name.encode("utf-8", "surrogateescape")
        whole.update(b"%d %d " % (len(encoded), len(content)))
        whole.update(encoded)
        whole.update(content)
    return whole.hexdigest()[:32]


def is_digest(text: str) -> bool:
    """Return whether a text is a digest, and so safe as a folder name."""
    return _DIGEST.fullmatch(text) is not None


def unpack(tree: Tree, digest: str, folder: str) -> None:
    """Write the files of a snapshot (`CodeSnapshot.to_tree`) to a new folder, all of them or none.

    The folder's parent exists, and is private to this user. Raise OSError, or RemoteProtocolError if the tree is
    malformed, has another digest, is too large, or has a name that points out of the folder.
    """
    names, contents = _checked(tree, digest)
    staged = f"{folder}.{os.urandom(4).hex()}"
    os.mkdir(staged, 0o700)
    try:
        for name, content in zip(names, contents, strict=True):
            path = os.path.join(staged, *name.split("/"))
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # O_EXCL: a name may repeat in another case on case-insensitive file systems
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
        raise RemoteProtocolError("code with a wrong digest")
    return names, contents


def _walk(folder: str, skipped: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (relative name, path) of possible code, unordered; add unreadable folders to `skipped`."""
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
            skipped.append(f"{prefix!a} ({error.strerror})")
            continue
        looked += len(found)
        if looked > ENTRIES_MAX:
            raise CodeTooLarge(
                f"{folder} was not sent: it has more than {ENTRIES_MAX:,} entries; move your modules into "
                "a separate folder, and set `code: FOLDER`"
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


def _content(folder: str, name: str, path: str, skipped: list[str]) -> bytes | None:
    """Return a file's bytes, or None if it is skipped, and add the reason to `skipped`."""
    try:
        name.encode()
        real = os.path.realpath(path)
        is_within = real.startswith(os.path.join(os.path.realpath(folder), ""))
        if os.path.islink(path) and (os.path.isdir(real) or not is_within):
            skipped.append(f"{name} (a link to {real})")
            return None
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            skipped.append(f"{name} (not a regular file)")
            return None
        if facts.st_size > FILE_BYTES_MAX:
            skipped.append(f"{name} ({facts.st_size / 2**20:.1f} MiB)")
            return None
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not valid text"
        skipped.append(f"{name!a} ({reason})")
        return None
    if len(content) <= 4096 and _KEYS in content:
        skipped.append(f"{name} (keys)")
        return None
    return content


def remove(folder: str) -> None:
    import shutil  # slow to import, and most workers receive no code

    shutil.rmtree(folder, ignore_errors=True)


class CodeStore:
    """The local copies of the driver's code folders, in a worker on another host.

    If the driver's folder exists here with the same digest (a shared file system), it is used itself. Otherwise its
    files are unpacked into a private folder, which is named by their digest: the next incarnation of the worker finds
    them there. The folder belongs to the supervisor, which removes it. It is in `root`, which is private to this user;
    "": a temporary one, which `close` removes.
    """

    def __init__(self, root: str, worker: str) -> None:
        self._root = root
        self._temporary: ScratchFolder | None = None
        self._worker = worker
        self._local: dict[str, str] = {}  # the driver's folder -> the folder here
        self._descriptions: dict[str, str] = {}  # the driver's folder -> its description for errors

    def add(self, code: Code, frames: Sequence[memoryview]) -> None:
        """Add a folder of the driver, and unpack its files if they were sent.

        Raises RemoteProtocolError if they are malformed, or neither sent nor here.
        """
        folder = os.fsdecode(code.folder)
        local, description = folder, code.text
        if code.digest:
            if not is_digest(code.digest) or not os.path.isabs(folder):
                raise RemoteProtocolError(f"code of {folder!r} with the digest {code.digest!r}")
            if _has(folder, code.digest):
                description = f"{folder}, which is identical here"
            else:
                try:
                    local = self._unpacked(code.digest, frames)
                    description = f"{folder} ({code.text})"
                except OSError as error:
                    description = f"{folder}, but it can't be unpacked here: {error}"
        self._local[folder], self._descriptions[folder] = local, description

    def _unpacked(self, digest: str, frames: Sequence[memoryview]) -> str:
        if not self._root:
            self._temporary = ScratchFolder("code")
            self._root = self._temporary.path
        place = os.path.join(self._root, digest)
        if not os.path.isdir(place):
            if not frames:
                raise RemoteProtocolError(f"code {digest} was not sent, and is not here")
            unpack(decode(frames), digest, place)
        return place

    def local_folder(self, folder: str) -> str:
        return self._local.get(folder, folder)

    def announce(self) -> None:
        """Add the name of this worker, and the code that it was sent, to errors about functions."""
        sent = "; ".join(self._descriptions.values()) or "no code folder"
        functions.process_note = f"this is worker {self._worker}, on another host, which was sent: {sent}"

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.close()


def stored_digests(root: str) -> tuple[str, ...]:
    """Return the digests of the copies in a folder; "": none."""
    try:
        names = sorted(os.listdir(root)) if root else []
    except OSError:
        return ()
    return tuple(filter(is_digest, names))


def _has(folder: str, digest: str) -> bool:
    """Return whether the driver's folder exists here, with the same files."""
    if not os.path.isdir(folder):
        return False
    try:
        return take(folder).digest == digest
    except (OSError, CodeTooLarge):
        return False
