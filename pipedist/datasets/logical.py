"""`Dataset`: a small, NumPy-valued tf.data for the Strategy API.

A Dataset is a description: it can be iterated any number of times, each time from the start, and
rewritten for an input pipeline (`pipedist.datasets.sharding`). Elements are trees of NumPy arrays
and scalars. Semantics and names are those of tf.data; misuse that tf.data tolerates is an error.
"""

from __future__ import annotations

import glob as globbing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

from pipedist.core.arguments import check_int
from pipedist.core.misuse_hints import TfNames
from pipedist.core.types import Tree
from pipedist.datasets import nodes, transforms
from pipedist.datasets.element import as_element
from pipedist.datasets.input import AutoShardPolicy
from pipedist.datasets.sources.base import SourceReader

_PREFETCHED: Final = 2  # elements, with AUTOTUNE


class Dataset(TfNames):
    """A finite or infinite sequence of elements of one structure.

    Static methods (`range`, `from_tensor_slices`, `list_files`, ...) create one; the other methods
    return a transformed one.

    Example:
        data = pipedist.Dataset.from_tensor_slices({"x": x, "y": y}).batch(64)
        async for batch in strategy.distribute_dataset(data):
            losses = await strategy.run(step, args=(batch,))
    """

    __slots__ = ("_node", "_policy", "_spec")

    _tf_names: ClassVar = {
        "as_numpy_iterator": "`for element in dataset`",
        "shuffle": "permute the arrays first: `from_tensor_slices(x[rng.permutation(len(x))])`",
    }

    AUTOTUNE: Final = -1  # in `prefetch`: pipedist chooses the size

    INFINITE: Final = nodes.INFINITE  # `cardinality()` of a dataset that never ends

    UNKNOWN: Final = nodes.UNKNOWN  # `cardinality()` of a dataset whose length is unknown before reading

    SHARD_HINT: Final = transforms.SHARD_HINT
    """In `shard(SHARD_HINT, SHARD_HINT)`, which policy HINT replaces by real numbers."""

    def __init__(self, node: nodes.Node, policy: AutoShardPolicy = AutoShardPolicy.AUTO) -> None:
        if not isinstance(node, nodes.Node):
            raise TypeError("a Dataset is created by Dataset.range, Dataset.from_tensor_slices, ...")
        self._node = node
        self._policy = policy
        self._spec: tuple[Tree] | None = None

    # Sources.

    @staticmethod
    def range(*args: int) -> Dataset:
        """Return int64 scalars: range(stop), range(start, stop) or range(start, stop, step)."""
        return Dataset(nodes.RangeNode(range(*args)))

    @staticmethod
    def from_tensor_slices(tensors: Tree) -> Dataset:
        """Return the slices of a tree of arrays along their first axis.

        Args:
            tensors: arrays [n, ...] in tuples and dicts; a list is stacked to one array. The arrays
                are not copied, and must not be changed afterwards.

        Raises:
            ValueError: a leaf is a scalar, or lengths differ.
            TypeError: a leaf has no NumPy dtype.
        """
        return Dataset(nodes.SlicesNode.of(tensors))

    @staticmethod
    def from_tensors(tensors: Tree) -> Dataset:
        """Return a dataset of one element.

        Args:
            tensors: the element, as for `from_tensor_slices`.
        """
        return Dataset(nodes.SingleNode(as_element(tensors)))

    @staticmethod
    def from_generator(
        generator: Callable[[], Iterable[Any]], element_spec: Tree | None = None, *, batched: bool = False
    ) -> Dataset:
        """Return the elements that an iterable yields.

        Args:
            generator: called for each iteration, without arguments; returns an iterable.
            element_spec: tree of ArraySpec of an element; without it, the first two elements are
                read when it is needed.
            batched: True: each element is a global batch, which may be distributed as it is.

        Raises:
            TypeError: `generator` can't be called.
        """
        if not callable(generator):
            raise TypeError(
                f"from_generator needs a callable that returns an iterable, got {generator!r}: a bare "
                "iterator could be read only once"
            )
        return Dataset(nodes.GeneratorNode(generator, element_spec, batched))

    @staticmethod
    def from_source(reader: SourceReader) -> Dataset:
        """Return the elements of a reader, which is also a source of specs.

        Args:
            reader: an object with `__len__()` and `read(ids)`; see `pipedist.SourceReader`. It is read in this process.

        Raises:
            TypeError: one of the methods is missing.
        """
        if not isinstance(reader, SourceReader):
            raise TypeError(
                f"from_source needs an object with `__len__` and `read`, got {reader!r} of type {type(reader).__name__}"
            )
        return Dataset(nodes.SourceNode(reader, len(reader)))

    @staticmethod
    def list_files(pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Dataset:
        """Return the names of the files that match, sorted; auto-sharding may divide them (FILE).

        Args:
            pattern: a glob (`**` is recursive), or several.

        Raises:
            ValueError: nothing matches.
        """
        found: set[str] = set()
        for one in _paths(pattern):
            matches = globbing.glob(one, recursive=True)
            if not matches:
                raise ValueError(f"no file matches {one!r} (in {os.getcwd()})")
            found.update(matches)
        return Dataset(nodes.FileNamesNode(tuple(sorted(found))))

    @staticmethod
    def file_names(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Dataset:
        """Return the names of files, in the order given; auto-sharding may divide them (FILE)."""
        return Dataset(nodes.FileNamesNode(_paths(paths)))

    @staticmethod
    def text_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Dataset:
        """Return the lines of UTF-8 files, in the order of the files (tf.data.TextLineDataset).

        Accepts one path too, so that `flat_map` and `interleave` can call it.
        """
        return Dataset(nodes.TextFilesNode(_paths(paths)))

    @staticmethod
    def zip(*datasets: Dataset | tuple[Dataset, ...]) -> Dataset:
        """Return tuples of one element of each dataset, as many as the shortest has.

        Args:
            datasets: the datasets, or one tuple of them.
        """
        parts = datasets[0] if len(datasets) == 1 and isinstance(datasets[0], tuple) else datasets
        if not parts:
            raise ValueError("zip needs at least one dataset")
        inputs = [_dataset("zip", part) for part in parts]
        node = transforms.ZipNode(tuple(each.node for each in inputs))
        return Dataset(node, _last_set(*(each.auto_shard_policy for each in inputs)))

    # Transformations.

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements.

        Args:
            batch_size: elements of a batch, at least 1; for distribution, of a global batch.
            drop_remainder: drop a shorter last batch.
        """
        size = check_int("batch_size", batch_size, at_least=1)
        return self._then(transforms.BatchNode(self._node, size, bool(drop_remainder)))

    def padded_batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements of unequal shapes, padded at the end with 0, False or ""."""
        size = check_int("batch_size", batch_size, at_least=1)
        return self._then(transforms.BatchNode(self._node, size, bool(drop_remainder), padded=True))

    def unbatch(self) -> Dataset:
        """Return the rows of each element."""
        return self._then(transforms.UnbatchNode(self._node))

    def repeat(self, times: int | None = None) -> Dataset:
        """Return the dataset `times` times in a row; None or -1: without end."""
        times = (
            nodes.INFINITE
            if times is None or times == nodes.INFINITE
            else check_int("times", times, at_least=0)
        )
        return self._then(transforms.RepeatNode(self._node, times))

    def take(self, elements: int) -> Dataset:
        """Return the first `elements` elements; -1: all of them."""
        if elements == nodes.INFINITE and type(elements) is int:
            return self
        return self._then(transforms.TakeNode(self._node, check_int("elements", elements, at_least=0)))

    def skip(self, elements: int) -> Dataset:
        """Skip the first `elements` elements; -1: all of them."""
        if elements == nodes.INFINITE and type(elements) is int:
            return self.take(0)
        return self._then(transforms.SkipNode(self._node, check_int("elements", elements, at_least=0)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return elements `index`, `index + num_shards`, ...

        Args:
            num_shards: at least 1, or SHARD_HINT.
            index: 0 to num_shards - 1, or SHARD_HINT.

        Raises:
            ValueError: a number is out of range. With SHARD_HINT, reading the dataset raises
                RuntimeError unless policy HINT has replaced it.
        """
        if num_shards == transforms.SHARD_HINT:
            return self._then(transforms.ShardNode(self._node, num_shards, index))
        shards = check_int("num_shards", num_shards, at_least=1)
        place = check_int("index", index, at_least=0)
        if place >= shards:
            raise ValueError(f"index is {place}, but there are {shards} shards: expected 0 to {shards - 1}")
        return self._then(transforms.ShardNode(self._node, shards, place))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Read up to `buffer_size` elements ahead, in a thread; the elements stay the same.

        Args:
            buffer_size: 0: read none ahead; AUTOTUNE (-1), as in tf.data: two.
        """
        size = check_int("buffer_size", buffer_size, at_least=self.AUTOTUNE)
        if size == 0:
            return self._then(self._node)
        return self._then(transforms.PrefetchNode(self._node, _PREFETCHED if size == self.AUTOTUNE else size))

    def cache(self) -> Dataset:
        """Cache the elements in memory during the first complete pass."""
        return self._then(transforms.CacheNode(self._node))

    def enumerate(self, start: int = 0) -> Dataset:
        """Return pairs (number, element), numbered from `start` as int64."""
        return self._then(transforms.EnumerateNode(self._node, int(start)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return this dataset, then another one of the same structure."""
        second = _dataset("concatenate", dataset)
        node = transforms.ConcatenateNode((self._node, second.node))
        return Dataset(node, _last_set(self._policy, second.auto_shard_policy))

    def map(self, fn: Callable[..., Any], *, element_spec: Tree | None = None) -> Dataset:
        """Return `fn` of each element.

        Args:
            fn: called with the element; a tuple is unpacked into arguments. It may return a tree,
                in which a list is stacked to one array.
            element_spec: tree of ArraySpec of the results; without it, `fn` is called on the first
                two elements when the spec is needed.
        """
        return self._then(transforms.MapNode(self._node, _function("map", fn), element_spec))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keep the elements for which `predicate` returns True; anything but a bool is an error."""
        return self._then(transforms.FilterNode(self._node, _function("filter", predicate)))

    def flat_map(self, fn: Callable[..., Dataset]) -> Dataset:
        """Return the elements of the datasets that `fn` returns for each element, one after the other."""
        return self.interleave(fn, cycle_length=1)

    def interleave(self, fn: Callable[..., Dataset], cycle_length: int = 2, block_length: int = 1) -> Dataset:
        """Return the elements of the datasets that `fn` returns for each element, in turns.

        Args:
            fn: called with an element; returns a Dataset.
            cycle_length: number of datasets that are open at a time.
            block_length: number of elements of a dataset before the turn of the next one.
        """
        _function("interleave", fn)

        def open_node(element: Tree) -> nodes.Node:
            return _dataset("the function of interleave or flat_map", transforms.apply(fn, element)).node

        cycle = check_int("cycle_length", cycle_length, at_least=1)
        block = check_int("block_length", block_length, at_least=1)
        return self._then(transforms.InterleaveNode(self._node, open_node, cycle, block))

    def with_options(self, *, auto_shard_policy: AutoShardPolicy | str) -> Dataset:
        """Set the division of the dataset among input pipelines.

        Args:
            auto_shard_policy: an AutoShardPolicy or its name; AUTO, the default, keeps what was set before.
        """
        return Dataset(self._node, _last_set(self._policy, AutoShardPolicy.of(auto_shard_policy)))

    # Properties.

    @property
    def element_spec(self) -> Tree:
        """The tree of ArraySpecs that fits every element.

        May read the first two elements, if user code makes them.

        Raises:
            ValueError: the dataset is empty, and the spec was not declared.
        """
        if self._spec is None:
            self._spec = (self._node.spec(),)
        return self._spec[0]

    def cardinality(self) -> int:
        """Return the number of elements, INFINITE (-1) or UNKNOWN (-2), without reading any."""
        return self._node.cardinality()

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The division of the dataset among input pipelines."""
        return self._policy

    @property
    def node(self) -> nodes.Node:
        """The last stage of the pipeline."""
        return self._node

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over the elements: trees of NumPy arrays and scalars."""
        return iter(self._node)

    def __repr__(self) -> str:
        return f"<Dataset {type(self._node).__name__.removesuffix('Node')}, cardinality {self.cardinality()}>"

    def _then(self, node: nodes.Node) -> Dataset:
        return Dataset(node, self._policy)


def _paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    if isinstance(paths, str | os.PathLike):
        return (os.fspath(paths),)
    return tuple(os.fspath(path) for path in paths)


def _last_set(*policies: AutoShardPolicy) -> AutoShardPolicy:
    """Return the last policy that is not the default: tf.data merges the options of all inputs so."""
    return next(
        (policy for policy in reversed(policies) if policy is not AutoShardPolicy.AUTO), AutoShardPolicy.AUTO
    )


def _dataset(maker: str, dataset: object) -> Dataset:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{maker}: expected a pipedist.Dataset, got {dataset!r} of type {type(dataset).__name__}"
        )
    return dataset


def _function(maker: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(f"{maker}: {fn!r} can't be called")
    return fn
