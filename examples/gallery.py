"""Run every job of the gallery, draw its picture, and put its output into its README: make gallery."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pictures

EXAMPLES = Path(__file__).parent
BIN = Path(sys.executable).parent
JOBS = {
    "flights": "fetch.py",
    "words": "data.py",
    "images": "data.py",
    "filetypes": "data.py",
    "llm": "",
    "sweep": "",
    "climate": "data.py",
}
"""The jobs, and the script that brings the data of each."""


def output_of(name: str, folder: Path) -> str:
    """Run the command in the README of a job, and return what it printed on standard output."""
    text = (EXAMPLES / name / "README.md").read_text()
    (command,) = re.findall(r"^\$ (.*pipedist run .*)$", text, re.MULTILINE)
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "88"}
    (folder / name).symlink_to(EXAMPLES / name)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode not in (0, 3):  # 3: with quarantined elements
        sys.exit(f"{name}: exit code {done.returncode}")
    return done.stdout


def main(names: list[str]) -> None:
    for name in names or list(JOBS):
        if JOBS[name]:
            subprocess.run([sys.executable, EXAMPLES / name / JOBS[name]], check=True)
        with tempfile.TemporaryDirectory() as scratch:
            found = output_of(name, Path(scratch))
            (out,) = (Path(scratch) / "out").iterdir()
            pictures.draw(name, out)
        readme = EXAMPLES / name / "README.md"
        lines = [line.rstrip() for line in found.strip().splitlines()]
        before, command, rest = re.split(r"^(\$ .*pipedist run .*\n)", readme.read_text(), flags=re.MULTILINE)
        readme.write_text(
            "\n".join([before + command + lines[0], *lines[1:], "```" + rest.partition("```")[2]])
        )
        print(f"{name}: examples/{name}/README.md, examples/{name}/picture.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
