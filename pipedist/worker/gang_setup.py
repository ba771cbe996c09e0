"""What a worker keeps from one gang to the next, and how a gang's lease is made ready to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pipedist.collectives.channel import Channel
from pipedist.collectives.gang import LocalGang
from pipedist.collectives.options import CommunicationOptions, Implementation
from pipedist.collectives.segment import GangSegments
from pipedist.collectives.thread_pool import ReplicaThreadPool
from pipedist.errors import RemoteProtocolError, UsageError
from pipedist.protocol.messages import AssignGang, spans
from pipedist.protocol.program import Shards
from pipedist.worker.devices import Devices
from pipedist.worker.execution import PassExecutor
from pipedist.worker.gang_run import NOT_SHARED, GangRun
from pipedist.worker.loops import PersistentLoop
from pipedist.worker.relay_channel import Hub, HubChannel, Inbox

if TYPE_CHECKING:
    from pipedist.worker.variables import BoundVariables


class Scheduler(Hub, Protocol):
    """What gangs say to the scheduler, through the worker's driver."""

    def miss(self, lease: int, members: tuple[int, ...], text: str) -> None:
        """Tell that a collective has waited too long for members, from whichever thread of the gang."""


class Gangs:
    """Makes the runs of gangs' leases; keeps threads, event loops and mapped memory.

    Args:
        scheduler: whom they talk to.
        loop: the main thread's, for the first replica of each.
    """

    def __init__(self, scheduler: Scheduler, loop: PersistentLoop) -> None:
        self._scheduler = scheduler
        self._loops = [loop]
        self._threads = ReplicaThreadPool()
        self._segments = GangSegments()
        self._devices = Devices()

    def new_run(
        self,
        assigned: AssignGang,
        executor: PassExecutor,
        shards: Shards,
        inbox: Inbox,
        *,
        bound: BoundVariables | None,
        begin: Callable[[int], None],
        on_success: Callable[[], None],
    ) -> GangRun:
        """Return the run of a lease.

        Raises:
            RemoteProtocolError: its calls are not those of this member.
            UsageError: shared memory is asked for where there is none.
            SegmentUnavailable: the shared memory can't be had.
            DevicesUnseen: its replicas need devices that only a new process can see.
        """
        program, lo, hi = executor.program, assigned.lo, assigned.hi
        local = local_replicas(lo, hi, program.replicas, assigned.member, assigned.members)
        devices = program.devices
        if devices:
            self._devices.show(devices[local.start : local.stop])
        bytes_per_pack, timeout_s, implementation = program.communication
        options = CommunicationOptions(bytes_per_pack, timeout_s, Implementation.of(implementation))
        channel = self._channel(assigned, program.replicas, options.implementation, inbox)
        gang = LocalGang(
            replicas=program.replicas,
            local=local,
            channel=channel,
            options=options,
            on_stalled=partial(self._scheduler.miss, assigned.lease),
            threads=self._threads,
        )
        return GangRun(
            executor,
            self._loops,
            executor.finder.of_lease(shards, lo, hi),
            lo,
            hi,
            gang=gang,
            channel=channel,
            can_share=not isinstance(channel, HubChannel),
            device_of=lambda replica: self._devices.name_of(devices[replica]) if devices else "",
            bound=bound,
            begin=begin,
            on_success=on_success,
        )

    def _channel(
        self, assigned: AssignGang, replicas: int, implementation: Implementation, inbox: Inbox
    ) -> Channel | None:
        if assigned.members == 1:
            return None
        if assigned.segment and implementation is not Implementation.TRANSPORT:
            from pipedist.collectives.shared import SharedChannel  # as large as all the rest

            return SharedChannel(
                self._segments.get(assigned.segment),
                serial=assigned.serial,
                member=assigned.member,
                spans=[range(a, b) for a, b in spans(replicas, assigned.members)],
            )
        if implementation is Implementation.SHARED:
            raise UsageError(NOT_SHARED)
        return HubChannel(self._scheduler, assigned.lease, inbox, assigned.member, assigned.members)

    def close(self) -> None:
        """End the threads, close the loops but the main thread's, unmap the memory."""
        self._threads.close()
        for loop in self._loops[1:]:
            loop.close()
        self._segments.close()


def local_replicas(lo: int, hi: int, replicas: int, member: int, members: int) -> range:
    """Return which replicas the calls [lo, hi) of a gang are.

    Raises:
        RemoteProtocolError: they are of several steps, or not those of this member.
    """
    local = range(lo % replicas, lo % replicas + hi - lo)
    if members > replicas or local != range(*spans(replicas, members)[member]):
        raise RemoteProtocolError(
            f"calls [{lo}, {hi}) are not those of member {member} of {members}, with {replicas} replicas"
        )
    return local
