"""Names, options and help of the commands; their code is imported when they run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import click

from pipedist._version import __version__
from pipedist.cli.command_group import CommandGroup
from pipedist.cli.options import (
    FOLDER,
    LIVE_OPTIONS,
    cluster_option,
    count,
    live_options,
    parameters_option,
    reject,
    run_argument,
    spec_argument,
    trace_option,
    workers_option,
)
from pipedist.errors import PipedistError


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    # Commands report their own errors (`_end`); these are errors of the command line itself.
    try:
        code = app(prog_name="pipedist", standalone_mode=False)
    except click.Abort:  # click's KeyboardInterrupt; click itself would exit with 1
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            del error.possibilities[1:]  # the nearest one is first
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


@click.group(
    "pipedist",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with `pipedist init`; `pipedist COMMAND --help` prints options, exit codes and an example.",
)
@click.version_option(__version__, message="pipedist %(version)s", help="Print the version and exit.")
def app() -> None:
    """Run pipelines over data, with the same bytes on any number of workers.

    A pipeline is a YAML file, the spec, and the Python functions that it names.
    """


_START, _INSPECT, _CLUSTERS, _EDITORS = "Write and run", "Inspect a run", "Clusters", "Editors and shells"


@app.section_command(
    _START,
    "pipedist init flights --from 'data/*.csv'",
    "pipedist init",
)
@click.argument("names", metavar="[NAME]", type=FOLDER, nargs=-1)
@click.option(
    "--from",
    "pattern",
    metavar="FILE|GLOB",
    type=click.Path(),
    help="Data to read: .csv, .tsv, .parquet, .jsonl, .npy, .npz, .txt, or files of other kinds, whose bytes are "
    "read. The columns of tables and their types come from the first rows.",
)
def init(names: tuple[str, ...], pattern: str | None) -> None:
    """Create a project: a spec, functions, a test and a README.

    NAME is a new or empty folder, `pipeline` by default. Without --from, a small CSV file is written into it. The
    project runs as it is, and its test passes.

    Exit codes: 0 the files are written; 2 the folder is not empty, or the data can't be read.
    """
    from pipedist.cli.init_command import create_project

    _end(lambda: create_project(names, pattern))


@app.section_command(
    _START,
    "pipedist run flights.yaml -w 4",
    "pipedist run flights.yaml -p late_after_min=30 -o out/late",
    "pipedist run flights.yaml --resume",
)
@spec_argument
@workers_option
@cluster_option
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=FOLDER,
    help="Folder or URL of the outputs. Default: out/NAME in the current folder.",
)
@parameters_option
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the unfinished or failed run in the output folder. If the run is finished, print its results.",
)
@click.option(
    "--reuse",
    is_flag=True,
    help="Like --resume; if the spec, its inputs or its modules have changed, keep the results that do not depend "
    "on that, and execute the others again.",
)
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
    "-q", "--quiet", is_flag=True, help="Print results, warnings and errors: no progress, no timings."
)
@trace_option
@live_options
def run(resume: bool, reuse: bool, **options: Any) -> None:
    """Execute the spec in the YAML file SPEC, and print its results.

    Exit codes: 0 all elements committed; 1 the run failed; 2 the spec or the command line is wrong;
    3 finished, with quarantined elements; 129, 130, 143 interrupted by SIGHUP, SIGINT, SIGTERM.
    """
    if not options["live"]:
        reject(LIVE_OPTIONS, "needs --live")
    from pipedist.cli.run_command import RunOptions, execute

    _end(lambda: execute(RunOptions(resume="reuse" if reuse else resume, **options)))


@app.section_command(_START, "pipedist validate specs/*.yaml")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True, type=click.Path())
def validate(specs: tuple[str, ...]) -> None:
    """Check spec files, without reading data or importing code.

    Exit codes: 0 all are valid; 2 problems are listed.
    """
    from pipedist.cli.commands import validate_specs

    _end(lambda: validate_specs(list(specs)))


@app.section_command(
    _START, "pipedist plan flights.yaml", "pipedist plan flights.yaml --predict -p late_after_min=30"
)
@spec_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@workers_option
@cluster_option
@parameters_option
@click.option(
    "--predict", is_flag=True, help="Print the expected time on 1, 2, 4, ... workers, and what limits it."
)
@count(
    "--sample",
    text="With --predict: execute this number of calls of each pass on one worker, and write nothing.",
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

    Exit codes: 0 the plan is printed; 2 problems are listed, or the command line is wrong.
    """
    from pipedist.cli.commands import predict_run, print_plan

    predicts, sample, measured = (prediction[name] for name in ("predict", "sample", "measured"))
    if predicts:
        reject(("workers", "cluster"), "has no effect with --predict, which covers 1, 2, 4, ... workers")
        _end(lambda: predict_run(spec, form, sets, sample, measured))
    reject(("sample", "measured"), "needs --predict")
    _end(lambda: print_plan(spec, form, workers, sets, cluster))


