"""The top of a spec, and its cluster: every key, its type, its default and its description.

A model holds what ONE section may contain; rules between sections (names, kinds, cycles) are in
`pipedist.spec.checks`. All of version 1 of the language is here, including parts that this version of the
engine cannot execute: the plan reports those.
"""

import re
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema

from pipedist.spec.datasets import DatasetSpec
from pipedist.spec.fields import (
    Endpoint,
    Expected,
    ExpectedShape,
    PathText,
    PositiveSeconds,
    Seconds,
    Section,
    filled_mapping,
    mapping,
    message_error,
    satisfies,
)
from pipedist.spec.outputs import AnyOutput
from pipedist.spec.scalars import as_text, listing
from pipedist.spec.stages import AnyStage

REPLICAS_MAX = 65_536
WORKERS_MAX = 65_536
THREADS_MAX = 1_024
NAME_CHARACTERS_MAX = 100
SPECULATION_MAX = 1_000_000

Launcher = Literal["local", "connect", "ray", "dask"]
LAUNCHERS: Final[tuple[str, ...]] = get_args(Launcher)

ENGINE_ADDRESS_PATTERN = r"^(local|auto|([a-z]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5})$"
_ENGINE_ADDRESSES = {
    "ray": re.compile(r"local|auto|(ray://)?[^/]+"),
    "dask": re.compile(r"local|(tcp|tls|ws|wss|ucx)://[^/]+"),
}
ENGINE_ADDRESS_EXPECTED: Final = {
    "ray": "local, auto, HOST:PORT or ray://HOST:PORT",
    "dask": "local or tcp://HOST:PORT (tls, ws, wss, ucx)",
}
"""By launcher."""


def fits_engine(address: str, launcher: str) -> bool:
    return bool(re.match(ENGINE_ADDRESS_PATTERN, address) and _ENGINE_ADDRESSES[launcher].fullmatch(address))


def _version(value: int) -> int:
    if value != 1:
        raise message_error(f"version {as_text(value)} of the language is not supported", "`pipedist: 1`")
    return value


def _is_run_name(value: str | None) -> bool:
    return (
        value is not None  # only an absent key means the default
        and 1 <= len(value) <= NAME_CHARACTERS_MAX
        and value[0] not in ".-"
        and "/" not in value
        and value.isprintable()
    )


KEPT_MAX: Final = 1_000  # snapshots of states


QUARANTINE_MAX: Final = 10**12  # elements
QUARANTINE_DEFAULT: Final = 1_000  # elements that `quarantine_max: auto` allows, or more in large datasets


