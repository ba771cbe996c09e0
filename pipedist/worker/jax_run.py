"""Execution of gang leases whose replicas are one JAX program; see `pipedist.worker.jax_program`."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np

from pipedist.collectives.channel import WORD_BYTES, Channel, GangAborted
from pipedist.core.platform_id import kernel_boot
from pipedist.core.types import Tree
from pipedist.protocol.codec import decode, encode
from pipedist.protocol.program import JaxDevices
from pipedist.worker import jax_mesh, jax_program
from pipedist.worker.devices import DevicesUnseen
from pipedist.worker.failures import CallFailure
from pipedist.worker.gangs import GangRun
from pipedist.worker.jax_arguments import ReplicaArguments
from pipedist.worker.jax_mesh import Host, Mesh
from pipedist.worker.jax_program import NeedsAll
from pipedist.worker.outcomes import Result
from pipedist.worker.stages import Call, GangCallContext, Stage

Group = Sequence[Sequence[ReplicaArguments]]  # the arguments of each replica, in each step
_WORD: Final = b"jax".ljust(WORD_BYTES, b".")  # the members agree on a mesh and a program

_held: dict[int, tuple[Host, tuple[Any, ...], Any]] = {}
"""The latest values of variables: the array of the host, and its copies on devices; of one step's variables."""


