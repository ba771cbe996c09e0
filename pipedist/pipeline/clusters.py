"""From what a plan says of its cluster to the cluster."""

from __future__ import annotations

from pathlib import Path

from pipedist.local_cluster import Cluster, LocalCluster
from pipedist.plan import Plan


def cluster_for(plan: Plan, *, force: bool = False, folder: Path | None = None) -> Cluster:
    """Return the cluster that a spec asks for, not yet open.

    Args:
        force: let workers in that differ in versions or processor type.
        folder: the private one of a run that can be resumed; None: this one can't.

    Raises:
        UsageError: what its launcher needs is not installed.
    """
    wanted, workers, gpus = plan.spec.cluster, plan.workers, plan.gpus_needed
    threads = plan.spec.threads_per_replica
    match wanted.launcher:
        case "connect":
            from pipedist.connect_cluster import REJOIN_S, ConnectCluster

            return ConnectCluster(
                listen=wanted.listen,
                key_file=wanted.key_file,
                workers=workers,
                threads_per_replica=threads,
                rejoin_s=REJOIN_S if wanted.rejoin_s is None else wanted.rejoin_s,
                gpus_per_worker=gpus,
                force=force,
            )
        case "ray":
            from pipedist.engine_clusters import RayCluster

            return RayCluster(
                workers,
                address=wanted.address,
                placement=wanted.placement,
                place_s=wanted.place_s,
                listen=wanted.listen,
                threads_per_replica=threads,
                gpus_per_worker=gpus,
                code=plan.spec.code,
                force=force,
                folder=folder,
                rejoin_s=wanted.rejoin_s or 0.0,
            )
        case "dask":
            from pipedist.engine_clusters import DaskCluster

            return DaskCluster(
                workers,
                address=wanted.address,
                place_s=wanted.place_s,
                listen=wanted.listen,
                threads_per_replica=threads,
                force=force,
                folder=folder,
                rejoin_s=wanted.rejoin_s or 0.0,
            )
        case _ if wanted.rejoin_s and folder is not None:
            from pipedist.lasting_cluster import LastingCluster

            return LastingCluster(
                workers,
                folder=folder,
                rejoin_s=wanted.rejoin_s,
                threads_per_replica=threads,
                gpus_per_worker=gpus,
            )
        case _:
            return LocalCluster(workers=workers, threads_per_replica=threads, gpus_per_worker=gpus)
