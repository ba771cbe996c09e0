"""From what a spec says of its cluster to the cluster."""

from __future__ import annotations

from pipedist.local_cluster import Cluster, LocalCluster
from pipedist.spec import Spec


def cluster_for(spec: Spec, *, workers: int) -> Cluster:
    """Return the cluster that a spec asks for, not yet open.

    Raises:
        UsageError: what its launcher needs is not installed.
    """
    wanted = spec.cluster
    threads = spec.threads_per_replica
    match wanted.launcher:
        case "connect":
            from pipedist.connect_cluster import ConnectCluster

            return ConnectCluster(listen=wanted.listen, key_file=wanted.key_file, workers=workers)
        case "ray":
            from pipedist.engine_clusters import RayCluster

            return RayCluster(
                workers,
                address=wanted.address,
                placement=wanted.placement,
                place_s=wanted.place_s,
                listen=wanted.listen,
                threads_per_replica=threads,
                code=spec.code,
            )
        case "dask":
            from pipedist.engine_clusters import DaskCluster

            return DaskCluster(
                workers,
                address=wanted.address,
                place_s=wanted.place_s,
                listen=wanted.listen,
                threads_per_replica=threads,
            )
        case _:
            return LocalCluster(workers=workers, threads_per_replica=threads)