@app.section_command(
    _START, "pipedist simulate flights.yaml --seeds 20", "pipedist simulate flights.yaml --costs delays=0.2"
)
@spec_argument
@count("--seeds", text="Number of seeds, from 0 on.  [default: 100]")
@click.option(
    "--seed", metavar="K", type=click.IntRange(0), help="Simulate this seed only; not with --seeds."
)
@count("-w", "--workers", text="Number of simulated workers.", default=3, show_default=True)
@click.option(
    "--faults",
    metavar="KIND=RATE,...",
    help="drop, duplicate, delay, reorder, cut, partition (a message), crash, pause, slow (a call), "
    "each with a probability; or none. Default: all kinds but reorder, at low rates.",
)
@click.option(
    "--costs",
    metavar="STAGE=SECONDS,...",
    help="Do not execute these stages: a call takes this virtual time, and returns a placeholder.",
)
@parameters_option
def simulate(**options: Any) -> None:
    """Execute a spec in virtual time with faults, and compare results.

    Each seed is another sequence of faults of the simulated workers and their messages.

    Exit codes: 0 every seed gave the results of a run without faults; 1 a seed did not, or the spec fails
    without faults; 2 the spec or the command line is wrong.
    """
    from pipedist.cli.simulate_command import SimulateOptions, execute

    _end(lambda: execute(SimulateOptions(**options)))


@app.section_command(_INSPECT, "pipedist audit out/flights")
@run_argument
def audit(run: str) -> None:
    """Verify that every element of a run is accounted for.

    RUN is its output folder, whose journal is read.

    Exit codes: 0 every element is accounted for; 1 problems are listed; 2 there is no journal.
    """
    from pipedist.cli.commands import audit_run

    _end(lambda: audit_run(run))


@app.section_command(
    _INSPECT,
    "pipedist replay out/flights --call delays/3/1",
    "pipedist replay out/flights --call delays/3/1 --element 49200 --pdb",
)
@run_argument
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


@app.section_command(_INSPECT, "pipedist why out/flights")
@run_argument
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


@app.section_command(_INSPECT, "pipedist report out/flights -o flights.html")
@run_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="The page to write; by default RUN/report.html.",
)
@trace_option
def report(run: str, output: str | None, trace: str | None) -> None:
    """Write a report of a run: one HTML page that needs no network.

    It shows the plan, a timeline of the workers, timings by stage, quarantined elements, outputs and logs. RUN is the
    output folder of a run that has finished, failed or was interrupted, or of one that is executing. With --trace,
    the trace is written instead of the page.

    Exit codes: 0 the file is written; 2 there is no run.
    """
    from pipedist.cli.commands import write_report

    _end(lambda: write_report(run, output, trace))


