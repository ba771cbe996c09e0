"""The commands `pipedist launch slurm` and `pipedist launch kubernetes`: print what a batch system takes."""

from __future__ import annotations

import io
import os

from msgspec import Struct

from pipedist.cli.streams import write_out
from pipedist.errors import UsageError


class LaunchOptions(Struct, frozen=True):
    """What the command line says.

    Args:
        spec: path of the spec, as typed.
        nodes, workers_per_node, gpus: see `pipedist.templates.request.Request`.
        prints: whether the text is to be printed, which is all that can be done with it.
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
        UsageError: the options make no sense.
    """
    from pipedist.spec import load
    from pipedist.templates.request import Request
    from pipedist.templates.slurm import batch_script

    _check(options, "sbatch")
    request = Request.of(
        load(options.spec),
        nodes=options.nodes,
        workers_per_node=options.workers_per_node,
        gpus=options.gpus,
    )
    write_out(batch_script(request, os.path.abspath(options.spec), time=time, port=port))
    return 0


def kubernetes(
    options: LaunchOptions, *, image: str, namespace: str, claim: str | None, spec_in_image: str | None
) -> int:
    """Print a JobSet, and before it, as comments, the commands that make what it refers to.

    Raises:
        SpecError: the spec has mistakes.
        UsageError: the options make no sense.
    """
    from ruamel.yaml import YAML

    from pipedist.spec import load
    from pipedist.templates.kubernetes import jobset, prepare
    from pipedist.templates.request import Request

    _check(options, "kubectl apply -f -")
    spec = load(options.spec)
    request = Request.of(
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
    commands = prepare(request, namespace=namespace, spec=None if spec_in_image else options.spec)
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in ("Once, before it is applied:", *commands))
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its own default is None
    yaml.dump(manifest, text)
    write_out(text.getvalue())
    return 0


def _check(options: LaunchOptions, submit: str) -> None:
    if not options.prints:
        raise UsageError(
            f"nothing is submitted from here: with --print the text is printed, for `{submit}`, "
            "and for your eyes"
        )
