"""Sends leases to workers: what their calls work on, and before it the states that they read."""

from __future__ import annotations

from collections.abc import Callable

from pipedist.coordinator.gang_relay import Gangs
from pipedist.coordinator.pass_handle import PassHandle
from pipedist.coordinator.state_versions import States
from pipedist.coordinator.worker_pool import Fleet
from pipedist.datasets.feeds import ElementRanges
from pipedist.protocol import messages as msg
from pipedist.protocol.codec import Frame, encode
from pipedist.scheduler import Event
from pipedist.scheduler import commands as cmd
from pipedist.scheduler import events as ev


class Dispatch:
    """Carries out the scheduler's commands to send leases.

    Args:
        post: tells the scheduler.
        fleet: speaks with workers.
        states: what leases may read.
        gangs: told of each gang.
    """

    def __init__(self, post: Callable[[Event], None], fleet: Fleet, states: States, gangs: Gangs) -> None:
        self._post = post
        self._fleet = fleet
        self._states = states
        self._gangs = gangs

    def lease(self, handle: PassHandle, command: cmd.SendAssign) -> None:
        """Send a range of calls to the worker that got it."""
        worker, lease, lo, hi = command.worker, command.lease, command.lo, command.hi
        payload = self._payload(handle, worker, lease, lo, hi, command.elements)
        if payload is not None:
            sent = sum(end - start for start, end in command.elements)
            head = msg.Assign(lease, command.pass_id, lo, hi, command.attempt, sent)
            self._fleet.send(worker, head, payload)

    def gang(self, handle: PassHandle, command: cmd.SendGang) -> None:
        """Send each member of a gang its calls; nothing is sent if those of one can't be."""
        segment = self._gangs.begin(command)
        payloads: list[list[Frame]] = []
        for worker, lease, lo, hi in command.parts:
            payload = self._payload(handle, worker, lease, lo, hi)
            if payload is None:
                return
            payloads.append(payload)
        members = len(payloads)
        for member, (worker, lease, lo, hi) in enumerate(command.parts):
            head = msg.AssignGang(
                lease, command.pass_id, lo, hi, command.attempt, command.serial, member, members, segment
            )
            self._fleet.send(worker, head, payloads[member])

    def _payload(
        self, handle: PassHandle, worker: str, lease: int, lo: int, hi: int, elements: ElementRanges = ()
    ) -> list[Frame] | None:
        """Return what is sent for calls [lo, hi), and send the states that they read.

        Args:
            elements: of a single call, the positions of those that are sent; none: all of them.

        Where that can't be had the pass fails, if a feed made it, or else the steps of these calls.
        """
        try:
            shards = handle.shards(lo, hi, local=self._fleet.reads(worker, handle.id), elements=elements)
            payload = encode([shards.ids, shards.locations, shards.values, shards.states])
            if shards.states:
                self._states.send(worker, shards.states)
        except Exception as error:  # reading the user's data may raise anything
            if handle.has_feed:
                handle.fail(error)
                self._post(ev.PassClosed(handle.id))
            else:
                handle.not_sent(lo, hi, lease, error)
                self._post(ev.LeaseNotSent(lease))
            return None
        return payload