@dataclass(eq=False)
class JaxRun(GangRun):
    """The execution of a lease of a gang on JAX devices; used like a `GangRun`."""

    mesh: Mesh = field(init=False)  # if there are other members, not before they have joined
    exchanges: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channel is None:
            self.mesh = jax_mesh.start(self._devices, self.local)

    @property
    def _devices(self) -> JaxDevices:
        devices = self.executor.program.jax
        assert devices is not None  # its caller has checked
        return devices

    def _execute(self) -> dict[int, Result | CallFailure]:
        executor = self.executor
        calls: list[Call] = []
        for number in range(self._next, self.hi):
            replica = number % executor.program.replicas
            variables = None if self.bound is None else self.bound.of(replica)
            device = self.factory.device_of(executor, replica)
            calls.append(executor.call(number, GangCallContext(_no_collectives, device, variables)))
        self.begin(self._next)
        returned = False
        try:
            if self.channel is not None:
                self._join(self.channel)
            results = executor.run_at_once(calls, self.shards, partial(self._stage, calls))
            returned = True
        except DevicesUnseen:
            raise
        except BaseException as error:  # an outcome; the scheduler decides
            if self.channel is not None and _is_broken(error):
                raise DevicesUnseen(
                    f"the mesh of {self.channel.members} processes is broken: {error}"
                ) from error
            return {call.number: self._failure(call, error) for call in calls}
        finally:
            if self.channel is not None:
                self.channel.ended(returned=returned)
                self.channel.close()
        if self.on_success is not None:
            self.on_success()
        return {call.number: result for call, result in zip(calls, results, strict=True)}

    def _share(self, channel: Channel, value: Tree) -> list[Any]:
        """Send a value to all members; return the values of all."""
        self.exchanges += 1
        policy = self.gang.patience("the mesh of a TPUStrategy")
        found = channel.exchange(self.exchanges, _WORD, encode(value), policy)
        if found.frames is None:
            raise GangAborted("a member has left the mesh")
        return [decode(list(frames)) for frames in found.frames]

    def _join(self, channel: Channel) -> None:
        """Join the other members: as in the last step, or all anew, in processes that have not started jax."""
        known = jax_mesh.joined()
        boot, host = kernel_boot(), socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))  # a free port
            port = probe.getsockname()[1]
        identity = secrets.token_hex(8)
        mine = {"joined": known, "boot": boot, "host": host, "port": port, "identity": identity}
        shared = self._share(channel, mine)
        if all(each["joined"] is None for each in shared):
            first = shared[0]
            is_local = bool(boot) and all(each["boot"] == boot for each in shared)
            address = "127.0.0.1" if is_local else socket.gethostbyname(first["host"])
            peers = jax_mesh.Peers(
                first["identity"], f"{address}:{first['port']}", channel.member, channel.members
            )
        elif known and all(each["joined"] == known for each in shared):
            self.mesh = jax_mesh.start(self._devices, self.local, jax_mesh.peers())
            return
        elif known is None:
            raise GangAborted("other members of the mesh begin anew")
        else:
            raise DevicesUnseen("the mesh has other members than before")
        self.mesh = jax_mesh.start(self._devices, self.local, peers)
        self.mesh.connect()

    def abandon(self) -> None:
        """Do nothing: a program on devices ends by itself, and its results are dropped."""

    def _stage(self, calls: Sequence[Call], stage: Stage, values: Sequence[Tree]) -> list[Tree]:
        """Execute a stage's function on the values of all local replicas; return their results."""
        if stage.program.form != "apply":
            steps = [[stage.arguments(value) for value in values]]
            return [result for [result] in self._steps(calls, stage, calls[0].step, steps)]
        first = values[0][0]
        steps = [
            [stage.arguments(each) for each in row] for row in zip(*(own for _, own in values), strict=True)
        ]
        return self._steps(calls, stage, first, steps)

    def _steps(self, calls: Sequence[Call], stage: Stage, first: int, steps: Sequence[Any]) -> list[Tree]:
        """Execute steps, given the arguments of each replica in each; return a list of results per replica."""
        results: list[list[Tree]] = [[] for _ in calls]
        state = _State(self, calls)
        prepared = [ReplicaArguments.all_of(arguments) for arguments in steps]
        groups: list[list[list[ReplicaArguments]]] = []
        for each in prepared:
            if groups and _is_uniform(each) and _is_uniform(groups[-1][0]) and each[0].like(groups[-1][0][0]):
                groups[-1].append(each)
            else:
                groups.append([each])
        is_apart = False
        if self.channel is not None:
            mine = [[each[0][0].signature.digest, len(each), _is_uniform(each[0])] for each in groups]
            whole = [group for group in groups if _is_uniform(group[0])]
            ready = all(state.program(stage, group).is_ready for group in whole)
            shared = self._share(self.channel, [mine, ready])
            if any(other != mine for other, _ in shared):
                groups, is_apart = [[each] for each in prepared], True
            elif not all(is_ready for _, is_ready in shared):
                for group in whole:
                    state.trace(stage, first, group)
                self._share(self.channel, None)  # a member whose function hangs is missing here
                for group in whole:
                    state.program(stage, group).is_ready = True
        for group in groups:
            execute = state.apart if is_apart or not _is_uniform(group[0]) else state.together
            for own, new in zip(results, execute(stage, first, group), strict=True):
                own += new
            first += len(group)
        return results


