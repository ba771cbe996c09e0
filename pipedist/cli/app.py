"""Names, options and help of the commands; their code is imported when they run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Final

import click

from pipedist.errors import PipedistError

_REUSE: Final = "--resume-reuse"  # stands for `--resume=reuse`: an optional value would consume SPEC

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class RunCommand(click.Command):
    """`pipedist run`, whose `--resume` may have the value `reuse`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for place, arg in enumerate(args):
            if arg == "--":
                break
            if arg.startswith("--resume="):
                if arg != "--resume=reuse":
                    raise click.BadParameter(
                        f"{arg!r} is not a way to resume. Use --resume or --resume=reuse", ctx
                    )
                args = [*args[:place], _REUSE, *args[place + 1 :]]
        return super().parse_args(ctx, args)


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    # Commands report their own errors (`_end`); these are errors of the command line itself.
    try:
        code = app(prog_name="pipedist", standalone_mode=False)
    except click.Abort:  # click's KeyboardInterrupt; click itself would exit with 1
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (OSError, PipedistError) as error:
        from pipedist.cli.terminal import output_error, report

        report(output_error(error) if isinstance(error, OSError) else error)
        raise SystemExit(1) from None
    raise SystemExit(code)


def _end(command: Callable[[], int]) -> None:
    """Run a command, and exit with its code."""
    from pipedist.cli.terminal import guarded

    gc.freeze()  # imported modules live until the process ends
    gc.enable()
    click.get_current_context().exit(guarded(command))


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from pipedist._version import __version__
        from pipedist.cli.terminal import write_out

        write_out(f"pipedist {__version__}\n")
        ctx.exit()


def _count(name: str, text: str, *, least: int = 1, most: int | None = None, **more: Any) -> _Decorator:
    return click.option(name, metavar="N", type=click.IntRange(least, most), help=text, **more)


_spec = click.argument("spec", metavar="SPEC")
_run = click.argument("run", metavar="RUN")
_sets = click.option(
    "--set",
    "sets",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a parameter; the value is YAML. May be repeated.",
)
_workers = _count(
    "--workers",
    "Number of worker processes; never changes a result. Default: from the spec, or the usable cores.",
)
_trace = click.option(
    "--trace",
    metavar="FILE",
    help="Write a trace of the calls and the driver's work, which Perfetto (ui.perfetto.dev) opens.",
)
_cluster = click.option(
    "--cluster",
    metavar="NAME[:ADDRESS]",
    help="Launcher of the workers: local, connect, ray or dask, such as ray:auto or dask:tcp://10.0.0.1:8786; "
    "never changes a result. Default: from the spec.",
)


def _live_options(command: Callable[..., Any]) -> Callable[..., Any]:
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
    help="Continue the unfinished or failed run in the output folder. If the run is finished, print its results. "
    "--resume=reuse: if the spec, its inputs or its modules have changed, keep results that do not depend on that.",
)
@click.option(_REUSE, "reuse", is_flag=True, hidden=True)
@click.option("--restart", is_flag=True, help="Discard the run in the output folder, and start again.")
@click.option("--verify", is_flag=True, help="Execute every call twice, and fail if the results differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option(
    "--key-file", metavar="FILE", help="Key file for workers that connect over TCP, with --cluster connect."
)
@click.option(
    "--force",
    is_flag=True,
    help="Accept workers, and resume runs, of other versions or processor types: bits may differ.",
)
@click.option(
    "--force-code",
    is_flag=True,
    help="With --resume: keep results although their functions, or files that these read, have changed.",
)
@click.option(
    "--live", is_flag=True, help="Serve a page of the run while it executes, and print its address."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print the run's events on stderr too: workers, phases, the outcome.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Print only warnings and errors on stderr, and no progress."
)
@_trace
@_live_options
def run(resume: bool, reuse: bool, **options: Any) -> None:
    """Execute the spec in the YAML file SPEC, and print its results.

    Exit codes: 0 all elements committed; 1 the run failed; 2 the spec or the command line is wrong;
    3 finished, with quarantined elements; 129, 130, 143 interrupted by SIGHUP, SIGINT, SIGTERM.
    """
    from pipedist.cli.run_command import RunOptions, execute

    _end(lambda: execute(RunOptions(resume="reuse" if reuse else resume, **options)))


