"""The top of the language as frozen, strict types: every key, its type, default and account.

A model says what ONE section may hold; what sections say about each other (names, kinds,
cycles) is `pipedist.spec.checks`. Everything of version 1 is here, also what an engine can't
execute yet: that is for the plan to say.
"""

from __future__ import annotations

from typing import Any, Literal

from pipedist.spec.keys import Endpoint, EngineAddress, PathText
from pipedist.spec.kinds import (
    Anything,
    Checked,
    Choice,
    Either,
    Factor,
    Integer,
    MappingOf,
    Nullable,
    Number,
    Text,
    Wrong,
)
from pipedist.spec.scalars import as_text
from pipedist.spec.section import Key, Section, SectionOf, key

REPLICAS_MAX = 65_536
WORKERS_MAX = 65_536
THREADS_MAX = 1_024
GRACE_S_MAX = 10_000_000
NAME_CHARACTERS_MAX = 100
SPECULATION_MAX = 1_000_000

PLACE_S_MAX = 10_000_000
PLACEMENTS = ("pack", "spread")
LAUNCHERS = ("local", "connect", "ray", "dask")


def _version(value: object) -> object:
    if type(value) is int and value != 1:
        raise Wrong(f"the spec is written in version {as_text(value)} of the language")
    if type(value) is not int:
        raise Wrong
    return value


def _run_name(value: object) -> object:
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= NAME_CHARACTERS_MAX
        or value[0] in ".-"
        or "/" in value
        or not value.isprintable()
    ):
        raise Wrong
    return value


class ClusterSpec(Section):
    """Where workers come from; it never changes a result."""

    launcher: Literal["local", "connect", "ray", "dask"] = key(
        Choice(*LAUNCHERS),
        Key(
            "What starts the workers: processes on this host (`local`), hosts that dial in (`connect`), or a "
            "system that places them. For Slurm and Kubernetes, `pipedist launch` writes what they start.",
            "local, connect, ray or dask; for Slurm and Kubernetes see `pipedist launch`",
            "launcher: local",
            choices=LAUNCHERS,
        ),
        default="local",
    )
    workers: int | Literal["auto"] = key(
        Either(Integer(1, WORKERS_MAX), Choice("auto")),
        Key(
            "How many worker processes there are; `auto`: as many as usable cores. `--workers` overrides it.",
            "a positive whole number of processes, or auto",
            "workers: 4",
            choices=("auto",),
        ),
        default="auto",
    )
    grace_s: float = key(
        Number(GRACE_S_MAX),
        Key(
            "How long running calls may go on after the first SIGINT or SIGTERM, in seconds.",
            "a number of seconds, 0 or more",
            "grace_s: 10",
        ),
        default=10.0,
    )
    speculation: float | Literal["off"] = key(
        Either(Factor(SPECULATION_MAX), Choice("off")),
        Key(
            "A call that takes so many times as long as 19 of 20 do, and a second at least, is executed once "
            "more by a worker that has nothing else to do; the first result counts. Never of a gang. `off`: "
            "every call runs once at a time.",
            f"a number from 1 to {SPECULATION_MAX:,}, or off",
            "speculation: off",
            choices=("off",),
        ),
        default=4.0,
    )
    stall_s: float = key(
        Number(GRACE_S_MAX, positive=True),
        Key(
            "After how long without progress a run says what it waits for, in seconds; then again after "
            "twice as long, and so on.",
            "a number of seconds, more than 0",
            "stall_s: 600",
        ),
        default=60.0,
    )
    rejoin_s: float | None = key(
        Nullable(Number(GRACE_S_MAX)),
        Key(
            "How long workers keep their finished results when the process of the run is gone, and wait for "
            "it to be resumed, in seconds, with `launcher: connect`; then they end. Default: 60. Workers of "
            "other launchers end with the process of their run.",
            "a number of seconds, 0 or more",
            "rejoin_s: 60",
        ),
        default=None,
    )
    listen: str | None = key(
        Nullable(Endpoint),
        Key(
            "Where workers dial in, with `launcher: connect`: an address of this host and a port. With `ray` "
            "and `dask`, instead of the address that their nodes reach and any free port.",
            '"tcp://ADDRESS:PORT"',
            'listen: "tcp://10.0.0.1:5555"',
        ),
        default=None,
    )
    key_file: str | None = key(
        Nullable(PathText),
        Key(
            "The file with the cluster's keys, with `launcher: connect`, relative to the spec's folder: only "
            "workers which have it may join.",
            "a path",
            "key_file: cluster.key",
        ),
        default=None,
    )

    address: str | None = key(
        Nullable(EngineAddress),
        Key(
            "Where Ray or Dask is, with `launcher: ray` or `dask`. `local`: one of the run's own, on this "
            "host. `auto` (Ray): the one that runs here, or that RAY_ADDRESS names. Default: the one "
            "that runs here or that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names, and `local` where there is "
            "none.",
            "local; for ray also auto, HOST:PORT or ray://HOST:PORT; for dask also tcp://HOST:PORT",
            'address: "ray://10.0.0.1:10001"',
        ),
        default=None,
    )
    placement: Literal["pack", "spread"] = key(
        Choice(*PLACEMENTS),
        Key(
            "How Ray places the workers, with `launcher: ray`: on as few nodes as have room (`pack`), or on "
            "as many (`spread`).",
            "pack or spread",
            "placement: spread",
            choices=PLACEMENTS,
        ),
        default="pack",
    )
    place_s: float = key(
        Number(PLACE_S_MAX, positive=True),
        Key(
            "How long Ray may take to have room for the workers, or Dask to have one of its own, in seconds.",
            "a number of seconds above 0",
            "place_s: 600",
        ),
        default=60.0,
    )