class _State:
    """The values of the variables while the steps of a lease are executed."""

    def __init__(self, run: JaxRun, calls: Sequence[Call]) -> None:
        self._run = run
        self._replicas = [
            c.gang.variables for c in calls if c.gang is not None and c.gang.variables is not None
        ]
        self._traits = {} if run.bound is None else run.bound.traits
        self._program = run.executor.program

    def program(self, stage: Stage, group: Group) -> jax_program.CompiledFunction:
        return jax_program.program(
            stage,
            group[0][0].signature,
            self._traits,
            self._run.mesh,
            replicas=self._program.replicas,
            steps=len(group),
        )

    def trace(self, stage: Stage, first: int, group: Group) -> None:
        self.program(stage, group).trace(*self._inputs(first, group))

    def _inputs(self, first: int, group: Group) -> tuple[Any, ...]:
        mesh, steps = self._run.mesh, len(group)

        def column(at: int) -> Any:
            each = [row[replica].arrays[at] for replica in range(len(group[0])) for row in group]
            whole = np.stack(each)
            return mesh.put(whole if steps == 1 else whole.reshape(-1, steps, *whole.shape[1:]))

        arrays = [column(at) for at in range(len(group[0][0].arrays))]

        def copies(space: int) -> Any:
            host = self._replicas[0].value(space)
            if space not in _held or _held[space][0] is not host or _held[space][1] != mesh.devices:
                _held[space] = host, mesh.devices, mesh.put_copies(host)
            return _held[space][2]

        shared = {space: copies(space) for space, each in self._traits.items() if not each.copies}
        own = {
            s: mesh.put(np.stack([r.value(s) for r in self._replicas]))
            for s, t in self._traits.items()
            if t.copies
        }
        for space in _held.keys() - shared.keys() if shared else ():
            del _held[space]
        return first, arrays, group[0][0].numbers, shared, own

    def together(self, stage: Stage, first: int, group: Group) -> list[list[Tree]]:
        mesh, steps, program = self._run.mesh, len(group), self.program(stage, group)
        found, changed, changed_own = program(*self._inputs(first, group))
        parts = [mesh.parts(each) for each in found]
        for space, value in changed.items():
            new = _host(np.asarray(value.addressable_shards[0].data))
            for replica in self._replicas:
                replica.changed[space] = new
            _held[space] = new, mesh.devices, value
        for space, value in changed_own.items():
            for replica, part in zip(self._replicas, mesh.parts(value), strict=True):
                replica.changed[space] = _host(part)
        count = len(mesh.local)
        if steps == 1:
            return [[program.results([part[r] for part in parts])] for r in range(count)]
        return [[program.results([part[r][k] for part in parts]) for k in range(steps)] for r in range(count)]

    def apart(self, stage: Stage, first: int, group: Group) -> list[list[Tree]]:
        """Execute one step whose replicas have arguments of different shapes."""
        mesh, library, [row] = self._run.mesh, jax_mesh.jax(), group
        results: list[list[Tree]] = []
        stopped: dict[int, NeedsAll] = {}
        local = [device for device in mesh.devices if device.process_index == library.process_index()]
        for place, (replica, call, device) in enumerate(zip(mesh.local, row, local, strict=True)):
            program = jax_program.program(
                stage,
                call.signature,
                self._traits,
                mesh,
                replicas=self._program.replicas,
                together=False,
            )
            values = {space: self._replicas[place].value(space) for space in self._traits}
            inputs = library.device_put((replica, first, call.arrays), device)
            try:
                found, changed = program(*inputs, call.numbers, library.device_put(values, device))
            except NeedsAll as error:
                stopped[replica] = error
                continue
            for space, value in changed.items():
                self._replicas[place].changed[space] = _host(np.asarray(value))
            results.append([program.results([_scalar(np.asarray(each)) for each in found])])
        if stopped:
            kind = next(iter(stopped.values())).args[0]
            lines = [
                f"  replica {replica}: {stopped[replica].args[1] if replica in stopped else 'no collective'}; its "
                f"arguments: {call.signature}"
                for replica, call in zip(mesh.local, row, strict=True)
            ]
            raise ValueError(
                f"{kind} needs tensors of the same rank and shape in all replicas of a TPUStrategy, and so do the "
                "arguments of its function:\n"
                + "\n".join(lines)
                + "\nPad the arguments, or drop the incomplete "
                "batch: Dataset.batch(n, drop_remainder=True)"
            )
        return results


def _is_broken(error: BaseException) -> bool:
    """Return whether an error means that a process of this one's mesh is gone.

    Then a new process replaces this one at once, so that it is there when the next attempt begins.
    """
    if isinstance(error, GangAborted):
        return bool(jax_mesh.joined())
    return isinstance(error, jax_mesh.jax().errors.JaxRuntimeError)


def _is_uniform(calls: Sequence[ReplicaArguments]) -> bool:
    return all(call.like(calls[0]) for call in calls)


def _host(value: Any) -> Host:
    array = np.array(value)
    array.flags.writeable = False
    return array


def _scalar(array: Host) -> Any:
    return array[()] if array.ndim == 0 else array


def _no_collectives(_is_async: bool) -> NoReturn:
    raise AssertionError("the context of a compiled function is a TracedContext")
