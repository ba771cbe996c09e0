"""Runs the blocks of every page; the package's docstring has the conventions."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks, comments
from tests.docs.running import ROOT, Page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN_MAX = 14


def _parameter(page: Path, whole: bool) -> object:
    marks = []
    found = comments(page)
    if "slow" in found:
        marks.append(pytest.mark.slow)
    if "needs" in found:
        module, _, target = found["needs"].partition(", ")
        missing = importlib.util.find_spec(module) is None
        marks += [pytest.mark.jax] * (module == "jax")
        marks.append(pytest.mark.skipif(missing, reason=f"needs {module}: {target}"))
    if whole:
        marks.append(pytest.mark.slow)
    return pytest.param(page, whole, id=f"{page.relative_to(ROOT)}{'-whole' * whole}", marks=marks)


def _is_slow(block: Block) -> bool:
    return "slow block" in block.comments


RUN = [page for page in PAGES if any(blocks(page))]


WITH_SLOW_BLOCKS = [page for page in RUN if any(map(_is_slow, blocks(page)))]


@pytest.mark.parametrize(
    ("page", "whole"),
    [_parameter(page, False) for page in RUN] + [_parameter(page, True) for page in WITH_SLOW_BLOCKS],
)
def test_the_blocks_of_a_page_run(page: Path, whole: bool, tmp_path: Path) -> None:
    with Page(page, tmp_path, comments(page).get("files", "").split()) as used:
        for block in blocks(page):
            if "not run" not in block.comments and (whole or not _is_slow(block)):
                used.use(block)


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    reasons = [
        (page, block.line, block.comments["not run"])
        for page in PAGES
        for block in blocks(page)
        if "not run" in block.comments
    ]
    assert all(len(reason.split()) > 1 for _, _, reason in reasons)
    assert len(reasons) <= NOT_RUN_MAX, "\n".join(
        f"{page}:{line}: {reason}" for page, line, reason in reasons
    )


def test_every_picture_is_shown_and_small() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    there = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert {name for name in there if f"pictures/{name}" in texts} == set(there)
    assert max(there.values()) <= 200 * 1024


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_links_lead_to_files_of_a_clone_or_to_the_generated_reference() -> None:
    generated = re.compile(r"docs/reference/(spec|command-line|api/[\w-]+)\.md")
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^()\s#:]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if not path.exists() and not generated.fullmatch(str(path.relative_to(ROOT))):
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


def test_pages_that_the_code_names_exist() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pipedist").rglob("*.py"))
    named = set(re.findall(r"docs/[\w/-]+\.md", texts))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("name", ["language", "command_line"])
def test_a_generated_reference_shows_stars_and_bars_as_they_are(name: str) -> None:
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    text = re.sub(r"```.*?```", "", module.reference(), flags=re.DOTALL)
    assert re.findall(r"[^\s*]\*[^\s*]", re.sub(r"`[^`]*`", "", text)) == [], "it would be emphasis"
    assert [code for code in re.findall(r"`[^`]*`", text) if "\\|" in code] == []
