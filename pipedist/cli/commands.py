"""The short commands: validate, plan, schema, audit and keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipedist.cli import exits
from pipedist.cli.streams import stdout_to_stderr, write_error, write_out
from pipedist.errors import SpecError, UsageError


def validate_specs(paths: Sequence[str]) -> int:
    """Check spec files; print OK for each valid one, all problems of the others to stderr.

    Returns:
        0, or 2 if any file has a problem.
    """
    from pipedist.spec import load

    code = exits.OK
    for path in paths:
        try:
            load(path)
        except SpecError as error:
            write_error(f"{error}\n")
            code = exits.USAGE
        else:
            write_out(f"{path}: OK\n")
    return code


def print_plan(
    path: str, form: str, workers: int | None, sets: Sequence[str], cluster: str | None = None
) -> int:
    """Print what `pipedist run` would execute.

    Args:
        path: path of the spec.
        form: text, mermaid or json.
        workers: number of worker processes; None: from the spec.
        sets: texts NAME=VALUE.
        cluster: NAME[:ADDRESS] in place of the spec's launcher.

    Raises:
        UsageError: a package that the launcher needs is not installed.
    """
    import json

    from pipedist.cluster.base import usable_cores
    from pipedist.outputs import encoding
    from pipedist.plan import compile_plan
    from pipedist.runs.clusters import cluster_for
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
            text = json.dumps(encoding.to_json(plan.to_json()))
        else:
            text = plan.mermaid() if form == "mermaid" else plan.text()
    finally:
        plan.close()
    write_out(text.rstrip("\n") + "\n")
    return exits.OK


def print_schema() -> int:
    """Print the JSON Schema of specs."""
    import json

    from pipedist.spec.schema import json_schema

    write_out(json.dumps(json_schema(), indent=2) + "\n")
    return exits.OK


def audit_run(run: str) -> int:
    """Verify the journal of the run in an output folder, and print the findings.

    Returns:
        0, or 1 if an element is not accounted for.

    Raises:
        UsageError: there is no run in the folder, or it has no journal.
    """
    from pipedist.journal.audit import audit
    from pipedist.outputs.run_record import PRIVATE, read_record, read_results

    path = Path(run)
    record = read_record(path, path)
    if record is None:
        raise UsageError(f"there is no run in {path}. RUN is the output folder of a run, such as out/NAME")
    finished = record.state == "finished"
    ledger = read_results(path, path).get("ledger") if finished else None
    found = audit(path / PRIVATE / "journal", finished=finished, ledger=ledger)
    write_out("\n".join(found.lines()) + "\n")
    return exits.FAILED if found.problems else exits.OK


def new_key_files(output: str) -> int:
    """Create the keys of a cluster: one file for the run's host, one for those of its workers.

    Args:
        output: the run's file; the workers' file is beside it (`pipedist.transport.keys.workers_file`).

    Returns:
        0.

    Raises:
        UsageError: a file exists already or can't be written; then neither is created.
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
    return exits.OK
