"""The division of a dataset among input pipelines and replicas.

An input pipeline is a logical reader; pipeline w of W feeds R replicas of its own, N = W * R in all.
Every global batch of m rows is divided into N chunks of ceil(m / N) rows, the last ones shorter or
empty. Batch boundaries are kept. Then the policy assigns the chunks:

| policy | pipeline w delivers |
|---|---|
| DATA | chunks w, w + W, w + 2W, ... of every batch |
| FILE | all chunks of the batches of files w, w + W, ... |
| OFF | all chunks: each element W times |
| HINT | all chunks, with `shard(SHARD_HINT, SHARD_HINT)` replaced by shard(W, w) |
| AUTO | as FILE if every source reads files, at least W of them, and nothing is enumerated; else as DATA |

R consecutive chunks of a pipeline are one step of its replicas. The assignment is tf.distribute's; under
OFF, FILE and HINT its sizes are rounded down or up and cross batch boundaries, here one rule holds for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipedist.core.arguments import check_int
from pipedist.core.types import Tree
from pipedist.datasets.input import AutoShardPolicy
from pipedist.datasets.logical import Dataset
from pipedist.datasets.nodes import INFINITE, UNKNOWN, FilesNode, Node
from pipedist.datasets.transforms import EnumerateNode, RebatchNode, ShardNode


def auto_shard(
    dataset: Dataset, num_pipelines: int, index: int, policy: AutoShardPolicy | str | None = None
) -> Dataset:
    """Return the part of a dataset that input pipeline `index` of `num_pipelines` reads.

    ValueError: the policy is FILE, and the dataset does not read only files, or fewer than `num_pipelines` (for every
    index, before anything is read).
    """
    pipelines = check_int("num_pipelines", num_pipelines, at_least=1)
    place = check_int("index", index, at_least=0)
    if place >= pipelines:
        raise ValueError(
            f"index is {place}, but there are {pipelines} pipelines: expected 0 to {pipelines - 1}"
        )
    chosen = dataset.auto_shard_policy if policy is None else AutoShardPolicy.of(policy)
    return Dataset(_sharded(dataset.node, pipelines, place, chosen), dataset.auto_shard_policy)


def _sharded(node: Node, pipelines: int, index: int, policy: AutoShardPolicy) -> Node:
    if policy is AutoShardPolicy.HINT:
        return _with_hints(node, pipelines, index)
    if policy is AutoShardPolicy.OFF or pipelines == 1:
        return node
    if policy is AutoShardPolicy.DATA:
        return ShardNode(node, pipelines, index)
    problem = _file_problem(node, pipelines)
    if problem:
        if policy is AutoShardPolicy.FILE:
            raise ValueError(
                f"auto-shard policy FILE among {pipelines} input pipelines: {problem}; "
                "use AutoShardPolicy.DATA, or AUTO"
            )
        return ShardNode(node, pipelines, index)
    return _with_files(node, pipelines, index)


def _file_problem(node: Node, pipelines: int) -> str:
    """Return the reason why a pipeline can't be divided by whole files, or ""."""
    for source in _sources(node):
        if isinstance(source, EnumerateNode):
            return "enumerate numbers the elements of all files"
        if not isinstance(source, FilesNode):
            return (
                f"the dataset reads a source that is not files ({type(source).__name__.removesuffix('Node')})"
            )
        if len(source.paths) < pipelines:
            return f"the dataset reads {len(source.paths)} file(s), fewer than there are pipelines"
    return ""


def _sources(node: Node) -> Iterator[Node]:
    """Yield the sources, and the nodes that number elements."""
    if not node.inputs or isinstance(node, EnumerateNode):
        yield node
    for child in node.inputs:
        yield from _sources(child)


def _with_files(node: Node, pipelines: int, index: int) -> Node:
    if isinstance(node, FilesNode):
        return replace(node, paths=node.paths[index::pipelines])
    return node.with_inputs([_with_files(child, pipelines, index) for child in node.inputs])


def _with_hints(node: Node, pipelines: int, index: int) -> Node:
    node = node.with_inputs([_with_hints(child, pipelines, index) for child in node.inputs])
    if isinstance(node, ShardNode) and node.hinted:
        return ShardNode(node.input, pipelines, index)
    return node


def rebatch(dataset: Dataset, parts: int) -> Dataset:
    """Return each element divided into `parts` chunks of ceil(rows / parts), empty ones included."""
    return Dataset(
        RebatchNode(dataset.node, check_int("parts", parts, at_least=1)), dataset.auto_shard_policy
    )


def divide(dataset: Dataset, num_pipelines: int, replicas_per_pipeline: int) -> list[Dataset]:
    """Return the chunks of each input pipeline, R consecutive ones per step; ValueError if batches can't be divided."""
    if dataset.node.batch_depth == 0:
        raise ValueError(
            "a dataset is distributed by global batches, but this one is not batched: "
            "add .batch(global_batch_size)"
        )
    chunks = rebatch(dataset, num_pipelines * replicas_per_pipeline)
    return [auto_shard(chunks, num_pipelines, index) for index in range(num_pipelines)]


class MissingElement:
    """In place of the element of a replica whose pipeline has ended."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = MissingElement()


def steps(pipelines: Sequence[Dataset], replicas_per_pipeline: int) -> Iterator[list[Tree | MissingElement]]:
    """Yield the elements of all replicas per step, pipeline by pipeline, until all pipelines have ended.

    The element of a replica whose pipeline has ended is MISSING.
    """
    readers = [iter(pipeline) for pipeline in pipelines]
    while True:
        step: list[Tree | MissingElement] = [
            next(reader, MISSING) for reader in readers for _ in range(replicas_per_pipeline)
        ]
        if all(element is MISSING for element in step):
            return
        yield step


def steps_cardinality(pipelines: Sequence[Dataset], replicas_per_pipeline: int) -> int:
    """Return the number of `steps`, INFINITE or UNKNOWN."""
    counts = [pipeline.cardinality() for pipeline in pipelines]
    if INFINITE in counts:
        return INFINITE
    if UNKNOWN in counts:
        return UNKNOWN
    return max(-(-each // replicas_per_pipeline) for each in counts)
