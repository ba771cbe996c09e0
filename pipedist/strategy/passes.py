"""The passes that `Strategy.run` keeps open: one for each function it was recently called with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipedist.collectives.options import CommunicationOptions
from pipedist.core.types import FunctionRef
from pipedist.protocol.program import Emit, Program, StageProgram
from pipedist.scheduler import PassSettings
from pipedist.worker.variables import replica as variables

if TYPE_CHECKING:
    from pipedist.coordinator import Coordinator, PassHandle

PASSES_MAX: Final = 64
"""Functions that are kept loaded in the workers; beyond that, the one unused for longest is dropped."""

SLOT: Final = "value"
"""Name under which a call sends back what the function returned."""

_SEED_SHIFT: Final = 32


@dataclass(slots=True)
class _Open:
    """A pass, and how many runs are using it now."""

    handle: PassHandle
    users: int = 0


class Passes:
    """Opens a pass for a function, and keeps it for the next run of the same function.

    The same function means: the same reference. One that travels by value is pickled for each run, so
    that what it has captured is what it captures NOW, and a change makes it another function.

    Args:
        coordinator: the cluster's.
        replicas: R.
        seed: pass number p gets the seed `seed * 2**32 + p`, so that `ctx.rng` differs between
            functions, and between the runs of one.
        gang: the calls of a step run at once, and may call collectives.
        devices: of the replicas, for `ctx.device`; empty: not said.
        communication: the options of collectives that say none themselves.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        replicas: int,
        seed: int,
        *,
        gang: bool = False,
        devices: tuple[str, ...] = (),
        communication: CommunicationOptions | None = None,
    ) -> None:
        options = communication or CommunicationOptions()
        self.coordinator = coordinator
        self._replicas = replicas
        self._seed = seed
        self._gang = gang
        self._devices = devices
        self._communication = (options.bytes_per_pack, options.timeout_s, options.implementation.value)
        self._opened = 0
        self._open: OrderedDict[FunctionRef, _Open] = OrderedDict()

    @contextmanager
    def using(self, function: FunctionRef) -> Iterator[PassHandle]:
        """Give a function's pass; it stays open at least as long as the `with` block.

        A pass that fails as a whole is not kept: the next run of the function gets a new one.
        """
        entry = self._open.get(function)
        if entry is None:
            entry = self._open[function] = _Open(self._new(function))
        self._open.move_to_end(function)
        entry.users += 1
        try:
            yield entry.handle
        finally:
            entry.users -= 1
            if entry.handle.has_failed:  # an error of one step is no matter of the others
                if self._open.get(function) is entry:
                    del self._open[function]
                entry.handle.close()
            if len(self._open) > PASSES_MAX:
                self._shrink()

    def close(self) -> None:
        """Close every pass; what is running of them fails."""
        while self._open:
            self._open.popitem(last=False)[1].handle.close()

    def _new(self, function: FunctionRef) -> PassHandle:
        stage = StageProgram(
            name=function.label, function=function, of=-1, kwargs={}, form="apply", collectives=self._gang
        )
        emits = (
            (Emit(SLOT, of=0), Emit(variables.SLOT, of=variables.EMIT_OF))
            if self._gang
            else (Emit(SLOT, of=0),)
        )
        program = Program(
            seed=(self._seed << _SEED_SHIFT) + self._opened,
            replicas=self._replicas,
            reader=None,
            stages=(stage,),
            emits=emits,
            gang=self._gang,
            devices=self._devices,
            communication=self._communication,
        )
        self._opened += 1
        settings = PassSettings(
            replicas=self._replicas, ordered=False, fail_fast=False, pulled=False, gang=self._gang
        )
        return self.coordinator.open_pass(program, name=function.label, settings=settings)

    def _shrink(self) -> None:
        idle = [function for function, entry in self._open.items() if entry.users == 0]
        for function in idle[: len(self._open) - PASSES_MAX]:
            self._open.pop(function).handle.close()
