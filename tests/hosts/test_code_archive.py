"""Snapshots of code folders: files that are sent or skipped, and snapshots that a worker rejects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipedist.errors import RemoteProtocolError
from pipedist.protocol import code_archive
from pipedist.protocol.code_archive import CodeStore, CodeTooLarge, digest_of, stored_digests, take, unpack
from pipedist.protocol.messages import Code
from pipedist.transport.keys import write_key_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    it = tmp_path / "code"
    for name in ("a.py", "pkg/b.py", "pkg/table.json", "pkg/deep/er/c.py"):
        (it / name).parent.mkdir(parents=True, exist_ok=True)
        (it / name).write_text(f"# {name}\n")
    return it


def test_code_files_are_taken_and_unpacked_unchanged(folder: Path, tmp_path: Path) -> None:
    snapshot = take(str(folder))
    assert snapshot.names == ("a.py", "pkg/b.py", "pkg/deep/er/c.py", "pkg/table.json")
    out = tmp_path / "out"
    unpack(snapshot.to_tree(), snapshot.digest, str(out))
    assert take(str(out)).digest == snapshot.digest
    assert out.stat().st_mode & 0o777 == 0o700
    assert (out / "a.py").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_read_costs_itself_alone(folder: Path) -> None:
    before = take(str(folder))
    name = "d" * 200
    place = os.open(folder, os.O_RDONLY)
    for _ in range(25):  # its path is longer than the kernel takes; permissions would not stop root
        os.mkdir(name, dir_fd=place)
        above, place = place, os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(above)
    os.close(place)
    after = take(str(folder))
    assert after.digest == before.digest
    assert after.text.endswith("/' (File name too long)")


def test_skipped_files(folder: Path, tmp_path: Path) -> None:
    before = take(str(folder))
    for name in (".git/config", "__pycache__/a.pyc", "x.pyc", "venv/pyvenv.cfg", "venv/lib/x.py", ".env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "out/run/.pipedist").mkdir(parents=True)
    (folder / "out/run/result.json").write_text("{}")
    assert take(str(folder)) == before, "what tools and runs make is no code, and does not change the digest"

    write_key_file(folder / "cluster.key")
    (folder / "big.npy").write_bytes(bytes(code_archive.FILE_BYTES_MAX + 1))
    (tmp_path / "secret").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "inside.py").symlink_to(folder / "a.py")
    after = take(str(folder))
    assert set(after.names) - set(before.names) == {"inside.py"}
    for told in ("cluster.key (keys)", "big.npy (1.0 MiB)", f"link.txt (a link to {tmp_path}/secret)"):
        assert told in after.text


@pytest.mark.parametrize(
    ("limit", "value"), [("FILES_MAX", 3), ("BYTES_MAX", 20), ("ENTRIES_MAX", 3)], ids=lambda v: str(v)
)
def test_a_folder_with_too_much_in_it_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(code_archive, limit, value)
    with pytest.raises(CodeTooLarge, match="was not sent: it has more than"):
        take(str(folder))


@pytest.mark.parametrize(
    "name",
    ["../x.py", "/etc/x", "a/../../x", "a//b", "./x", "", "a\0b", "a/", "/".join(["d"] * 40)],
)
def test_a_name_that_leads_out_of_the_folder_is_rejected(tmp_path: Path, name: str) -> None:
    out = tmp_path / "root" / "out"
    out.parent.mkdir()
    contents = [b"x"]
    with pytest.raises(RemoteProtocolError, match="a file named"):
        unpack([[name], contents], digest_of([name], contents), str(out))
    assert [path.name for path in tmp_path.rglob("*")] == ["root"]


@pytest.mark.parametrize(
    "tree", [None, [], [["a"], []], [["a"], ["text"]], [[b"a"], [b"x"]], {"a": b"x"}, [["a"], [b"other"]]]
)
def test_a_malformed_snapshot_is_rejected(tmp_path: Path, tree: object) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(tree, digest_of(["a"], [b"x"]), str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_given_twice_leaves_nothing(tmp_path: Path) -> None:
    tree = [["a", "a"], [b"1", b"2"]]
    with pytest.raises(FileExistsError):
        unpack(tree, digest_of(*tree), str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_digest_is_no_path(tmp_path: Path) -> None:
    store = CodeStore(str(tmp_path), "w")
    for digest in ("../../etc", "a" * 31, "A" * 32):
        with pytest.raises(RemoteProtocolError, match="with the digest"):
            store.add(Code(b"/somewhere", digest, ""), [])
    with pytest.raises(RemoteProtocolError, match="was not sent, and is not here"):
        store.add(Code(b"/somewhere", "a" * 32, ""), [])
    (tmp_path / ("a" * 32)).mkdir()
    assert stored_digests(str(tmp_path)) == ("a" * 32,)
    store.add(Code(b"/somewhere", "a" * 32, ""), [])
    assert store.local_folder("/somewhere") == str(tmp_path / ("a" * 32))
