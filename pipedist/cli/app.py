"""Names, options and help of the commands; what they do is elsewhere, and imported when it is used."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from typer.core import TyperCommand

from pipedist.errors import PipedistError

REUSE = "--resume-reuse"
"""What `--resume=reuse` is read as: an option with a value that may be left out would swallow SPEC."""


class RunCommand(TyperCommand):
    """`pipedist run`, where `--resume` may have the value `reuse`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the command line."""
        for place, arg in enumerate(args):
            if arg == "--":
                break
            if arg.startswith("--resume="):
                if arg != "--resume=reuse":
                    raise typer.BadParameter(f"{arg!r}: it is --resume, or --resume=reuse", ctx)
                args = [*args[:place], REUSE, *args[place + 1 :]]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pipedist",
    help="Declarative pipelines over per-replica values: bit-identical on any number of workers.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # help is text; rich is imported where tables and bars are drawn
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys_app, name="keys")

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="The spec, a YAML file.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter's value, read as YAML; may be repeated.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Worker processes; never changes a result. Default: the spec's, or the usable cores.",
        show_default=False,
    ),
]

ClusterChoice = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME[:ADDRESS]",
        help="Where workers come from: local, connect, ray, dask, as in ray:auto or "
        "dask:tcp://10.0.0.1:8786; never changes a result. Default: the spec's.",
        show_default=False,
    ),
]


class PlanFormat(enum.StrEnum):
    """How a plan is printed."""

    TEXT = "text"
    MERMAID = "mermaid"
    JSON = "json"


def main() -> None:
    """Carry out the command line of this process, and end the process with its exit code."""
    # what the commands do is guarded; here are the texts that come of the command line alone: --help
    try:
        app(prog_name="pipedist")
    except (OSError, PipedistError) as error:
        from pipedist.cli.exits import report
        from pipedist.cli.streams import lost

        report(lost(error) if isinstance(error, OSError) else error)
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from pipedist.cli.streams import write_out
        from pipedist.version import __version__

        write_out(f"pipedist {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Declarative pipelines over per-replica values: bit-identical on any number of workers."""


@app.command(cls=RunCommand)
def run(
    spec: SpecPath,
    workers: Workers = None,
    cluster: ClusterChoice = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the outputs. Default: out/NAME.", show_default=False),
    ] = None,
    sets: Sets = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the unfinished run in the output folder. Of a finished run: print it. "
            "--resume=reuse: if the spec or its inputs have changed, keep what does not hang on that.",
        ),
    ] = False,
    reuse: Annotated[bool, typer.Option(REUSE, hidden=True)] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard the unfinished run in the folder, and begin again."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Execute every call twice: one that gives two results fails the run."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
    key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Keys of workers that dial in: with --cluster connect.", show_default=False
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Let workers in that differ in versions or processor type: bits of results may differ.",
        ),
    ] = False,
) -> None:
    """Execute a spec and print its results.

    Exit codes: 0 all elements committed; 1 the run failed; 2 the spec or the command line is wrong;
    129, 130, 143 interrupted by SIGHUP, SIGINT, SIGTERM.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.run_command import RunOptions, execute

    options = RunOptions(
        spec=spec,
        workers=workers,
        cluster=cluster,
        output=output,
        sets=tuple(sets or ()),
        resume="reuse" if reuse else resume,
        restart=restart,
        as_json=as_json,
        verify=verify,
        key_file=key_file,
        force=force,
    )
    raise typer.Exit(guarded(lambda: execute(options)))


@app.command()
def validate(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC...", help="Specs, YAML files.", show_default=False)
    ],
) -> None:
    """Check specs: the files alone, no data is read and no code imported."""
    from pipedist.cli.exits import guarded
    from pipedist.cli.spec_commands import validate_specs

    raise typer.Exit(guarded(lambda: validate_specs(specs)))


@app.command()
def plan(
    spec: SpecPath,
    form: Annotated[PlanFormat, typer.Option("--format", help="How it is printed.")] = PlanFormat.TEXT,
    workers: Workers = None,
    cluster: ClusterChoice = None,
    sets: Sets = None,
) -> None:
    """Check a spec, open its sources, import its functions, and print what would be executed."""
    from pipedist.cli.exits import guarded
    from pipedist.cli.spec_commands import print_plan

    raise typer.Exit(guarded(lambda: print_plan(spec, form.value, workers, tuple(sets or ()), cluster)))


@app.command()
def simulate(
    spec: SpecPath,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="How many seeds, from 0 on.")] = 100,
    seed: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="Play this seed alone.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Simulated workers.")] = 3,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="KIND=RATE,...",
            help="drop, duplicate, delay, reorder, cut, partition (a message), crash, pause, slow (a call), "
            "each with a probability; or none. Default: some of everything.",
            show_default=False,
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE=SECONDS,...",
            help="Do not execute these stages: a call takes so long, and gives a stand-in.",
            show_default=False,
        ),
    ] = None,
    sets: Sets = None,
) -> None:
    """Execute a spec in virtual time, with simulated workers and faults, and compare the results.

    Exit codes: 0 every seed gave the same as without faults; 1 one did not; 2 the spec or the command
    line is wrong.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.simulate_command import SimulateOptions, execute

    options = SimulateOptions(
        spec=spec,
        seeds=seeds,
        seed=seed,
        workers=workers,
        faults=faults,
        costs=costs,
        sets=tuple(sets or ()),
    )
    raise typer.Exit(guarded(lambda: execute(options)))


