"""Names, options and help of the commands; what they do is elsewhere, and imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from pipedist.errors import PipedistError

_REUSE: Final = "--resume-reuse"
"""What `--resume=reuse` is read as: an option with a value that may be left out would swallow SPEC."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class RunCommand(click.Command):
    """`pipedist run`, where `--resume` may have the value `reuse`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        for place, arg in enumerate(args):
            if arg == "--":
                break
            if arg.startswith("--resume="):
                if arg != "--resume=reuse":
                    raise click.BadParameter(f"{arg!r}: it is --resume, or --resume=reuse", ctx)
                args = [*args[:place], _REUSE, *args[place + 1 :]]
        return super().parse_args(ctx, args)


def main() -> None:
    """Carry out the command line of this process, and end the process with its exit code."""
    # what the commands do is guarded; here are the texts that come of the command line alone: --help
    try:
        code = app(prog_name="pipedist", standalone_mode=False)
    except click.Abort:  # click's name for a KeyboardInterrupt; by itself it would end with 1
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (OSError, PipedistError) as error:
        from pipedist.cli.exits import report
        from pipedist.cli.streams import lost

        report(lost(error) if isinstance(error, OSError) else error)
        raise SystemExit(1) from None
    raise SystemExit(code)


def _end(carry_out: Callable[[], int]) -> None:
    """End the process with the exit code of a command."""
    from pipedist.cli.exits import guarded

    click.get_current_context().exit(guarded(carry_out))


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from pipedist.cli.streams import write_out
        from pipedist.version import __version__

        write_out(f"pipedist {__version__}\n")
        ctx.exit()


def _argument(name: str, metavar: str, **more: Any) -> Callable[[_Command], _Command]:
    return click.argument(name, metavar=metavar, **more)


def _count(least: int = 1, most: int | None = None) -> click.IntRange:
    return click.IntRange(least, most)


_spec = _argument("spec", "SPEC")
_run = _argument("run", "RUN")
_sets = click.option(
    "--set",
    "sets",
    metavar="NAME=VALUE",
    multiple=True,
    help="A parameter's value, read as YAML; may be repeated.",
)
_workers = click.option(
    "--workers",
    metavar="N",
    type=_count(),
    help="Worker processes; never changes a result. Default: the spec's, or the usable cores.",
)
_cluster = click.option(
    "--cluster",
    metavar="NAME[:ADDRESS]",
    help="Where workers come from: local, connect, ray, dask, as in ray:auto or dask:tcp://10.0.0.1:8786; "
    "never changes a result. Default: the spec's.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version and exit.",
)
def app() -> None:
    """Declarative pipelines over per-replica values: bit-identical on any number of workers."""


@app.command(cls=RunCommand)
@_spec
@_workers
@_cluster
@click.option("--output", metavar="DIR", help="Folder of the outputs. Default: out/NAME.")
@_sets
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the unfinished or failed run in the output folder. Of a finished run: print it. "
    "--resume=reuse: if the spec, its inputs or modules have changed, keep what does not hang on that.",
)
@click.option(_REUSE, "reuse", is_flag=True, hidden=True)
@click.option("--restart", is_flag=True, help="Discard the run in the folder, and begin again.")
@click.option(
    "--verify", is_flag=True, help="Execute every call twice: one that gives two results fails the run."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("--key-file", metavar="FILE", help="Keys of workers that dial in: with --cluster connect.")
@click.option(
    "--force",
    is_flag=True,
    help="Let workers in, and resume a run, that differ in versions or processor type: bits may differ.",
)
def run(resume: bool, reuse: bool, **options: Any) -> None:
    """Execute the spec in the YAML file SPEC, and print its results.

    Exit codes: 0 all elements committed; 1 the run failed; 2 the spec or the command line is wrong;
    3 finished, with elements set aside; 129, 130, 143 interrupted by SIGHUP, SIGINT, SIGTERM.
    """
    from pipedist.cli.run_command import RunOptions, execute

    _end(lambda: execute(RunOptions(resume="reuse" if reuse else resume, **options)))


@app.command()
@_argument("specs", "SPEC...", nargs=-1, required=True)
def validate(specs: tuple[str, ...]) -> None:
    """Check specs: the files alone, no data is read and no code imported."""
    from pipedist.cli.spec_commands import validate_specs

    _end(lambda: validate_specs(list(specs)))


@app.command()
@_spec
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "json"]),
    default="text",
    show_default=True,
    help="How it is printed.",
)
@_workers
@_cluster
@_sets
def plan(spec: str, form: str, workers: int | None, cluster: str | None, sets: tuple[str, ...]) -> None:
    """Check a spec, open its sources, import its functions, and print what would be executed."""
    from pipedist.cli.spec_commands import print_plan

    _end(lambda: print_plan(spec, form, workers, sets, cluster))


@app.command()
@_spec
@click.option("--seeds", metavar="N", type=_count(), help="How many seeds, from 0 on.  [default: 100]")
@click.option("--seed", metavar="K", type=_count(0), help="Play this seed alone; not with --seeds.")
@click.option(
    "--workers", metavar="N", type=_count(), default=3, show_default=True, help="Simulated workers."
)
@click.option(
    "--faults",
    metavar="KIND=RATE,...",
    help="drop, duplicate, delay, reorder, cut, partition (a message), crash, pause, slow (a call), "
    "each with a probability; or none. Default: some of everything.",
)
@click.option(
    "--costs",
    metavar="STAGE=SECONDS,...",
    help="Do not execute these stages: a call takes so long, and gives a stand-in.",
)
@_sets
def simulate(**options: Any) -> None:
    """Execute a spec in virtual time, with simulated workers and faults, and compare the results.

    Exit codes: 0 every seed gave the same as without faults; 1 one did not, or the spec fails without
    faults too; 2 the spec or the command line is wrong.
    """
    from pipedist.cli.simulate_command import SimulateOptions, execute

    _end(lambda: execute(SimulateOptions(**options)))


@app.command()
@_run
def audit(run: str) -> None:
    """Verify from the journal in RUN, the output folder, that every element is accounted for.

    Exit codes: 0 it adds up; 1 it does not, and what is wrong is listed; 2 there is no journal.
    """
    from pipedist.cli.audit_command import audit_run

    _end(lambda: audit_run(run))


@app.command()
@_run
@click.option("--call", metavar="STAGE/STEP/REPLICA", required=True, help="Which call, as errors name it.")
@click.option(
    "--element",
    metavar="ID",
    type=int,
    multiple=True,
    help="Without the call's other elements; may be repeated.",
)
@click.option("--pdb", is_flag=True, help="Stop in the debugger where it fails.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(run: str, call: str, element: tuple[int, ...], pdb: bool, as_json: bool) -> None:
    """Execute one call of a run again, alone, in this process, with the inputs that it had.

    RUN is the run's output folder.

    Exit codes: 0 it returned; 1 it failed; 2 there is no such call, or its inputs can't be had any more.
    """
    from pipedist.cli.replay_command import ReplayOptions, execute

    _end(lambda: execute(ReplayOptions(run, call, element, pdb, as_json)))


@app.command()
@_run
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
def why(run: str, as_json: bool) -> None:
    """Ask a run what it waits for: which calls, on which workers, for what.

    RUN is its output folder. Of a run that is not going on, print what its journal knows. A run without
    outputs is asked by SIGUSR1.

    Exit codes: 0 the run has answered; 1 it is not going on; 2 there is no run.
    """
    from pipedist.cli.why_command import explain_run

    _end(lambda: explain_run(run, as_json=as_json))


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    from pipedist.cli.spec_commands import print_schema

    _end(print_schema)


@app.command()
@click.option("--connect", metavar="ENDPOINT", required=True, help="Where the run listens: tcp://HOST:PORT.")
@click.option("--key-file", metavar="FILE", required=True, help="The cluster's key file.")
@click.option(
    "--threads",
    metavar="N",
    type=_count(),
    default=1,
    show_default=True,
    help="BLAS and OpenMP threads: the spec's threads_per_replica.",
)
@click.option(
    "--grace-s",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="How long the running call may go on after SIGTERM.",
)
def worker(connect: str, key_file: str, threads: int, grace_s: float) -> None:
    """Execute replica calls for a run on another host, until it ends.

    Exit codes: 0 the run has ended, or SIGTERM; 1 refused, no scheduler answered (any more), or its process
    kept dying; 2 the endpoint or the key file can't be used.
    """
    from pipedist.cli.worker_command import execute

    _end(lambda: execute(connect, key_file, threads, grace_s))


@app.group()
def keys() -> None:
    """Make the keys of a cluster whose workers dial in over TCP."""


@keys.command("new")
@click.option(
    "--output",
    metavar="FILE",
    default="cluster.key",
    show_default=True,
    help="The run's key file; the workers' is beside it: NAME.worker.ENDING.",
)
def keys_new(output: str) -> None:
    """Make a cluster's keys: a file for the run, and one for its workers; none is overwritten.

    Exit codes: 0 both files are there; 2 one of them exists already, or can't be written.
    """
    from pipedist.cli.keys_command import new_key_files

    _end(lambda: new_key_files(output))


@app.group()
def launch() -> None:
    """Print what starts a run and its workers in a batch system."""


_prints = click.option("--print", "prints", is_flag=True, help="Print it; nothing is submitted.")
_nodes = click.option(
    "--nodes", metavar="N", type=_count(), default=1, show_default=True, help="Hosts with workers."
)
_workers_per_node = click.option(
    "--workers-per-node",
    metavar="N",
    type=_count(),
    help="Default: the spec's workers, divided among the nodes.",
)
_gpus = click.option(
    "--gpus", metavar="N", type=_count(0), default=0, show_default=True, help="GPUs of each node."
)


@launch.command()
@_spec
@_prints
@_nodes
@_workers_per_node
@_gpus
@click.option(
    "--time", metavar="TIME", default="01:00:00", show_default=True, help="Limit of the job, as for sbatch."
)
@click.option(
    "--port", metavar="N", type=_count(1, 65_535), help="Where the run listens. Default: by the job's number."
)
def slurm(time: str, port: int | None, **options: Any) -> None:
    """Print a batch script for sbatch: the run on the first node, workers on all."""
    from pipedist.cli import launch_command

    _end(lambda: launch_command.slurm(launch_command.LaunchOptions(**options), time=time, port=port))


@launch.command()
@_spec
@click.option("--image", metavar="IMAGE", required=True, help="Has pipedist, and what the functions import.")
@_prints
@_nodes
@_workers_per_node
@_gpus
@click.option("--namespace", metavar="NAME", default="default", show_default=True, help="Where it is to run.")
@click.option(
    "--claim",
    metavar="NAME",
    help="A PersistentVolumeClaim for outputs: a driver that is restarted resumes.",
)
@click.option(
    "--spec-in-image",
    metavar="PATH",
    help="Where the image has the spec. Default: a ConfigMap of the spec's folder.",
)
def kubernetes(
    image: str, namespace: str, claim: str | None, spec_in_image: str | None, **options: Any
) -> None:
    """Print a JobSet: one job of the driver, one of the workers."""
    from pipedist.cli import launch_command

    wanted = launch_command.LaunchOptions(**options)
    _end(
        lambda: launch_command.kubernetes(
            wanted, image=image, namespace=namespace, claim=claim, spec_in_image=spec_in_image
        )
    )
