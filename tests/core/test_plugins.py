from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipedist.core import plugins
from pipedist.core.plugins import SOURCES, Argument, arguments_of, registered, summary_of
from pipedist.errors import UsageError


class Slices:
    """Reads slices
    of scans.

    Args:
        path: the folder,
            absolute.
        level (int): the zoom.

    Example:
        path: not an argument.
    """

    def __init__(self, path: str, level: int = 0, *, strict: NotThere = None, **_more: object) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def install(folder: Path, package: str, *entries: str, group: str = SOURCES) -> None:
    """Install the metadata of a package with entry points in a group."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the import path, whose packages are found anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    yield tmp_path
    registered.cache_clear()


def test_registered_classes_are_found_by_name_and_loaded(packages: Path) -> None:
    install(packages, "scans", f"slices = {__name__}:Slices", "gone = not_there_at_all:Reader")
    found = registered(SOURCES)
    assert found["slices"] == plugins.Plugin("slices", f"{__name__}:Slices", "scans 1.0")
    assert found["slices"].load() is Slices
    with pytest.raises(
        UsageError, match=r"`gone` of scans 1\.0 can't be used: .*no module 'not_there_at_all'"
    ):
        found["gone"].load()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("slices = other:Slices", r"both register `slices` in pipedist\.sources: uninstall one"),
        ("a b = other:Slices", r"registers 'a b' in pipedist\.sources, which can't be a key"),
    ],
)
def test_ambiguous_and_unusable_names_are_errors(packages: Path, second: str, message: str) -> None:
    install(packages, "scans", f"slices = {__name__}:Slices")
    install(packages, "others", second)
    with pytest.raises(UsageError, match=message):
        registered(SOURCES)


def test_arguments_have_types_defaults_and_descriptions() -> None:
    empty = inspect.Parameter.empty
    assert summary_of(Slices) == "Reads slices of scans."
    found = arguments_of(Slices)
    assert list(found) == ["path", "level", "strict"]
    assert found["path"].default is empty
    assert found["path"].description == "the folder, absolute."
    assert found["level"].default == 0

    class Typed(Slices):
        def __init__(self, path: str, level: int = 0) -> None: ...

    assert arguments_of(Typed)["level"] == Argument(int, 0, "the zoom.")
    assert arguments_of(type) == {}
