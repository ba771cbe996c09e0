"""Runs the blocks of one page in its folder."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from jsonschema import Draft7Validator

from pipedist.errors import SpecError
from pipedist.spec import load
from pipedist.spec.schema import json_schema
from pipedist.spec.yaml_text import read_yaml
from tests import preloaded
from tests.docs.blocks import Block

ROOT = Path(__file__).parents[2]
HOME = "/home/me/project"
SECONDS_MAX = 100
UNUSED = {"text", "csv", "dockerfile", "bash", "html", "diff", "ini", "jsonl", "md"}
_DIFFERS = (
    # progress of a run or a simulation that takes a while
    (
        re.compile(
            r"^[\w-]+(?: phase .*)?: (?:\d+%, )?\d[\d,]* (?:of .* )?(?:call|seed)s?, .*\n", re.MULTILINE
        ),
        "",
    ),
    (re.compile(r"^pipedist: .* takes long, so it is executed on .*\n", re.MULTILINE), ""),
    # the closing table
    (re.compile(r"^stages? +calls .*?(?=^phase |^\.\.\.$)", re.MULTILINE | re.DOTALL), "TIMES\n"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z\b"), "TIME"),
    (re.compile(r"\b\d[\d,.]* (?:ms|us|s)\b"), "TIME"),
    (re.compile(r"\brun [0-9a-f]{16}\b"), "run ID"),
    (re.compile(r"\bw\d+\b"), "w0"),
    (re.compile(r"\(process \d+\)"), "(process N)"),
    (re.compile(r"─+"), "-"),
)
"""Texts that differ from run to run, and what both sides of a comparison have instead."""
_PROGRAMS = {"pipedist", "python", "pytest"}
_SHELL = set("|&;<>()$`*?~#=")


class Page:
    """The folder of a page, and the session that executes its Python blocks.

    Args:
        files: of the repository, that are copied into the folder.
        fill: gets the real outputs in place of those that are `?`; None compares all of them.
    """

    def __init__(self, path: Path, folder: Path, files: list[str], fill: list[str] | None = None) -> None:
        self.path = path
        self.folder = folder
        self._session: subprocess.Popen[str] | None = None
        self._printed = ""
        self._code = 0
        self._fill = fill
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, folder / file)
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "COLUMNS": "88", "NO_COLOR": "1", "HOME": str(folder), "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.stdin.close()  # type: ignore[union-attr]
            self._session.wait(SECONDS_MAX)
            self._session.stdout.close()  # type: ignore[union-attr]

    def use(self, block: Block) -> None:
        """Use a block as its language and title say."""
        if block.title == "Output":
            self._compare(block.text, self._printed, block.line)
            return
        if block.title:
            name = block.title.removesuffix(" (continued)")
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a" if block.title != name else "w", encoding="utf-8") as out:
                out.write(block.text)
        match block.language:
            case "python" if not block.title:
                self._execute(block)
            case "python":
                compile(block.text, block.title, "exec")
            case "console":
                self._commands(block)
            case "yaml" if "invalid" in block.comments:
                assert problems(block.text), f"{self._at(block.line)}: the spec is valid"
            case "yaml":
                assert (found := problems(block.text)) == [], f"{self._at(block.line)}:\n" + "\n".join(found)
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case language:
                assert language in UNUSED, (
                    f"{self._at(block.line)}: the language of this block is {language!r}; see tests/docs/__init__.py"
                )

    def _execute(self, block: Block) -> None:
        if self._session is None:
            self._session = preloaded.Popen(
                [sys.executable, "-m", "tests.docs.python_session"],
                cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**self._env, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        request = {"text": "\n" * (block.line - 1) + block.text, "name": self.path.name}
        self._session.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self._session.stdin.flush()  # type: ignore[union-attr]
        reply = json.loads(self._session.stdout.readline())  # type: ignore[union-attr]
        self._printed = reply["printed"]
        assert not reply["failure"], f"{self._at(block.line)}:\n{reply['printed']}{reply['failure']}"

    def _commands(self, block: Block) -> None:
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"{self._at(block.line)}: a console block begins with `$ `"
        commands = [_divided(part) for part in parts[1:]]
        for number, (command, expected) in enumerate(commands):
            if command == "echo $?":
                printed = f"{self._code}\n"
            else:
                last = number + 1 == len(commands)
                printed = self._command(command)
                if last and "repeated" in block.comments:
                    end = time.monotonic() + SECONDS_MAX
                    while not self._agrees(expected, printed) and time.monotonic() < end:
                        printed = self._command(command)
                following = commands[number + 1][0] if number + 1 < len(commands) else ""
                if following != "echo $?":
                    code = int(block.comments.get("exit", 0)) if last else 0
                    assert self._code == code, f"{self._at(block.line)}: $ {command}: {self._code}\n{printed}"
            if expected.strip():
                self._compare(expected, printed, block.line, command)

    def _command(self, command: str) -> str:
        """Execute a command, keep its exit code, and return its output."""
        words = shlex.split(command, comments=True)
        if (
            words[:2] == ["pip", "install"]
            or words[:3] == ["uv", "pip", "install"]
            or words[:2] == ["uv", "add"]
        ):
            self._code = 0
            missing = {name for word in words for name in extras_of(word)} - extras()
            assert not missing, f"{command}: no such extra: {', '.join(missing)}"
            return ""
        if words[0] in _PROGRAMS and not set(re.sub(r"'[^']*'", "", command)) & _SHELL:
            module = ["-m", words[0]] if words[0] != "python" else []
            run: Any = preloaded.run
            words = [sys.executable, *module, *words[1:]]
        else:
            run, words = subprocess.run, ["bash", "-c", command]
        done = run(
            words, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX,
        )  # fmt: skip
        self._code = done.returncode
        return str(done.stdout)

    def _compare(self, expected: str, printed: str, line: int, command: str = "") -> None:
        printed = printed.replace(str(self.folder), HOME)
        if self._fill is not None and expected.strip() == "?":
            self._fill.append(printed)
            return
        assert self._agrees(expected, printed), (
            f"{self._at(line)}: {command or 'the block'} printed\n{printed}\nthe page has\n{expected}"
        )

    def _agrees(self, expected: str, printed: str) -> bool:
        """Return whether an output is what the page has."""
        printed = printed.replace(str(self.folder), HOME)
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        return doctest.OutputChecker().check_output(_stable(expected), _stable(printed), options)

    def _at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def _stable(text: str) -> str:
    for pattern, instead in _DIFFERS:
        text = pattern.sub(instead, text)
    return text.strip() + "\n"


def _divided(part: str) -> tuple[str, str]:
    """Return a command, which a backslash continues in the next line, and its output."""
    lines = part.splitlines(keepends=True)
    count = 1
    while count < len(lines) and lines[count - 1].rstrip().endswith("\\"):
        count += 1
    return "".join(lines[:count]).strip(), "".join(lines[count:])


def problems(text: str) -> list[str]:
    """Return the problems of a spec, or of some of its keys; other YAML has none."""
    document, found = read_yaml(text.encode(), "")
    found.raise_all()
    value: Any = document.value
    if "pipedist" in value:
        try:
            load(value, env=_Anything())
        except SpecError as error:
            return str(error).splitlines()
        return []
    schema = json_schema()
    if not set(value) <= set(schema["properties"]):
        return []
    return [
        f"{key}: {error.json_path}: {error.message}"
        for key, part in value.items()
        for error in Draft7Validator(
            {**schema["properties"][key], "definitions": schema["definitions"]}
        ).iter_errors(part)
    ]


class _Anything(dict[str, str]):
    """An environment in which every variable is set."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return "1"

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def extras_of(requirement: str) -> set[str]:
    match = re.fullmatch(r"pipedist\[([\w,-]+)\]", requirement)
    return set(match[1].split(",")) if match else set()


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])
