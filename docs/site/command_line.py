"""The reference of the command line, generated from its commands."""

from __future__ import annotations

from collections.abc import Iterator

import click

from pipedist.cli.app import app

BRACKET = "\\["  # no link


def reference() -> str:
    """Return the reference as Markdown."""
    context = click.Context(app, info_name="pipedist")
    parts = ["# Command line", _text(app.help), "Each command prints its help with `--help`."]
    parts.append("\n".join(_rows(context, app)))
    for name in app.list_commands(context):
        command = app.get_command(context, name)
        if command is not None and not command.hidden:
            parts += _command(command, click.Context(command, info_name=name, parent=context), "##")
    return "\n\n".join(part for part in parts if part) + "\n"


def _command(command: click.Command, context: click.Context, heading: str) -> Iterator[str]:
    yield f"{heading} `{context.command_path}`"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```"
    yield _text(command.help)
    rows = list(_rows(context, command))
    if len(rows) > 2:
        yield "\n".join(rows)
    yield _text(command.epilog)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _command(
                    inner, click.Context(inner, info_name=name, parent=context), f"{heading}#"
                )


def _rows(context: click.Context, command: click.Command) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if record is not None and record[1] and "--help" not in record[0]:
            names, text = record
            meaning = text.replace("|", "\\|").replace("[", BRACKET)
            yield f"| `{names}` | {' '.join(meaning.split())} |"  # a bar in code separates no cells


def _text(text: str | None) -> str:
    """Return a help text as Markdown; paragraphs marked with `\\b` keep their lines."""
    parts = []
    for paragraph in (text or "").replace("\r", "").split("\n\n"):
        if "\b" in paragraph:
            parts.append("```text\n" + paragraph.replace("\b\n", "").strip("\n") + "\n```")
        else:
            parts.append(" ".join(paragraph.split()).replace("<", "&lt;"))
    return "\n\n".join(parts)
