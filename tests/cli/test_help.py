"""Help of the commands: sections, whole summaries, examples that parse."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from pipedist.cli.app import app
from pipedist.cli.command_group import CommandGroup
from tests.cli.conftest import Command


def leaves(group: CommandGroup, path: str = "pipedist") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, CommandGroup):
            yield from leaves(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


COMMANDS = dict(leaves(app))


def test_help_has_each_command_in_a_section_with_its_whole_summary() -> None:
    listed = [name for names in app.sections.values() for name in names]
    assert sorted(listed) == sorted(app.commands)
    text = CliRunner().invoke(app, ["--help"]).output
    assert "..." not in text.partition("\nOptions:")[2]
    for section in app.sections:
        assert f"\n{section}:\n" in text
    for command in app.commands.values():
        assert command.help is not None
        assert command.help.partition("\n")[0] in " ".join(text.split())


@pytest.mark.parametrize("path", COMMANDS)
def test_examples_in_help_parse(path: str) -> None:
    command = COMMANDS[path]
    lines = [line.strip() for line in (command.epilog or "").splitlines() if "pipedist" in line]
    assert lines
    for line in lines:
        found = line.partition("$(")[2].partition(")")[0] if "$(" in line else line
        words = shlex.split(found.partition(" > ")[0])
        assert " ".join(words).startswith(path)
        command.make_context(path, words[len(path.split()) :])


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["flights.yaml"], "To execute a spec: pipedist run flights.yaml"),
        (["rum"], "there is no command 'rum'; did you mean 'run'?"),
        (["keys", "nwe"], "there is no command 'nwe'; did you mean 'new'?"),
        (["xyz"], "there is no command 'xyz'\n"),
    ],
)
def test_a_wrong_command_gets_a_hint(args: list[str], hint: str) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert hint in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("run flights.yaml --live-address 127.0.0.1:0", "--live-address needs --live"),
        ("run flights.yaml --live-key key.pem", "--live-key needs --live"),
        ("run flights.yaml --restart --force-code", "--force-code needs --resume"),
        ("watch out/flights --live-token-file token", "--live-token-file needs --web"),
        ("plan flights.yaml --sample 3", "--sample needs --predict"),
        ("plan flights.yaml --from out/flights", "--from needs --predict"),
        ("plan flights.yaml --predict -w 3", "--workers has no effect with --predict"),
        ("plan flights.yaml --predict --cluster ray", "--cluster has no effect with --predict"),
    ],
)
def test_an_option_without_effect_is_rejected(args: str, message: str) -> None:
    done = CliRunner().invoke(app, shlex.split(args))
    assert done.exit_code == 2
    assert message in done.output


def test_short_options(pipedist: Command, spec: object) -> None:
    done = pipedist("run", "squares.yaml", "-w", "1", "-o", "short", "-p", "factor=2", "--json")
    assert done.returncode == 0, done.stderr
    assert '"total"' in done.stdout
    lost = pipedist("why", "squares.yaml")
    assert lost.returncode == 2
    assert (
        "there is no run in squares.yaml. RUN is the output folder of a run, such as out/NAME" in lost.stderr
    )
    near = pipedist("audit", ".")
    assert "there is no run in /" in near.stderr
    assert "such as short" in near.stderr
    assert pipedist("run", "squares.yaml", "-w", "1", "-o", "out/named", "-q").returncode == 0
    assert pipedist("audit", "out").stderr.endswith("such as out/named\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0
    assert "_PIPEDIST_COMPLETE" in done.output


def test_completion_knows_commands_options_and_files(pipedist: Command) -> None:
    def completed(words: str, at: int) -> str:
        env = {"_PIPEDIST_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        return pipedist(**env).stdout

    assert "plain,validate" in completed("pipedist va", 1)
    assert "plain,--workers" in completed("pipedist run --wo", 2)
    assert completed("pipedist run ", 2).startswith("file,")
    assert completed("pipedist why ", 2).startswith("dir,")