LAUNCHERS_OF = {
    "listen": ("connect", "ray", "dask"),
    "key_file": ("connect",),
    "rejoin_s": ("connect",),
    "address": ("ray", "dask"),
    "placement": ("ray",),
    "place_s": ("ray", "dask"),
}
"""The launchers that keys of a cluster go with, and that another launcher has from the spec alone."""


class SpecKeys(Section):
    """The keys at the top of a spec."""

    pipedist: int = key(
        Checked(_version, {"const": 1}),
        Key("The version of the language that the spec is written in.", "1", "pipedist: 1"),
    )
    name: str | None = key(
        Checked(_run_name, {"type": "string"}),
        Key(
            "What the run is called, in tables and in the default output folder. Default: the file's name "
            "without its ending.",
            f"a text of at most {NAME_CHARACTERS_MAX} characters that can be a folder's name, and does not "
            "begin with `.` or `-`",
            "name: flight-delays",
        ),
        default=None,
    )
    params: dict[str, Any] = key(
        MappingOf(Anything()),
        Key(
            "Parameters and their defaults, read as `${params.NAME}`, overridden with `--set NAME=VALUE`.",
            "a mapping of names to values",
            "params: {late_after_min: 15}",
        ),
        default={},
    )
    replicas: int = key(
        Integer(1, REPLICAS_MAX),
        Key(
            "Shards per step: logical, part of the result, and NOT the number of processes.",
            f"an integer from 1 to {REPLICAS_MAX}",
            "replicas: 4",
        ),
        default=1,
    )
    seed: int = key(
        Integer(0, 2**64 - 1),
        Key(
            "Where all randomness comes from: shuffling, and `ctx.rng` of each call.",
            "an integer from 0 to 2**64 - 1",
            "seed: 7",
        ),
        default=0,
    )
    code: str = key(
        PathText,
        Key(
            "The folder of your modules, relative to the spec's own, which `.` is; it is searched last.",
            "a folder",
            "code: src",
        ),
        default=".",
    )
    threads_per_replica: int = key(
        Integer(1, THREADS_MAX),
        Key(
            "BLAS and OpenMP threads of each replica call; part of the result, because they change its last "
            "bits.",
            f"an integer from 1 to {THREADS_MAX}",
            "threads_per_replica: 2",
        ),
        default=1,
    )
    cluster: ClusterSpec = key(
        SectionOf(ClusterSpec),
        Key(
            "Where workers come from; it never changes a result.",
            "a mapping of cluster keys",
            "cluster: {launcher: local, workers: 4}",
        ),
        default=ClusterSpec.read({}, []),
    )
    dataset: dict[str, Any] | None = key(
        Nullable(MappingOf(Anything())),
        Key(
            "The only dataset of the spec; short for `datasets: {dataset: {...}}`.",
            "a mapping with one source key and `batch`",
            "dataset: {range: 10, batch: 4}",
        ),
        default=None,
    )
    datasets: dict[str, Any] | None = key(
        Nullable(MappingOf(Anything())),
        Key(
            "The datasets, by name. They share their names with the stages.",
            "a mapping of names to datasets",
            "datasets: {train: {range: 10, batch: 4}, test: {range: 5, batch: 5}}",
        ),
        default=None,
    )
    stages: dict[str, Any] = key(
        MappingOf(Anything(), items_min=1),
        Key(
            "The stages, by name. Names connect them; the order of writing means nothing.",
            "a mapping of names to stages",
            "stages: {total: {reduce: sum, of: dataset, axis: 0}}",
        ),
    )
    outputs: dict[str, str] = key(
        MappingOf(Text()),
        Key(
            "The files that finished values are written to, below the output folder: the name of a reduce, "
            "gather or update, and a path whose ending chooses the format.",
            "a mapping of stage names to relative paths",
            "outputs: {total: total.json}",
        ),
        default={},
    )