class ClusterSection(Section):
    """Where workers come from; it never changes a result."""

    launcher: Annotated[
        Launcher,
        Expected(f"{listing(LAUNCHERS)} (for Slurm use `pipedist launch slurm`)", *LAUNCHERS),
    ] = Field(
        default="local",
        description="How workers are started: as processes on this host (`local`), by hosts that connect "
        "(`connect`), or by a system that places them (`ray`, `dask`). Jobs of Slurm and "
        "Kubernetes use `connect` (docs/how-to/hosts.md).",
        examples=["local"],
    )
    workers: Annotated[
        Annotated[int, Field(ge=1, le=WORKERS_MAX)] | Literal["auto"],
        Expected("a positive whole number of processes, or auto", "auto"),
    ] = Field(
        default="auto",
        description="The number of worker processes; `auto`: the number of usable cores. `--workers` overrides "
        "it.",
        examples=[4],
    )
    grace_s: Seconds = Field(
        default=10.0,
        description="How long running calls may continue after the first SIGINT or SIGTERM, in seconds. A call that "
        "waits for another attempt, or for `rate`, ends at once, and is executed again by `--resume`.",
        examples=[10],
    )
    speculation: Annotated[
        Annotated[float, Field(ge=1, le=SPECULATION_MAX)] | Literal["off"],
        Expected(f"a number from 1 to {SPECULATION_MAX:,}, or off", "off"),
    ] = Field(
        default=4.0,
        description="A call is executed a second time, by an idle worker, when it has taken this many times as "
        "long as 19 of 20 calls do, and at least one second; the first result counts. Calls of a gang never "
        "are. `off`: every call runs once at a time.",
        examples=["off"],
    )
    stall_s: PositiveSeconds = Field(
        default=60.0,
        description="How long a run may be without progress before it reports the reason, in seconds; it "
        "reports again after twice as long, and so on.",
        examples=[600],
    )
    rejoin_s: Seconds | None = Field(
        default=None,
        description="With `launcher: connect`: how long workers keep their finished results, in seconds, and "
        "wait for a resume when the process of the run is dead; then they end. Default: 60. Workers of "
        "other launchers end with the process of their run.",
        examples=[60],
    )
    listen: Endpoint | None = Field(
        default=None,
        description="With `launcher: connect`: the endpoint to which workers connect, an address of this host "
        "and a port. With `ray` and `dask`: an endpoint to use instead of the address that their nodes reach "
        "and any free port.",
        examples=["tcp://10.0.0.1:5555"],
    )
    key_file: PathText | None = Field(
        default=None,
        description="With `launcher: connect`: the file with the cluster's keys, relative to the spec's folder. "
        "Only workers that have it may join.",
        examples=["cluster.key"],
    )
    address: (
        Annotated[
            str,
            satisfies(lambda address: bool(re.match(ENGINE_ADDRESS_PATTERN, address))),
            WithJsonSchema({"type": "string", "pattern": ENGINE_ADDRESS_PATTERN}),
            Expected(
                "local; for ray also auto, HOST:PORT or ray://HOST:PORT; for dask also tcp://HOST:PORT",
                "local",
                "auto",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="With `launcher: ray` or `dask`: the address of the engine. `local`: a new engine on this "
        "host, for this run. `auto` (Ray): the one that runs here, or that RAY_ADDRESS names. Default: the one "
        "that runs here or that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names; if there is none, `local`.",
        examples=["ray://10.0.0.1:10001"],
    )
    placement: Literal["pack", "spread"] = Field(
        default="pack",
        description="With `launcher: ray`: whether Ray places the workers on as few nodes as possible (`pack`), "
        "or on as many as possible (`spread`).",
        examples=["spread"],
    )
    place_s: PositiveSeconds = Field(
        default=60.0,
        description="How long Ray may take to have capacity for the workers, or Dask to have a worker, in "
        "seconds.",
        examples=[600],
    )


class CheckpointSection(Section):
    """The snapshots of a training in the journal of its output folder; they never change a result."""

    every_s: Seconds | None = Field(
        default=None,
        description="The time between two snapshots of the states, in seconds; a resumed run executes the steps "
        "after the last one again. It is longer if snapshots would take more than 5% of the time. Default: 0.5.",
        examples=[30],
    )
    keep: Annotated[int, Field(ge=1, le=KEPT_MAX), Expected(f"an integer from 1 to {KEPT_MAX}")] = Field(
        default=1,
        description="The number of snapshots whose states are kept, so that `pipedist replay` can execute calls "
        "again that read them. States of at most 64 KiB are kept for every step in any case.",
        examples=[2],
    )


LAUNCHERS_OF: Final = {
    "listen": ("connect", "ray", "dask"),
    "key_file": ("connect",),
    "rejoin_s": ("connect",),
    "address": ("ray", "dask"),
    "placement": ("ray",),
    "place_s": ("ray", "dask"),
}
"""The launchers of those keys of a cluster that not every launcher has."""


class SpecSection(Section):
    """A dataset, replica functions and reductions."""

    pipedist: Annotated[
        Annotated[int, Expected("1")], AfterValidator(_version), WithJsonSchema({"const": 1})
    ] = Field(description="The version of the language.", examples=[1])
    name: Annotated[
        str | None,
        satisfies(_is_run_name),
        WithJsonSchema({"type": "string"}),
        Expected(
            f"a text of at most {NAME_CHARACTERS_MAX} characters that can be a folder's name, and does not "
            "begin with `.` or `-`"
        ),
    ] = Field(
        default=None,
        description="The name of the run, in tables and in the default output folder. Default: the file's name "
        "without its ending.",
        examples=["flight-delays"],
    )
    params: Annotated[dict[str, Any], ExpectedShape("a mapping of names to values", mapping)] = Field(
        default_factory=dict,
        description="Parameters and their defaults, read as `${params.NAME}`, overridden with "
        "`--set NAME=VALUE`.",
        examples=[{"late_after_min": 15}],
    )
    replicas: Annotated[
        int, Field(ge=1, le=REPLICAS_MAX), Expected(f"an integer from 1 to {REPLICAS_MAX}")
    ] = Field(
        default=1,
        description="The number of shards per step: logical, part of the result, and NOT the number of "
        "processes.",
        examples=[4],
    )
    seed: Annotated[int, Field(ge=0, le=2**64 - 1), Expected("an integer from 0 to 2**64 - 1")] = Field(
        default=0,
        description="The seed of all randomness: of shuffling, and of `ctx.rng` in each call.",
        examples=[7],
    )
    code: PathText = Field(
        default=".",
        description="The folder of your modules, relative to the spec's own folder, which `.` stands for; it is "
        "searched last.",
        examples=["src"],
    )
    threads_per_replica: Annotated[
        int, Field(ge=1, le=THREADS_MAX), Expected(f"an integer from 1 to {THREADS_MAX}")
    ] = Field(
        default=1,
        description="The number of BLAS and OpenMP threads of each replica call; part of the result, because "
        "it changes the last bits.",
        examples=[2],
    )
    quarantine_max: Annotated[
        Annotated[int, Field(ge=1, le=QUARANTINE_MAX)] | Literal["auto"],
        Expected("a positive whole number of elements, or auto", "auto"),
    ] = Field(
        default="auto",
        description="The number of elements that may be quarantined in one pass over a dataset; when more fail, "
        "the run ends with an error, and `--resume` continues it with a higher number. `auto`: 1,000, or 1% of the "
        "elements of all epochs if that is more and their number is known, and never all. It never changes a result.",
        examples=[100],
    )
    cluster: Annotated[ClusterSection, ExpectedShape("a mapping of cluster keys", mapping)] = Field(
        default_factory=ClusterSection,
        description="Where workers come from; it never changes a result.",
        examples=[{"launcher": "local", "workers": 4}],
    )
    checkpoint: Annotated[CheckpointSection, ExpectedShape("a mapping of `every_s` and `keep`", mapping)] = (
        Field(
            default_factory=CheckpointSection,
            description="How often the states of a training are written to the journal, and how many versions of "
            "them stay there. It requires an `update`.",
            examples=[{"every_s": 30, "keep": 2}],
        )
    )
    dataset: Annotated[
        DatasetSpec | None, ExpectedShape("a mapping with one source key and `batch`", mapping, DatasetSpec)
    ] = Field(
        default=None,
        description="The only dataset of the spec; short for `datasets: {dataset: {...}}`.",
        examples=[{"range": 10, "batch": 4}],
    )
    datasets: Annotated[
        dict[str, DatasetSpec], ExpectedShape("a mapping of names to datasets", filled_mapping)
    ] = Field(
        default_factory=dict,
        min_length=1,
        description="The datasets, by name. Datasets and stages share one namespace.",
        examples=[{"train": {"range": 10, "batch": 4}, "test": {"range": 5, "batch": 5}}],
    )
    stages: Annotated[
        dict[str, AnyStage], ExpectedShape("a mapping of names to stages, with at least one", filled_mapping)
    ] = Field(
        min_length=1,
        description="The stages, by name. Names connect them; their order in the file has no meaning.",
        examples=[{"total": {"reduce": "sum", "of": "dataset", "axis": 0}}],
    )
    outputs: Annotated[
        dict[str, AnyOutput],
        ExpectedShape("a mapping of stage names to relative paths", mapping),
    ] = Field(
        default_factory=dict,
        description="The files to which finished values are written, in the output folder: the name of a "
        "reduce, gather or update, and a path whose ending is the format; `NAME.parquet/` is a folder of files, and "
        "`{COLUMN}` in a path stands for the values of a column, one file each. Or a kind with options, such as "
        "`parquet`. Or a mapping: paths in the value, such as `hists` or `tables/left`, each with a file; other parts "
        "of the value are not written.",
        examples=[{"total": "total.json", "features": {"hists": "hists.npy", "table": "table.parquet"}}],
    )
