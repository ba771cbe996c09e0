"""A cluster that is chosen for one run, instead of the spec's: `--cluster NAME[:ADDRESS]`."""

from __future__ import annotations

import re
from dataclasses import replace

from pipedist.errors import UsageError
from pipedist.spec.keys import ENDPOINT_PATTERN, ENGINE_ADDRESS_EXPECTED, fits_engine
from pipedist.spec.loading import Spec
from pipedist.spec.model import LAUNCHERS, LAUNCHERS_OF, ClusterSpec

KEY_FILE = "cluster.key"
"""The file with a cluster's keys, where the spec names none."""


def with_cluster(spec: Spec, choice: str) -> Spec:
    """Return a spec with another cluster; its workers, and what goes with every launcher, stay.

    Args:
        spec: without mistakes.
        choice: a launcher's name, or the name, a colon and an address: of the engine with `ray` and `dask`,
            where to listen with `connect`, whose key file is `cluster.key` in the spec's folder if the
            spec names none.

    Raises:
        UsageError: there is no such launcher, or the address is none of its kind.
    """
    name, colon, address = choice.partition(":")
    if name not in LAUNCHERS:
        also = f"; `pipedist launch {name}` prints a job of it" if name in ("slurm", "kubernetes") else ""
        raise UsageError(
            f"there is no cluster {name!r}: expected {', '.join(LAUNCHERS)}, or one of them with an "
            f"address, as in ray:auto{also}"
        )
    cluster = spec.cluster
    if cluster.launcher != name:
        own = {key: ClusterSpec.fields[key].default for key in LAUNCHERS_OF}
        cluster = cluster.replaced(launcher=name, **own)
    if colon:
        cluster = cluster.replaced(**_placed(name, address, choice))
    if name == "connect" and cluster.key_file is None:
        cluster = cluster.replaced(key_file=str(spec.folder / KEY_FILE))
    return replace(spec, cluster=cluster)


def _placed(name: str, address: str, choice: str) -> dict[str, str]:
    """Return the key that says where, and its value."""
    if name == "ray" and address.startswith("//"):  # `ray://HOST:PORT`, without a name before it
        address = choice
    if name in ENGINE_ADDRESS_EXPECTED:
        if fits_engine(address, name):
            return {"address": address}
        raise UsageError(f"cluster {choice!r}: expected {ENGINE_ADDRESS_EXPECTED[name]} after `{name}:`")
    if name == "connect":
        if re.match(ENDPOINT_PATTERN, address):
            return {"listen": address}
        raise UsageError(f"cluster {choice!r}: expected tcp://ADDRESS:PORT after `connect:`")
    raise UsageError(f"cluster {choice!r}: {name} has no address")
