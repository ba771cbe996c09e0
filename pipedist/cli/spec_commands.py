"""The commands that look at specs and execute nothing: validate, plan, schema."""

from __future__ import annotations

from collections.abc import Sequence

from pipedist.cli import exits
from pipedist.cli.streams import stdout_to_stderr, write_error, write_out
from pipedist.errors import SpecError


def validate_specs(paths: Sequence[str]) -> int:
    """Check files, and say OK of each good one; all problems of all bad ones go to stderr.

    Returns:
        0, or 2 if any has a problem.
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
        path: of the spec.
        form: text, mermaid or json.
        workers: overrides the spec's number of worker processes.
        sets: texts NAME=VALUE.
        cluster: overrides where its workers come from.

    Raises:
        UsageError: what that needs is not installed.
    """
    import json

    from pipedist.local_cluster import usable_cores
    from pipedist.outputs import encoding
    from pipedist.pipeline.clusters import cluster_for
    from pipedist.plan import compile_plan
    from pipedist.spec import load, with_cluster

    spec = load(path, sets=sets)
    if cluster is not None:
        spec = with_cluster(spec, cluster)
    if workers is None:
        workers = usable_cores() if spec.cluster.workers == "auto" else spec.cluster.workers
    with stdout_to_stderr():  # modules of the user may print
        plan = compile_plan(spec, workers=workers)
    try:
        cluster_for(plan)  # is not opened: whether it could be
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

    from pipedist.spec.json_schema import schema

    write_out(json.dumps(schema(), indent=2) + "\n")
    return exits.OK
