"""The commands `pipedist launch slurm` and `launch kubernetes`: print scripts for batch systems."""

from __future__ import annotations

import io
import os

from msgspec import Struct

from pipedist.cli.streams import write_out
from pipedist.errors import UsageError


class LaunchOptions(Struct, frozen=True):
    """Options common to the `launch` commands.

    Args:
        spec: path of the spec, as typed.
        nodes, workers_per_node, gpus: see `pipedist.cluster.templates.JobRequest`.
        prints: print the text; nothing is ever submitted.
    """

    spec: str
    nodes: int
    workers_per_node: int | None
    gpus: int
    prints: bool


def slurm(options: LaunchOptions, *, time: str, port: int | None) -> int:
    """Print a batch script.

    Raises:
        SpecError: the spec has mistakes.
        UsageError: the options contradict each other or the spec.
    """
    from pipedist.cluster.templates import JobRequest, slurm_script
    from pipedist.spec import load

    _check(options, "sbatch")
    request = JobRequest.of(
        load(options.spec),
        nodes=options.nodes,
        workers_per_node=options.workers_per_node,
        gpus=options.gpus,
    )
    write_out(slurm_script(request, os.path.abspath(options.spec), time=time, port=port))
    return 0


def kubernetes(
    options: LaunchOptions, *, image: str, namespace: str, claim: str | None, spec_in_image: str | None
) -> int:
    """Print a JobSet, after comments with the commands that create the objects it refers to.

    Raises:
        SpecError: the spec has mistakes.
        UsageError: the options contradict each other or the spec.
    """
    from ruamel.yaml import YAML

    from pipedist.cluster.templates import JobRequest, jobset, jobset_commands
    from pipedist.spec import load

    _check(options, "kubectl apply -f -")
    spec = load(options.spec)
    request = JobRequest.of(
        spec, nodes=options.nodes, workers_per_node=options.workers_per_node, gpus=options.gpus
    )
    manifest = jobset(
        request,
        image=image,
        namespace=namespace,
        spec=spec_in_image or os.path.basename(options.spec),
        in_image=spec_in_image is not None,
        claim=claim,
    )
    commands = jobset_commands(request, namespace=namespace, spec=None if spec_in_image else options.spec)
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in ("Run once, before applying this manifest:", *commands))
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the default is None
    yaml.dump(manifest, text)
    write_out(text.getvalue())
    return 0


def _check(options: LaunchOptions, submit: str) -> None:
    if not options.prints:
        raise UsageError(
            f"pipedist does not submit jobs. Print the script with --print, and pass it to `{submit}`"
        )
