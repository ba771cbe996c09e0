"""The passes that `Strategy.run` keeps open, one per function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipedist.collectives.options import CommunicationOptions
from pipedist.core.misuse_hints import require_loop, running_loop
from pipedist.core.types import FunctionRef
from pipedist.protocol.program import Emit, JaxDevices, Program, StageProgram
from pipedist.reduction.tree import Reduction
from pipedist.scheduler import PassSettings
from pipedist.worker.variables import replica as variables

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator, PassHandle

PASSES_MAX: Final = 64  # functions kept loaded in the workers; the least recently used one is dropped
SLOT: Final = "value"  # name of a function's result in the message of a call
PARTIAL: Final = "partial"  # name of its partial, if workers reduce it

_SEED_SHIFT: Final = 32
_Key = tuple[FunctionRef, Reduction | None]


@dataclass(slots=True)
class _OpenPass:
    """A pass, and the number of runs that use it."""

    key: _Key
    handle: PassHandle
    users: int = 0
    may_group: bool = True  # see `UsedPass`


class UsedPass:
    """A pass in use; as a context manager, which is entered once, its handle.

    The use ends with the `with` block, or with this object: the results of a run may never be fetched.
    """

    __slots__ = ("_entry", "_is_used", "_used")

    def __init__(self, entry: _OpenPass, used: Callable[[_OpenPass], None]) -> None:
        self._entry = entry
        self._used = used
        self._is_used = False

    def __enter__(self) -> PassHandle:
        self._is_used = True
        self._entry.users += 1
        return self._entry.handle

    @property
    def may_group(self) -> bool:
        """Whether several steps may be sent at once: none has failed, or needed the other replicas."""
        return self._entry.may_group

    def forbid_groups(self) -> None:
        self._entry.may_group = False

    def __exit__(self, *_error: object) -> None:
        if self._is_used:
            self._is_used = False
            self._entry.users -= 1
            self._used(self._entry)

    def __del__(self) -> None:
        if self._is_used:
            self.__exit__()


class FunctionPasses:
    """Opens a pass for a function, and keeps it open for later runs of the same function.

    Functions are the same if their references are equal: a function that is sent by value, and whose
    captured objects have changed, is another function. Pass number p gets the seed `seed * 2**32 + p`, so that
    `ctx.rng` differs between functions, and between the runs of one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        replicas: int,
        seed: int,
        *,
        gang: bool = False,  # the calls of a step run at the same time, and may call collectives
        devices: tuple[str, ...] = (),  # one for each replica, for `ctx.device`; empty: the CPU
        communication: CommunicationOptions | None = None,  # of collectives without options of their own
        jax: JaxDevices | None = None,  # functions are compiled for these devices
    ) -> None:
        options = communication or CommunicationOptions()
        self.coordinator = coordinator
        self._loop = running_loop()
        self._replicas = replicas
        self._seed = seed
        self._gang = gang
        self._devices = devices
        self._communication = (options.bytes_per_pack, options.timeout_s, options.implementation.value)
        self._jax = jax
        self._opened = 0
        self._open: OrderedDict[_Key, _OpenPass] = OrderedDict()

    def using(self, function: FunctionRef) -> UsedPass:
        """Return a context manager of the pass of a function.

        It stays open at least until the `with` block ends. A pass that fails as a whole is dropped: the next run of the
        function opens a new one. Raises UsageError in another event loop than the cluster's.
        """
        require_loop(self._loop)
        return UsedPass(self._entry((function, None)), self._used)

    def enter(self, function: FunctionRef, reduction: Reduction | None = None) -> _OpenPass:
        """Return the pass of a function, whose results workers may reduce; it stays open at least until `leave`.

        For coroutines; otherwise as `using`.
        """
        import asyncio  # loaded already

        if asyncio.get_running_loop() is not self._loop:
            require_loop(self._loop)
        entry = self._entry((function, reduction))
        entry.users += 1
        return entry

    def leave(self, entry: _OpenPass) -> None:
        entry.users -= 1
        self._used(entry)

    def _entry(self, key: _Key) -> _OpenPass:
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = _OpenPass(key, self._new(*key))
        self._open.move_to_end(key)
        return entry

    def _used(self, entry: _OpenPass) -> None:
        if entry.handle.has_failed:  # the error of a single step does not affect others
            if self._open.get(entry.key) is entry:
                del self._open[entry.key]
            entry.handle.close()
        if len(self._open) > PASSES_MAX:
            idle = [each for each, opened in self._open.items() if opened.users == 0]
            for each in idle[: len(self._open) - PASSES_MAX]:
                self._open.pop(each).handle.close()

    def close(self) -> None:
        """Close every pass; their running calls fail."""
        while self._open:
            self._open.popitem(last=False)[1].handle.close()

    def _new(self, function: FunctionRef, reduction: Reduction | None) -> PassHandle:
        name, gang = function.label, self._gang
        stage = StageProgram(name, function=function, of=-1, kwargs={}, form="apply", collectives=gang)
        result = Emit(SLOT, of=0)
        if reduction is not None:
            result = Emit(PARTIAL, of=0, op=reduction.op.value, axis=reduction.axis, whole=SLOT)
        assigned = Emit(variables.SLOT, of=variables.EMIT_OF)
        program = Program(
            seed=(self._seed << _SEED_SHIFT) + self._opened,
            replicas=self._replicas,
            reader=None,
            stages=(stage,),
            emits=(result, assigned) if gang else (result,),
            gang=gang,
            devices=() if self._jax else self._devices,
            communication=self._communication,
            jax=self._jax,
        )
        self._opened += 1
        settings = PassSettings(
            self._replicas,
            ordered=False,
            pulled=False,
            gang=gang,
            members=0 if self._jax is None else self._jax.hosts,
        )
        return self.coordinator.open_pass(program, name=name, settings=settings)
