"""The group of commands: help in sections, with whole summaries and examples, and hints for wrong names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pipedist.core.names import did_you_mean

SPEC_ENDINGS = (".yaml", ".yml")

Function = Callable[..., Any]


class CommandGroup(click.Group):
    """A group whose help lists its commands in sections, in the order of their declaration.

    Example:
        @app.section_command("Clusters", "pipedist worker --connect tcp://10.0.0.1:7000 --key-file worker.key")
        def worker() -> None: ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections: dict[str, list[str]] = {}

    def section_command(
        self, section: str, *examples: str, name: str | None = None
    ) -> Callable[[Function], click.Command]:
        """Return a decorator that declares a command of a section, with examples in its help."""

        def declare(function: Function) -> click.Command:
            command = self.command(name=name, epilog=_examples(examples))(function)
            self.sections.setdefault(section, []).append(str(command.name))
            return command

        return declare

    def section_group(self, section: str) -> Callable[[Function], CommandGroup]:
        """Return a decorator that declares a group of commands in a section."""

        def declare(function: Function) -> CommandGroup:
            group: CommandGroup = self.group(cls=CommandGroup)(function)  # type: ignore[assignment]
            self.sections.setdefault(section, []).append(str(group.name))
            return group

        return declare

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their whole summaries; click would cut them to one line."""
        width = max(map(len, self.commands))
        for section, names in self.sections.items():
            commands = [(name, self.commands[name]) for name in names]
            rows = [
                (f"{name:<{width}}", command.get_short_help_str(limit=1000))
                for name, command in commands
                if not command.hidden
            ]
            with formatter.section(section):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, or raise an error that names a similar one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"there is no command {name!r}{self._hint(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: click.Context, name: str) -> str:
        if name.endswith(SPEC_ENDINGS) and "run" in self.commands:
            return f". To execute a spec: {ctx.command_path} run {name}"
        return did_you_mean(name, self.commands)


def _examples(lines: tuple[str, ...]) -> str:
    """Return the end of a help text, whose lines click keeps as they are."""
    if not lines:
        return ""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\b\n" + "\n".join([title, *(f"  {line}" for line in lines)])