@app.command()
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
def validate(specs: tuple[str, ...]) -> None:
    """Check spec files, without reading data or importing code."""
    from pipedist.cli.commands import validate_specs

    _end(lambda: validate_specs(list(specs)))


@app.command()
@_spec
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@_workers
@_cluster
@_sets
@click.option(
    "--predict", is_flag=True, help="Print the expected time on 1, 2, 4, ... workers, and what limits it."
)
@_count(
    "--sample",
    "With --predict: execute this number of calls of each pass on one worker, and write nothing.",
    default=20,
    show_default=True,
)
@click.option(
    "--from",
    "measured",
    metavar="RUN",
    help="With --predict: use the measurements of an earlier run, in this output folder, instead of a sample.",
)
def plan(
    spec: str, form: str, workers: int | None, cluster: str | None, sets: tuple[str, ...], **prediction: Any
) -> None:
    """Check a spec, and print what would run.

    It opens the sources and imports the functions of the spec, but executes no call, except with --predict.
    """
    from pipedist.cli.commands import predict_run, print_plan

    predicts, sample, measured = (prediction[name] for name in ("predict", "sample", "measured"))
    if predicts:
        _end(lambda: predict_run(spec, form, sets, sample, measured))
    if measured is not None:
        raise click.UsageError("--from needs --predict")
    _end(lambda: print_plan(spec, form, workers, sets, cluster))


@app.command()
@_spec
@_count("--seeds", "Number of seeds, from 0 on.  [default: 100]")
@click.option(
    "--seed", metavar="K", type=click.IntRange(0), help="Simulate this seed only; not with --seeds."
)
@_count("--workers", "Number of simulated workers.", default=3, show_default=True)
@click.option(
    "--faults",
    metavar="KIND=RATE,...",
    help="drop, duplicate, delay, reorder, cut, partition (a message), crash, pause, slow (a call), "
    "each with a probability; or none. Default: all kinds, at low rates.",
)
@click.option(
    "--costs",
    metavar="STAGE=SECONDS,...",
    help="Do not execute these stages: a call takes this virtual time, and returns a placeholder.",
)
@_sets
def simulate(**options: Any) -> None:
    """Execute a spec in virtual time with faults, and compare results.

    Each seed is another sequence of faults of the simulated workers and their messages.

    Exit codes: 0 every seed gave the results of a run without faults; 1 a seed did not, or the spec fails
    without faults; 2 the spec or the command line is wrong.
    """
    from pipedist.cli.simulate_command import SimulateOptions, execute

    _end(lambda: execute(SimulateOptions(**options)))


@app.command()
@_run
def audit(run: str) -> None:
    """Verify that every element of a run is accounted for.

    RUN is its output folder, whose journal is read.

    Exit codes: 0 every element is accounted for; 1 problems are listed; 2 there is no journal.
    """
    from pipedist.cli.commands import audit_run

    _end(lambda: audit_run(run))


