"""The top of the language as frozen, strict types: every key, its type, default and account.

A model says what ONE section may hold; what sections say about each other (names, kinds,
cycles) is `pipedist.spec.checks`. Everything of version 1 is here, also what an engine can't
execute yet: that is for the plan to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from pipedist.spec.keys import Endpoint, Key, PathText, Section, wrong

REPLICAS_MAX = 65_536
WORKERS_MAX = 65_536
THREADS_MAX = 1_024
GRACE_S_MAX = 10_000_000
NAME_CHARACTERS_MAX = 100

LAUNCHERS = ("local", "connect", "ray", "dask", "slurm", "kubernetes")


def _version(value: object) -> object:
    if type(value) is int and value != 1:
        raise wrong(f"the spec is written in version {value} of the language")
    if type(value) is not int:
        raise wrong("")
    return value


def _run_name(value: object) -> object:
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= NAME_CHARACTERS_MAX
        or value[0] in ".-"
        or "/" in value
        or not value.isprintable()
    ):
        raise wrong("")
    return value


class ClusterSpec(Section):
    """Where workers come from; it never changes a result."""

    launcher: Annotated[
        Literal["local", "connect", "ray", "dask", "slurm", "kubernetes"],
        Key(
            "What starts the workers: processes on this host (`local`), hosts that dial in (`connect`), or a "
            "system that places them.",
            "local, connect, ray, dask, slurm or kubernetes",
            "launcher: local",
            choices=LAUNCHERS,
        ),
    ] = "local"
    workers: Annotated[
        Annotated[int, Field(ge=1, le=WORKERS_MAX)] | Literal["auto"],
        Key(
            "How many worker processes there are; `auto`: as many as usable cores. `--workers` overrides it.",
            "a positive number of processes, or auto",
            "workers: 4",
            choices=("auto",),
        ),
    ] = "auto"
    grace_s: Annotated[
        float,
        Key(
            "How long running calls may go on after the first SIGINT or SIGTERM, in seconds.",
            "a number of seconds, 0 or more",
            "grace_s: 10",
        ),
        Field(ge=0, le=GRACE_S_MAX, allow_inf_nan=False),
    ] = 10.0
    listen: Annotated[
        Endpoint | None,
        Key(
            "Where workers dial in, with `launcher: connect`: an address of this host and a port.",
            '"tcp://ADDRESS:PORT"',
            'listen: "tcp://10.0.0.1:5555"',
        ),
    ] = None
    key_file: Annotated[
        PathText | None,
        Key(
            "The file with the cluster's keys, with `launcher: connect`, relative to the spec's folder: only "
            "workers which have it may join.",
            "a path",
            "key_file: cluster.key",
        ),
    ] = None


class SpecKeys(Section):
    """The keys at the top of a spec."""

    pipedist: Annotated[
        int,
        PlainValidator(_version),
        WithJsonSchema({"const": 1}),
        Key("The version of the language that the spec is written in.", "1", "pipedist: 1"),
    ]
    name: Annotated[
        str | None,
        BeforeValidator(_run_name),
        Key(
            "What the run is called, in tables and in the default output folder. Default: the file's name "
            "without its ending.",
            f"a text of at most {NAME_CHARACTERS_MAX} characters that can be a folder's name, and does not "
            "begin with `.` or `-`",
            "name: flight-delays",
        ),
    ] = None
    params: Annotated[
        dict[str, Any],
        Key(
            "Parameters and their defaults, read as `${params.NAME}`, overridden with `--set NAME=VALUE`.",
            "a mapping of names to values",
            "params: {late_after_min: 15}",
        ),
    ] = Field({})
    replicas: Annotated[
        int,
        Key(
            "Shards per step: logical, part of the result, and NOT the number of processes.",
            f"an integer from 1 to {REPLICAS_MAX}",
            "replicas: 4",
        ),
        Field(ge=1, le=REPLICAS_MAX),
    ] = 1
    seed: Annotated[
        int,
        Key(
            "Where all randomness comes from: shuffling, and `ctx.rng` of each call.",
            "an integer from 0 to 2**64 - 1",
            "seed: 7",
        ),
        Field(ge=0, lt=2**64),
    ] = 0
    code: Annotated[
        PathText,
        Key(
            "The folder of your modules, relative to the spec's own, which `.` is; it is searched last.",
            "a folder",
            "code: src",
        ),
    ] = "."
    threads_per_replica: Annotated[
        int,
        Key(
            "BLAS and OpenMP threads of each replica call; part of the result, because they change its last "
            "bits.",
            f"an integer from 1 to {THREADS_MAX}",
            "threads_per_replica: 2",
        ),
        Field(ge=1, le=THREADS_MAX),
    ] = 1
    cluster: Annotated[
        ClusterSpec,
        Key(
            "Where workers come from; it never changes a result.",
            "a mapping of cluster keys",
            "cluster: {launcher: local, workers: 4}",
        ),
    ] = ClusterSpec()
    dataset: Annotated[
        dict[str, Any] | None,
        Key(
            "The only dataset of the spec; short for `datasets: {dataset: {...}}`.",
            "a mapping with one source key and `batch`",
            "dataset: {range: 10, batch: 4}",
        ),
    ] = None
    datasets: Annotated[
        dict[str, Any] | None,
        Key(
            "The datasets, by name. They share their names with the stages.",
            "a mapping of names to datasets",
            "datasets: {train: {range: 10, batch: 4}, test: {range: 5, batch: 5}}",
        ),
    ] = None
    stages: Annotated[
        dict[str, Any],
        Key(
            "The stages, by name. Names connect them; the order of writing means nothing.",
            "a mapping of names to stages",
            "stages: {total: {reduce: sum, of: dataset, axis: 0}}",
        ),
        Field(min_length=1),
    ]
    outputs: Annotated[
        dict[str, str],
        Key(
            "The files that finished values are written to, below the output folder: the name of a reduce, "
            "gather or update, and a path whose ending chooses the format.",
            "a mapping of stage names to relative paths",
            "outputs: {total: total.json}",
        ),
    ] = Field({})
