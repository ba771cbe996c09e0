"""Makes the cluster that a plan's spec declares."""

from __future__ import annotations

from pipedist.cluster.base import Cluster, LocalCluster
from pipedist.plan import Plan


def cluster_for(plan: Plan, *, force: bool = False) -> Cluster:
    """Return the cluster that a spec declares, not yet open."""
    wanted, workers, gpus = plan.spec.cluster, plan.workers, plan.gpus_needed
    threads = plan.spec.threads_per_replica
    match wanted.launcher:
        case "connect":
            from pipedist.cluster.remote import REJOIN_S, ConnectCluster

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
            from pipedist.cluster.engine_clusters import RayCluster

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
            )
        case "dask":
            from pipedist.cluster.engine_clusters import DaskCluster

            return DaskCluster(
                workers,
                address=wanted.address,
                place_s=wanted.place_s,
                listen=wanted.listen,
                threads_per_replica=threads,
                force=force,
            )
        case _:
            return LocalCluster(workers=workers, threads_per_replica=threads, gpus_per_worker=gpus)
