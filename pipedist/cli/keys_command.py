"""The command `pipedist keys new`: the keys of a cluster whose workers dial in."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pipedist.cli import exits
from pipedist.cli.streams import write_out
from pipedist.errors import UsageError


def new_key_files(output: str) -> int:
    """Make the keys of a new cluster: one file for the host of the run, one for those of its workers.

    Args:
        output: the run's file; the workers' is beside it, see `pipedist.transport.keys.workers_file`.

    Returns:
        0.

    Raises:
        UsageError: one of the files exists, or can't be made; then neither is there.
    """
    import shlex

    from pipedist.transport.keys import new_keys, workers_file, write_key_file

    server = Path(output)
    if server.is_dir():
        raise UsageError(
            f"--output {output!r} is a folder: expected a file, as {str(server / 'cluster.key')!r}"
        )
    workers = workers_file(output)
    for path in (server, workers):
        if os.path.lexists(path):
            # Before anything is written: half a cluster's keys are worse than none.
            raise UsageError(f"{path} exists already, and would be lost; remove it, or say --output FILE")
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
        "Both have mode 0600, and must keep it. Who has one of them may join the cluster, and is sent its "
        "code and data;\n"
        "who has the first may stand in for the run, and have its own code executed by the workers.\n"
    )
    return exits.OK
