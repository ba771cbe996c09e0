"""What a worker holds of passes, leases and states, and how a lease becomes a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipedist.errors import PipedistError, ProtocolError
from pipedist.protocol.messages import AssignGang, Relay
from pipedist.protocol.program import ReaderConfig, Shards
from pipedist.worker.binding import Unloadable, from_frames, load_tree
from pipedist.worker.commands import Execute
from pipedist.worker.execution import PassExecutor
from pipedist.worker.loops import PersistentLoop
from pipedist.worker.progress import StageClock
from pipedist.worker.ranges import RangeRun, RefusedRange
from pipedist.worker.state_store import StateStore

if TYPE_CHECKING:
    from pipedist.worker.code_store import CodeStore
    from pipedist.worker.gang_run import GangRun
    from pipedist.worker.gang_setup import Gangs, Scheduler
    from pipedist.worker.relay_channel import Inbox
    from pipedist.worker.variables import BoundVariables

    Run = RangeRun | RefusedRange | GangRun


class Leases:
    """Keeps what the machine says is to be kept.

    Args:
        scheduler: whom gangs talk to.
        threads: BLAS and OpenMP threads of this process.
        clock: where it is noted which stage runs.
        code: what stands here for the scheduler's code folders.
    """

    def __init__(self, scheduler: Scheduler, threads: int, clock: StageClock, code: CodeStore) -> None:
        self._scheduler = scheduler
        self._threads = threads
        self._clock = clock
        self._code = code
        self._loop = PersistentLoop()
        self._passes: dict[int, PassExecutor | Unloadable] = {}
        """What executes each bound pass, or why nothing can."""
        self._readers: dict[int, ReaderConfig | None] = {}
        """How the shards of each of them are found."""
        self._payloads: dict[int, Sequence[memoryview]] = {}
        """Shards of leases that have not begun."""
        self._members: dict[int, tuple[AssignGang, Inbox]] = {}
        """Leases that are of a gang, until they are dropped: their place, and what others bring."""
        self._gangs: Gangs | None = None
        """Made when the first gang needs it."""
        self.states = StateStore()

    def open_pass(self, pass_id: int, frames: Sequence[memoryview], *, elsewhere: bool = False) -> None:
        """Keep a program; one that can't be loaded is told by each of its calls.

        Args:
            elsewhere: the scheduler's files are not this host's.
        """
        if elsewhere:
            self._code.announce()
        try:
            program = from_frames(frames, self._code.place)
            self._passes[pass_id] = PassExecutor(program, self._threads, self._clock)
        except Unloadable as error:
            self._passes[pass_id] = error
            return
        self._readers[pass_id] = program.reader

    def sees_data(self, pass_id: int) -> bool:
        """Whether this host has the very files that a pass reads."""
        reader = self._readers.get(pass_id)
        if reader is None or reader.source is None:
            return False
        from pipedist.datasets.sources.paths import is_visible  # only where hosts differ

        return is_visible(reader.source)

    def drop_pass(self, pass_id: int) -> None:
        """Let go of a pass."""
        self._readers.pop(pass_id, None)
        executor = self._passes.pop(pass_id)
        if isinstance(executor, PassExecutor):
            executor.close()

    def keep(self, lease: int, frames: Sequence[memoryview], gang: AssignGang | None) -> None:
        """Keep the shards of a lease, and its place in a gang."""
        self._payloads[lease] = frames
        if gang is not None:
            from pipedist.worker.relay_channel import Inbox  # most workers see no gang

            self._members[lease] = (gang, Inbox())

    def keep_relay(self, relay: Relay, frames: Sequence[memoryview]) -> None:
        """Keep what another member of a lease's gang brought."""
        self._members[relay.lease][1].put(relay, frames)

    def drop(self, lease: int) -> bool:
        """Let go of a lease; return whether it had not begun."""
        self._members.pop(lease, None)
        return self._payloads.pop(lease, None) is not None

    def is_gangs(self, lease: int) -> bool:
        """Whether a lease is of a gang, and has not been dropped."""
        return lease in self._members

    def begin(self, slice_: Execute, begin: Callable[[int], None]) -> Run:
        """Return the run of a lease, whose first slice is to be executed.

        Args:
            begin: told the number of each call before it runs.

        Raises:
            RemoteProtocolError: what the scheduler sent makes no sense.
        """
        frames = self._payloads.pop(slice_.lease)
        executor = self._passes[slice_.pass_id]
        if isinstance(executor, Unloadable):
            return RefusedRange(executor, "", slice_.lo)
        begin(slice_.lo)  # decoding may import a user's module, which may end the process
        try:
            shards = Shards(*load_tree(frames, "the arguments of this call"))
            bound = self._use_states(executor, shards)
            if slice_.lease not in self._members:
                return RangeRun(executor, self._loop, shards, slice_.lo, slice_.hi, begin)
            return self._begin_gang(slice_.lease, executor, shards, bound, begin)
        except ProtocolError:
            raise
        except PipedistError as error:
            return RefusedRange(error, executor.first_stage, slice_.lo)

    def _use_states(self, executor: PassExecutor, shards: Shards) -> BoundVariables | None:
        """Give the pass's stages the states that a lease reads; return the variables among them."""
        states = shards.states or {}
        values = self.states.values(states)
        bound = None
        if states:
            from pipedist.worker import variables  # most passes read no state

            bound = variables.bind(states, values)
            if bound is not None:
                values |= bound.proxies
        executor.use(states, values)
        return bound

    def _begin_gang(
        self,
        lease: int,
        executor: PassExecutor,
        shards: Shards,
        bound: BoundVariables | None,
        begin: Callable[[int], None],
    ) -> GangRun:
        if self._gangs is None:
            from pipedist.worker.gang_setup import Gangs

            self._gangs = Gangs(self._scheduler, self._loop)

        def keep_produced() -> None:
            if bound is not None:
                for space, version, value in bound.produced():
                    self.states.keep(space, version, value)

        assigned, inbox = self._members[lease]
        return self._gangs.new_run(
            assigned, executor, shards, inbox, bound=bound, begin=begin, on_success=keep_produced
        )

    def close(self) -> None:
        """Let go of threads and mapped memory; the process ends."""
        if self._gangs is not None:
            self._gangs.close()
