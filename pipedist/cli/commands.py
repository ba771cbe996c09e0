"""The short commands: validate, plan, audit, diff, why, keys, launch, schema and completion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedist.cli import terminal
from pipedist.cli.terminal import stdout_to_stderr, write_error, write_json, write_out
from pipedist.errors import SpecError, UsageError

if TYPE_CHECKING:
    import click

    from pipedist.journal.history import Header

REPLY_S = 10.0  # time for a run to reply to `pipedist why`


def validate_specs(paths: Sequence[str]) -> int:
    """Check spec files; print OK for each valid one, all problems of the others to stderr."""
    from pipedist.spec import load

    code = terminal.OK
    for path in paths:
        try:
            load(path)
        except SpecError as error:
            write_error(f"{error}\n")
            code = terminal.USAGE
        else:
            write_out(f"{path}: OK\n")
    return code


def print_plan(
    path: str, form: str, workers: int | None, sets: Sequence[str], cluster: str | None = None
) -> int:
    """Print what `pipedist run` would execute; `form` is text, mermaid or json."""
    from pipedist.cluster.base import usable_cores
    from pipedist.cluster.factory import cluster_for
    from pipedist.outputs import encoding
    from pipedist.plan import compile_plan
    from pipedist.plan.view import as_json, as_mermaid, as_text
    from pipedist.spec import load, with_cluster

    spec = load(path, sets=sets)
    if cluster is not None:
        spec = with_cluster(spec, cluster)
    if workers is None:
        workers = usable_cores() if spec.cluster.workers == "auto" else spec.cluster.workers
    with stdout_to_stderr():  # the user's modules may print
        plan = compile_plan(spec, workers=workers)
    try:
        cluster_for(plan)  # checks the launcher; the cluster is not opened
        if form == "json":
            write_json(encoding.to_json(as_json(plan)))
        else:
            write_out((as_mermaid(plan) if form == "mermaid" else as_text(plan)).rstrip("\n") + "\n")
    finally:
        plan.close()
    return terminal.OK


def predict_run(path: str, form: str, sets: Sequence[str], sample: int, measured: str | None) -> int:
    """Print the expected times of a run, from an earlier run or a sample; `form` is text or json."""
    import anyio

    from pipedist.outputs import encoding
    from pipedist.plan import compile_plan
    from pipedist.runs import prediction
    from pipedist.spec import load

    if form == "mermaid":
        raise UsageError("--predict prints text or json: use another --format")
    spec = load(path, sets=sets)
    with stdout_to_stderr():  # the user's modules may print
        plan = compile_plan(spec, workers=1)
        try:
            if measured is not None:
                costs = prediction.costs_of_run(plan, Path(measured))
            else:
                costs = anyio.run(prediction.sampled_costs, plan, sample)
        finally:
            plan.close()
    rows = prediction.as_rows(costs)
    document = {"format": 1, "memory_bytes": costs.memory_bytes, "sampled": costs.sampled, "workers": rows}
    if form == "json":
        import msgspec

        write_json(encoding.to_json(msgspec.to_builtins(document)))
    else:
        write_out(prediction.as_text(costs, rows) + "\n")
    return terminal.OK


def print_schema() -> int:
    import json

    from pipedist.spec.schema import json_schema

    write_out(json.dumps(json_schema(), indent=2) + "\n")
    return terminal.OK


def print_completion(app: click.Command, shell: str) -> int:
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None, "the option allows shells that click knows"
    write_out(complete(app, {}, "pipedist", "_PIPEDIST_COMPLETE").source() + "\n")
    return terminal.OK


def audit_run(run: str) -> int:
    """Verify the journal of the run in an output folder; return 1 if an element is not accounted for."""
    from pipedist.journal.history import audit
    from pipedist.outputs.run_record import PRIVATE, existing_record, read_results

    path = Path(run)
    record = existing_record(path)
    finished = record.state == "finished"
    ledger = read_results(path, path).get("ledger") if finished else None
    found = audit(path / PRIVATE / "journal", finished=finished, ledger=ledger)
    write_out("\n".join(found.lines()) + "\n")
    return terminal.FAILED if found.problems else terminal.OK


def write_report(run: str, output: str | None, trace: str | None = None) -> int:
    """Write the report of the run in an output folder, by default into it, or its trace into the file `trace`."""
    from pipedist.core.files import replace_file
    from pipedist.report import collect, page, trace_of

    output = output or os.path.join(run, "report.html")
    path, option = (output, "--output") if trace is None else (trace, "--trace")
    content = page(collect(Path(run))).encode() if trace is None else trace_of(Path(run))
    try:
        replace_file(Path(path), content)
    except OSError as error:
        raise UsageError(
            f"can't write {path}: {error.strerror or error}. Give another {option} FILE"
        ) from None
    write_out(f"{path}\n")
    return terminal.OK


def diff_runs(a: str, b: str, *, as_json: bool) -> int:
    """Print the differences of two runs; return 1 if their results differ."""
    from pipedist.report.differences import as_text, compare

    found = compare(Path(a), Path(b))
    if as_json:
        write_json(found)
    else:
        write_out(as_text(found) + "\n")
    return terminal.OK if found["same"] else terminal.FAILED


def new_key_files(output: str) -> int:
    """Create the keys of a cluster: one file for the run's host, and one beside it for those of its workers.

    If one of them exists already or can't be written, neither is created.
    """
    import shlex

    from pipedist.transport.keys import new_keys, workers_file, write_key_file

    server = Path(output)
    if server.is_dir():
        raise UsageError(
            f"--output {output!r} is a folder. Give a file, such as {str(server / 'cluster.key')!r}"
        )
    workers = workers_file(output)
    for path in (server, workers):
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already. Remove it, or give another --output FILE")
    keys = new_keys()
    write_key_file(server, keys)
    try:
        write_key_file(workers, replace(keys, server=None))
    except UsageError:
        server.unlink()
        raise
    width = max(len(str(server)), len(str(workers)))
    write_out(
        f"{server!s:<{width}}  for the host of the run:  cluster: {{launcher: connect, listen: "
        f'"tcp://ADDRESS:PORT", key_file: {server.name}}}\n'
        f"{workers!s:<{width}}  for hosts of workers:    pipedist worker --connect tcp://ADDRESS:PORT "
        f"--key-file {shlex.quote(workers.name)}\n"
        "Both files have mode 0600; keep it. With either file a process can join the cluster, and receives its "
        "code and data;\n"
        "with the first it can also impersonate the run, and have workers execute its code.\n"
    )
    return terminal.OK


def explain_run(run: str, *, as_json: bool) -> int:
    """Print what the run in an output folder waits for; return 1 if it is not executing."""
    import json

    from pipedist.journal.history import audit
    from pipedist.outputs.run_record import LIVE, PRIVATE, existing_record, is_there
    from pipedist.report.data import read_json
    from pipedist.runs.about import FAILURE_FILE
    from pipedist.runs.diagnostics import VERSION, lines, query_status

    path = Path(run)
    record = existing_record(
        path, ". A run without outputs has none: use kill -USR1 PID, and read its standard error"
    )
    reply = query_status(path / PRIVATE / LIVE, REPLY_S)
    if reply is not None:
        try:
            status: dict[str, Any] = json.loads(reply)
        except ValueError:
            raise UsageError(f"the run in {path} ended while it replied. Try again") from None
        if status.get("pipedist_why") != VERSION:
            raise UsageError(
                f"the run in {path} uses another version of pipedist. Use that version's `pipedist why`"
            )
        write_out((reply.decode() if as_json else "\n".join(lines(status))) + "\n")
        return terminal.OK
    state = record.state if record.state in _ENDED else "unfinished"
    folder = path / PRIVATE / "journal"
    journal, passes, again = ["it has no journal"], [], []
    failure = read_json(path / PRIVATE / FAILURE_FILE) if state == "failed" else {}
    text, has_advice = failure.get("text"), failure.get("has_advice", False)
    if is_there(folder / "journal", path):
        found = audit(folder, finished=state == "finished")
        journal, passes = found.lines(), found.passes()
        if found.history is not None and state != "finished" and not has_advice:
            again = _resume_command(found.history.header, path)
    if as_json:
        head = {"pipedist_why": VERSION, "run": record.run, "state": state}
        head |= {"failure": text} if text else {}
        write_json({**head, "journal": journal, "passes": passes})
    else:
        ended = "has failed" if has_advice else _ENDED[state]
        why = [text] if text else []
        write_out("\n".join([f"run {record.run} in {path} {ended}", *again, *why, *journal]) + "\n")
    return terminal.FAILED


def _resume_command(header: Header, folder: Path) -> list[str]:
    """Return the line with the command that resumes a run, if there is one."""
    from pipedist.runs.spec_source import SpecSource

    output = "" if folder.absolute() == (Path("out") / header.name).absolute() else str(folder)
    command = SpecSource(header.source, tuple(header.sets), header.params).command(output)
    return [f"  {command} --resume"] if command else []


_ENDED = {
    "finished": "has finished: it waits for nothing",
    "failed": f"has failed. {terminal.CONTINUE}",
    "unfinished": "is not executing: no process on this host replies (it was interrupted or killed, or it "
    "runs on another host). Continue it with --resume",
}


def launch_slurm(
    spec: str,
    *,
    nodes: int,
    workers_per_node: int | None,
    gpus: int,
    time: str,
    port: int | None,
) -> int:
    from pipedist.cluster.slurm import JobRequest, slurm_script
    from pipedist.spec import load

    request = JobRequest.of(load(spec), nodes=nodes, workers_per_node=workers_per_node, gpus=gpus)
    write_out(slurm_script(request, os.path.abspath(spec), time=time, port=port))
    return terminal.OK
