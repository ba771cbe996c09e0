"""The passes, leases and states that a worker holds, and the start of a lease's execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from pipedist.errors import LocalProtocolError, PipedistError, ProtocolError
from pipedist.protocol.messages import AssignGang, Quota, Relay, Retried
from pipedist.protocol.program import Shards, Unloadable, from_frames, load_tree
from pipedist.worker.commands import Begin, Execute
from pipedist.worker.execution import PassExecutor
from pipedist.worker.inputs import States, StateStore
from pipedist.worker.lease_run import LeaseRun, OverlappingRuns, PersistentLoop, RejectedLeaseRun
from pipedist.worker.progress import StageClock

if TYPE_CHECKING:
    from pipedist.protocol.code_archive import CodeStore
    from pipedist.worker.gangs import GangRun, GangRunFactory
    from pipedist.worker.prepared_step import PreparedStep
    from pipedist.worker.relay_channel import RelayBuffer, RelayClient
    from pipedist.worker.variables.replica import BoundVariables

    Run = LeaseRun | RejectedLeaseRun | GangRun | PreparedStep


@cache
def gang_run_of(jax: bool) -> type[GangRun]:
    """Return the class that executes the gang leases of a program, whose replicas `jax` may compile."""
    if jax:
        from pipedist.worker.jax_run import JaxRun  # of an extra

        return JaxRun
    from pipedist.worker.gangs import GangRun  # most workers run no gangs

    return GangRun


class Leases:
    """Stores what the machine's commands name, and makes the run of a lease."""

    def __init__(
        self,
        client: RelayClient,
        threads: int,
        clock: StageClock,
        code: CodeStore,
        report: Callable[[Retried], None],
    ) -> None:
        self._client = client
        self._report = report
        self._threads = threads
        self._clock = clock
        self._code = code
        self._loop = PersistentLoop()
        self.overlapping = OverlappingRuns(self._loop)  # the leases that overlap
        self._passes: dict[int, PassExecutor | Unloadable] = {}  # the executor, or why there is none
        self._payloads: dict[int, Sequence[memoryview]] = {}  # shards of leases that have not begun
        self._members: dict[int, tuple[AssignGang, RelayBuffer]] = {}  # gang leases until they are dropped
        self._unused: RelayBuffer | None = None  # of leases whose members share memory
        self._gangs: GangRunFactory | None = None  # made for the first gang
        self._prepared: PreparedStep | None = None  # for steps like the latest one
        self.states = StateStore()

    def open_pass(self, pass_id: int, frames: Sequence[memoryview], *, elsewhere: bool = False) -> None:
        """Store a program; if it cannot be loaded, each of its calls fails."""
        if elsewhere:
            self._code.announce()
        try:
            program = from_frames(frames, self._code.local_folder)

            def report(stage: str, call: int, attempt: int, timed_out: bool, text: str) -> None:
                self._report(Retried(pass_id, call, stage, attempt, timed_out, text))

            self._passes[pass_id] = PassExecutor(program, self._threads, self._clock, report)
        except Unloadable as error:
            self._passes[pass_id] = error

    def use_quota(self, quota: Quota) -> None:
        if isinstance(executor := self._passes[quota.pass_id], PassExecutor):
            executor.use_quota(quota.calls, quota.sharing)

    def quotas_met(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield lower quotas that are met now, by pass."""
        for pass_id, executor in self._passes.items():
            if isinstance(executor, PassExecutor) and (calls := executor.quota_met()) is not None:
                yield pass_id, calls

    def sees_data(self, pass_id: int) -> bool:
        """Return whether this host has the very files that a pass reads."""
        executor = self._passes[pass_id]
        program = executor.program if isinstance(executor, PassExecutor) else None
        if program is None or program.reader is None or program.reader.source is None:
            return False
        from pipedist.datasets.sources import is_visible  # needed only if hosts differ

        return is_visible(program.reader.source, program.code)

    def drop_pass(self, pass_id: int) -> None:
        executor = self._passes.pop(pass_id)
        if self._prepared is not None and self._prepared.executor is executor:
            self._prepared = None
        if isinstance(executor, PassExecutor):
            executor.close()

    def store(self, lease: int, frames: Sequence[memoryview], gang: AssignGang | None) -> None:
        self._payloads[lease] = frames
        if gang is not None:
            from pipedist.worker.relay_channel import RelayBuffer  # most workers run no gangs

            self._members[lease] = (gang, RelayBuffer())

    def store_relay(self, relay: Relay, frames: Sequence[memoryview]) -> None:
        self._members[relay.lease][1].put(relay, frames)

    def drop(self, lease: int) -> bool:
        """Drop a lease; return False if it has begun."""
        self._members.pop(lease, None)
        return self._payloads.pop(lease, None) is not None

    def is_gang_lease(self, lease: int) -> bool:
        return lease in self._members

    def begin(self, slice_: Execute | Begin, begin: Callable[[int], None]) -> Run:
        """Return the run of a lease whose first slice is about to execute.

        `begin` is called with the number of each call before it runs.
        """
        return self._run(slice_, self._payloads.pop(slice_.lease), self._members.get(slice_.lease), begin)

    def begin_step(
        self, assigned: AssignGang, frames: Sequence[memoryview], begin: Callable[[int], None]
    ) -> GangRun | PreparedStep | RejectedLeaseRun | None:
        """Return the run of a gang's lease that is not stored; None: its messages need it to be.

        See `begin`; `has_begun` stores the lease later.
        """
        if assigned.members > 1 and not assigned.segment:
            return None
        if self._unused is None:
            from pipedist.worker.relay_channel import RelayBuffer  # most workers run no gangs

            self._unused = RelayBuffer()
        if self._prepared is not None and self._prepared.begin(assigned, frames, begin):
            return self._prepared
        run = self._run(assigned, frames, (assigned, self._unused), begin)
        if isinstance(run, RejectedLeaseRun):
            return run
        if isinstance(run, LeaseRun) or run.is_relayed:
            return None
        from pipedist.worker.prepared_step import PreparedStep  # most workers run no gangs

        self._prepared = PreparedStep(run, self) if PreparedStep.fits(run) else None
        return run

    def general_step(
        self, assigned: AssignGang, frames: Sequence[memoryview], begin: Callable[[int], None]
    ) -> GangRun:
        """Return the run of a step that began as a prepared one."""
        assert self._unused is not None  # `begin_step` came first
        run = self._run(assigned, frames, (assigned, self._unused), begin)
        if isinstance(run, LeaseRun | RejectedLeaseRun):
            raise LocalProtocolError(f"{assigned} has no general run")
        return run

    def has_begun(self, lease: int) -> None:
        """Record that a lease which was stored has a run already."""
        del self._payloads[lease]

    def _run(
        self,
        slice_: Execute | Begin | AssignGang,
        frames: Sequence[memoryview],
        member: tuple[AssignGang, RelayBuffer] | None,
        begin: Callable[[int], None],
    ) -> LeaseRun | RejectedLeaseRun | GangRun:
        executor = self._passes[slice_.pass_id]
        if isinstance(executor, Unloadable):
            return RejectedLeaseRun(executor, "", slice_.lo, slice_.hi)
        begin(slice_.lo)  # decoding may import a user's module, which may end the process
        try:
            shards = Shards(*load_tree(frames, "the arguments of this call"))
            reads = shards.states or executor.reads_states
            bound = self.use_states(executor, shards.states) if reads else None
            if member is None:
                return LeaseRun(executor, self._loop, shards, slice_.lo, slice_.hi, begin)
            return self._begin_gang(*member, executor, shards, bound, begin)
        except ProtocolError:
            raise
        except PipedistError as error:
            return RejectedLeaseRun(error, executor.program.first_stage, slice_.lo, slice_.hi)

    def use_states(self, executor: PassExecutor, states: States | None) -> BoundVariables | None:
        """Pass a lease's states, or that it has none, to the stages; return the variables among them."""
        if not states:
            executor.use({}, {})
            return None
        from pipedist.worker.variables.replica import bind  # most passes read no state

        values = self.states.values(states)
        bound = bind(states, values)
        variables = {} if bound is None else bound.proxies
        executor.use(states, values | variables, variables)
        return bound

    def store_produced(self, bound: BoundVariables) -> None:
        """Store the next versions of the variables of a lease whose calls have all returned."""
        for space, version, value in bound.produced():
            self.states.put(space, version, value)

    def _begin_gang(
        self,
        assigned: AssignGang,
        buffer: RelayBuffer,
        executor: PassExecutor,
        shards: Shards,
        bound: BoundVariables | None,
        begin: Callable[[int], None],
    ) -> GangRun:
        from pipedist.worker.gangs import GangRunFactory  # most workers run no gangs

        if self._gangs is None:
            self._gangs = GangRunFactory(self._client, self._loop)

        on_success = None if bound is None else partial(self.store_produced, bound)
        return self._gangs.new_run(
            assigned,
            executor,
            shards,
            buffer,
            bound=bound,
            begin=begin,
            on_success=on_success,
            kind=gang_run_of(executor.program.jax is not None),
        )

    def close(self) -> None:
        if self._gangs is not None:
            self._gangs.close()
