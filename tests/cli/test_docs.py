"""Transcripts in the docs are what the commands print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests import preloaded

DOCS = Path(__file__).parents[2] / "docs"
HOME = "/home/me"
TYPED = re.compile(r"\(Pdb\) (.*)\n")
PROGRESS = re.compile(r"^\w+: .* elements/s, .*\n", re.MULTILINE)
"""Of a run that takes a while."""


def test_replay_prints_the_output_in_its_page(tmp_path: Path) -> None:
    text = (DOCS / "how-to" / "replay.md").read_text()
    blocks = re.findall(r"```(yaml|python|console)\n(.*?)```\n", text, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["yaml", "python", "console"]
    for _, block in blocks[:2]:
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    commands = re.split(r"^\$ pipedist ", blocks[2][1], flags=re.MULTILINE)[1:]
    assert len(commands) == 3
    for command in commands:
        words, _, expected = command.partition("\n")
        typed = "".join(f"{line}\n" for line in TYPED.findall(expected))
        done = preloaded.run(
            [sys.executable, "-m", "pipedist", *shlex.split(words)],
            cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"}, input=typed, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100, check=False,
        )  # fmt: skip
        assert shown(done.stdout.replace(str(tmp_path), HOME)) == shown(TYPED.sub("(Pdb) ", expected))


def test_seeing_prints_the_output_in_its_page(tmp_path: Path) -> None:
    text = (DOCS / "how-to" / "seeing.md").read_text().split("\n## Logs")[0].split("\n## Compare")[0]
    blocks = re.findall(r"```(yaml|python|console)\n(.*?)```\n", text, re.DOTALL)
    for kind, block in blocks:
        if kind != "console":
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    for command in [block for kind, block in blocks if kind == "console"]:
        words, _, expected = command.removeprefix("$ ").partition("\n")
        program = [sys.executable] if words.startswith("python ") else [sys.executable, "-m", "pipedist"]
        done = preloaded.run(
            [*program, *shlex.split(words)[1:]], cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=100, check=False,
        )  # fmt: skip
        assert without_times(done.stdout) == without_times(expected), done.stderr


def without_times(text: str) -> str:
    """Return output without its numbers, the width of its columns, and the sentence that they lead to."""
    text = re.sub(r"\n\n[^\n]+\nphase", "\n\nSENTENCE\nphase", re.sub(r"─+", "-", shown(text)))
    return re.sub(r" +", " ", re.sub(r"\d[\d,.]*( ms| s)?", "N", text))


def test_diff_prints_the_output_in_its_page(tmp_path: Path) -> None:
    text = (
        (DOCS / "how-to" / "seeing.md")
        .read_text()
        .partition("## Compare two runs\n")[2]
        .partition("\n## ")[0]
    )
    blocks = re.findall(r"```(?:yaml|python|console)\n(.*?)```\n", text, re.DOTALL)
    for block in blocks[:2]:
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    first, second, diff = re.split(r"^\$ pipedist ", blocks[2], flags=re.MULTILINE)[1:]
    for command in (first, second):
        assert preloaded.run_module("pipedist", *shlex.split(command), cwd=tmp_path).returncode == 0
    command, _, expected = diff.partition("\n")
    done = preloaded.run_module("pipedist", *shlex.split(command), cwd=tmp_path)
    assert (done.returncode, shown(done.stdout)) == (1, shown(expected))


def shown(text: str) -> str:
    """Return what does not differ from run to run."""
    text = PROGRESS.sub("", text)
    return re.sub(r"run [0-9a-f]{16}", "run ID", re.sub(r"worker w\d", "worker w", text)).strip()
