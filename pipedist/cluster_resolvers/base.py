"""What every cluster resolver can tell (tf.distribute.cluster_resolver.ClusterResolver)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import SupportsIndex

from pipedist.cluster_resolvers.cluster_spec import ClusterSpec
from pipedist.errors import UsageError


class ResolverError(UsageError, ValueError):
    """What a resolver was told, or found in the environment, is malformed: the text names it."""


class ResolverStateError(UsageError, RuntimeError):
    """What a resolver needs is not there, or not yet: a variable, a running pod, tasks or GPUs enough."""


class ClusterResolver(ABC):
    """Knows the tasks of a cluster, and which of them this process is.

    What a kind of resolver knows beyond the tasks' addresses it sets when it is made; the rest stays unknown.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _environment: str | None = ""
    _rpc_layer: str | None = None
    _num_accelerators: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, as they are now."""

    @abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type, task_id: which one; None: the resolver's own choice.
            rpc_layer: put in front: "grpc" gives `grpc://HOST:PORT`; "": nothing; None: the resolver's.

        Returns:
            The address; nothing behind the layer where the resolver knows of no master, as in tf.distribute.

        Raises:
            ValueError: there is no such task.
        """

    @property
    def task_type(self) -> str | None:
        """The job of this process; None: unknown."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job; None: unknown."""
        return self._task_id

    @property
    def environment(self) -> str | None:
        """Where the cluster runs, as it was told; "" or None: unknown."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """What `master` puts in front of addresses; None: nothing."""
        return self._rpc_layer

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return kind of accelerator -> how many a task has, as far as the resolver was told.

        Args:
            task_type, task_id: which one; all tasks have the same.
        """
        return dict(self._num_accelerators)

    def _url(self, address: str, rpc_layer: str | None) -> str:
        """Return an address, behind the layer that `master` was told, or its own."""
        layer = self._rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, task {self.task_type} {self.task_id}>"


def text_or_none(name: str, value: object) -> str | None:
    """Return an argument that is text, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; expected text")
    return value


def number_or_none(name: str, value: object, *, at_least: int = 0) -> int | None:
    """Return an argument that is an int, or None.

    Raises:
        TypeError: it is something else; bool counts as no int.
        ResolverError: it is smaller than `at_least`.
    """
    return None if value is None else number(name, value, at_least=at_least)


def number(name: str, value: object, *, at_least: int = 0) -> int:
    """Return an argument that is an int.

    Raises:
        TypeError: it is something else; bool counts as no int.
        ResolverError: it is smaller than `at_least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value.__index__() < at_least:
        raise ResolverError(f"{name} is {value!r}; expected an int >= {at_least}")
    return value.__index__()


def accelerators(value: Mapping[str, int] | None) -> dict[str, int]:
    """Return an argument that says how many accelerators of each kind there are.

    Raises:
        TypeError: it is no mapping, or a number is no int.
        ResolverError: a number is negative.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"num_accelerators is {value!r}; expected a mapping such as {{'GPU': 2}}")
    return {kind: number(f"num_accelerators[{kind!r}]", count) for kind, count in value.items()}