@app.command()
@_run
@click.option(
    "--call", metavar="STAGE/STEP/REPLICA", required=True, help="The call, as named in error messages."
)
@click.option(
    "--element",
    metavar="ID",
    type=int,
    multiple=True,
    help="Execute the call with this element only; may be repeated.",
)
@click.option("--pdb", is_flag=True, help="Stop in the debugger where the call fails.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(run: str, call: str, element: tuple[int, ...], pdb: bool, as_json: bool) -> None:
    """Execute one call of a run again, in this process.

    The call gets its original inputs. RUN is the run's output folder.

    Exit codes: 0 the call returned; 1 it failed; 2 there is no such call, or its inputs are gone.
    """
    from pipedist.cli.replay_command import execute

    _end(lambda: execute(run, call, element, debug=pdb, as_json=as_json))


@app.command()
@_run
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
def why(run: str, as_json: bool) -> None:
    """Explain what a run waits for.

    The output lists the unfinished calls, their workers, and the reasons. RUN is the output folder. If the
    run is not executing, a summary of its journal is printed. A run without outputs explains itself on
    SIGUSR1.

    Exit codes: 0 the run is executing; 1 it is not; 2 there is no run.
    """
    from pipedist.cli.commands import explain_run

    _end(lambda: explain_run(run, as_json=as_json))


@app.command()
@_run
@click.option(
    "--output", "-o", metavar="FILE", default="report.html", show_default=True, help="The page to write."
)
@_trace
def report(run: str, output: str, trace: str | None) -> None:
    """Write a report of a run: one HTML page that needs no network.

    It shows the plan, a timeline of the workers, timings by stage, quarantined elements, outputs and logs. RUN is the
    output folder of a run that has finished, failed or was interrupted, or of one that is executing. With --trace,
    the trace is written instead of the page.

    Exit codes: 0 the file is written; 2 there is no run.
    """
    from pipedist.cli.commands import write_report

    _end(lambda: write_report(run, output, trace))


@app.command()
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def diff(run_a: str, run_b: str, as_json: bool) -> None:
    """Compare two runs: what they were made from, and their results.

    RUN_A and RUN_B are their output folders. For each output that differs, the first row that does is printed, with
    its step and element where these are known, and the largest differences.

    Exit codes: 0 results, outputs and ledgers are the same; 1 they differ; 2 there is no such run.
    """
    from pipedist.cli.commands import diff_runs

    _end(lambda: diff_runs(run_a, run_b, as_json=as_json))


@app.command()
@_run
@click.option(
    "--web", is_flag=True, help="Serve the report as a page that is updated, instead of the terminal."
)
@_live_options
def watch(run: str, web: bool, **options: str) -> None:
    """Show a run that another process executes, until it ends.

    RUN is its output folder.

    Exit codes: 0 the run has finished; 1 it failed or was interrupted; 2 there is no run.
    """
    from pipedist.cli.watch_command import watch as watch_terminal
    from pipedist.cli.watch_command import watch_web

    _end(lambda: watch_web(run, **options) if web else watch_terminal(run))


@app.command()
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    from pipedist.cli.commands import print_schema

    _end(print_schema)


@app.command()
@click.option("--connect", metavar="ENDPOINT", required=True, help="Endpoint of the run: tcp://HOST:PORT.")
@click.option("--key-file", metavar="FILE", required=True, help="The cluster's key file.")
@_count(
    "--threads",
    "BLAS and OpenMP threads; must equal the spec's threads_per_replica.",
    default=1,
    show_default=True,
)
@click.option(
    "--grace-s",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Time for the running call to finish after SIGTERM.",
)
def worker(connect: str, key_file: str, threads: int, grace_s: float) -> None:
    """Execute replica calls for a run on another host, until it ends.

    Exit codes: 0 the run has ended, or SIGTERM; 1 rejected, no driver at the endpoint (any more), or the
    worker process kept dying; 2 the endpoint or the key file can't be used.
    """
    from pipedist.worker.supervisor import run_worker

    _end(lambda: run_worker(connect, key_file, threads=threads, leave_s=grace_s))


@app.group()
def keys() -> None:
    """Create the keys of a cluster whose workers connect over TCP."""


@keys.command("new")
@click.option(
    "--output",
    metavar="FILE",
    default="cluster.key",
    show_default=True,
    help="Key file of the run; that of the workers is written beside it as NAME.worker.SUFFIX.",
)
def keys_new(output: str) -> None:
    """Create a key file for the run, and one for its workers.

    Existing files are never overwritten.

    Exit codes: 0 both files were written; 2 one of them exists already, or can't be written.
    """
    from pipedist.cli.commands import new_key_files

    _end(lambda: new_key_files(output))


@app.group()
def launch() -> None:
    """Print a job script that starts a run and its workers."""


@launch.command()
@_spec
@click.option("--print", "prints", is_flag=True, help="Print the script; nothing is submitted.")
@_count("--nodes", "Number of hosts with workers.", default=1, show_default=True)
@_count(
    "--workers-per-node",
    "Number of workers of each host. Default: the spec's workers, divided among the hosts.",
)
@_count("--gpus", "Number of GPUs of each host.", least=0, default=0, show_default=True)
@click.option(
    "--time",
    metavar="TIME",
    default="01:00:00",
    show_default=True,
    help="Time limit of the job, as for sbatch.",
)
@_count("--port", "Port of the run. Default: derived from the job id.", most=65_535)
def slurm(time: str, port: int | None, **options: Any) -> None:
    """Print a batch script for sbatch.

    The job executes the run on its first host, and workers on all hosts.
    """
    from pipedist.cli.commands import launch_slurm

    _end(lambda: launch_slurm(time=time, port=port, **options))
