"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def count(*names: str, text: str, least: int = 1, most: int | None = None, **more: Any) -> Decorator:
    return click.option(*names, metavar="N", type=_Integer(least, most), help=text, **more)


class _Integer(click.IntRange):
    name = "integer"  # in errors; click's own is "integer range"


class _Folder(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A text that shells complete to a folder; the commands check it."""

    name = "directory"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


FOLDER = _Folder()
spec_argument = click.argument("spec", metavar="SPEC", type=click.Path())
run_argument = click.argument("run", metavar="RUN", type=FOLDER)
parameters_option = click.option(
    "-p",
    "--set",
    "sets",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a parameter; the value is YAML. May be repeated.",
)
workers_option = count(
    "-w",
    "--workers",
    text="Number of worker processes; never changes a result. Default: from the spec, or the usable cores.",
)
trace_option = click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(),
    help="Write a trace of the calls and the driver's work, which Perfetto (ui.perfetto.dev) opens.",
)
cluster_option = click.option(
    "--cluster",
    metavar="NAME[:ADDRESS]",
    help="Launcher of the workers: local, connect, ray or dask, such as ray:auto or dask:tcp://10.0.0.1:8786; "
    "never changes a result. Default: from the spec.",
)


LIVE_OPTIONS = ("live_address", "live_token_file", "live_cert", "live_key")


def reject(parameters: tuple[str, ...], reason: str) -> None:
    """Raise a usage error if one of the parameters was given on the command line; `reason` ends its message."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in parameters and given:
            raise click.UsageError(f"{parameter.opts[-1]} {reason}")


def live_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--live-key", "live_key", metavar="FILE", default="", help="Key of the certificate, PEM."
        ),
        click.option(
            "--live-cert",
            "live_cert",
            metavar="FILE",
            default="",
            help="Certificate of the page's server, PEM.",
        ),
        click.option(
            "--live-token-file",
            "live_token_file",
            metavar="FILE",
            default="",
            help="Token of the page's address.",
        ),
        click.option(
            "--live-address",
            metavar="HOST:PORT",
            default="127.0.0.1:0",
            show_default=True,
            help="Where the page is served. Addresses that other hosts can reach need the three options below.",
        ),
    ):
        command = option(command)
    return command
