"""Pages of the Python API: which public names are on which page; mkdocstrings writes their texts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pipedist
from pipedist import testing

PAGES = {
    "runs": (
        "Runs",
        "Execute a spec: in one call, or with its steps as they finish.",
        "run open stream Run SyncStream Result Ledger Progress Step Part",
    ),
    "mapping": (
        "Mapping",
        "Call a function on data, in one line.",
        "map imap amap AsyncResults Quarantined",
    ),
    "clusters": (
        "Clusters",
        "Where the worker processes come from.",
        "LocalCluster ConnectCluster RayCluster DaskCluster TaskCluster open_cluster ClusterSpec ClusterResolver "
        "SimpleClusterResolver UnionResolver SlurmClusterResolver KubernetesClusterResolver TFConfigClusterResolver "
        "TPUClusterResolver TPUTopology DeviceAssignment",
    ),
    "datasets": (
        "Datasets",
        "Elements, and their division into steps and shards.",
        "Dataset DistributedDataset ArraySpec InputContext InputOptions InputReplicationMode AutoShardPolicy "
        "ValueContext SourceReader SinkWriter",
    ),
    "strategy": (
        "Strategies",
        "The semantics of `tf.distribute.Strategy`, in asyncio and NumPy.",
        "Strategy MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy CentralStorageStrategy TPUStrategy "
        "ParameterServerStrategy ClusterCoordinator RemoteValue ClosureCancelled get_strategy has_strategy "
        "in_cross_replica_context strategy_of",
    ),
    "values": (
        "Values and variables",
        "Values with one component per replica, and state that lasts from step to step.",
        "PerReplica Mirrored ReduceOp Variable ShardedVariable VariableTree VariableAggregation "
        "VariableSynchronization FixedShardsPartitioner MinSizePartitioner MaxSizePartitioner",
    ),
    "replica-functions": (
        "In replica functions",
        "What a replica function can use while it runs: its place, a generator, collectives, and errors.",
        "get_replica_context ReplicaContext CommunicationOptions RetryAfter",
    ),
    "errors": (
        "Exceptions",
        "Every exception that pipedist raises. [Errors and their fixes](../errors.md) explains the causes.",
        "PipedistError SpecError Problem PlanError UsageError CallError QuarantineError WorkerDied WorkersLost "
        "RunCancelled RunDrained FoldError OutputError JournalError OutOfRangeError CollectiveMismatchError "
        "CollectiveTimeoutError",
    ),
}

# Members of base classes that have no page of their own, in their order.
INHERITED = {
    "LocalCluster": "workers ready",
    "Strategy": "num_replicas_in_sync devices scope distribute_dataset distribute_datasets_from_function "
    "distribute_values_from_function make_numpy_dataset compile reduce reduce_to batch_reduce_to broadcast gather "
    "update local_results save restore",
    "Variable": "name shape dtype trainable synchronization aggregation numpy assign assign_add assign_sub",
    "ShardedVariable": "numpy assign assign_add assign_sub",
}
# Members that other modules of pipedist use.
INTERNAL = {
    "LocalCluster": "supply",
    "ConnectCluster": "gather",
    "TaskCluster": "coordinator",
    "Variable": "pickles_identically saved restored require_unused",
}


def pages() -> dict[str, Callable[[], str]]:
    """Return each page's writer by the page's name."""
    listed = [name for _, _, names in PAGES.values() for name in names.split()]
    missing = {*pipedist.__all__, "map", "open"} - {"__version__"} - set(listed)
    if missing or len(listed) != len(set(listed)):
        raise ValueError(
            f"docs/site/api.py: each public name belongs to one page; missing: {sorted(missing)}"
        )
    found: dict[str, Callable[[], str]] = {
        name: partial(_page, "pipedist", *page) for name, page in PAGES.items()
    }
    found["combiners"] = _combiners
    found["testing"] = partial(
        _page, "pipedist.testing", "Testing", testing.__doc__ or "", " ".join(sorted(testing.__all__))
    )
    found["index"] = _index
    return found


def _page(module: str, title: str, text: str, names: str) -> str:
    parts = [f"# {title}", text, *(_member(module, name) for name in names.split())]
    return "\n\n".join(parts) + "\n"


def _member(module: str, name: str) -> str:
    bases = getattr(getattr(sys.modules[module], name), "__bases__", ())
    options = {}
    if any(
        base.__module__.startswith("pipedist.") and base.__name__ not in pipedist.__all__ for base in bases
    ):
        options["show_bases"] = "false"  # a reader can't look them up
    if module == "pipedist" and name in {*INHERITED, *INTERNAL}:
        options["inherited_members"] = f"[{', '.join(INHERITED.get(name, '').split())}]"
        options["filters"] = f"['!^({'|'.join(['_.*', *INTERNAL.get(name, '').split()])})$']"
    shown = ", ".join(f"{option}: {value}" for option, value in options.items())
    return f"::: {module}.{name}" + (f"\n    options: {{{shown}}}" if shown else "")


def _combiners() -> str:
    return (
        "# Combiners\n\n::: pipedist.combiners\n    options: {show_root_heading: false, heading_level: 1}\n"
    )


def _index() -> str:
    rows = [f"| [{title}]({name}.md) | {_names(names)} |" for name, (title, _, names) in PAGES.items()]
    return "\n".join(
        [
            "# Python API\n\nThe names below are in the package `pipedist`, unless the row says otherwise.\n",
            "| page | names |",
            "|---|---|",
            *rows,
            "| [Combiners](combiners.md) | functions of `pipedist.combiners`, for `reduce` |",
            "| [Testing](testing.md) | the test harness, `pipedist.testing` |",
            "",
        ]
    )


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())