@app.command()
def audit(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's output folder: out/NAME.", show_default=False)
    ],
) -> None:
    """Verify from a run's journal that every element is accounted for.

    Exit codes: 0 it adds up; 1 it does not, and what is wrong is listed; 2 there is no journal.
    """
    from pipedist.cli.audit_command import audit_run
    from pipedist.cli.exits import guarded

    raise typer.Exit(guarded(lambda: audit_run(run)))


@app.command()
def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's output folder: out/NAME.", show_default=False)
    ],
    call: Annotated[
        str,
        typer.Option(metavar="STAGE/STEP/REPLICA", help="Which call, as errors name it.", show_default=False),
    ],
    element: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID", help="Without the call's other elements; may be repeated.", show_default=False
        ),
    ] = None,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger where it fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Execute one call of a run again, alone, in this process, with the inputs that it had.

    Exit codes: 0 it returned; 1 it failed; 2 there is no such call, or its inputs can't be had any more.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.replay_command import ReplayOptions, execute

    options = ReplayOptions(run, call, tuple(element or ()), pdb, as_json)
    raise typer.Exit(guarded(lambda: execute(options)))


@app.command()
def why(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's output folder: out/NAME.", show_default=False)
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of lines.")
    ] = False,
) -> None:
    """Ask a run what it waits for: which calls, on which workers, for what.

    Of one that is not going on, print what its journal knows. A run without outputs is asked by SIGUSR1.

    Exit codes: 0 the run has answered; 1 it is not going on; 2 there is no run.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.why_command import explain_run

    raise typer.Exit(guarded(lambda: explain_run(run, as_json=as_json)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    from pipedist.cli.exits import guarded
    from pipedist.cli.spec_commands import print_schema

    raise typer.Exit(guarded(print_schema))


@app.command()
def worker(
    connect: Annotated[
        str,
        typer.Option(metavar="ENDPOINT", help="Where the run listens: tcp://HOST:PORT.", show_default=False),
    ],
    key_file: Annotated[
        str, typer.Option(metavar="FILE", help="The cluster's key file.", show_default=False)
    ],
    threads: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="BLAS and OpenMP threads: the spec's threads_per_replica."),
    ] = 1,
    grace_s: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long the running call may go on after SIGTERM."),
    ] = 10.0,
) -> None:
    """Execute replica calls for a run on another host, until it ends.

    Exit codes: 0 the run has ended, or SIGTERM; 1 refused, no scheduler answered (any more), or its process
    kept dying; 2 the endpoint or the key file can't be used.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.worker_command import execute

    raise typer.Exit(guarded(lambda: execute(connect, key_file, threads, grace_s)))


@keys_app.callback()
def _keys() -> None:
    """Make the keys of a cluster whose workers dial in over TCP."""


@keys_app.command("new")
def keys_new(
    output: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The run's key file; the workers' is beside it: NAME.worker.ENDING."
        ),
    ] = "cluster.key",
) -> None:
    """Make a cluster's keys: a file for the run, and one for its workers; none is overwritten.

    Exit codes: 0 both files are there; 2 one of them exists already, or can't be written.
    """
    from pipedist.cli.exits import guarded
    from pipedist.cli.keys_command import new_key_files

    raise typer.Exit(guarded(lambda: new_key_files(output)))


launch = typer.Typer(
    help="Print what starts a run and its workers in a batch system.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(launch, name="launch")

Nodes = Annotated[int, typer.Option(metavar="N", min=1, help="Hosts with workers.")]
WorkersPerNode = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Default: the spec's workers, divided among the nodes.", show_default=False
    ),
]
Gpus = Annotated[int, typer.Option(metavar="N", min=0, help="GPUs of each node.")]
Print = Annotated[bool, typer.Option("--print", help="Print it; nothing is submitted.")]


@launch.command()
def slurm(
    spec: SpecPath,
    prints: Print = False,
    nodes: Nodes = 1,
    workers_per_node: WorkersPerNode = None,
    gpus: Gpus = 0,
    time: Annotated[str, typer.Option(metavar="TIME", help="Limit of the job, as for sbatch.")] = "01:00:00",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Where the run listens. Default: by the job's number.", show_default=False
        ),
    ] = None,
) -> None:
    """Print a batch script for sbatch: the run on the first node, workers on all."""
    from pipedist.cli import launch_command
    from pipedist.cli.exits import guarded

    options = launch_command.LaunchOptions(spec, nodes, workers_per_node, gpus, prints)
    raise typer.Exit(guarded(lambda: launch_command.slurm(options, time=time, port=port)))


@launch.command()
def kubernetes(
    spec: SpecPath,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Has pipedist, and what the functions import.")],
    prints: Print = False,
    nodes: Nodes = 1,
    workers_per_node: WorkersPerNode = None,
    gpus: Gpus = 0,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Where it is to run.")] = "default",
    claim: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A PersistentVolumeClaim for outputs: a driver that is restarted resumes.",
            show_default=False,
        ),
    ] = None,
    spec_in_image: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the image has the spec. Default: a ConfigMap of the spec's folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print a JobSet: one job of the driver, one of the workers."""
    from pipedist.cli import launch_command
    from pipedist.cli.exits import guarded

    options = launch_command.LaunchOptions(spec, nodes, workers_per_node, gpus, prints)
    raise typer.Exit(
        guarded(
            lambda: launch_command.kubernetes(
                options, image=image, namespace=namespace, claim=claim, spec_in_image=spec_in_image
            )
        )
    )