@app.section_command(_INSPECT, "pipedist diff out/a out/b")
@click.argument("run_a", metavar="RUN_A", type=FOLDER)
@click.argument("run_b", metavar="RUN_B", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def diff(run_a: str, run_b: str, as_json: bool) -> None:
    """Compare two runs: what they were made from, and their results.

    RUN_A and RUN_B are their output folders. For each output that differs, the first row that does is printed, with
    its step and element where these are known, and the largest differences.

    Exit codes: 0 results, outputs and ledgers are the same; 1 they differ; 2 there is no such run.
    """
    from pipedist.cli.commands import diff_runs

    _end(lambda: diff_runs(run_a, run_b, as_json=as_json))


@app.section_command(_INSPECT, "pipedist watch out/flights", "pipedist watch out/flights --web")
@run_argument
@click.option(
    "--web", is_flag=True, help="Serve the report as a page that is updated, instead of the terminal."
)
@live_options
def watch(run: str, web: bool, **options: str) -> None:
    """Show a run that another process executes, until it ends.

    RUN is its output folder.

    Exit codes: 0 the run has finished; 1 it failed or was interrupted; 2 there is no run.
    """
    if not web:
        reject(LIVE_OPTIONS, "needs --web")
    from pipedist.cli.watch_command import watch as watch_terminal
    from pipedist.cli.watch_command import watch_web

    _end(lambda: watch_web(run, **options) if web else watch_terminal(run))


@app.section_command(_CLUSTERS, "pipedist worker --connect tcp://10.0.0.1:7000 --key-file cluster.worker.key")
@click.option("--connect", metavar="ENDPOINT", required=True, help="Endpoint of the run: tcp://HOST:PORT.")
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(),
    required=True,
    help="The worker key file of the cluster (NAME.worker.key).",
)
@count(
    "--threads",
    text="BLAS and OpenMP threads; must equal the spec's threads_per_replica.",
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


@app.section_group(_CLUSTERS)
def keys() -> None:
    """Create the keys of a cluster whose workers connect over TCP."""


@keys.section_command("Commands", "pipedist keys new -o cluster.key", name="new")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
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


@app.section_group(_CLUSTERS)
def launch() -> None:
    """Print a job script that starts a run and its workers."""


@launch.section_command("Batch systems", "pipedist launch slurm spec.yaml --nodes 2 --gpus 4 > job.sh")
@spec_argument
@count("--nodes", text="Number of hosts with workers.", default=1, show_default=True)
@count(
    "--workers-per-node",
    text="Number of workers of each host. Default: the spec's workers, divided among the hosts.",
)
@count("--gpus", text="Number of GPUs of each host.", least=0, default=0, show_default=True)
@click.option(
    "--time",
    metavar="TIME",
    default="01:00:00",
    show_default=True,
    help="Time limit of the job, as for sbatch.",
)
@count("--port", text="Port of the run. Default: derived from the job id.", most=65_535)
def slurm(time: str, port: int | None, **options: Any) -> None:
    """Print a batch script for sbatch.

    The job executes the run on its first host, and workers on all hosts. Nothing is submitted: write the script
    to a file, and pass that to sbatch.
    """
    from pipedist.cli.commands import launch_slurm

    _end(lambda: launch_slurm(time=time, port=port, **options))


@app.section_command(_EDITORS, "pipedist schema > pipedist.schema.json")
def schema() -> None:
    """Print the JSON Schema of specs, for editors.

    The package contains the same document, in pipedist/spec/schema.json. An editor that uses yaml-language-server
    finds it by the first line of a spec: # yaml-language-server: $schema=pipedist.schema.json
    """
    from pipedist.cli.commands import print_schema

    _end(print_schema)


@app.section_command(
    _EDITORS,
    'eval "$(pipedist completion bash)"  # in ~/.bashrc',
    'eval "$(pipedist completion zsh)"  # in ~/.zshrc',
    "pipedist completion fish > ~/.config/fish/completions/pipedist.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and files in a shell."""
    from pipedist.cli.commands import print_completion

    _end(lambda: print_completion(app, shell))
