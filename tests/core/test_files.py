"""Locks of files and folders, and the removal of trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipedist.core.files import remove_tree, try_lock


def test_shared_locks_exclude_only_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    files = [os.open(path, os.O_RDONLY) for _ in range(3)]
    try:
        assert [try_lock(files[0], shared=True), try_lock(files[1], shared=True)] == [True, True]
        assert not try_lock(files[2])
    finally:
        for each in files:
            os.close(each)


def test_a_tree_is_removed_though_another_process_removes_files_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "file").touch()
    unlink, taken = os.unlink, []

    def late(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if not taken:
            taken.append(path)
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", late)
    remove_tree(tmp_path / "tree")
    assert taken == ["file"]
    assert not (tmp_path / "tree").exists()
